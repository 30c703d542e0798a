"""A clone named `locret`, its wheel, and one environment per way of installing it, without a network.

The environments see the dependencies of the running one and hold a locret of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLONED = ("locret", "train", "infer", "data", "recipes", "checkpoints", "tests", "docs", ".ci")
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation")


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkout as `git clone` makes it, without what tools leave behind."""
    folder = tmp_path_factory.mktemp("above") / "locret"
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
    for name in CLONED:
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    for file in ROOT.iterdir():
        if file.is_file() and file.name != ".git":
            shutil.copy2(file, folder)
    return folder


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Return a function that builds the wheel of a source tree."""
    pytest.importorskip("setuptools", reason="nothing can be built")

    def build_wheel(source: Path) -> Path:
        folder = tmp_path_factory.mktemp("dist")
        _run(sys.executable, "-m", "pip", "wheel", "--quiet", *OFFLINE, "--wheel-dir", folder, source)
        (wheel,) = folder.glob("*.whl")
        return wheel

    return build_wheel


@pytest.fixture(scope="session")
def wheel(build: Callable[[Path], Path], clone: Path) -> Path:
    """Return the wheel of the clone."""
    return build(clone)


@pytest.fixture(scope="session")
def pythons(clone: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the interpreter of a fresh environment for each way of installing: wheel, editable, and not at all."""
    folder = tmp_path_factory.mktemp("environments")
    sources = {"wheel": [wheel], "editable": ["--editable", clone], "checkout": []}
    return {name: _environment(folder / name, source) for name, source in sources.items()}


def _environment(folder: Path, source: list[str | Path]) -> Path:
    venv.EnvBuilder(with_pip=False, symlinks=os.name != "nt").create(folder)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    (site,) = [path for path in folder.rglob("site-packages") if path.parent.parent in (folder, folder / "lib")]
    # Read after an editable install's line, by its name, because the running environment may hold a locret too.
    (site / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if source:
        _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *OFFLINE, *source)
    return python


def _run(*words: str | Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
