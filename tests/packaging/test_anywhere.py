"""Wheel, editable install and bare checkout work from every folder, and each with files of one tree.

Inside the checkout, `python -c` and `python -m` take the checkout, whatever is installed: the current folder is first.
The console scripts run what is installed. A bare checkout has no scripts, and outside of it needs PYTHONPATH.
Above a clone named `locret` the clone must not be taken for the package.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

INSTALLS = ("wheel", "editable", "checkout")
PLACES = ("inside", "above", "elsewhere")
IMPORTS = """
import json, sys
from locret import RetainingHeads, generate, shipped
import locret, locret.data, locret.infer, locret.train
from locret.train import retention_loss
names = ["locret.generation", "locret.data", "locret.infer", "locret.train", "locret.train.loss"]
files = [locret.__file__, *(sys.modules[name].__file__ for name in names)]
files += map(shipped.find, ["recipes/infer/tiny.yaml", "checkpoints/tiny/", "checkpoints/tiny-heads"])
print(json.dumps(files))
"""

pytestmark = pytest.mark.slow


class Anywhere:
    """Runs commands of one install in one folder."""

    def __init__(self, python: Path, folder: Path, path: Path | None) -> None:
        self.python, self.folder = python, folder
        removed = {"PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH"}
        self.environment = {key: value for key, value in os.environ.items() if key not in removed}
        self.environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if path is not None:
            self.environment["PYTHONPATH"] = str(path)

    def run(self, *words: Any, typed: str = "") -> str:
        """Run the interpreter, or a console script named `locret-...`, and return what it prints."""
        program = self.python.parent / words[0] if str(words[0]).startswith("locret-") else self.python
        line = [str(program), *map(str, words[1:] if program != self.python else words)]
        pipes: Any = {"input": typed, "capture_output": True, "text": True}
        done = subprocess.run(line, cwd=self.folder, env=self.environment, check=False, **pipes)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def anywhere(combination: tuple[str, str], pythons: dict[str, Path], clone: Path, tmp_path: Path) -> Anywhere:
    install, place = combination
    folder = {"inside": clone, "above": clone.parent, "elsewhere": tmp_path}[place]
    return Anywhere(pythons[install], folder, clone if install == "checkout" and place != "inside" else None)


COMBINATIONS = [(install, place) for install in INSTALLS for place in PLACES]


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_every_install_works_in_every_folder(
    anywhere: Anywhere, combination: tuple[str, str], clone: Path, tmp_path: Path
) -> None:
    install, place = combination
    installed = anywhere.python.parents[1] if install == "wheel" else clone
    expected = clone if place == "inside" else installed
    files, *answer = anywhere.run("-c", IMPORTS + _readme_example(clone / "README.md", tmp_path)).splitlines()
    foreign = [file for file in json.loads(files) if not (anywhere.folder / file).resolve().is_relative_to(expected)]
    assert foreign == []
    readme = (clone / "README.md").read_text()
    assert answer == re.findall(r"^print\(.*\)  # (.*)$", readme, re.MULTILINE)
    assert "--characters" in anywhere.run("-m", "locret.data.training.text_rows", "--help")
    script = ["-m", "locret.infer.command"] if install == "checkout" else ["locret-infer"]
    shown = anywhere.run(*script, "--config", "recipes/infer/tiny.yaml", "--print_config")
    assert "heads: checkpoints/tiny-heads" in shown


def _readme_example(readme: Path, folder: Path) -> str:
    """Return the first Python of the README, which reads and writes its files in a folder of the test's."""
    (block, *_) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    return str(block.replace('"limits.ctx"', repr(str(folder / "limits.ctx"))))


@pytest.mark.parametrize("combination", [("wheel", "elsewhere")], ids="-".join)
def test_a_wheel_alone_reads_saves_and_talks(anywhere: Anywhere) -> None:
    code = """
from locret import LongContextModel
lm = LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads")
lm.read("recipes/infer/pass_key.txt").save("book.ctx")
print(lm.load("book.ctx").ask("What is the pass key?"))
"""
    assert anywhere.run("-c", code) == "The pass key is 43600.\n"
    pair = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads"]
    question = "What is the pass key?\n"
    talked = anywhere.run("locret-chat", *pair, "--prompt-file", "recipes/infer/pass_key.txt", typed=3 * question)
    assert talked.count("The pass key is 43600.") == 3
