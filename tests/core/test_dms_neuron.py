"""Backbones of DMS whose queries lend a number to its decisions: attention takes it for 0, and the scorer reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompt
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from locret import RetentionCache, RetentionPolicy, generate, prefill, scorers

NUMBERS = {
    "dms_alpha_scale": 10.0,
    "dms_initial_alpha_offset": 0.5,
    "dms_window_size": 512,
    "dms_separate_alpha": False,
    "dms_alpha_per": "head",
}
ROOMY = RetentionPolicy(budget=64, chunk_size=16, stabilizers=0, local_len=4, positions="original")


def lending(family: str = "qwen3", **changes: Any) -> Any:
    return build(family, **{**NUMBERS, **changes})


def written(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **NUMBERS, **changes}))
    return str(folder)


@contextmanager
def slowly(model: Any, seen: list[Tensor]) -> Iterator[None]:
    """Let transformers' own attention do what DMS does, and gather the numbers of each layer that are lent."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads

    def blank(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        output = output.unflatten(-1, (-1, model.config.head_dim)) if output.ndim == 3 else output
        seen.append(output[0, :, ::group, -1].T.clone())
        output[:, :, ::group, -1] = 0
        return output if hasattr(layer, "q_norm") else output.flatten(2)

    def attend(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        query = query.clone()
        query[:, ::group, :, -1] = 0
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("dms-slow", attend)
    layer = model.model.layers[0].self_attn
    hooks = [
        getattr(one.self_attn, "q_norm" if hasattr(layer, "q_norm") else "q_proj").register_forward_hook(blank)
        for one in model.model.layers
    ]
    before = model.config._attn_implementation
    model.set_attn_implementation("dms-slow")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("tokens", [40, 4])  # as many as query heads is where layouts look alike
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_reading_is_what_dms_computes_and_scores_are_its_logits(family: str, tokens: int, tmp_path: Path) -> None:
    model, ids, seen = lending(family), prompt(tokens), list[Tensor]()
    with slowly(model, seen), torch.no_grad():
        wanted = model(ids).logits[:, -1]
        plain = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    scorer = scorers.get("dms", path=written(tmp_path), window=0)
    cache = RetentionCache(model, scorer, RetentionPolicy(budget=64, chunk_size=64, positions="original"))
    torch.testing.assert_close(prefill(model, ids, cache), wanted, atol=2e-5, rtol=1e-4)
    for layer in range(3):
        alphas = 10.0 * seen[layer] - 0.5
        torch.testing.assert_close(cache.kept_scores(layer)[0], -alphas, atol=1e-4, rtol=1e-4)
    chunked = RetentionCache(model, scorer, ROOMY)
    assert torch.equal(generate(model, ids, cache=chunked, max_new_tokens=6, do_sample=False, eos_token_id=None), plain)
    unlent = build(family)
    unlent.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert not torch.allclose(unlent(ids).logits[:, -1], wanted, atol=1e-3)


def test_the_best_units_are_those_that_dms_would_evict_last(tmp_path: Path) -> None:
    model, ids, seen = lending(), prompt(60), list[Tensor]()
    with slowly(model, seen), torch.no_grad():
        model(ids)
    policy = RetentionPolicy(budget=20, chunk_size=16, stabilizers=0, local_len=4, positions="original")
    cache = RetentionCache(model, scorers.get("dms", path=written(tmp_path), window=0), policy)
    prefill(model, ids, cache)
    best = seen[0][:, :56].topk(20, largest=False).indices.sort().values
    assert torch.equal(cache.kept_positions(0)[0, :, :20].long(), best)


def test_one_decision_for_a_layer_is_that_of_its_first_head(tmp_path: Path) -> None:
    model = lending(dms_alpha_per="layer")
    scorer = scorers.get("dms", path=written(tmp_path, dms_alpha_per="layer"))
    cache = RetentionCache(model, scorer, RetentionPolicy(budget=64, chunk_size=64, positions="original"))
    prefill(model, prompt(30), cache)
    scores = cache.kept_scores(0)[0]
    assert torch.equal(scores[0], scores[1])
    assert scores[0].std() > 0


def test_the_window_is_the_models_own_where_it_fits_a_quarter_of_the_budget(tmp_path: Path) -> None:
    path = written(tmp_path, dms_window_size=24)
    assert [scorers.get("dms", path=path).recent(budget) for budget in (64, 96, 4096)] == [16, 24, 24]
    assert scorers.get("dms", path=path, window=30).recent(64) == 30


def test_decisions_of_another_backbone_are_refused(tmp_path: Path) -> None:
    scorer = scorers.get("dms", path=written(tmp_path))
    for model in (build("qwen3"), lending(dms_alpha_scale=20.0)):
        with pytest.raises(ValueError, match="are a number of its own queries .*; read with that model itself"):
            scorer.prepare(model)
    fused = lending("phi3")
    with pytest.raises(ValueError, match="the queries of Phi3Attention lend a number to DMS, but come with keys and"):
        prefill(fused, prompt(9), RetentionCache(fused, "streaming", ROOMY))
