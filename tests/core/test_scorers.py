"""A contract that every registered scorer keeps, its options and its guide."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gate_folders
import pytest
import torch
from families import build, padded, prompt
from torch import Tensor

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill, scorers
from locret.backbone.chunk import Chunk
from locret.base import fields

NUMBERS = {"budget": 24, "chunk_size": 10, "stabilizers": 5, "local_len": 6}
POLICY = RetentionPolicy(**NUMBERS)
GREEDY = {"do_sample": False, "eos_token_id": None}
NAMES = scorers.names()
CAUSAL = [scorer.name for scorer in scorers._SCORERS if scorer.causal]
RATES_ANSWERS = [scorer.name for scorer in scorers._SCORERS if scorer.rates_answers]
MOMENTS = ["chunk", "prompt_end"]


def make(name: str, model: Any) -> scorers.Scorer:
    """Return the scorer with whatever it cannot do without, and windows that fit the small chunks of these tests."""
    options: dict[str, dict[str, Any]] = {
        "retaining_heads": {"heads": RetainingHeads.for_model(model, hidden_dim=8, seed=0)},
        "oracle": {"labels": torch.rand(3, 2, 60, generator=torch.Generator().manual_seed(0))},
        "snapkv": {"window": 7},
        "scissorhands": {"history": 8},
        "nacl": {"most_proxies": 6},
        "expected_attention": {"queries": 8, "future": 30},
        **{gate: {"path": gate_folders.folder_of(gate, model)} for gate in ("kvzap", "fast_kvzip", "dms")},
    }
    return scorers.get(name, **options.get(name, {}))


def policy_of(name: str, **changes: Any) -> RetentionPolicy:
    """Return a small policy with the positions of the scorer's paper."""
    positions = next(scorer.positions for scorer in scorers._SCORERS if scorer.name == name)
    return RetentionPolicy(**{**NUMBERS, "positions": positions, **changes})


@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_float32_one_per_unit_and_no_worse_than_finite(
    monkeypatch: pytest.MonkeyPatch, name: str, when: str
) -> None:
    model = build("llama")
    scorer, calls = make(name, model), []
    score = type(scorer).score

    def watched(self: scorers.Scorer, chunk: Chunk) -> Tensor:
        scores = score(self, chunk)
        assert scores.dtype == torch.float32
        assert scores.shape in ((1, 2, chunk.new_tokens), (1, 2, chunk.key.shape[2]))
        assert scores.isfinite().all()  # what stays by right stays by a mask
        calls.append(chunk.layer_idx)
        return scores

    monkeypatch.setattr(type(scorer), "score", watched)
    cache = RetentionCache(model, scorer, policy_of(name, when=when))
    generate(model, prompt(60), cache=cache, max_new_tokens=3, **GREEDY)
    assert set(calls) == {0, 1, 2}
    # Six passes over the prompt and, where answers are rated, three tokens, which heads rate together.
    assert len(calls) >= 3 * (6 + (1 if isinstance(scorer, scorers.FeatureScorer) else 3 * scorer.rates_answers))
    held = cache.kept_scores(1)
    assert not held.isnan().any()
    assert held.isfinite().sum() >= 2 * 24
    assert scorer.rates_answers or not held[..., -2:].any(), "tokens of an answer get zeros"


@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("name", RATES_ANSWERS)
def test_answers_evict_alike_however_their_prompt_was_read(name: str, when: str) -> None:
    # In a padded batch, or by `prefill` first, the last token is read with the prompt; by `generate`, with the answer.
    model, rows = build("llama"), [prompt(61, seed=5), prompt(9, seed=6)]
    ids, mask = padded(rows)
    policy = policy_of(name, when=when, decode_budget=33, decode_interval=5)
    caches = [RetentionCache(model, make(name, model), policy) for _ in range(3)]
    batch = generate(model, ids, cache=caches[0], attention_mask=mask, max_new_tokens=20, **GREEDY)
    alone = generate(model, rows[0], cache=caches[1], max_new_tokens=20, **GREEDY)
    prefill(model, rows[0], caches[2])
    later = generate(model, None, cache=caches[2], max_new_tokens=20, **GREEDY)
    assert torch.equal(batch[0, -20:], alone[0, -20:])
    assert torch.equal(later[0], alone[0, -20:])
    for cache in caches:
        assert torch.equal(cache.kept_positions(1)[0], caches[1].kept_positions(1)[0])


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(RATES_ANSWERS)))
def test_an_answer_is_not_evicted_by_a_scorer_that_cannot_rate_it(name: str) -> None:
    model = build("llama")
    with pytest.raises(ValueError, match=f"decode_budget=36 .* scorer {name} is not defined for generated tokens"):
        RetentionCache(model, make(name, model), policy_of(name, decode_budget=36, decode_interval=7))


