"""Bytes are those that were allocated, seconds come in rounds, and what runs out of memory stops nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from locret.infer.speed import machine, measure
from locret.infer.speed.allocations import peak_bytes, phase
from locret.infer.speed.bench_options import BenchOptions
from locret.infer.speed.measure import Seconds
from locret.infer.speed.peaks import measure_peaks
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.resolve import make_plan
from locret.infer.speed.runs import FloorRun, layer_bytes, make_setup, new_run, storage_bytes
from locret.infer.speed.shapes import TINY

MIB = 2**20
LAYERS = TINY.num_hidden_layers


def plan_of(methods: str, **changes: Any) -> BenchPlan:
    numbers = {"budget": 32, "chunk_size": 24, "stabilizers": 8, "local_len": 7, "new_tokens": 3, "threads": 1}
    given = {"shape": "tiny", "lengths": "150", "methods": methods, "repeats": 2, **numbers, **changes}
    return make_plan(BenchOptions(**given), set(given))


def floats(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


def test_a_phase_counts_what_is_alive_in_it() -> None:
    def side() -> None:
        before = floats(1)
        with phase("first"):
            kept = floats(4)
            gone = floats(2)
            del gone
        with phase("second"):
            last = floats(1)
        del before, kept, last

    peaks = peak_bytes(side)
    assert peaks.phases == {"first": 7 * MIB, "second": 6 * MIB}
    assert peaks.everything == 7 * MIB


def test_a_phase_does_not_count_what_it_frees_of_an_earlier_one_twice() -> None:
    def side() -> None:
        with phase("first"):
            cache = floats(3)
        with phase("second"):
            cache = torch.cat([cache, floats(1)])
        del cache

    assert peak_bytes(side).phases == {"first": 3 * MIB, "second": (3 + 1 + 4) * MIB}


@pytest.mark.parametrize("name", ["full", "floor", "locret"])
@pytest.mark.slow
def test_peak_bytes_are_weights_cache_and_workspace(name: str) -> None:
    plan = plan_of(name)
    setup, method = make_setup(plan), plan.methods[0]
    peaks, planned = measure_peaks(setup, method, 150), plan.planned_bytes(method, 150)
    assert peaks.prefill.weights == planned.weights
    last = 3 if name == "full" else 0  # the last new tokens' units come later
    unit = LAYERS * 2 * 4 * 32 * 4
    assert peaks.prefill.cache == planned.cache - last * unit
    assert peaks.decode.cache == planned.cache
    # A chunk's states and the gate, up and product of an MLP at the least; no more than forty of its widest tensors.
    widest = 24 * 384 * 4
    assert 3 * widest < peaks.prefill.workspace < 40 * widest
    assert 0 < peaks.decode.workspace < peaks.prefill.workspace


@pytest.mark.slow
def test_what_a_layer_allocates_shows_as_workspace() -> None:
    plan = plan_of("locret")
    setup, method = make_setup(plan), plan.methods[0]
    before = measure_peaks(setup, method, 150).prefill

    class Wasteful(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states + floats(16).sum() * 0

    setup.model.get_decoder().layers[1].mlp = Wasteful()
    after = measure_peaks(setup, method, 150).prefill
    assert after.cache == before.cache
    assert 16 * MIB <= after.workspace <= 16 * MIB + before.workspace


def test_bytes_of_tensors_that_share_memory_count_once() -> None:
    base = floats(2)
    assert storage_bytes([base, base[1:], base.view(2, -1), floats(1)]) == 3 * MIB


def test_bytes_of_a_full_cache_grow_with_the_prompt_and_those_of_a_bounded_one_do_not() -> None:
    plan = plan_of("full,locret", lengths="100,200")
    setup = make_setup(plan)
    counted = {}
    for method in plan.methods:
        for length in plan.lengths:
            run = new_run(setup, method, length)
            run.read()
            counted[method.name, length] = run.cache_bytes()
    assert counted["full", 200] == 2 * counted["full", 100] == 200 * LAYERS * 2 * 4 * 32 * 4
    assert counted["locret", 200] == counted["locret", 100]


@pytest.mark.slow
def test_every_round_runs_everything_once_and_the_machine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, order = plan_of("full,floor", lengths="40,60"), []
    real = measure._time

    def noted(setup: Any, method: Any, length: int) -> Seconds:
        order.append((method.name, length))
        return real(setup, method, length)

    monkeypatch.setattr(measure, "_time", noted)
    monkeypatch.setitem(machine.MATMUL_SIZE, "cpu", 16)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 2**16)
    found = measure.measure(plan)
    rounds = [("full", 40), ("floor", 40), ("full", 60), ("floor", 60)]
    assert order == [*rounds, *rounds * 2]  # once to warm up
    assert set(found.seconds) == set(found.peaks) == set(rounds)
    assert all(len(seconds) == 2 for seconds in found.seconds.values())
    assert all(one.prefill > 0 and one.decode > 0 for seconds in found.seconds.values() for one in seconds)
    assert len(found.rates) == 2


@pytest.mark.slow
def test_a_method_that_runs_out_of_memory_is_left_out_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.MATMUL_SIZE, "cpu", 16)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 2**16)
    tried = []

    def full_up(self: FloorRun) -> int:
        tried.append(self.ids.shape[1])
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(FloorRun, "read", full_up)
    found = measure.measure(plan_of("floor,full"))
    assert set(found.seconds) == set(found.peaks) == {("full", 150)}
    assert len(found.rates) == 2
    assert len(tried) == 1


def test_threads_are_the_plans_while_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(*_: Any) -> None:
        seen.append(torch.get_num_threads())
        raise RuntimeError("enough")

    monkeypatch.setattr(measure, "make_setup", note)
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="enough"):
        measure.measure(plan_of("full", threads=before + 1))
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_a_backbone_that_does_not_fit_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full_up(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(measure, "make_setup", full_up)
    with pytest.raises(OSError, match="cpu is out of memory before a prompt is read; take a smaller --shape"):
        measure.measure(plan_of("full"))


def test_rates_are_operations_and_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.MATMUL_SIZE, "cpu", 100)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 4000)
    seconds = iter((0.5, 0.25))
    done = []

    def clock(_device: torch.device, call: Any) -> float:
        done.append(call())
        return next(seconds)

    monkeypatch.setattr(machine, "_seconds", clock)
    rates = machine.measure_rates(torch.device("cpu"), torch.float32)
    assert rates.flops_per_second == 2 * 100**3 / 0.5
    assert rates.bytes_per_second == 2 * 4000 / 0.25
    product, copy = done
    assert product.shape == (100, 100)
    assert torch.equal(copy, torch.ones(1000))


def test_a_static_cache_counts_its_buffers_and_not_what_is_filled() -> None:
    plan = plan_of("floor")
    run = new_run(make_setup(plan), plan.methods[0], 40)
    run.read()
    assert isinstance(run, FloorRun)
    assert layer_bytes(run.cache) == LAYERS * (32 + 24) * 2 * 4 * 32 * 4
