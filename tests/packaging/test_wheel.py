"""What the wheel holds: the package, the recipes and the embedded pair; neither tests nor what measures the project."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def names(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_one_package_with_recipes_and_the_embedded_pair(wheel: Path, clone: Path) -> None:
    inside = names(wheel)
    assert wheel.stat().st_size < 12e6
    assert {name.split("/")[0] for name in inside} == {"locret"}
    code = {f"locret/{file.relative_to(clone / 'locret')}" for file in (clone / "locret").rglob("*.py")}
    for folder in ("train", "infer", "data"):
        code |= {f"locret/{file.relative_to(clone)}" for file in (clone / folder).rglob("*.py")}
    assert {name for name in inside if name.endswith(".py")} == {name for name in code if "/speed/lab/" not in name}
    shipped = {*(clone / "recipes").rglob("*.yaml"), *(clone / "checkpoints").glob("tiny*/*")}
    assert {name for name in inside if not name.endswith(".py")} == {
        "locret/py.typed",
        *(f"locret/{file.relative_to(clone)}" for file in shipped),
    }


def test_the_source_archive_makes_the_same_wheel(
    wheel: Path, clone: Path, build: Callable[[Path], Path], tmp_path: Path
) -> None:
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, check=True)
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as held:
        inside = {name.partition("/")[2] for name in held.getnames()}
    assert {"checkpoints/build/model.py", "tests/conftest.py", "docs/heads.md", "constraints.txt", "Makefile"} <= inside
    assert names(build(archive)) == names(wheel)


def test_a_moved_module_does_not_come_back_from_an_earlier_build(
    wheel: Path, clone: Path, build: Callable[[Path], Path]
) -> None:
    left = clone / "build" / "lib" / "locret" / "moved.py"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.touch()
    assert names(build(clone)) == names(wheel)
