"""The names of recipes, embedded backbones and heads mean the same in every folder; other names are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from locret import shipped

ROOT = Path(__file__).parents[2]
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
