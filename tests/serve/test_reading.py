"""Reading beside answers: turns, streams of bytes, and memory that is what was planned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from running import until

from locret import LongContextModel, RetentionPolicy
from locret.engines.transformers import PagedContexts
from locret.infer.serve.jobs import Room, Turns
from locret.infer.serve.plan import MemoryPlan


def wait() -> None:
    """Wait on."""


# -- turns ------------------------------------------------------------------------------------------------------------


def chunks(turns: Turns, name: str, count: int, order: list[str], check: Callable[[], None] = wait) -> threading.Thread:
    """Read so many chunks in a thread."""

    def read() -> None:
        with turns.turn(check) as next_turn:
            for _ in range(count):
                order.append(name)
                time.sleep(0.01)
                next_turn()

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_readers_go_chunk_by_chunk_in_turns() -> None:
    turns, order = Turns(), list[str]()
    with turns.turn(wait):
        threads = [chunks(turns, name, 5, order) for name in "abc"]
        until(lambda: len(turns._waiting) == 3)
    for thread in threads:
        thread.join()
    assert [sorted(order[at : at + 3]) for at in range(0, 15, 3)] == [["a", "b", "c"]] * 5
    assert turns.chunks == 15


def test_a_chunk_gives_way_until_every_answer_has_begun_and_one_went_on() -> None:
    turns, order, answers = Turns(patience=1000.0), list[int](), list[object]()

    def read() -> None:
        with turns.turn(wait) as next_turn:
            for chunk in range(3):
                order.append(chunk)
                time.sleep(0.01)
                for answer in () if chunk else ("first", "second"):
                    turns.note(answer, False)
                    answers.append(answer)
                next_turn()

    def read_in_a_while() -> int:
        time.sleep(0.05)
        return len(order)

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: len(answers) == 2)
    assert read_in_a_while() == 1
    turns.note("first", True)
    assert read_in_a_while() == 1  # the second has no token yet
    turns.note("second", True)
    until(lambda: len(order) == 2)
    assert read_in_a_while() == 2  # one chunk for one step
    turns.note("first", True)
    until(lambda: len(order) == 3)
    for answer in (*answers, "second"):
        turns.note(answer, None)
    turns.note("second", True)  # one that was cancelled may still have a token
    assert not turns._answers
    thread.join(5)
    assert not thread.is_alive()


# -- bytes that jobs share --------------------------------------------------------------------------------------------


def test_jobs_wait_for_room_in_the_order_they_came() -> None:
    room, order = Room(10), list[int]()

    def hold(wanted: int) -> None:
        with room.taken(wanted, wait):
            order.append(wanted)

    with room.taken(6, wait):
        threads = [threading.Thread(target=hold, args=(wanted,)) for wanted in (9, 3)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        assert (order, room.used) == ([], 6)  # there is room for 3, but 9 came first
    for thread in threads:
        thread.join(5)
    assert (order, room.used) == ([9, 3], 0)
    with pytest.raises(ValueError, match="takes 11 bytes, but --kv-memory leaves 10"), room.taken(11, wait):
        pass


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_that_is_too_small_is_refused_with_what_is_needed(serving: LongContextModel) -> None:
    with pytest.raises(ValueError, match=r"--kv-memory 1MiB is too small: 2 readers of .* give as much") as caught:
        MemoryPlan.of(serving, "1MiB")
    needed = int(str(caught.value).split(" take ")[1].split(" bytes")[0].replace(",", ""))
    plan = MemoryPlan.of(serving, needed)
    assert plan.reading + plan.engine + plan.moving + plan.working == plan.kv_memory == needed
    assert PagedContexts(serving.model, kv_bytes=plan.engine).room(plan.units) >= serving.policy.chunk_size
    with pytest.raises(ValueError, match="is too small"):
        MemoryPlan.of(serving, needed - 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "original"}, 'positions="original" leaves gaps'),
        ({"when": "prompt_end"}, "--when prompt_end holds all of a text"),
        ({"memory": "adaptive"}, "--memory adaptive plans by a text's length"),
        ({"host_budget": 100, "recall": 8}, "--host-budget 100 is a second tier"),
        ({"key_bits": 8}, "--key-bits and --value-bits hold codes"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_read(
    serving: LongContextModel, changes: dict[str, Any], message: str
) -> None:
    policy = RetentionPolicy(**{"budget": 64, "chunk_size": 64, **changes})
    lm = LongContextModel(serving.model, serving.tokenizer, serving.scorer, policy)
    with pytest.raises(ValueError, match=message):
        MemoryPlan.of(lm, "1GiB")
