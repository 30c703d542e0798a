"""Runs the command: `python -m checkpoints.build`."""

from checkpoints.build.command import command
from locret.cli.command import run

if __name__ == "__main__":
    run(command)
