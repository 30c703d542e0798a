"""Reading beside answers: turns, streams of bytes, and memory that is what was planned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from allocations import peak_bytes
from running import until

from locret import LongContextModel, RetentionPolicy
from locret.engines.prefix import Prefix
from locret.engines.transformers import PagedContexts, Written
from locret.infer.serve.engine import Engine
from locret.infer.serve.jobs import Room
from locret.infer.serve.library import Library
from locret.infer.serve.plan import MemoryPlan
from locret.infer.serve.turns import Turns
from locret.infer.serve.upload import Upload

MIB = 1 << 20


def wait() -> None:
    """Wait on."""


# -- turns ------------------------------------------------------------------------------------------------------------


def chunks(turns: Turns, name: str, count: int, order: list[str], check: Callable[[], None] = wait) -> threading.Thread:
    """Read so many chunks in a thread."""

    def read() -> None:
        with turns.turn(check) as turn:
            for _ in range(count):
                order.append(name)
                time.sleep(0.01)
                turn.chunk()

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


def test_who_lets_go_waits_for_nobody_and_is_waited_for_by_nobody() -> None:
    turns, order = Turns(), list[str]()
    with turns.turn(wait) as turn:
        turn.let_go()
        turn.let_go()
        chunks(turns, "b", 3, order).join(5)
        assert order == ["b"] * 3
        turn.take()
        turn.take()
        assert turns._running is turn
    assert turns._running is None


def test_a_chunk_gives_way_until_every_answer_has_begun_and_one_went_on() -> None:
    turns, order, answers = Turns(patience=1000.0), list[int](), list[object]()

    def read() -> None:
        with turns.turn(wait) as turn:
            for chunk in range(3):
                order.append(chunk)
                time.sleep(0.01)
                answers.extend(turns.answering() for _ in range(0 if chunk else 2))  # while the first one is read
                turn.chunk()

    def read_in_a_while() -> int:
        time.sleep(0.05)
        return len(order)

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: len(answers) == 2)
    first, second = answers
    assert read_in_a_while() == 1
    turns.stepped(first)
    assert read_in_a_while() == 1  # the second has no token yet
    turns.stepped(second)
    until(lambda: len(order) == 2)
    assert read_in_a_while() == 2  # one chunk for one step
    turns.stepped(first)
    until(lambda: len(order) == 3)
    for answer in (first, second, second):
        turns.ended(answer)
    thread.join(5)
    assert not thread.is_alive()


def test_reading_goes_on_beside_an_answer_that_never_begins() -> None:
    turns, order = Turns(patience=2.0), list[str]()
    stuck = turns.answering()
    chunks(turns, "a", 5, order).join(5)
    assert len(order) == 5
    turns.ended(stuck)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_who_is_not_wanted_any_more_leaves_the_line() -> None:
    turns, order, unwanted = Turns(), list[str](), threading.Event()

    def check() -> None:
        if unwanted.is_set():
            raise RuntimeError

    with turns.turn(wait):
        thread = chunks(turns, "a", 1, order, check)
        until(lambda: len(turns._waiting) == 1)
        unwanted.set()
        thread.join(5)
        assert not turns._waiting
    assert order == []


def test_an_engine_lets_the_readers_know_of_its_answers(
    serving: LongContextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def submit(self: Any, ids: Any, prefix: Any = None, **options: Any) -> Callable[[], None]:
        if not options["max_new_tokens"]:
            raise ValueError("no")
        told.append(options["on_token"])
        return lambda: told.append("cancelled")

    monkeypatch.setattr(PagedContexts, "submit", submit)
    turns, written = Turns(), list[Written]()
    engine = Engine(serving.model, turns, kv_bytes=4 * MIB)
    cancel = engine.submit([1], max_new_tokens=2, on_token=written.append)
    assert list(turns._answers.values()) == [False]
    told[-1](Written(5))
    assert list(turns._answers.values()) == [True]
    told[-1](Written(6, "length"))
    assert not turns._answers
    assert [one.token for one in written] == [5, 6]
    cancel()
    assert told[-1] == "cancelled"
    engine.submit([1], max_new_tokens=2, on_token=written.append)()
    told[-2](Written(7))  # a token that was under way when it was cancelled
    assert not turns._answers
    with pytest.raises(ValueError, match="no"):
        engine.submit([1], max_new_tokens=0, on_token=written.append)
    assert not turns._answers


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


# -- uploads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def upload(tmp_path: Path) -> Iterator[Upload]:
    """Return an upload of at most 1,000 bytes that is given up after a moment without any."""
    upload = Upload(tmp_path / "upload", most=1000, stall=0.3)
    yield upload
    upload.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_text_comes_as_it_was_however_it_is_cut(upload: Upload, size: int) -> None:
    text = "\ufeffGrüße,\r\nein Text\rvon 三 Zeilen 𝒳.\n"
    data = text.encode()
    for at in range(0, len(data), size):
        upload.write(data[at : at + size])
    upload.end()
    assert "".join(upload.pieces(wait)) == "Grüße,\nein Text\nvon 三 Zeilen 𝒳.\n"
    assert upload.written == upload.given == len(data)


def test_an_upload_that_stalls_ends_its_reading_and_says_so_once(upload: Upload) -> None:
    upload.write(b"one")
    pieces = upload.pieces(wait)
    assert next(pieces) == "one"
    for call in (lambda: next(pieces), lambda: upload.write(b"two"), lambda: upload.fail("another") or upload.check()):
        with pytest.raises(ValueError, match="nothing of the text came for 0.3 seconds"):
            call()
    assert upload.fault == 408


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_plan_are_all_of_it(serving: LongContextModel) -> None:
    for memory, readers in (("16MiB", 1), (20 * MIB, 2), ("2GiB", 7)):
        plan = MemoryPlan.of(serving, memory, readers=readers)
        parts = plan.reading + plan.engine + plan.loaded + plan.moving + plan.working
        assert parts == plan.kv_memory
        assert plan.loaded >= plan.units * plan.unit
        assert f"{plan.kv_memory:,}" in plan.table()


def test_memory_that_is_too_small_is_refused_with_what_is_needed(serving: LongContextModel) -> None:
    with pytest.raises(
        ValueError, match=r"--kv-memory 1MiB is too small: 2 readers of .* give as much, or lower"
    ) as caught:
        MemoryPlan.of(serving, "1MiB")
    needed = int(str(caught.value).split(" take ")[1].split(" bytes")[0].replace(",", ""))
    assert MemoryPlan.of(serving, needed).kv_memory == needed
    with pytest.raises(ValueError, match="is too small"):
        MemoryPlan.of(serving, needed - 1)
    with pytest.raises(ValueError, match="--readers 0"):
        MemoryPlan.of(serving, needed, readers=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "original"}, 'positions="original" leaves gaps'),
        ({"when": "prompt_end"}, "--when prompt_end holds all of a text"),
        ({"memory": "adaptive"}, "--memory adaptive plans by a text's length"),
        ({"host_budget": 100, "recall": 8}, "--host-budget 100 is a second tier"),
        ({"key_bits": 8}, "--key-bits 8 and --value-bits 16 hold units as codes"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_read(
    serving: LongContextModel, changes: dict[str, Any], message: str
) -> None:
    policy = RetentionPolicy(**{"budget": 64, "chunk_size": 64, **changes})
    lm = LongContextModel(serving.model, serving.tokenizer, serving.scorer, policy)
    with pytest.raises(ValueError, match=message):
        MemoryPlan.of(lm, "1GiB")


def test_a_reader_takes_what_was_planned_and_not_more_for_longer_texts(serving: LongContextModel, book: str) -> None:
    plan = MemoryPlan.of(serving, 24 * MIB)
    caches = []

    def read(text: str) -> int:
        def side() -> None:
            caches.append(serving.read(text + "\n", progress=False).cache)

        return peak_bytes(side)

    short, long = read(book), read(book * 3)
    assert max(cache.memory().peak for cache in caches) <= plan.reader
    assert short <= plan.reader + plan.working
    assert long <= short + 64 * 1024  # the second text's ids, and what the tokenizer's window holds of it


def test_moving_and_joining_contexts_take_what_was_planned(
    serving: LongContextModel, book: str, tmp_path: Path
) -> None:
    from locret import compose
    from locret.infer.serve.library import _COPIES

    plan = MemoryPlan.of(serving, 24 * MIB)
    context, path = serving.read(book + "\n", progress=False), tmp_path / "a.ctx"
    assert peak_bytes(lambda: context.save(path)) <= plan.moving
    size = path.stat().st_size
    loaded = plan.units * plan.unit
    assert peak_bytes(lambda: Prefix.from_file(path)) <= plan.moving + loaded
    assert peak_bytes(lambda: serving.load(path)) <= plan.moving + plan.reader
    for budget in (None, 32):
        joined = peak_bytes(lambda budget=budget: compose([serving.load(path) for _ in range(4)], budget))
        assert joined <= _COPIES * 4 * size + plan.working
    assert peak_bytes(lambda: serving.load(path).shrink(16)) <= _COPIES * size


def test_uploads_side_by_side_stay_within_the_plan_and_go_on_together(library: Library, book: str) -> None:
    entries, uploads = [], []
    for name in "abc":
        upload = library.upload(name)
        upload.write((book * 3).encode())
        uploads.append(upload)
        entries.append(library.read(name, upload))
    seen: list[tuple[int, ...]] = []
    for upload in uploads:
        upload.end()
    while any(entry.state in ("waiting", "reading") for entry in entries):
        assert library.room.used <= library.plan.reading
        if (now := tuple(entry.progress.tokens for entry in entries)) not in seen:
            seen.append(now)
        time.sleep(0.005)
    assert [entry.state for entry in entries] == ["ready"] * 3
    both = [now for now in seen if all(0 < tokens < entries[0].tokens for tokens in sorted(now)[1:])]
    assert len(both) > 3
    assert all(abs(one - other) <= 2 * 128 for now in both for one, other in [sorted(now)[1:]])
    assert all(min(now) == 0 for now in both)  # two caches at once, the third waits
    assert len({library.prefix(entry).digest for entry in entries}) == 1
