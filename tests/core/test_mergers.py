"""Evicted units folded into kept ones: LoCoCo's convolution, its kernels as files, and their training."""

from __future__ import annotations

import re
from pathlib import Path

import oracle as reference
import pytest
import torch
from families import build, prompt
from test_scorers import NUMBERS

from locret import RetainingHeads, RetentionCache, RetentionPolicy
from locret.mergers.kernels import MergingKernel, MergingKernels
from locret.mergers.loco import WORST, Units, fold
from locret.train import merging_command
from locret.train.merging_step import merging_step

ROWS, HEADS, DIM = 2, 2, 8


def units_of(held: int, kept: int) -> Units:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(ROWS, HEADS, held, DIM, generator=generator) for _ in range(2))
    scores = torch.randn(ROWS, HEADS, held, generator=generator)
    chosen = scores.topk(kept).indices.sort().values
    stays = torch.zeros(ROWS, HEADS, held).scatter_(2, chosen, 1)
    gone = stays.argsort(dim=-1, stable=True)[..., : held - kept]
    pinned, positions = torch.zeros(ROWS, HEADS, held, dtype=torch.bool), torch.arange(held).expand(ROWS, HEADS, held)
    states = {"keys": keys, "values": values, "scores": scores, "positions": positions, "pinned": pinned}
    return Units(layer_idx=0, **states, kept=chosen, gone=gone, free=kept)


# -- in a cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("d2o:threshold=0.5", 'merge "d2o" was retired; release 0.1.0'),
        ("loco", "merge loco needs its option kernels; write loco:kernels=VALUE"),
        ("loco:kernels=nowhere/at/all", "merge loco: there is no folder 'nowhere/at/all'"),
    ],
)
def test_a_spec_that_says_nothing_is_refused_before_reading(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        RetentionCache(build("llama"), "random", RetentionPolicy(**NUMBERS, merge=spec))


@pytest.mark.parametrize(
    ("held", "kept", "slots", "width", "alpha"),
    [(31, 9, 3, 5, 0.5), (12, 4, 2, 21, 0.9), (40, 39, 5, 1, 0.3), (9, 3, 3, 3, 1.0), (23, 7, 1, 5, 0.0)],
)
def test_merged_slots_are_those_of_the_reference(held: int, kept: int, slots: int, width: int, alpha: float) -> None:
    units, kernel = units_of(held, kept), MergingKernel(slots, 2 * 8, width, torch.Generator().manual_seed(1))
    kernel.requires_grad_(False).weight.mul_(8)
    kernel.alpha.fill_(alpha)
    pinned = torch.zeros(ROWS, HEADS, held, dtype=torch.bool)
    pinned[..., -2:] = kept > slots + 1
    merged = fold(type(units)(**{**vars(units), "pinned": pinned}), kernel)
    for row in range(ROWS):
        for head in range(HEADS):
            keys, values, positions, scores = reference.loco(
                units.keys[row, head],
                units.values[row, head],
                units.scores[row, head].tolist(),
                units.positions[row, head].tolist(),
                units.kept[row, head].tolist(),
                units.gone[row, head].tolist(),
                (kernel.weight, kernel.bias, float(kernel.alpha)),
                set(pinned[row, head].nonzero()[:, 0].tolist()),
            )
            torch.testing.assert_close(merged.keys[row, head], keys, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(merged.values[row, head], values, rtol=1e-4, atol=1e-5)
            assert merged.positions[row, head].tolist() == positions
            assert merged.scores[row, head].tolist() == scores
    assert (merged.positions.diff() > 0).all()
    assert (merged.scores == WORST).sum() == ROWS * HEADS * slots


# -- files ------------------------------------------------------------------------------------------------------------


def test_kernels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, saved, heads = build("llama"), tmp_path / "kernels", tmp_path / "heads"
    MergingKernels.for_model(model, slots=3, kernel_size=5, seed=0).save_pretrained(saved)
    RetainingHeads.for_model(model, hidden_dim=8, seed=0).save_pretrained(heads)
    policy = RetentionPolicy(**NUMBERS, merge=f"loco:kernels={heads}")
    with pytest.raises(ValueError, match="lacks kernel_size"):
        RetentionCache(model, "random", policy)
    with pytest.raises(ValueError, match="holds something else"):
        MergingKernels.for_model(model, slots=3).save_pretrained(heads)
    with pytest.raises(ValueError, match="unknown key 'kernel_size'"):
        RetainingHeads.from_pretrained(saved)
    merge = f"loco:kernels={saved}"
    with pytest.raises(ValueError, match="the merging kernels do not belong to this model: num_key_value_heads is 2"):
        RetentionCache(build("llama-mha"), "random", RetentionPolicy(**NUMBERS, merge=merge))
    tight = RetentionPolicy(budget=24, chunk_size=10, stabilizers=22, local_len=6, merge=merge)
    with pytest.raises(ValueError, match="makes 3 units per KV head, more than budget=24 holds beside stabilizers=22"):
        RetentionCache(model, "random", tight)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_training_lowers_what_an_eviction_costs_and_touches_nothing_else(family: str) -> None:
    model = build(family).requires_grad_(False)
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    kernels = MergingKernels.for_model(model, slots=6, kernel_size=3, seed=0)
    policy = RetentionPolicy(budget=20, chunk_size=10, stabilizers=4, local_len=6)
    optimizer = torch.optim.AdamW(kernels.parameters(), lr=0.02, weight_decay=0.0)
    losses = []
    for _ in range(15):
        left = merging_step(model, heads, kernels, prompt(60), policy)
        losses.append(float(left.mean()))
        optimizer.step()
        optimizer.zero_grad()
    assert len(left) == len(kernels.config.layers) * 4  # of six chunks the last four follow an eviction
    assert min(losses[-5:]) < 0.98 * losses[0]
    assert all(p.grad is None for p in [*model.parameters(), *heads.parameters()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slots", "0"], "--slots 0 is not between 1 and the 48 units of --policy.budget 64"),
        (["--policy.key-bits", "4"], "the kernels merge"),
    ],
)
def test_what_does_not_go_with_kernels_is_refused_before_training(
    tmp_path: Path, options: list[str], message: str
) -> None:
    given = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads", "--dataset", "rows.jsonl"]
    given += ["--output", str(tmp_path / "kernels"), "--policy.budget", "64"]
    with pytest.raises(ValueError, match=message):
        merging_command.command([*given, *options])
