"""What the package imports is what pip installs for it, and what it ships is found from every folder."""

from __future__ import annotations

import ast
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import locret
from locret import shipped
from locret.__main__ import COMMANDS

ROOT = Path(locret.__file__).resolve().parent.parent
NAMES = {"yaml": "pyyaml", "flash_attn": "flash-attn"}
"""Distributions whose name is not that of their module."""
WITH = {"numpy": "transformers", "tokenizers": "transformers", "pydantic": "fastapi"}
WITH |= {"starlette": "fastapi", "h11": "uvicorn"}
"""Modules that a requirement brings, and cannot do without."""
COMPARED = {"kvpress", "llama_cpp"}
"""Peers that are compared with where somebody has installed them."""


def setup_cfg() -> ConfigParser:
    found = ConfigParser()
    found.read(ROOT / "setup.cfg")
    return found


def required(extra: str | None) -> set[str]:
    setup = setup_cfg()
    lines = setup["options.extras_require"][extra] if extra else setup["options"]["install_requires"]
    return {line.split()[0].partition("[")[0].lower() for line in lines.splitlines() if line}


def imported(folder: Path) -> dict[str, str]:
    """Return what the modules below a folder import that is neither Python's nor ours, with the first that does."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for name in (name.partition(".")[0] for name in names):
                if name not in sys.stdlib_module_names and name != "locret":
                    found.setdefault(NAMES.get(WITH.get(name, name), WITH.get(name, name)), str(path))
    return found


def test_installed_commands_are_those_that_locret_lists() -> None:
    scripts = setup_cfg()["options.entry_points"]["console_scripts"].split("\n")
    names = {line.partition(" = ")[0].removeprefix("locret-") for line in scripts if line} - {"locret"}
    assert names == COMMANDS.keys() - {"kernels", "rows", "demo", "env"}, "the small ones go by `locret NAME`"


def test_what_is_imported_comes_with_the_package_or_an_extra_and_the_server_with_its_own() -> None:
    setup = setup_cfg()
    every = required(None).union(*(required(extra) for extra in setup["options.extras_require"])) | COMPARED
    rooms = [*((ROOT / room, every) for room in ("locret", "train", "infer", "data"))]
    for folder, installed in (*rooms, (ROOT / "infer/serve", required(None) | required("serve"))):
        assert {name: path for name, path in imported(folder).items() if name not in installed} == {}


RECIPES = ["recipes/infer/tiny.yaml", "recipes/infer/pass_key.txt"]
SHIPPED = [*RECIPES, *(f"checkpoints/{name}" for name in ("tiny", "tiny-heads", "qwen2.5-coder-0.5b-heads"))]
OTHERS = ["checkpoints/tiny-hea", "checkpoints/README.md", "recipes/../setup.cfg", "setup.cfg", ""]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [*SHIPPED, *OTHERS])
def test_what_is_shipped_is_found_from_elsewhere_and_other_names_are_left_alone(name: str) -> None:
    assert shipped.find(name) == (name if name in OTHERS else str(ROOT / name))


def test_the_embedded_backbone_has_its_own_heads(elsewhere: Path) -> None:
    whole, heads = str(ROOT / "checkpoints/tiny"), str(ROOT / "checkpoints/tiny-heads")
    assert shipped.embedded_heads("checkpoints/tiny") == shipped.embedded_heads(whole) == heads
    (elsewhere / "checkpoints/tiny").mkdir(parents=True)
    assert shipped.embedded_heads(whole) is None, "the user's has taken the name"
