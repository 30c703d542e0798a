"""Every causal model that transformers knows is read right, or refused in one sentence that names the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import registry
import transformers
from registry import FAMILIES, said, walk

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "backbones.md"
VERSION, PAGED = registry.documented(PAGE.read_text(encoding="utf-8"))
HERE = transformers.__version__ == VERSION


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted(FAMILIES, key=lambda name: name not in ("deepseek_v3", "gemma4_text")))
def test_a_family_is_right_or_refused_as_documented(family: str) -> None:
    outcome = walk(family)
    if outcome.kind != "right":
        assert outcome.reason
    if HERE:
        assert PAGED[family] == said(outcome), "run: python tests/core/registry.py --write docs/backbones.md"


def test_the_page_lists_all_families_of_its_version() -> None:
    if not HERE:
        pytest.skip(f"the tables are of transformers {VERSION}, here is {transformers.__version__}")
    assert sorted(PAGED) == FAMILIES
