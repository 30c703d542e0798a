"""One fused kernel steps the heads of all layers, to where the plain AdamW takes them."""

from __future__ import annotations

import pytest
import torch
from training_cases import backbone, token_ids

from locret import RetainingHeads
from locret.train.optimizer import head_optimizer
from locret.train.step import train_step
from locret.train.training_options import OptimizerOptions

OPTIONS = OptimizerOptions(steps=6, warmup_steps=2, lr=1e-2)


def made() -> RetainingHeads:
    return RetainingHeads.for_model(backbone(), hidden_dim=12, seed=3)


def test_fused_steps_end_where_plain_ones_do() -> None:
    heads, plain = made(), made()
    optimizer, schedule = head_optimizer(heads, OPTIONS)
    twin = torch.optim.AdamW(
        plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01, foreach=False, fused=False
    )
    for step, factor in enumerate([0, 0.5, 1, 0.75, 0.5, 0.25]):
        twin.param_groups[0]["lr"] = 1e-2 * factor
        for trained, stepping in ((heads, optimizer), (plain, twin)):
            train_step(backbone(), trained, token_ids(20, seed=step), token_ids(4, seed=9))
            stepping.step()
            stepping.zero_grad()
        schedule.step()
    fresh = made().state_dict()
    for name, weight in heads.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], atol=1e-6, rtol=0)
        assert (weight - fresh[name]).abs().max() > 1e-3


def test_one_call_of_one_kernel_steps_all_layers() -> None:
    heads = made()
    optimizer, _ = head_optimizer(heads, OPTIONS)
    train_step(backbone(), heads, token_ids(20), token_ids(4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as record:
        optimizer.step()
    calls = {event.key: event.count for event in record.key_averages()}
    assert calls["aten::_fused_adamw_"] == 1
    (group,) = optimizer.param_groups
    assert len(group["params"]) == 2 * len(heads) == 6


@pytest.mark.parametrize("step", [0, 1, 1999, 2000, 2500, 2999, 3000])
def test_the_default_schedule_is_the_papers(step: int) -> None:
    expected = step / 2000 if step < 2000 else (3000 - step) / 1000
    _, schedule = head_optimizer(made(), OptimizerOptions())
    assert schedule.lr_lambdas[0](step) == pytest.approx(expected)
