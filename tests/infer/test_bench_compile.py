"""`locret-bench --compile` times steps that were compiled before, and says which rows they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from locret import generation
from locret.infer.speed import machine, measure
from locret.infer.speed.bench_options import BenchOptions
from locret.infer.speed.command import command
from locret.infer.speed.measure import Measurements, Seconds
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.record import make_record
from locret.infer.speed.report import COMPILED, page
from locret.infer.speed.resolve import make_plan
from locret.infer.speed.runs import make_setup, new_run

NUMBERS = {"budget": 32, "chunk_size": 24, "stabilizers": 8, "local_len": 7, "new_tokens": 4, "threads": 1}


def plan_of(model: Path | None = None, **changes: Any) -> BenchPlan:
    which = {"shape": "tiny"} if model is None else {"model": str(model), "hidden_dim": 8}
    given = {**which, "lengths": "100", "methods": "full,floor,locret", "compile": True, **NUMBERS, **changes}
    return make_plan(BenchOptions(**given), set(given))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Trace steps without waiting for the compiler itself (which tests/core does), and count the programs made."""
    counter, real = CompileCounter(), generation.compiled_steps

    def traced(model: Any, cache: Any, new_tokens: int, backend: str) -> Any:
        assert backend == "inductor"
        return real(model, cache, new_tokens, counter)

    torch._dynamo.reset()
    monkeypatch.setattr(generation, "compiled_steps", traced)
    yield counter
    torch._dynamo.reset()


@pytest.mark.slow
def test_all_programs_are_made_before_the_rounds(
    monkeypatch: pytest.MonkeyPatch, programs: CompileCounter, backbone: Path
) -> None:
    # Two lengths hold different numbers of units; the first is too short for the budget.
    plan, made, real = plan_of(backbone, methods="full,locret", lengths="30,120", repeats=2), [], measure._time

    def noted(setup: Any, method: Any, length: int) -> Seconds:
        before = programs.frame_count
        found = real(setup, method, length)
        made.append((method.name, programs.frame_count - before))
        return found

    monkeypatch.setattr(measure, "_time", noted)
    monkeypatch.setitem(machine.MATMUL_SIZE, "cpu", 16)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 2**16)
    measure.measure(plan)
    warm, rounds = made[:4], made[4:]
    assert [name for name, _ in warm] == ["full", "locret"] * 2
    assert warm[0] == ("full", 0)
    assert warm[1] == ("locret", 1)
    assert rounds == [("full", 0), ("locret", 0)] * 4


@pytest.mark.slow
def test_a_compiled_answer_is_the_one_that_is_written_otherwise(programs: CompileCounter, backbone: Path) -> None:
    answers = []
    for compile in (False, True):
        plan = plan_of(backbone, methods="locret", compile=compile)
        run = new_run(make_setup(plan), plan.methods[0], 100)
        answers.append(run.write(run.read()))
        assert (programs.frame_count > 0) == compile
    assert answers[0] == answers[1]


def test_rows_and_a_sentence_say_what_is_compiled() -> None:
    seconds = {(name, 100): [Seconds(1.0, 1.0)] for name in ("full", "floor", "locret")}
    found = Measurements(rates=[machine.MachineRates(1.0, 1.0)], seconds=seconds)
    compiled, plain = (make_record(plan_of(compile=compile), found) for compile in (True, False))
    assert [row["compiled"] for row in compiled["results"]] == [False, False, True]
    assert not any(row["compiled"] for row in plain["results"])
    assert (compiled["config"]["compile"], plain["config"]["compile"]) == (True, False)
    text = page(compiled, "locret-bench --compile")
    assert "| locret, compiled | 100 |" in text
    assert "| full | 100 |" in text
    assert COMPILED in text
    assert "ompiled" not in page(plain, "locret-bench")


def test_a_dry_run_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--shape", "tiny", "--methods", "full,locret", "--compile", "--dry-run", "--quiet"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["config"]["compile"] is True
    assert {(row["method"], row["compiled"]) for row in record["plan"]} == {("full", False), ("locret", True)}


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            "full,snapkv",
            "--methods snapkv cannot be compiled here: scorer snapkv looks at every step's attention; reta",
        ),
        ("locret+pyramid", "locret+pyramid cannot be compiled here: layers or heads hold different numbers of units"),
        ("locret+adaptive_heads", "--methods locret+adaptive_heads cannot be compiled here: layers or heads hold"),
        ("full,floor", "--compile changes how locret writes, which --methods leaves out; add locret, or drop"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_weights_are_made(methods: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("+", r"\+")) as raised:
        plan_of(methods=methods)
    assert "\n" not in str(raised.value)
    plan_of(methods=methods, compile=False)
