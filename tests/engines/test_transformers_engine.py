"""The server's own engine: what an `Engine` promises, over contexts in pages."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from test_paged_contexts import Read, ids
from transformers import AutoModelForCausalLM

from locret import RetainingHeads
from locret.engines.transformers import Written
from locret.infer.serve.engine import Asked, NoRoom, NotRunning, Step
from locret.infer.serve.transformers_engine import TransformersEngine


@pytest.fixture(scope="module")
def book() -> Read:
    model: Any = AutoModelForCausalLM.from_pretrained("checkpoints/tiny").eval()
    return Read.by(model, RetainingHeads.from_pretrained("checkpoints/tiny-heads"), 0)


def test_an_engine_answers_questions_to_contexts_and_plain_prompts(book: Read) -> None:
    engine = TransformersEngine(book.model, kv_bytes=4 << 20)
    assert 0 < engine.planned_bytes <= 4 << 20
    with pytest.raises(NotRunning, match="does not run"):
        engine.hold(book.prefix)
    assert not engine.running
    engine.start()
    try:
        assert engine.running
        engine.hold(book.prefix)
        assert 0 < engine.used_bytes < engine.planned_bytes
        question, steps, over = ids(9, 1), [], threading.Event()

        def on_step(step: Step) -> None:
            steps.append(step)
            if step.finish:
                over.set()

        engine.ask(Asked(ids=tuple(question), prefix=book.prefix, max_new_tokens=8, top_logprobs=2), on_step)
        assert over.wait(20)
        assert [step.token for step in steps] == book.answer(question, 8)
        assert [step.finish for step in steps] == [None] * 7 + ["length"]
        assert all(step.logprob is not None and step.top[0] == (step.token, step.logprob) for step in steps)
        with pytest.raises(ValueError, match="positions, more than"):
            engine.ask(Asked(ids=(5,), max_new_tokens=engine.longest), on_step)
        cancels = [engine.ask(Asked(ids=(5,), max_new_tokens=engine.longest - 100), lambda _step: None)]
        with pytest.raises(NoRoom):
            engine.ask(Asked(ids=(5,), prefix=book.prefix, max_new_tokens=engine.longest - 60), on_step)
        for cancel in cancels:
            cancel()
    finally:
        engine.stop()
    assert engine.used_bytes == 0
    assert not engine.running
    with pytest.raises(NotRunning):
        engine.ask(Asked(ids=(5,), max_new_tokens=1), on_step)


def test_a_step_says_all_that_a_written_token_says() -> None:
    assert set(Step.__dataclass_fields__) == set(Written.__dataclass_fields__)
