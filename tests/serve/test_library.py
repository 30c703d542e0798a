"""Contexts on disk: whole or not at all, by names that are no paths, validated, within bytes in memory and on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from running import ids, never, refusal

from locret import RetentionCache, RetentionPolicy, prefill, save_cache
from locret.engines.prefix import Prefix
from locret.infer.serve.index import AUTO, UPLOADS
from locret.infer.serve.library import Library

Read = Callable[..., Any]


def again(library: Library, **options: Any) -> Library:
    """Close a library and open its folder once more."""
    library.close()
    return Library(library.folder, library.lm, library.plan, **options)


def read_on(library: Library, text: list[int], base: Any = None, cancelled: Callable[[], bool] = never) -> Any:
    """Read a text from its beginning, after a context if one is given."""
    return library.read_on(text, (base, 0), base, cancelled)


# -- what is read -----------------------------------------------------------------------------------------------------


def test_contexts_are_what_python_reads_and_there_after_a_restart_and_what_a_kill_left_is_not(
    library: Library, read: Read, book: str
) -> None:
    entry, lm = read(library, "b", book, source="book.txt"), library.lm
    assert (entry.state, entry.source, entry.message) == ("ready", "book.txt", "")
    ours, theirs = library.prefix(entry), Prefix.of(lm.read(book + "\n", progress=False))
    assert (ours.digest, ours.tokens) == (theirs.digest, theirs.tokens)
    assert (entry.tokens, entry.units) == (theirs.tokens, theirs.units)
    assert entry.notes["seconds"] >= 0
    entry = read(library, "a", book[:1500])
    read(library, "c.2_x-y", book[:1500])
    before = {entry.name: (entry.tokens, entry.key) for entry in library.entries()}
    with pytest.raises(ValueError, match=f"--contexts .* is being written by process {os.getpid()} on "):
        Library(library.folder, library.lm, library.plan)
    library.close()
    for name in (UPLOADS, AUTO, ".written.0a1b2c3d.partial"):
        (library.folder / name).mkdir()
        (library.folder / name / "half.ctx").write_text("half")
    library = again(library)
    after = {entry.name: (entry.tokens, entry.key) for entry in library.entries()}
    assert list(after) == ["a", "b", "c.2_x-y"]
    assert after == before
    assert len({key for _, key in after.values()}) == 3
    library.delete("a")
    library.delete("b")
    assert library.prefix(library.get("c.2_x-y")).tokens == entry.tokens
    library.close()
    assert [path.name for path in library.folder.rglob("*") if path.is_file()] == ["c.2_x-y.ctx"]


# -- names and files --------------------------------------------------------------------------------------------------


def test_no_name_leaves_the_folder(library: Library) -> None:
    paths = ("", ".", "..", ".a", "../a", "a/b", "/etc/passwd", "a\\b")
    for name in (*paths, "a b", "a\n", "a\0b", "ä", "-a", "x" * 101, "a.ctx"):
        refused = refusal(lambda name=name: library.upload(name))
        assert (refused.status, "is no name of a context" in refused.message) == (400, True)
        for call in (library.find, library.delete):
            assert refusal(lambda name=name, call=call: call(name)).status == 404


def test_a_link_out_of_the_folder_is_not_followed(library: Library, read: Read, book: str, tmp_path: Path) -> None:
    read(library, "a", book[:1500])
    outside = tmp_path / "outside.ctx"
    outside.write_bytes((library.folder / "a.ctx").read_bytes())
    (library.folder / "b.ctx").symlink_to(outside)
    os.mkfifo(library.folder / "c.ctx")
    states = {entry.name: entry.state for entry in library.entries()}
    assert states == {"a": "ready", "b": "unusable", "c": "unusable"}
    refused = refusal(lambda: library.prefix(library.get("b")))
    assert (refused.status, refused.code) == (409, "unusable")
    assert str(tmp_path) not in refused.message
    for name in ("b", "c"):
        library.delete(name)
    assert outside.is_file()
    assert [entry.name for entry in library.entries()] == ["a"]


def test_unusable_files_are_listed_with_a_sentence(library: Library, read: Read, book: str, tiny_llama: Any) -> None:
    other = RetentionCache(tiny_llama, "streaming", RetentionPolicy(budget=16, chunk_size=16))
    prefill(tiny_llama, torch.arange(40)[None] % 60, other)
    save_cache(other, library.folder / "other.ctx")
    assert "another backbone" in library.find("other").message
    read(library, "a", book[:1500])
    whole = (library.folder / "a.ctx").read_bytes()
    turned = bytearray(whole)
    turned[-50] ^= 1
    files = {"empty": b"", "text": b"no context", "short": whole[: len(whole) // 2], "turned": bytes(turned)}
    for name, data in files.items():
        (library.folder / f"{name}.ctx").write_bytes(data)
    for name in files:
        if name == "turned":
            assert library.get(name).state == "ready"  # its units are looked at when they are loaded
            refusal(lambda name=name: library.prefix(library.get(name)))
        entry = library.find(name)
        assert entry.state == "unusable", name
        assert entry.message
        assert str(library.folder) not in entry.message
        assert refusal(lambda name=name: library.get(name)).status == 409
    library.delete("turned")
    (library.folder / "text.ctx").write_bytes(whole)
    assert library.get("text").state == "ready"


# -- contexts without a name ------------------------------------------------------------------------------------------


def test_the_longest_beginning_that_was_read_is_found(library: Library, read: Read, book: str) -> None:
    text = ids(900)
    assert library.longest(text) == (None, 0)
    short = read_on(library, text[:300])
    assert library.longest(text[:299]) == (None, 0)
    assert library.longest(text) == (short, 300)
    longer = library.read_on(text[:600], library.longest(text[:600]), None, never)
    assert (short.tokens, longer.tokens) == (300, 600)
    assert library.longest(text) == (longer, 600)
    assert library.longest([*text[:599], 3]) == (short, 300)
    assert library.read_on(text[:600], library.longest(text[:600]), None, never) is longer
    base = read(library, "book", book[:1500])
    assert library.longest(text, base) == (base, 0)
    after = read_on(library, text[:200], base)
    assert after.tokens == base.tokens + 200
    assert library.longest(text, base) == (after, 200)
    assert library.longest(text) == (longer, 600)
    library = again(library)
    assert library.longest(text) == (None, 0)
    assert not (library.folder / AUTO).exists()
    library.close()


def test_the_least_recently_used_goes_and_no_named_one(library: Library, read: Read, book: str) -> None:
    named = read(library, "named", book[:1500])
    library = again(library, auto_bytes=3 * named.size + 1000)
    made = [read_on(library, ids(200, start)).path for start in (5, 6, 7)]
    assert library.longest(ids(200, 5))[1] == 200  # used once more
    read_on(library, ids(200, 8))
    there = [library.longest(ids(200, start))[1] for start in (5, 6, 7, 8)]
    assert there == [200, 0, 200, 200]
    assert len(list((library.folder / AUTO).glob("*.ctx"))) == 3
    assert not made[1].exists()
    assert library.get("named").state == "ready"
    library.close()
    with pytest.raises(ValueError, match="--auto-contexts 1,000 bytes hold no context"):
        Library(library.folder, library.lm, library.plan, auto_bytes=1000)


def test_what_was_made_of_a_context_goes_with_it(library: Library, read: Read, book: str) -> None:
    named = read(library, "a", book[:1500])
    apart = read_on(library, ids(200))
    after = read_on(library, ids(200), named)
    assert after.path.exists()
    library.delete("a")
    assert set((library.folder / AUTO).iterdir()) == {apart.path}
    refused = refusal(lambda: library.prefix(after))
    assert (refused.status, refused.message[:48]) == (503, "what had been read for this has made room for ot")
    assert library.longest(ids(200))[1] == 200


def test_two_who_read_the_same_read_it_once(library: Library) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: read_on(library, ids(500)), range(3)))
    assert len(set(map(id, found))) == 1
    assert library.turns.chunks == len(range(0, 500 - 8, 128))


def test_what_nobody_waits_for_any_more_is_dropped(library: Library) -> None:
    asked = iter([False])
    refused = refusal(lambda: read_on(library, ids(500), cancelled=lambda: next(asked, True)))
    assert (refused.status, library.room.used, library.turns.used) == (503, 0, 0)
    assert library.turns.chunks > 0
    assert (library.automatic(), (library.folder / AUTO).exists()) == ([], False)
    assert read_on(library, ids(500)).read == 500


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_disk_that_takes_no_more_is_one_sentence_and_nothing_half_written(
    library: Library, read: Read, book: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(file: Path, mode: int) -> None:
        with open("/dev/full", "wb", buffering=0) as device:
            device.write(file.read_bytes())

    read(library, "a", book[:1500])
    before = sorted(path.name for path in library.folder.rglob("*") if path.name != UPLOADS)
    with monkeypatch.context() as patched:
        patched.setattr("locret.base.files._finish", finish)
        entry = read(library, "b", book)
        refused = refusal(lambda: read_on(library, ids(300)))
    assert entry.message.startswith("cannot write b.ctx: No space left on device; ")
    assert (entry.state, entry.fault, refused.status) == ("failed", 507, 507)
    time.sleep(0.05)
    left = {path.name for path in library.folder.rglob("*") if path.name != UPLOADS} - {AUTO}
    assert sorted(left) == before
    with monkeypatch.context() as patched:
        patched.setattr("locret.infer.serve.library.Job.start", None)  # no thread can be had: the name is free again
        pytest.raises(TypeError, read, library, "b", book)
    assert read(library, "b", book).state == "ready"
