"""What the wheel holds: package, recipes, embedded backbones; neither tests nor what measures the project."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


def names(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_one_package_with_recipes_and_the_embedded_backbones(wheel: Path, clone: Path) -> None:
    inside = names(wheel)
    assert wheel.stat().st_size < 36e6  # two kinds of heads of real backbones, of 14 MB each
    assert {name.split("/")[0] for name in inside} == {"locret"}
    code = {f"locret/{file.relative_to(clone / 'locret')}" for file in (clone / "locret").rglob("*.py")}
    for folder in ("train", "infer", "data"):
        code |= {f"locret/{file.relative_to(clone)}" for file in (clone / folder).rglob("*.py")}
    assert {name for name in inside if name.endswith(".py")} == code
    tables = {path for kind in ("json", "yaml") for path in (clone / "data").rglob(f"*.{kind}")}
    recipes = set((clone / "recipes").rglob("*.*"))
    pages = {path for kind in ("html", "css", "js") for path in (clone / "infer" / "serve").rglob(f"*.{kind}")}
    weights = {path for folder in ("tiny*", "[qs]*-heads") for path in (clone / "checkpoints").glob(f"{folder}/*")}
    texts = {path for path in (clone / "data" / "real").rglob("*.*") if path.suffix != ".py"}
    shipped = {*recipes, *weights, *tables, *pages, *texts, clone / "infer" / "speed" / "shapes.json"}
    assert {name for name in inside if not name.endswith(".py")} == {
        *("locret/py.typed", "locret/base/retired.json", "locret/heads/card_template.md"),
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
    assert {"tests/conftest.py", "docs/heads.md", "constraints.txt", "Makefile"} <= inside
    assert names(build(archive)) == names(wheel)
