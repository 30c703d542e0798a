"""What the wheel holds inside locret/ and a checkout next to it: train, infer and data, recipes, the embedded backbone.

Only this module and setup.py know both arrangements.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path, PurePath

from locret import backbone_names
from locret.base.nearest import check_retired

_INSIDE = Path(__file__).parent
_ROOT = _INSIDE if (_INSIDE / "train").is_dir() else _INSIDE.parent
_BACKBONE, _HEADS = PurePath("checkpoints/tiny"), PurePath("checkpoints/tiny-heads")
REAL = {
    "smollm2": PurePath("checkpoints/smollm2-heads"),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": PurePath("checkpoints/qwen2.5-coder-0.5b-heads"),
}
"""Heads of real backbones, by the short names of those that packages bring, or by Hub ids."""
_EMBEDDED = (_BACKBONE, _HEADS, *REAL.values())


def find(name: str) -> str:
    """Return where a recipe, its texts, the embedded backbone or its heads are: the user's, else those shipped.

    So `recipes/infer/tiny.yaml` and `checkpoints/tiny` mean the same in every folder, and neither is looked for on the
    Hub. Every other name is returned as it is.
    """
    path = PurePath(name)
    recipe = path.parts[:1] == ("recipes",) and path.suffix in (".yaml", ".txt") and ".." not in path.parts
    if (
        (recipe or path in (*_EMBEDDED, PurePath("recipes/infer")))
        and not os.path.exists(name)
        and (_ROOT / path).exists()
    ):
        return str(_ROOT / path)
    if not os.path.exists(name):
        check_retired("folder", name)
    return name


def text(name: str) -> str:
    """Return a text that locret came with, whatever lies in this folder."""
    return (_ROOT / name).read_text(encoding="utf-8")


def recipes() -> list[str]:
    """Return the recipes that locret came with, by the names under which `find` finds them."""
    return sorted(path.relative_to(_ROOT).as_posix() for path in (_ROOT / "recipes").rglob("*.yaml"))


def embedded_heads(backbone: str) -> str | None:
    """Return where shipped heads of a backbone are, by its name or path; None for a name that has none."""
    for name, heads in REAL.items():
        if backbone in (name, backbone_names.hub_id(name)) and not os.path.exists(backbone):
            return find(str(heads))
    at = os.path.realpath(find(backbone))
    return find(str(_HEADS)) if at == os.path.realpath(find(str(_BACKBONE))) else None


def named_heads() -> str:
    """Return the names of shipped heads of real backbones, as a message lists them."""
    return " or ".join(map(str, REAL.values()))


class _CheckoutFinder:
    """Finds the packages that a checkout holds next to locret/; on locret's path, all of its folders would be some."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in ("locret.train", "locret.infer", "locret.data"):
            return None
        folder = _ROOT / name.removeprefix("locret.")
        return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])


def import_from_checkout() -> None:
    """Make `locret.train`, `locret.infer` and `locret.data` importable where they do not lie inside locret/."""
    if _ROOT != _INSIDE:
        sys.meta_path.append(_CheckoutFinder)
