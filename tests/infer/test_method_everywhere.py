"""A method with options means the same in locret-infer, locret-bench and lm-eval, and stands in their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from locret import scorers
from locret.cli.command import parse_options
from locret.loading.options import ScorerOptions
from locret.scorers.chosen import load_scorer

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "checkpoints" / "tiny")
SNAPKV = scorers.SnapKVScorer(kernel=7, pooling="max")


def scorer_options(*arguments: str) -> ScorerOptions:
    (options,), _ = parse_options("test", "", [ScorerOptions], arguments)
    assert isinstance(options, ScorerOptions)
    return options


def test_a_scorer_of_locret_infer_has_its_options_behind_its_name(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("scorer: snapkv:kernel=7,pooling=max\n")
    for options in (
        scorer_options("--scorer", "snapkv:kernel=7,pooling=max"),
        scorer_options("--config", str(tmp_path / "recipe.yaml")),
    ):
        assert load_scorer(options) == (SNAPKV, {})
        assert options.label == "snapkv:kernel=7,pooling=max"


def test_modifiers_of_a_scorer_change_the_policy_where_no_option_does() -> None:
    scorer, recommended = load_scorer(scorer_options("--scorer", "snapkv:window=8+prompt_end+original"))
    assert scorer == scorers.SnapKVScorer(window=8)
    assert recommended == {"positions": "original", "when": "prompt_end"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--scorer", ""), "--scorer is empty"),
        (("--scorer", "oracle"), "scorer oracle needs the labels of the true answer, which only locret-eval knows"),
        (("--scorer", "retaining_heads"), "scorer retaining_heads needs trained heads; give --heads FOLDER"),
        (("--scorer", "snapkv:kernel=1.5"), "scorer snapkv: kernel=1.5 is not a whole number"),
        (("--scorer", "snapkv", "--scorer-options.kernel", "9"), 'option "scorer_options" was retired: a scorer\'s'),
        (("--scorer", "snapkv+linear+sqrt"), '--scorer "snapkv+linear+sqrt": +linear and +sqrt both set memory'),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match="scorer") as caught:
        load_scorer(scorer_options(*arguments))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"scorer": "snapkv:kernel=7", "pooling": "max"},  # as the harness splits --model_args at commas
        {"scorer": "snapkv:kernel=7,pooling=max"},
    ],
)
def test_the_harness_takes_options_of_a_scorer(settings: dict[str, Any]) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    from locret.infer.evaluation.harness_model import LocretLM

    model = LocretLM(TINY, device="cpu", budget=64, chunk_size=64, stabilizers=8, local_len=8, **settings)
    assert model.scorer == SNAPKV
    assert model.policy.positions == "compact"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"scorer": "snapkv", "kernle": 7}, "--model_args: kernle is not a setting of the model locret"),
        ({"kernel": 7}, "--model_args: kernel is not a setting of the model locret"),
        ({"scorer": "snapkv:kernel=7", "kernel": 9}, "has the option kernel already; give it once"),
    ],
)
def test_the_harness_refuses_what_no_scorer_knows(settings: dict[str, Any], sentence: str) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    from locret.infer.evaluation.harness_model import LocretLM

    with pytest.raises(ValueError, match=sentence):
        LocretLM(TINY, device="cpu", budget=64, **settings)
