"""`locret`, or `python -m locret`: all commands under one name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import PurePath

COMMANDS = {
    "infer": ("locret.infer.command", "read a text of any size in fixed memory, and answer a question about it"),
    "context": ("locret.infer.context_command", "make, show, ask, join, shrink and export what has been read"),
    "chat": ("locret.infer.chat_command", "talk about a document"),
    "serve": ("locret.infer.serve.command", "serve contexts and answers over HTTP, as OpenAI's clients ask"),
    "train": ("locret.train.command", "train retaining heads on a frozen backbone"),
    "kernels": ("locret.train.merging_command", "train kernels that merge evicted units"),
    "eval": ("locret.infer.evaluation.command", "compare methods on tasks within one budget"),
    "verify": ("locret.infer.verify.command", "check a backbone on this machine before trusting what is read with it"),
    "bench": ("locret.infer.speed.command", "measure time and bytes"),
    "push": ("locret.heads.push", "publish heads on the Hugging Face Hub"),
    "env": ("locret.environment", "show versions and devices, for a report of a problem"),
    "demo": ("locret.infer.demo", "ask a real model about a real text from all of it, what heads kept, and its end"),
    "rows": ("locret.data.training.text_rows", "write training rows from texts of your own"),
}
"""What may follow `locret`: the module whose `command` it runs, and what that does."""


def command(argv: Sequence[str] | None = None) -> int:
    """Run a command by its name, or list what there is; return its exit code."""
    from locret.cli.command import chosen  # as below

    about = {name: text for name, (_, text) in COMMANDS.items()}
    name, arguments = chosen("locret", about, sys.argv[1:] if argv is None else argv)
    code: int | None = import_module(COMMANDS[name][0]).command(arguments)
    return code or 0


def main() -> None:
    """Entry point of `locret`, and of `locret-NAME` by the name under which it was started."""
    from locret.base import interrupts  # signals are answered before what takes longer is imported

    prog, arguments = PurePath(sys.argv[0]).stem.lower(), sys.argv[1:]  # Windows says it as it was typed
    if (name := prog.removeprefix("locret-")) in COMMANDS:
        arguments.insert(0, name)
        words = [word for word in arguments[1:2] if name == "context" and word.isalpha()]
    else:
        prog, words = "locret", [word for word in arguments[:1] if word in COMMANDS]
    prog = " ".join([prog, *words])
    interrupts.answer(prog)
    from locret.cli.command import run

    run(command, arguments, prog=prog)


if __name__ == "__main__":
    main()
