"""Runs the command: `python -m locret.train.backbone`."""

from locret.cli import run
from locret.train.backbone.command import command

if __name__ == "__main__":
    run(command)
