"""Imports point one way: train and infer to data to the core, which knows none of them; the oracle needs only torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "locret": ("locret.train", "locret.infer", "locret.data"),
    "data": ("locret.train", "locret.infer"),
    "train": ("locret.infer",),
    "infer": ("locret.train",),
}
# The demo is a user of both commands and starts the trainer as a process of its own; the lab compares both.
FILES = [path for folder in FORBIDDEN for path in sorted((ROOT / folder).rglob("*.py")) if path.parent.name != "lab"]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    wrong = [name for name in imported(path) for banned in FORBIDDEN[folder] if (name + ".").startswith(banned + ".")]
    assert not wrong


def test_the_oracle_needs_only_torch_and_nobody_imports_it() -> None:
    oracle = sorted((ROOT / "locret" / "reference").glob("*.py"))
    needed = {name for path in oracle for name in imported(path) if not name.startswith("locret.reference.")}
    assert {name.split(".")[0] for name in needed} <= {"__future__", "math", "torch", "typing"}
    users = [path for path in FILES if any((name + ".").startswith("locret.reference.") for name in imported(path))]
    assert set(users) <= set(oracle)


def test_importing_the_core_loads_nothing_heavy() -> None:
    code = (
        "import sys, locret; heavy = {'datasets', 'jsonargparse', 'peft', 'matplotlib', 'tensorboard'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_public_names_load_on_demand_and_no_module_hides_one() -> None:
    code = (
        "import pkgutil, sys, locret; assert 'torch' not in sys.modules;"
        "import locret.chunked_prefill, locret.cache.cache;"
        "modules = {m.name for m in pkgutil.iter_modules(locret.__path__[:1])};"
        "print(sorted(modules & set(locret.__all__)), [n for n in locret.__all__ if not hasattr(locret, n)])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "['scorers'] []"
