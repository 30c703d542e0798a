"""Scorers and tasks of other packages and files work in every command, and are refused in one sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from locret import scorers
from locret.data import tasks

ROOT = Path(__file__).parents[2]
MODULE = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from locret.data.tasks.published.niah import NeedleTask
from locret.scorers import Chunk, Scorer


@dataclass(frozen=True, kw_only=True)
class ValueNorm(Scorer):
    """Keep long values."""

    name: ClassVar[str] = "value_norm"
    power: float = 1.0

    def score(self, chunk: Chunk) -> Tensor:
        return chunk.value[:, :, -chunk.new_tokens :].float().norm(dim=-1) ** self.power


@dataclass(frozen=True, kw_only=True)
class Nameless(Scorer):
    def score(self, chunk: Chunk) -> Tensor: ...


@dataclass
class Open:
    pass


KEYS = NeedleTask(
    name="keys", version=9, source="own", metric="first integer", max_new_tokens=16, file="keys.jsonl", passkey=True,
    scored=lambda said, sample: float(sample.targets[0] in said),
)
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a module that has a scorer and a task."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "acme_memory.py").write_text(MODULE)
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))


def run(module: str, *arguments: Any, site: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    # As an installed command does, without the current folder on the path.
    code = f"import sys; sys.path.remove(''); from runpy import run_module; run_module('{module}', run_name='__main__')"
    path = os.pathsep.join([str(ROOT), str(site)])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.long
def test_a_module_in_the_current_folder_is_not_imported_unless_its_file_is_named(site: Path, tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text(f"open('ran', 'w').close()\n{MODULE.replace('from __future__', '#', 1)}")
    (tmp_path / "text.txt").write_text("The pass key is 12345. " * 20)
    options = ("--model", ROOT / "checkpoints" / "tiny", "--prompt-file", "text.txt", "--dry-run", "--quiet")
    options = (*options, "--budget", 64, "--chunk-size", 64, "--stabilizers", 8, "--local-len", 8)
    out = run("locret.infer.command", *options, "--scorer", "here:ValueNorm", site=site, cwd=tmp_path)
    assert out.returncode == 2
    assert "Python finds no module here; install its package, or give a file as path/file.py:Class" in out.stderr
    assert not (tmp_path / "ran").exists()
    out = run("locret.infer.command", *options, "--scorer", "here.py:ValueNorm:power=3", site=site, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)["scorer"] == "here.py:ValueNorm:power=3"
    assert (tmp_path / "ran").exists()


def test_a_scorer_of_a_package_is_as_good_as_ours_in_methods_and_benchmarks_too(installed: None) -> None:
    from locret.infer.evaluation import methods
    from locret.infer.speed import ways as timed

    own = scorers.get("acme_memory:ValueNorm", power=2.0)
    found = methods.get("acme_memory:ValueNorm:power=2+pyramid")
    assert (found.name, found.description) == ("acme_memory:ValueNorm:power=2+pyramid", "keep long values")
    assert timed.get("acme_memory:ValueNorm:power=2+linear").scorer == own


REFUSED = {
    "acme_memory:Nameless": "has no name; add name: ClassVar",
    "acme_memory:Open": "is no subclass of locret.scorers.Scorer, and no press",
    "acme_memory:Valuenorm": "acme_memory has no Valuenorm; did you mean ValueNorm",
    "acme_memory:ValueNorm:pwer=2": 'scorer acme_memory:ValueNorm: it has no option "pwer"; did you mean power?',
    "acme_memory.more:X": "Python finds no module acme_memory.more; install its package",
    "nowhere.py:X": "there is no file nowhere.py; check the path",
}


def test_what_cannot_be_a_scorer_is_refused_in_one_sentence(installed: None) -> None:
    for spec, sentence in REFUSED.items():
        with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
            scorers.get(spec)
        assert "\n" not in str(caught.value)


def test_tasks_come_from_modules_files_and_packages(installed: None, site: Path) -> None:
    for name in ("acme_memory:KEYS", f"{site / 'acme_memory.py'}:KEYS"):
        task = tasks.get(name)
        assert (task.name, task.version, task.family) == (name, 9, "")
        assert tasks.get(task.name) == task
    with pytest.raises(ValueError, match=r'task "acme_memory:ValueNorm" is no locret\.data\.tasks\.Task; derive it'):
        tasks.get("acme_memory:ValueNorm")
    with pytest.raises(ValueError, match='task "acme_kees" is unknown'):
        tasks.get("acme_kees")
