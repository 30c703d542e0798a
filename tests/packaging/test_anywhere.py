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

pytestmark = pytest.mark.long


@pytest.mark.parametrize("place", ["inside", "above", "elsewhere"])
@pytest.mark.parametrize("install", ["wheel", "editable", "checkout"])
def test_every_install_works_in_every_folder(
    install: str, place: str, pythons: dict[str, Path], clone: Path, tmp_path: Path
) -> None:
    folder = {"inside": clone, "above": clone.parent, "elsewhere": tmp_path}[place]
    removed = {"PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH"}
    environment = {key: value for key, value in os.environ.items() if key not in removed}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if install == "checkout" and place != "inside":
        environment["PYTHONPATH"] = str(clone)

    def run(*words: str, typed: str = "") -> str:
        """Run Python, or a console script named `locret-...`, and return what it prints."""
        program = pythons[install].parent / words[0] if words[0].startswith("locret-") else pythons[install]
        line = [str(program), *(words[1:] if words[0] == program.name else words)]
        pipes: Any = {"input": typed, "capture_output": True, "text": True}
        done = subprocess.run(line, cwd=folder, env=environment, check=False, **pipes)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    readme = (clone / "README.md").read_text()
    (example, *_) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    example = example.replace('"limits.ctx"', repr(str(tmp_path / "limits.ctx")))
    files, *answer = run("-c", IMPORTS + example).splitlines()
    assert answer == re.findall(r"^print\(.*\)  # (.*)$", readme, re.MULTILINE)
    expected = pythons[install].parents[1] if install == "wheel" and place != "inside" else clone
    assert [one for one in json.loads(files) if not (folder / one).resolve().is_relative_to(expected)] == []
    assert "--characters" in run("-m", "locret.data.training.text_rows", "--help")
    script = ["-m", "locret.infer.command"] if install == "checkout" else ["locret-infer"]
    assert "heads: checkpoints/tiny-heads" in run(*script, "--config", "recipes/infer/tiny.yaml", "--print_config")
    if (install, place) == ("wheel", "elsewhere"):  # a wheel alone talks
        pair = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads"]
        asked = "What is the pass key?\n"
        talked = run("locret-chat", *pair, "--prompt-file", "recipes/infer/pass_key.txt", typed=2 * asked)
        assert talked.count("The pass key is 43600.") == 2