@pytest.mark.parametrize("name", CAUSAL)
def test_scores_do_not_depend_on_chunks_or_neighbours_in_the_batch(name: str) -> None:
    model = build("llama")
    scorer, ids = make(name, model), prompt(60, batch=2)
    scores = []
    for chunk_size, rows in ((60, ids), (7, ids), (60, ids[1:])):
        policy = RetentionPolicy(budget=60, chunk_size=chunk_size, stabilizers=0, local_len=1)
        cache = RetentionCache(model, scorer, policy)
        prefill(model, rows, cache)
        assert cache.kept_scores(0).shape == (len(rows), 2, 60)
        scores.append(cache.kept_scores(2)[-1])
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(scores[0], scores[2], atol=1e-4, rtol=0)


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("snapkv:kernel=1.5", "scorer snapkv: kernel=1.5 is not a whole number; give one such as 5"),
        ("snapkv:kernel=4", "scorer snapkv: kernel=4 has no middle slot; choose an odd number"),
        ("snapkv:pooling=median", 'scorer snapkv: pooling="median" is unknown; choose one of avg, max'),
        ("snapkv:kernle=7", 'scorer snapkv: it has no option "kernle"; did you mean kernel?'),
        ("streaming:sinks=-1", "scorer streaming: sinks=-1 is too small; it must be 0 or more"),
        ("h2o:accumulate=abc", "scorer h2o: accumulate='abc' is not true or false"),
        ("nacl:random_share=0,seed=3", "scorer nacl: seed=3 has no effect without a random_share above 0"),
        ("nacl:group=official", 'scorer option "nacl:group" was retired; release 0.1.0'),
        ("sirllm:decay=0", "scorer sirllm: decay=0 is not above 0 and at most 1"),
        ("sage_kv:sink_share=0.9,recent_share=0.2", "are more than the budget; lower one of them"),
        ("oracle", "scorer oracle needs the labels of the true answer, which only locret-eval knows"),
        ("retaining_heads", "scorer retaining_heads needs trained heads; give --heads FOLDER"),
        ("snapkv+pyramid", "+pyramid is for the policy, not for the scorer; set layer_budgets=pyramid there"),
    ],
)
def test_an_unfit_option_is_named_as_it_was_typed(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        scorers.get(spec)
    assert "\n" not in str(caught.value)


def test_options_are_given_behind_the_name_or_beside_it() -> None:
    assert type(fields.read(10**30, float)) is float, "torch takes no such integer"
    expected = scorers.SnapKVScorer(kernel=7, pooling="max")
    assert scorers.get("snapkv:kernel=7,pooling=max") == expected
    assert scorers.get("snapkv", kernel=7, pooling="max") == expected
    with pytest.raises(ValueError, match='"snapkv:kernel=7" has the option kernel already; give it once'):
        scorers.get("snapkv:kernel=7", kernel=9)


def test_the_example_of_the_guide_rates_units_and_answers_within_the_budget() -> None:
    root = Path(__file__).parents[2]
    guide, names = (root / "docs" / "scorers.md").read_text(), {"model": build("llama"), "ids": prompt(90)}
    for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        exec(compile(block, "docs/scorers.md", "exec"), names | {"__name__": __name__}, names)
    assert names["answer"].shape == (1, 98)
    assert names["cache"].kept_positions(0).shape[-1] <= 64 + 8 + 8
    paths = re.findall(r"`((?:locret|tests)/[\w./]+)`", guide)
    assert len(paths) >= 4
    assert [path for path in paths if not (root / path).exists()] == []
