"""The names of recipes, embedded backbones and heads mean the same in every folder; other names are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from locret import RetainingHeads, loading, shipped
from locret.cli.command import parse_options
from locret.infer.command import OPTION_CLASSES
from locret.infer.infer_options import PlacedModelOptions

ROOT = Path(__file__).parents[2]
RECIPES = ["recipes/infer/tiny.yaml", "recipes/infer/pass_key.txt"]
SHIPPED = [*RECIPES, "checkpoints/tiny", "checkpoints/tiny-heads"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_is_found_from_elsewhere(name: str) -> None:
    assert Path(shipped.find(name)) == ROOT / name


@pytest.mark.parametrize(
    "name",
    [
        "org/checkpoints",
        "checkpoints/tiny-hea",
        "checkpoints/README.md",
        "recipes/infer/no.yaml",
        "recipes/../setup.cfg",
        "recipes/../recipes/infer/tiny.yaml",
        "setup.cfg",
        "",
    ],
)
def test_other_names_are_left_alone(name: str) -> None:
    assert shipped.find(name) == name


def test_commands_and_heads_find_the_pair_without_asking_the_hub() -> None:
    # The tests run offline, where asking the Hub raises.
    for line in (["--config", "recipes/infer/tiny.yaml"], ["--config=recipes/infer/tiny.yaml"]):
        (model, *_), _ = parse_options("test", "", OPTION_CLASSES, line)
        assert model == PlacedModelOptions(model="checkpoints/tiny")
    assert loading.load_config(model).num_hidden_layers == len(RetainingHeads.from_pretrained("checkpoints/tiny-heads"))
    with pytest.raises(OSError, match="checkpoints/tiny-too"):
        RetainingHeads.from_pretrained("checkpoints/tiny-too")


def test_the_embedded_backbone_has_its_own_heads(elsewhere: Path) -> None:
    name = "tiny"
    heads = ROOT / "checkpoints" / f"{name}-heads"
    assert shipped.embedded_heads(f"checkpoints/{name}") == shipped.embedded_heads(str(ROOT / "checkpoints" / name))
    assert shipped.embedded_heads(f"checkpoints/{name}") == str(heads)
    backbone = loading.load_config(PlacedModelOptions(model=f"checkpoints/{name}"))
    assert backbone.num_hidden_layers == len(RetainingHeads.from_pretrained(str(heads)))
    (elsewhere / "checkpoints" / name).mkdir(parents=True)
    assert shipped.embedded_heads(str(ROOT / "checkpoints" / name)) is None, "the user's has taken the name"


def test_a_retired_backbone_is_no_name_on_the_hub() -> None:
    with pytest.raises(
        ValueError, match=r'folder "checkpoints/world" was retired; release 0\.1\.0 \(git tag lab-frozen\)'
    ):
        loading.load_config(PlacedModelOptions(model="checkpoints/world"))
