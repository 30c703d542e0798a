"""How commands start: nothing heavy is imported before the options are known."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMANDS = {
    "locret-train": "locret.train.command",
    "locret-infer": "locret.infer.command",
    "locret-eval": "locret.infer.evaluation.command",
    "locret-bench": "locret.infer.speed.command",
    "locret-verify": "locret.infer.verify.command",
    "locret-push": "locret.heads.push",
    "locret-context": "locret.infer.context_command",
    "locret-serve": "locret.infer.serve.command",
    "text_rows": "locret.data.training.text_rows",
}
HEAVY = ("torch", "transformers", "datasets", "accelerate", "peft", "numpy", "tensorboard", "matplotlib", "fastapi")
WATCHED = f"""
import runpy, sys

class Watcher:
    def find_spec(self, name, path=None, target=None):
        if name in {HEAVY!r}:
            sys.stdout.write("imports " + name)

sys.meta_path.insert(0, Watcher())
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", WATCHED, module, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", COMMANDS.values(), ids=COMMANDS)
def test_help_and_a_misspelt_option_import_nothing_heavy(module: str) -> None:
    shown = run(module, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "imports " not in shown.stdout
    refused = run(module, "--modell", "x")
    assert (refused.returncode, refused.stdout) == (2, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("locret.train.command", "--model", "m", "--dataset", "d", "--output", "o", "--lr", "-1"),
        ("locret.infer.command", "--model", "m", "--top-k", "-1"),
        ("locret.infer.evaluation.command", "--model", "m", "--output", "o", "--tasks", "passkeys"),
        ("locret.heads.push", "--heads", "h", "--repo", "r"),
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-2]}",
)
def test_a_value_that_makes_no_sense_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    refused = run(*arguments)
    assert (refused.returncode, refused.stdout) == (2, ""), refused
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("locret.infer.command", "--model", "checkpoints/tinny"),
            "--model checkpoints/tinny: there is no such folder in checkpoints; did you mean checkpoints/tiny?",
        ),
        (
            ("locret.train.command", "--model", "org/name", "--dataset", "LongAlpacca", "--output", "o"),
            "--dataset LongAlpacca: no data set of that name; did you mean LongAlpaca",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_name_that_is_nothing_here_is_refused_before_the_hub_is_asked(
    arguments: tuple[str, ...], message: str
) -> None:
    refused = run(*arguments)
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1)
    assert message in refused.stderr
