"""Scorers of tokens and keys equal their slow versions, on every forward pass of real reads and answers."""

from __future__ import annotations

from typing import Any

import oracle as reference
import pytest
import torch
from families import build, prompt
from scorer_passes import policy, read_and_answer, watch
from torch import Tensor

from locret import RetentionCache, prefill, scorers
from locret.backbone.chunk import Chunk

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


def test_sirllm_keeps_sinks_the_newest_and_surprises_alike_everywhere() -> None:
    model = build("llama")
    cache = RetentionCache(model, scorers.get("sirllm", keep_recent=7), policy(stabilizers=0))
    prefill(model, prompt(83), cache)
    kept = cache.kept_positions(0)[0, 0].tolist()
    assert kept[:4] == [0, 1, 2, 3]
    assert kept[-13:] == list(range(70, 83))  # seven newest of the last chunk, and six local tokens
    for layer in range(3):
        assert (cache.kept_positions(layer) == torch.tensor(kept)).all()


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
