"""The ledger of what heads predicted for what they have read, and the watch that compares it with an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from safetensors.torch import load_file, save_file

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache
from locret.backbone.adapters import describe
from locret.cache.compose import Part, joined, shrunk
from locret.cache.ledger import LEAST_WIDTH, Ledger, ledger_bytes
from locret.cache.watch import Watch, layer_weights

SMALL: dict[str, Any] = {"budget": 16, "chunk_size": 48, "stabilizers": 4, "local_len": 8}
IDS = torch.randint(5, 190, (1, 2500), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def heads(model: Any) -> RetainingHeads:
    return RetainingHeads.for_model(model, hidden_dim=12, seed=1)


def read(model: Any, heads: RetainingHeads, tokens: int = 400, **changes: Any) -> RetentionCache:
    cache = RetentionCache(model, heads, RetentionPolicy(**{**SMALL, "ledger": 32, **changes}))
    prefill(model, IDS[:, :tokens], cache)
    return cache


def summed(positions: torch.Tensor, scores: torch.Tensor, width: int, segments: int) -> torch.Tensor:
    """Return (K, J): the sum of exp(score) in each segment, one unit after another."""
    sums = torch.zeros(len(positions), segments, dtype=torch.float64)
    for head, (where, what) in enumerate(zip(positions, scores, strict=True)):
        for position, score in zip(where.tolist(), what.double().exp().tolist(), strict=True):
            sums[head, position // width] += score
    return sums


@pytest.mark.parametrize(("segments", "tokens"), [(32, 400), (4, 400), (5, 1000)])
def test_a_ledger_sums_what_was_predicted_for_all_units(
    model: Any, heads: RetainingHeads, segments: int, tokens: int
) -> None:
    cache = read(model, heads, tokens, ledger=segments, host_budget="all", recall=1)
    for layer in cache.governed:
        fast, host = (
            [store.held(name)[0] for name in ("positions", "scores")] for store in (layer.store, layer.host.store)
        )
        assert len(fast[0][0]) + len(host[0][0]) == tokens
        width = layer.ledger.width
        assert (tokens - 1) // width < segments
        assert width == LEAST_WIDTH or (tokens - 1) // (width // 2) >= segments
        held, gone = summed(*fast, width, segments), summed(*host, width, segments)
        base = layer.ledger.sums.amax(1, keepdim=True).double().exp()
        torch.testing.assert_close(layer.ledger.sums.double().exp(), held + gone, rtol=1e-4, atol=0)
        # What the second tier holds is not gone; without that tier it would be.
        assert not layer.ledger.masses(layer.store, layer.host.store).gone.any()
        alone = layer.ledger.masses(layer.store, None)
        torch.testing.assert_close(alone.held.double(), held / base, rtol=1e-3, atol=1e-7)
        torch.testing.assert_close(alone.gone.double(), gone / base, rtol=1e-3, atol=2e-4)


def test_nothing_is_gone_where_nothing_was_evicted(model: Any, heads: RetainingHeads) -> None:
    cache = read(model, heads, 200, budget=300)
    for layer in cache.governed:
        assert not layer.ledger.masses(layer.store, None).gone.any()
    assert watched(cache).share == 0


def test_chunks_change_nothing(model: Any, heads: RetainingHeads) -> None:
    ledger, other = Ledger(8), Ledger(8)
    scores = torch.randn(1, 2, 700, generator=torch.Generator().manual_seed(0)) * 4
    positions = torch.arange(700)[None, None]
    for size, target in ((700, ledger), (37, other)):
        for part, where in zip(scores.split(size, 2), positions.split(size, 2), strict=True):
            target.note(part, where)
    assert ledger.width == other.width == 128
    torch.testing.assert_close(ledger.sums, other.sums)


@pytest.mark.parametrize("tokens", [60, 500, 2500])
def test_its_bytes_are_planned_and_do_not_grow(model: Any, heads: RetainingHeads, tokens: int) -> None:
    on, off = read(model, heads, tokens).memory(), read(model, heads, tokens, ledger=0).memory()
    assert on.actual == on.planned
    assert on.actual - off.actual == ledger_bytes([2, 2, 2], 32) == 3 * 2 * 32 * 4


def test_it_changes_no_answer(model: Any, heads: RetainingHeads) -> None:
    on, off = read(model, heads), read(model, heads, ledger=0)
    assert torch.equal(on.kept_positions(1), off.kept_positions(1))
    options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    on.watch = Watch(on.governed)
    ours, theirs = (generate(model, cache=cache, **options) for cache in (on, off))
    assert all(map(torch.equal, ours.logits, theirs.logits))


def watched(cache: RetentionCache) -> Watch:
    twin = cache.copy()
    assert twin.watch is None
    twin.watch = Watch(twin.governed)
    generate(cache.model, cache=twin, max_new_tokens=4, do_sample=False)
    return twin.watch


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"head_budgets": "adaptive"}),
        ("gpt-oss", {}),
        ("gemma2", {}),
        ("qwen3", {"positions": "original"}),
        ("llama", {"key_bits": 8, "value_bits": 8}),
        ("llama", {"host_budget": 64, "recall": 4}),
        ("lfm2", {}),
        ("phi3", {"when": "prompt_end"}),
    ],
)
def test_a_watch_sees_what_the_answer_attends_to(family: str, changes: dict[str, Any]) -> None:
    """With all units held, all attention to the text is found; with few, part of it is lost as well."""
    model = build(family)
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=1)
    some = watched(read(model, heads, 300, **changes))
    assert 0 < some.share < 1
    assert torch.all(some.lost() >= 0)
    assert some.lost()[-(-300 // LEAST_WIDTH) :].sum() == 0
    assert float(some.found().sum()) <= 1 + 1e-5
    if "host_budget" not in changes:
        whole = watched(read(model, heads, 300, **{**changes, "budget": 400}))
        assert whole.share == 0


@pytest.mark.parametrize("shares", [None, "the last", "as measured"])
def test_found_attention_is_that_of_the_backbone(model: Any, heads: RetainingHeads, shares: str | None) -> None:
    """The attention of the answer's one step, summed by segment, from the weights of transformers' own eager code.

    Layers count as much as their shares are above the least.
    """
    cache = read(model, heads, 200, budget=400, positions="original")
    layers = len(cache.governed)
    given = {
        None: None,
        "the last": [0.5] * (layers - 1) + [0.5 + 0.5 * layers],
        "as measured": [0.75] + [1.0] * (layers - 2) + [1.25],
    }
    cache.watch = Watch(cache.governed, given[shares])
    generate(model, cache=cache, max_new_tokens=1, do_sample=False)
    weights = model(IDS[:, :200], output_attentions=True).attentions
    means = torch.stack([one[0, :, -1].mean(0) for one in weights]).double()
    counts = {None: [1.0] * layers, "the last": [0.0] * (layers - 1) + [1.0]}.get(
        shares, [0.25] + [0.5] * (layers - 2) + [0.75]
    )
    mean = torch.tensor(counts, dtype=torch.float64) @ means / sum(counts)
    segments = torch.zeros(32, dtype=torch.float64).index_add_(0, torch.arange(200) // LEAST_WIDTH, mean)
    torch.testing.assert_close(cache.watch.found(), segments, rtol=1e-4, atol=1e-6)
    alike = torch.zeros(32, dtype=torch.float64).index_add_(0, torch.arange(200) // LEAST_WIDTH, means.mean(0))
    torch.testing.assert_close(cache.watch.found(weighed=False), alike, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1.0, 0.01, 300.0])
def test_layers_count_by_the_ratio_of_their_shares(size: float) -> None:
    assert layer_weights(None, 3) == layer_weights([size] * 3, 3) == pytest.approx([1 / 3] * 3)
    assert layer_weights([0.5 * size, 0.5 * size, 2 * size], 3) == pytest.approx([0, 0, 1])
    assert layer_weights([0.4 * size, 0.8 * size, 1.8 * size], 3) == pytest.approx([0, 3 / 16, 13 / 16])
    with pytest.raises(ValueError, match="layer_shares has 2 numbers for 3 layers with full attention"):
        layer_weights([size, size], 3)
    for none in ([0.0, 0.0, 0.0], [-size, size, size]):  # as heads from elsewhere may say
        with pytest.raises(ValueError, match="are no shares; give a number above 0"):
            layer_weights(none, 3)


def test_lost_attention_is_that_of_the_layers_that_count(model: Any, heads: RetainingHeads) -> None:
    cache = read(model, heads, 300)
    alone = []
    for nth in range(len(cache.governed)):
        twin = cache.copy()
        twin.watch = Watch(twin.governed, [1.0 + 9 * (layer == nth) for layer in range(len(cache.governed))])
        generate(model, cache=twin, max_new_tokens=4, do_sample=False)
        alone.append(twin.watch.lost())
        alike = twin.watch.lost(weighed=False)
        assert twin.watch.share == pytest.approx(float(alike.sum()))
    assert not torch.allclose(alone[0], alone[1])
    torch.testing.assert_close(torch.stack(alone).mean(0), alike)


def test_where_layers_that_count_hold_everything_the_others_say_where_to_look(
    model: Any, heads: RetainingHeads
) -> None:
    layers = len(describe(model.config).layers)
    all_but_one = {"layer_budgets": "shares", "layer_shares": tuple([float(500 * layers)] + [1.0] * (layers - 1))}
    cache = read(model, heads, 300, **all_but_one, budget=400)
    if all(layer.evictions == 0 for layer in cache.governed[1:]):
        pytest.fail("the other layers have to evict")
    cache.watch = Watch(cache.governed, [1.0 + 9 * (layer == 0) for layer in range(layers)])
    generate(model, cache=cache, max_new_tokens=4, do_sample=False)
    lost = cache.watch.lost()
    assert lost.any()
    torch.testing.assert_close(lost, cache.watch.lost(weighed=False))


def test_it_is_saved_and_shrunk_and_left_out_of_what_is_joined(
    model: Any, heads: RetainingHeads, tmp_path: Path
) -> None:
    cache = read(model, heads)
    save_cache(cache, tmp_path / "cache")
    loaded = load_cache(tmp_path / "cache", model, heads)
    for ours, theirs in zip(cache.governed, loaded.governed, strict=True):
        assert torch.equal(ours.ledger.sums, theirs.ledger.sums)
        assert ours.ledger.width == theirs.ledger.width
    assert watched(loaded).share == pytest.approx(watched(cache).share)
    small = shrunk(loaded, 12)
    for before, after in zip(cache.governed, small.governed, strict=True):
        gone = [layer.ledger.masses(layer.store, None).gone.sum() for layer in (before, after)]
        assert gone[1] > gone[0]
    both = joined([Part(cache.copy()), Part(loaded)])
    assert [layer.ledger for layer in both.governed] == [None] * 3
    assert both.memory().actual <= both.memory().planned


@pytest.mark.parametrize("damage", ["width", "end", "shape", "nan", "missing", "text"])
def test_a_damaged_ledger_is_refused(model: Any, heads: RetainingHeads, tmp_path: Path, damage: str) -> None:
    from safetensors import safe_open

    path = tmp_path / "cache"
    save_cache(read(model, heads), path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    metadata.pop("checksum")
    tensors = load_file(path)
    if damage == "end":
        metadata["state"] = metadata["state"].replace('"ledger_end": 400', '"ledger_end": 4000')
    elif damage == "width":
        metadata["state"] = metadata["state"].replace('"ledger_width": 32', '"ledger_width": 33')
    elif damage == "text":
        metadata["state"] = metadata["state"].replace('"ledger_width": 32', '"ledger_width": "32"')
    elif damage == "shape":
        tensors["layers.1.ledger"] = tensors["layers.1.ledger"][:, :8].contiguous()
    elif damage == "nan":
        tensors["layers.1.ledger"][0, 3] = torch.nan
    else:
        tensors.pop("layers.1.ledger")
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match="it is damaged .*ledger"):
        load_cache(path, model, heads)


def test_a_file_of_an_earlier_version_has_none(model: Any, heads: RetainingHeads, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    save_cache(read(model, heads, ledger=0), path)
    loaded = load_cache(path, model, heads)
    assert [layer.ledger for layer in loaded.governed] == [None] * 3


def test_what_cannot_have_one_is_refused(model: Any, heads: RetainingHeads) -> None:
    with pytest.raises(ValueError, match=r"ledger=32 .* scorer snapkv does not predict any"):
        RetentionCache(model, "snapkv", RetentionPolicy(**SMALL, ledger=32))
    with pytest.raises(ValueError, match="ledger=32 is kept for one text, but input_ids has 2 rows"):
        prefill(model, IDS[:, :400].view(2, 200), RetentionCache(model, heads, RetentionPolicy(**SMALL, ledger=32)))
    deciding = RetainingHeads.for_model(model, gate="dms")
    with pytest.raises(ValueError, match=r"ledger=32 .* these heads decide without predicting any"):
        RetentionCache(model, deciding, RetentionPolicy(**SMALL, ledger=32))
    for number in (-1, 1):
        with pytest.raises(ValueError, match=f"ledger={number} is no number of segments"):
            RetentionPolicy(ledger=number)
