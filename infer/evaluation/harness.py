"""The way in for users of lm-evaluation-harness: our tasks for their models, and our bounded cache for their tasks.

    python -m locret.infer.evaluation.harness run --model locret --tasks locret_niah ...
        their command line, with the model `locret` and the tasks `locret_*` (all of them: the tag `locret`) known to it
    python -m locret.infer.evaluation.harness tasks FOLDER
        writes the tasks for `lm_eval --include_path FOLDER`, with any of their models

The tasks are those of benchmarks that the harness does not have, as the tags locret_leval, locret_niah and so on (tasks
such as locret_leval_codeU). They write their protocols' turns themselves, so leave out --apply_chat_template. They take
--metadata '{"lengths": [8192], "samples": 20, "seed": 0, "data_dir": "~/leval", "max_prompt": 32000}', also options by
task, as `locret-eval` has them ("task_options": {"leval/codeU": {"prompt_style": "official"}}), and size their prompts
with the tokenizer of --model_args (`tokenizer` or `pretrained`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from locret.base.files import write_text
from locret.base.plugins import install
from locret.cli.command import run
from locret.data import tasks

MODEL, TAG = "locret", "locret"
FAMILIES = ("leval", "niah", "twostage", "infinitebench_generated")
"""Benchmarks that lm-evaluation-harness 0.4.13 does not have."""
_USAGE = "usage: python -m locret.infer.evaluation.harness (run ARGUMENTS OF LM_EVAL | tasks FOLDER)"


def register() -> None:
    """Make the model `locret` known to lm-evaluation-harness in this process."""
    if find_spec("lm_eval") is None:
        raise ValueError(f"this needs lm-evaluation-harness; {install('eval')}")
    from lm_eval.api.registry import MODEL_REGISTRY, register_model

    from locret.infer.evaluation.harness_model import LocretLM

    if MODEL not in MODEL_REGISTRY:
        register_model(MODEL)(LocretLM)


def write_task_files(folder: str | Path) -> list[str]:
    """Write one YAML file per task of ours, for `--include_path` or `TaskManager(include_path=...)`."""
    known = [name for family in FAMILIES for name in tasks.names(family)]
    for name in known:
        text = (
            f"tag: [{TAG}, {TAG}_{name.partition('/')[0]}]\n"
            f"task: {harness_name(name)}\n"
            "class: !function locret.infer.evaluation.harness_tasks.HarnessTask\n"
            "metadata:\n"
            f"  locret_task: {name}\n"
        )
        write_text(Path(folder) / f"{harness_name(name)}.yaml", text, parents=True)
    return [harness_name(name) for name in known]


def harness_name(name: str) -> str:
    """Return what a task of ours is called there."""
    return f"{TAG}_{name.replace('/', '_')}"


def command(argv: Sequence[str] | None = None) -> int:
    """Run lm-evaluation-harness with our model and tasks, or write our tasks to a folder."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["-h"], ["--help"]):
        print(f"{_USAGE}\n\n{__doc__}")
        return 0
    if arguments[:1] == ["tasks"] and len(arguments) == 2:
        for name in write_task_files(arguments[1]):
            print(name)
        return 0
    if arguments[:1] != ["run"]:
        raise ValueError(f"{' '.join(arguments) or 'no argument'}: say `run` or `tasks FOLDER`; {_USAGE}")
    if any(argument.split("=")[0] == "--include_path" for argument in arguments):
        raise ValueError(
            "--include_path is taken by the tasks of locret; write them into your folder with "
            "`python -m locret.infer.evaluation.harness tasks FOLDER`, or copy your tasks into that folder"
        )
    register()
    from lm_eval.__main__ import cli_evaluate

    with tempfile.TemporaryDirectory() as folder:
        write_task_files(folder)
        before: Any = sys.argv
        sys.argv = ["lm_eval", *arguments, "--include_path", folder]
        try:
            cli_evaluate()
        finally:
            sys.argv = before
    return 0


if __name__ == "__main__":
    run(command)
