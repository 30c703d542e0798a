"""Scorers of tokens and keys equal their slow versions, on every forward pass of real reads and answers."""

from __future__ import annotations

import math
from typing import Any

import oracle as reference
import pytest
import torch
from chunks import make_chunk
from families import SHAPE, build, prompt
from scorer_passes import GREEDY, policy, read_and_answer, watch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, CohereConfig, GraniteConfig

from locret import RetentionCache, generate, prefill, scorers
from locret.backbone.chunk import Chunk
from locret.policy.selectors import Stay
from locret.scorers import sirllm

# -- SirLLM -----------------------------------------------------------------------------------------------------------


def passes(monkeypatch: pytest.MonkeyPatch, scorer: Any) -> list[tuple[scorers.TokenPass, Tensor]]:
    kind: Any = type(scorer)
    seen, score = [], kind.score_tokens

    def watched(self: Any, model: Any, tokens: scorers.TokenPass) -> Tensor:
        scores = score(self, model, tokens)
        seen.append((tokens, scores))
        return scores

    monkeypatch.setattr(kind, "score_tokens", watched)
    return seen


@pytest.mark.parametrize("when", ["chunk", "prompt_end"])
@pytest.mark.parametrize("definition", ["paper", "official"])
def test_surprisal_equals_the_slow_version_on_every_pass(
    monkeypatch: pytest.MonkeyPatch, definition: str, when: str
) -> None:
    model, scorer = build("llama"), scorers.get("sirllm", definition=definition)
    seen = passes(monkeypatch, scorer)
    read_and_answer(model, scorer, when=when)
    assert {len(scores[0]) for _, scores in seen} >= {11, 1}
    for tokens, scores in seen:
        with torch.no_grad():
            logits = model.lm_head(tokens.hidden_BLE[0])
            before = None if tokens.before_B1E is None else model.lm_head(tokens.before_B1E[0, 0])
        if definition == "paper":
            slow = reference.surprisal(logits, tokens.ids_BL[0], before)
        else:
            slow = reference.surprisal_of_the_release(logits, tokens.ids_BL[0])
        torch.testing.assert_close(scores[0], slow, atol=1e-5, rtol=1e-5)


def granite_and_cohere() -> list[Any]:
    torch.manual_seed(0)
    granite = AutoModelForCausalLM.from_config(GraniteConfig(**SHAPE, logits_scaling=3.0))
    cohere = AutoModelForCausalLM.from_config(CohereConfig(**SHAPE, logit_scale=0.25))
    return [granite.eval(), cohere.eval()]


def test_a_text_read_in_chunks_has_the_surprisal_of_the_models_own_logits() -> None:
    capped = build("gemma2", final_logit_softcapping=1.5)
    for model in (build("llama"), build("phi3"), capped, *granite_and_cohere()):
        ids = prompt(61)
        cache = RetentionCache(model, scorers.get("sirllm", sinks=0), policy(budget=61))
        prefill(model, ids, cache)
        with torch.no_grad():
            likely = model(ids).logits[0, :-1].log_softmax(-1)
        expected = -likely.gather(-1, ids[0, 1:, None])[:, 0]
        scores = cache.kept_scores(cache.backbone.layers[0])[0]
        torch.testing.assert_close(scores[:, 1:], expected.expand(scores.shape[0], -1), atol=1e-4, rtol=0)
        assert scores[0, 0] == pytest.approx(math.log(199))  # nothing is known of the first token


def test_logits_come_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, sizes = build("llama"), prompt(40), []
    monkeypatch.setattr(sirllm, "_LOGITS", 3 * 199)
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: sizes.append(output.numel()))
    cache = RetentionCache(model, "sirllm", policy(budget=60, chunk_size=40))
    prefill(model, ids, cache)
    assert max(sizes) == 3 * 199
    whole = RetentionCache(model, "sirllm", policy(budget=60, chunk_size=40))
    monkeypatch.undo()
    prefill(model, ids, whole)
    torch.testing.assert_close(whole.kept_scores(0), cache.kept_scores(0))


def test_sirllm_keeps_sinks_the_newest_and_surprises_alike_everywhere() -> None:
    model = build("llama")
    cache = RetentionCache(model, scorers.get("sirllm", keep_recent=7), policy(stabilizers=0))
    prefill(model, prompt(83), cache)
    kept = cache.kept_positions(0)[0, 0].tolist()
    assert kept[:4] == [0, 1, 2, 3]
    assert kept[-13:] == list(range(70, 83))  # seven newest of the last chunk, and six local tokens
    for layer in range(3):
        assert (cache.kept_positions(layer) == torch.tensor(kept)).all()


