"""Top-10 % consistency: overlaps by hand, attention sums against plain softmax, and what each curve must be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from locret import RetainingHeads, RetentionPolicy
from locret.infer.evaluation import consistency
from locret.infer.evaluation.consistency import ATTENTION

POLICY = RetentionPolicy(budget=12, chunk_size=8, stabilizers=4, local_len=4)


def ids_of(tokens: int) -> torch.Tensor:
    return torch.randint(0, 64, (1, tokens), generator=torch.Generator().manual_seed(0))


def test_best_prefers_newer_units_among_equals() -> None:
    assert consistency.best(torch.tensor([1.0, 1, 0, 1]), 2).tolist() == [False, True, False, True]


def test_overlap_counts_the_best_both_agree_on() -> None:
    one = torch.tensor([[[5.0, 4, 3, 2, 1, 0], [5.0, 4, 3, 2, 1, 0]]])
    other = torch.tensor([[[5.0, 0, 3, 2, 1, 4], [0.0, 0, 0, 1, 2, 3]]])
    # The best 3 of 6: {0, 1, 2} against {0, 5, 2}, and against {3, 4, 5}.
    assert consistency.overlap(one, other, share=0.5) == pytest.approx((2 / 3 + 0) / 2)


def test_share_is_rounded_up_to_whole_units() -> None:
    scores = torch.arange(11.0)[None, None]
    assert consistency.overlap(scores, scores.roll(1, -1), share=0.1) == 0.5  # {9, 10} against {10, 0}


def test_everywhere_looks_for_the_best_of_the_prefix_in_the_whole_text() -> None:
    prefix = torch.tensor([[[3.0, 2, 1, 0]]])
    whole = torch.tensor([[[3.0, 0, 0, 0, 9, 9, 9, 8]]])
    # The best 2 of the prefix, {0, 1}, against the best 4 of the whole, {4, 5, 6, 7}; with unit 0 among them below.
    assert consistency.overlap_everywhere(prefix, whole, share=0.5) == 0
    whole[0, 0, 0] = 10
    assert consistency.overlap_everywhere(prefix, whole, share=0.5) == 0.5


def test_attention_sums_are_column_sums_of_plain_softmax(tiny_llama: Any) -> None:
    ids = ids_of(20)
    tiny_llama.set_attn_implementation("eager")
    with torch.no_grad():
        layers = tiny_llama(ids, output_attentions=True).attentions
    for n, sums in zip([7, 20], consistency.attention_sums(tiny_llama, ids, [7, 20]), strict=True):
        assert sums.shape == (2, 2, n)
        expected = torch.stack([layer[0, :, :n, :n].sum(1).unflatten(0, (2, 2)).sum(1) for layer in layers])
        torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5)


def test_attention_sums_do_not_depend_on_the_block(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = consistency.attention_sums(tiny_llama, ids_of(20), [11, 20])
    monkeypatch.setattr(consistency, "_BLOCK_ELEMENTS", 4 * 20 * 3)
    for one, other in zip(whole, consistency.attention_sums(tiny_llama, ids_of(20), [11, 20]), strict=True):
        torch.testing.assert_close(one, other)


def test_recorded_scores_of_an_unbounded_read_are_the_heads_own(tiny_llama: Any) -> None:
    from locret.labels.labels import prompt_scores

    heads = RetainingHeads.for_model(tiny_llama, 8, seed=0)
    policy = RetentionPolicy(budget=40, chunk_size=8, stabilizers=0, local_len=4)
    scores = consistency.read_scores(tiny_llama, heads, ids_of(40), policy)
    torch.testing.assert_close(scores, prompt_scores(tiny_llama, heads, ids_of(40)), rtol=1e-4, atol=1e-6)


def test_recorded_scores_include_evicted_units(tiny_llama: Any) -> None:
    scores = consistency.read_scores(tiny_llama, "streaming", ids_of(40), POLICY)
    assert scores.shape == (2, 2, 40)
    assert scores[0, 0, 4:].tolist() == list(range(4, 40))


@pytest.mark.parametrize("name", ["snapkv", "expected_attention", "h2o"])
def test_scores_that_change_are_recorded_as_their_units_entered(tiny_llama: Any, name: str) -> None:
    scores = consistency.read_scores(tiny_llama, name, ids_of(40), POLICY)
    assert scores.shape == (2, 2, 40)
    assert not scores.isnan().any()


def test_causal_scores_agree_with_themselves_and_attention_does_not(tiny_llama: Any) -> None:
    for layer in tiny_llama.model.layers:
        # With small random weights attention is even, and its sums only say how many queries came after.
        layer.self_attn.q_proj.weight.data.mul_(100)
    methods = {"locret": RetainingHeads.for_model(tiny_llama, 8, seed=0), "random": "random", "streaming": "streaming"}
    labels = torch.rand(2, 2, 60, generator=torch.Generator().manual_seed(1))
    curves = consistency.measure(tiny_llama, ids_of(60), methods, POLICY, [20, 40, 60], labels)
    assert list(curves) == [*methods, ATTENTION]
    for name in methods:
        assert curves[name]["itself"] == [1, 1, 1]
    assert curves[ATTENTION]["itself"][0] < 1
    assert curves[ATTENTION]["itself"][-1] == 1
    assert curves[ATTENTION]["eviction"] == [None] * 3
    # Scores of states that eviction has changed differ; those of positions alone do not.
    assert curves["locret"]["eviction"][-1] < 1
    assert curves["streaming"]["eviction"] == [1, 1, 1]


def test_recent_units_of_a_prefix_are_not_the_best_of_the_text(tiny_llama: Any) -> None:
    curves = consistency.measure(tiny_llama, ids_of(60), {"streaming": "streaming"}, POLICY, [20, 60])
    # Best of 20: two sinks. Best of 60: four sinks and two recent ones.
    assert curves["streaming"]["everywhere"] == [1, 1]
    assert curves["streaming"]["oracle"] == [None, None]


def test_labels_as_scores_agree_with_the_oracle() -> None:
    labels = torch.rand(1, 1, 30, generator=torch.Generator().manual_seed(1))
    curves = consistency._curves([labels[..., :10], labels], labels, labels, -labels)
    assert curves["oracle"] == [1, 1]
    assert curves["eviction"] == [0, 0]


def test_averages_come_with_standard_errors() -> None:
    texts = [{"a": dict.fromkeys(consistency.CURVES, [value, None])} for value in (0.2, 0.4, 0.9)]
    result = consistency.average([5, 10], texts)
    assert result.means["a"]["itself"] == [pytest.approx(0.5), None]
    # Variance 0.13 of a sample of three.
    assert result.errors["a"]["oracle"] == [pytest.approx((0.13 / 3) ** 0.5), None]
    assert (result.prefixes, result.texts) == ((5, 10), 3)


def test_default_prefixes_end_with_the_whole_text() -> None:
    assert consistency.default_prefixes(100, 4) == [25, 50, 75, 100]
    with pytest.raises(ValueError, match="a text of 3 tokens has no 8 prefixes; give a longer one"):
        consistency.default_prefixes(3)


@pytest.mark.slow
def test_picture_comes_with_its_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra locret[eval]")
    from locret.infer.evaluation.consistency_figure import write_consistency

    texts = [{"a": dict.fromkeys(consistency.CURVES, [0.5, 1.0]), ATTENTION: dict.fromkeys(consistency.CURVES, [None])}]
    texts[0][ATTENTION] = {curve: [0.1, None] for curve in consistency.CURVES}
    names = write_consistency(tmp_path, consistency.average([50, 100], texts))
    assert names == ["consistency.png", "consistency.json"]
    assert (tmp_path / "consistency.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    written = json.loads((tmp_path / "consistency.json").read_text())
    assert written["means"]["a"]["itself"] == [0.5, 1.0]
    assert written["means"][ATTENTION]["eviction"] == [0.1, None]
    assert (written["prefixes"], written["texts"], written["share"]) == ([50, 100], 1, 0.1)
