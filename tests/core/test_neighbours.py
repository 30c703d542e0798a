"""Heads that look at a few tokens before each one: scores, chunks, turns, rows, copies, files, bytes, training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle as reference
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import locret
from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache
from locret.heads.head import RetainingHead
from locret.heads.shard import part_of, whole_of
from locret.labels.labels import answer_labels, observe, prompt_scores
from locret.train.loss import retention_loss
from locret.train.step import train_step
from locret.train.training_options import BackboneOptions, Loss

NEAR = 3
POLICY = RetentionPolicy(budget=24, chunk_size=16, stabilizers=4, local_len=4)
ROOMY = RetentionPolicy(budget=512, chunk_size=16, stabilizers=4, local_len=4)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=97, intermediate_size=40, initializer_range=0.3, pad_token_id=0, **shape)
    torch.manual_seed(1)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def heads(model: nn.Module) -> RetainingHeads:
    return RetainingHeads.for_model(model, 16, seed=0, neighbours=NEAR).requires_grad_(False)


def ids_of(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def scores_of(cache: RetentionCache) -> Tensor:
    return torch.stack([cache.kept_scores(layer)[0] for layer in cache.backbone.layers])


@pytest.mark.parametrize("length", [1, 2, NEAR, NEAR + 1, 11])
def test_scores_are_those_of_the_slow_version(length: int) -> None:
    head = RetainingHead(12, 8, 2, generator=torch.Generator().manual_seed(0), neighbours=NEAR).requires_grad_(False)
    assert head.mix is not None
    features = torch.randn(length, 12, generator=torch.Generator().manual_seed(1))
    expected = reference.head_scores(features, head.fc1.weight, head.fc2.weight, head.mix.weight[:, 0])
    torch.testing.assert_close(head(features).T, expected)
    torch.testing.assert_close(head(features[None].repeat(2, 1, 1))[1].T, expected)
    torch.testing.assert_close(head(features[0])[None].T, expected[:, :1])


def test_earlier_tokens_count_and_later_ones_do_not(model: nn.Module, heads: RetainingHeads) -> None:
    features = torch.randn(9, heads.config.feature_dim)
    changed = features.clone()
    changed[4] += 1
    differs = (heads[0](changed) - heads[0](features)).abs().amax(-1) > 1e-6
    assert differs.tolist() == [4 <= t <= 4 + NEAR for t in range(9)]


@pytest.mark.parametrize("chunk_size", [2, 3, 16, 64])
def test_scores_do_not_depend_on_chunks(model: nn.Module, heads: RetainingHeads, chunk_size: int) -> None:
    ids = ids_of(45)
    policy = RetentionPolicy(budget=512, chunk_size=chunk_size, stabilizers=1, local_len=3)
    cache = RetentionCache(model, heads, policy)
    prefill(model, ids, cache)
    torch.testing.assert_close(scores_of(cache), prompt_scores(model, heads, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("turns", [1, 2])
def test_answers_and_turns_go_on_from_the_tokens_before(model: nn.Module, heads: RetainingHeads, turns: int) -> None:
    cache, whole = RetentionCache(model, heads, ROOMY), torch.empty(1, 0, dtype=torch.long)
    for turn in range(turns):
        whole = torch.cat([whole, ids_of(30 + turn, seed=turn)], dim=1)
        whole = generate(model, whole, cache=cache, max_new_tokens=20, do_sample=False)
    expected = prompt_scores(model, heads, whole[:, : cache.seen])
    torch.testing.assert_close(scores_of(cache), expected, atol=1e-4, rtol=1e-4)


def test_copies_files_and_rows_go_on_alike(model: nn.Module, heads: RetainingHeads, tmp_path: Path) -> None:
    cache = RetentionCache(model, heads, POLICY)
    prefill(model, ids_of(50), cache)
    save_cache(cache, tmp_path / "kept.safetensors")
    loaded = load_cache(tmp_path / "kept.safetensors", model, scorer=heads)
    twins = [cache.copy(), loaded, cache]
    twins[0].take_back()
    assert twins[0].copy().trails[0].newest is not None
    for twin in twins:
        prefill(model, ids_of(40, seed=3), twin)
    for twin in twins[1:]:
        assert twin.kept_positions(1).equal(cache.kept_positions(1))
        torch.testing.assert_close(scores_of(twin), scores_of(cache))
    torch.testing.assert_close(scores_of(twins[0]), scores_of(cache))
    other = RetainingHeads.for_model(model, 16, seed=0)
    with pytest.raises(ValueError, match="other"):
        load_cache(tmp_path / "kept.safetensors", model, scorer=other)


@pytest.mark.parametrize("first", ["neighbours", "fewer neighbours", "snapkv"])
@pytest.mark.parametrize("second", ["neighbours", "snapkv"])
def test_another_scorer_may_go_on_whichever_looks_at_neighbours(
    model: nn.Module, heads: RetainingHeads, tmp_path: Path, first: str, second: str
) -> None:
    fewer = RetainingHeads.for_model(model, 16, seed=0, neighbours=NEAR - 1)
    named: dict[str, Any] = {"neighbours": heads, "fewer neighbours": fewer, "snapkv": "snapkv"}
    cache = RetentionCache(model, named[first], POLICY)
    prefill(model, ids_of(50), cache)
    save_cache(cache, tmp_path / "kept.safetensors")
    loaded = load_cache(tmp_path / "kept.safetensors", model, named[second], allow_other_scorer=True)
    assert loaded.kept_positions(1).equal(cache.kept_positions(1))
    assert all((trail.newest is not None) == (first == second) for trail in loaded.trails.values())
    prefill(model, ids_of(40, seed=3), loaded)
    assert loaded.seen == 90


def test_rows_of_a_batch_are_read_as_alone(model: nn.Module, heads: RetainingHeads) -> None:
    texts = [ids_of(60), ids_of(41, seed=2), ids_of(60, seed=4)]
    width = max(text.shape[1] for text in texts)
    rows = torch.cat([torch.nn.functional.pad(text, (width - text.shape[1], 0)) for text in texts])
    mask = torch.stack([torch.arange(width) >= width - text.shape[1] for text in texts]).long()
    batch = RetentionCache(model, heads, POLICY)
    prefill(model, rows, batch, mask)
    batch.select_rows(torch.tensor([1, 2]))
    generate(model, cache=batch, max_new_tokens=6, do_sample=False)
    for row, text in enumerate(texts[1:]):
        alone = RetentionCache(model, heads, POLICY)
        prefill(model, text, alone)
        generate(model, cache=alone, max_new_tokens=6, do_sample=False)
        kept = alone.kept_positions(1)[0]
        assert batch.kept_positions(1)[row, :, -kept.shape[-1] :].equal(kept)
        one, other = alone.trails[1].newest, batch.trails[1].newest
        assert one is not None
        assert other is not None
        torch.testing.assert_close(other[row], one[0])


def test_bytes_are_planned_and_do_not_grow_with_the_text(model: nn.Module, heads: RetainingHeads) -> None:
    sizes = []
    for length in (60, 240):
        cache = RetentionCache(model, heads, POLICY)
        prefill(model, ids_of(length), cache)
        memory = cache.memory()
        assert memory.actual == memory.planned
        sizes.append(memory.actual)
    plain = RetentionCache(model, RetainingHeads.for_model(model, 16, seed=0), POLICY)
    prefill(model, ids_of(60), plain)
    assert sizes[0] == sizes[1]
    assert sizes[0] - plain.memory().actual == 4 * (NEAR + 1) * 2 * heads.config.feature_dim


def test_a_step_learns_them_in_one_pass(model: nn.Module) -> None:
    prompt, answer, made = ids_of(37), ids_of(5, seed=1), []
    for _ in range(2):
        made.append(RetainingHeads.for_model(model, 16, seed=0, neighbours=NEAR).requires_grad_(True))
    one, naive = made
    loss = Loss(label_kind="log_attention", objective="ranking")
    result = train_step(model, one, prompt, answer, loss)
    features: list[Tensor] = []
    observe(model, prompt, lambda chunk: features.append(chunk.features()[0]))
    scores = torch.stack([naive[layer](own).T for layer, own in zip(naive, features, strict=True)])
    total, _, _ = retention_loss(scores, answer_labels(model, prompt, answer, "log_attention"), objective="ranking")
    total.backward()
    torch.testing.assert_close(result.total, total.detach())
    assert one[0].mix is not None
    assert naive[0].mix is not None
    torch.testing.assert_close(one[0].mix.weight.grad, naive[0].mix.weight.grad, atol=1e-5, rtol=1e-4)


def test_they_are_saved_and_loaded_and_others_keep_their_files(
    model: nn.Module, heads: RetainingHeads, tmp_path: Path
) -> None:
    heads.save_pretrained(tmp_path / "near")
    loaded = RetainingHeads.from_pretrained(str(tmp_path / "near"))
    assert loaded.config.neighbours == NEAR
    assert all(one.equal(other) for one, other in zip(loaded.parameters(), heads.parameters(), strict=True))
    assert locret.scorers.get("retaining_heads", heads=str(tmp_path / "near")).neighbours == NEAR
    RetainingHeads.for_model(model, 16, seed=0).save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "neighbours" not in config
    (tmp_path / "plain" / "config.json").write_text(json.dumps({**config, "neighbours": 2}))
    with pytest.raises(ValueError, match=r"missing: heads.0.mix.weight"):
        RetainingHeads.from_pretrained(str(tmp_path / "plain"))


def test_every_process_has_the_whole_of_what_mixes_tokens(heads: RetainingHeads) -> None:
    weights, ranks = heads.state_dict(), locret.backbone.head_ranks.HeadRanks(1, 2, None)
    name = "heads.0.mix.weight"
    assert part_of(weights[name], name, heads.config, ranks).equal(weights[name])
    assert whole_of(weights[name], name, heads.config, ranks).equal(weights[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"neighbours": -1}, "--neighbours -1 is out of range; give 0 for heads that look at one token"),
        ({"neighbours": 65}, "--neighbours 65 is out of range"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackboneOptions(**options)
