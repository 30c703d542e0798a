"""Several processes share a run of `locret-eval`, and nobody can tell from what it leaves; one run per folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from eval_runs import TIMES, cases, cells, environment, finish, records, start

from locret.base.files import locked
from locret.distributed.ranks import Ranks
from locret.infer.evaluation.records import PART, SampleLog, key

LINE = ("--methods", "full,locret,random", "--tasks", "passkey,number", "--lengths", "300,400", "--budget", 64)
LINE = (*LINE, "--chunk-size", 32, "--stabilizers", 16, "--local-len", 8, "--figures", "none")


@pytest.fixture(scope="module")
def line(backbone: Path, heads: Path) -> tuple[object, ...]:
    return ("--model", backbone, "--heads", heads, *LINE, "--samples", 3)


@pytest.fixture(scope="module")
def alone(line: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run in one process, without interruption: 12 samples, read three ways."""
    out = tmp_path_factory.mktemp("processes") / "alone"
    code, _, err = finish(start(1, *line, "--output", out))
    assert code == 0, err
    assert len(records(out)) == 36
    return out


@pytest.mark.slow
def test_two_processes_write_what_one_writes(line: tuple[object, ...], alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "two"
    code, table, err = finish(start(2, *line, "--output", out))
    assert code == 0, err
    assert records(out) == records(alone)
    assert cells(out) == cells(alone)
    assert table.count("| method |") == 1
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in alone.iterdir())


@pytest.mark.slow
def test_a_killed_run_goes_on_with_another_number_of_processes(
    line: tuple[object, ...], alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    running = start(2, *line, "--output", out)
    part = out / PART.format(1)
    deadline = time.monotonic() + 120
    while running.poll() is None and time.monotonic() < deadline and not (part.is_file() and part.stat().st_size):
        time.sleep(0.005)
    running.terminate()  # torchrun ends its processes, wherever they are
    assert finish(running)[0] != 0, "it was interrupted before the end"
    assert len(part.read_text().splitlines()) > 0, "the second process has left its own records"
    code, _, err = finish(start(3, *line, "--output", out, "--resume"))
    assert code == 0, err
    assert records(out) == records(alone)
    assert cells(out) == cells(alone)
    assert not part.exists()


@pytest.mark.slow
def test_a_mistake_is_said_once_and_ends_all_processes(line: tuple[object, ...], alone: Path) -> None:
    code, _, err = finish(start(2, *line, "--output", alone))
    assert code != 0
    assert err.count("holds this evaluation already; --resume goes on, --overwrite starts again") == 1
    assert 'infer/evaluation/command.py", line' not in err  # torchrun's own traceback is none of ours


def test_shares_are_all_of_it_and_disjoint() -> None:
    from locret.data import tasks

    places = cases([tasks.get("passkey")], [300, 600], 5, 0)
    shares = [Ranks(rank, 3).under("fsdp").share(places) for rank in range(3)]
    assert [len(share) for share in shares] == [4, 3, 3]
    assert {place.tokens for place in shares[2]} == {300, 600}
    assert sorted(p.axes["tokens"] * 10 + p.index for share in shares for p in share) == sorted(
        p.tokens * 10 + p.index for p in places
    )


@pytest.mark.parametrize("count", ["2", "two"])
@pytest.mark.slow
def test_processes_that_cannot_meet_say_so(count: str) -> None:
    own = {**environment(), "RANK": "0", "WORLD_SIZE": count}
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        own.pop(name, None)
    line = [sys.executable, "-m", "locret.infer.evaluation.command", "--model", "x", "--dry-run"]
    done = subprocess.run(line, capture_output=True, text=True, env=own, timeout=100)
    assert done.returncode == 1
    assert f"process 0 of {count} cannot reach the others" in done.stderr
    assert "start them with torchrun or accelerate launch" in done.stderr


def record(index: int, method: str = "random") -> dict[str, object]:
    return {
        **{"task": "passkey", "version": 1, "tokens": 300, "index": index, "score": 1.0, "method": method},
        **{"budget": 64, "chunk_size": 32, "stabilizers": 16, "prediction": "48213", "targets": ["48213"]},
        **dict.fromkeys(("prompt_tokens", "generated_tokens", "kept_units", "peak_units"), 9),
        **dict.fromkeys(("cache_bytes", "peak_bytes", "prefill_seconds", "decode_seconds"), 9),
    }


def test_merging_keeps_one_of_each_and_the_order_of_one_process(tmp_path: Path) -> None:
    order = {key(record(index)): index for index in range(5)}
    for rank, indices in ((0, (3, 0)), (1, (4, 1)), (2, (1, 2, 0))):
        log = SampleLog(tmp_path, rank)
        for index in indices:
            log.append(record(index))
    with (tmp_path / PART.format(2)).open("a") as file:
        file.write('{"task": "pass')  # cut off when its process was killed
    main = SampleLog(tmp_path)
    main.load()
    main.merge(order)
    assert [one["index"] for one in records(tmp_path)] == [0, 1, 2, 3, 4]
    assert [{k: v for k, v in one.items() if k not in TIMES} for one in main.records] == records(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_a_merge_that_is_interrupted_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    order = {key(record(index)): index for index in range(3)}
    for rank in range(3):
        SampleLog(tmp_path, rank).append(record(rank))
    main = SampleLog(tmp_path)
    main.load()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main.merge(order)
    again = SampleLog(tmp_path)
    again.load()
    again.merge(order)
    assert [one["index"] for one in records(tmp_path)] == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["samples.jsonl"]


@pytest.mark.slow
def test_a_folder_is_written_by_one_command_at_a_time(line: tuple[object, ...], tmp_path: Path) -> None:
    with locked(tmp_path / "out", "--output"):
        code, _, err = finish(start(1, *line, "--output", tmp_path / "out"))
    assert code == 2
    assert f"is being written by process {os.getpid()} on" in err
    assert list(tmp_path.iterdir()) == []
