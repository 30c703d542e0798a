"""How commands start: nothing heavy is imported before the options are known."""

from __future__ import annotations

import subprocess
import sys

import pytest

from locret.__main__ import COMMANDS

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


@pytest.mark.parametrize("module", [module for module, _ in COMMANDS.values()], ids=COMMANDS)
def test_help_and_a_misspelt_option_import_nothing_heavy(module: str) -> None:
    shown = run(module, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "imports " not in shown.stdout
    refused = run(module, "--modell", "x")
    assert (refused.returncode, refused.stdout) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("locret.train.command", "--model=m", "--dataset=d", "--output=o", "--lr=-1"), "--lr -1"),
        (("locret.infer.evaluation.command", "--model=m", "--output=o", "--tasks=passkeys"), "did you mean passkey"),
        (
            ("locret.train.command", "--model=org/name", "--dataset=LongAlpacca", "--output=o"),
            "did you mean LongAlpaca",
        ),
    ],
)
def test_a_value_that_makes_no_sense_imports_nothing_heavy_and_asks_no_hub(
    arguments: tuple[str, ...], message: str
) -> None:
    refused = run(*arguments)
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1), refused
    assert message in refused.stderr
