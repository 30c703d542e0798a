"""Runs the command: `python -m checkpoints.build`."""

from locret.cli import run
from checkpoints.build.command import command

if __name__ == "__main__":
    run(command)