def test_sinks_are_counted_in_the_text_however_short_a_pass_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, scorer = build("llama"), scorers.get("sirllm")
    seen = passes(monkeypatch, scorer)
    ids, mask = prompt(9, batch=2), torch.ones(2, 9, dtype=torch.long)
    mask[1, :7] = 0  # the second row has two tokens; its sinks go on in the answer
    cache = RetentionCache(model, scorer, policy(chunk_size=3, local_len=2, stabilizers=0))
    generate(model, ids, cache=cache, attention_mask=mask, max_new_tokens=6, **GREEDY)
    assert len(seen) > 6
    for row in cache.split(2):
        # Whatever else goes, the first four tokens of each row's own text are still there.
        row.governed[0].evict(Stay(5, 0, scorer.sink_tokens(5, 0)), row.next_position)
        assert row.kept_positions(0)[0, :, :4].tolist() == [[0, 1, 2, 3]] * 2


def test_sirllm_needs_a_language_model_head() -> None:
    with pytest.raises(ValueError, match="scorer sirllm asks a language-model head, but LlamaModel has none; load"):
        scorers.get("sirllm").prepare(AutoModel.from_config(build("llama").config))


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("family", ["llama", "llama-mqa", "phi3-longrope"])
def test_key_norms_and_differences_equal_the_slow_versions_on_every_pass(
    monkeypatch: pytest.MonkeyPatch, family: str, positions: str
) -> None:
    for name in ("key_norm", "key_difference"):
        scorer, count = scorers.get(name), []

        def compare(chunk: Chunk, scores: Tensor, name: str = name, count: list[int] = count) -> None:
            new = chunk.key[0, :, -chunk.new_tokens :]
            slow = reference.key_norm(new) if name == "key_norm" else reference.key_difference(chunk.key[0])
            assert scores.dtype == torch.float32
            torch.testing.assert_close(scores[0], slow, atol=1e-5, rtol=1e-5)
            count.append(chunk.new_tokens)

        with monkeypatch.context() as patch:
            watch(patch, scorer, compare)
            read_and_answer(build(family), scorer, positions=positions)
        assert len(set(count)) >= 3


def test_the_norm_of_a_key_does_not_turn_with_it() -> None:
    model = build("llama")
    scores = []
    for positions in ("compact", "original"):
        cache = RetentionCache(model, "key_norm", policy(budget=61, positions=positions))
        prefill(model, prompt(61), cache)
        scores.append(cache.kept_scores(0))
    torch.testing.assert_close(*scores)


def test_empty_slots_and_keys_of_zeros_do_not_count_among_keys() -> None:
    torch.manual_seed(0)
    key = torch.randn(2, 2, 9, 8)
    key[0, :, 5] = 0.0
    chunk = make_chunk(key[:, :, :3], key, 1.0, row_start=torch.tensor([0, 4]))
    scores = scorers.get("key_difference").score(chunk)
    torch.testing.assert_close(scores[1, :, 4:], reference.key_difference(key[1, :, 4:]))
    assert (scores[0, :, 5] == 0).all()
    others = [0, 1, 2, 3, 4, 6, 7, 8]
    torch.testing.assert_close(scores[0, :, others], reference.key_difference(key[0][:, others]))


def test_half_precision_keys_are_scored_in_float32() -> None:
    torch.manual_seed(0)
    key = torch.randn(1, 2, 50, 8).bfloat16()
    chunk = make_chunk(key, key, 1.0)
    for name, slow in (("key_norm", reference.key_norm), ("key_difference", reference.key_difference)):
        scores = scorers.get(name).score(chunk)
        torch.testing.assert_close(scores[0], slow(key[0].float()), atol=1e-5, rtol=1e-5)
        assert scores.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sirllm", {"definition": "entropy"}, 'definition="entropy" is unknown; choose one of paper, official'),
        ("sirllm", {"sinks": -1}, "scorer sirllm: sinks=-1 is too small; it must be 0 or more"),
        ("expected_attention", {"future": 0}, "scorer expected_attention: future=0 is too small"),
        ("expected_attention", {"epsilon": -0.1}, "scorer expected_attention: epsilon=-0.1 is too small; it must be 0"),
    ],
)
def test_a_wrong_option_of_these_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scorers.get(name, **options)
