"""A side that hangs is ended with all that it started, its row says so, and everything else is measured."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from locret.infer.speed.bench_options import BenchOptions
from locret.infer.speed.peers import compare, comparison, lines, process
from locret.infer.speed.peers.process import SideFailed, SideProcess
from locret.infer.speed.peers.tasks import rows
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.resolve import make_plan

SECONDS = 3.0
"""Enough for a small process to start on a busy machine."""
WORKER = """
import json, subprocess, sys, time
hang_at, held, pids = {hang_at!r}, {held!r}, {pids!r}
side = sys.argv[1]
for line in sys.stdin:
    request = json.loads(line)
    do, method = request["do"], request.get("method")
    if (do, side, method) == hang_at:
        # A process that outlives its parent, and holds on to the pipe that answers come through.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(pids, "a").write(str(child.pid) + " ")
        time.sleep(600)
    answers = {{
        "hello": {{"python": "3", "torch": "2"}},
        "load": {{}},
        "logits": {{"logits": [1.0, 2.0, 4.0]}},
        "memory": {{"allocated": 10, "process": 20}},
        "time": {{"first_token": 1.0, "seconds": 3.0, "held": held.get(f"{{side}} {{method}}")}},
    }}
    print(json.dumps(answers[do]), flush=True)
"""


def plan_for(backbone: Path, **changes: Any) -> BenchPlan:
    given = {
        "model": str(backbone), "lengths": "200", "methods": "locret", "hidden_dim": 8, "budget": 32, "chunk_size": 64,
        "stabilizers": 8, "local_len": 16, "new_tokens": 3, "repeats": 2, "threads": 1, "dtype": "float32",
        "device": "cpu", "vs": "transformers", "peer_timeout": SECONDS, **changes,
    }  # fmt: skip
    return make_plan(BenchOptions(**given), set(given))


class Hanging:
    """Workers that answer at once, but for one request that is never answered."""

    def __init__(self, folder: Path, plan: BenchPlan, monkeypatch: pytest.MonkeyPatch, hang_at: Any) -> None:
        self.pids, worker = folder / "pids", folder / "worker.py"
        held = {f"{side} {method}": row["expected"] for (side, method, _), row in rows(plan).items()}
        worker.write_text(WORKER.format(hang_at=hang_at, held=held, pids=str(self.pids)))
        monkeypatch.setattr(process, "_WORKER", worker)

    def started(self) -> list[int]:
        return [int(pid) for pid in self.pids.read_text().split()]


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or only waits to be asked how it ended."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("do", ["memory", "time"])
@pytest.mark.slow
def test_a_method_that_hangs_is_a_row_that_says_so_and_the_others_stand(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: str
) -> None:
    plan = plan_for(backbone)
    hanging = Hanging(tmp_path, plan, monkeypatch, (do, "transformers", "full"))
    start = time.monotonic()
    record = compare(plan)
    assert time.monotonic() - start >= SECONDS
    found = {(row["side"], row["method"]): row for row in record["rows"]}
    assert {key: row["error"] for key, row in found.items()} == {
        ("locret", "locret"): None,
        ("transformers", "full"): "timed out after 3 s (see --peer-timeout)",
        ("transformers", "full_chunked"): None,
    }
    # The side was started and loaded again, and what had not hung was measured in every round.
    assert len(found["transformers", "full_chunked"]["rounds"]) == plan.repeats
    assert found["transformers", "full_chunked"]["ratios"]["total"]["p50"] == 1
    assert found["transformers", "full"]["seconds"] == {}
    pids = hanging.started()
    assert len(pids) == 1, "what has timed out once is not tried again"
    assert has_ended(pids[0])
    page = "\n".join(lines(record))
    assert "* transformers full, 200 tokens: timed out after 3 s" in page
    assert next(line for line in page.splitlines() if line.startswith("| transformers | full |")).count("failed") == 1


@pytest.mark.slow
def test_a_side_that_never_loads_is_one_sentence(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(backbone)
    hanging = Hanging(tmp_path, plan, monkeypatch, ("load", "transformers", None))
    with pytest.raises(
        ValueError, match=r"--vs transformers cannot load the backbone: timed out after 3 s \(see --peer-timeout\)"
    ):
        compare(plan)
    assert has_ended(hanging.started()[0])


@pytest.mark.slow
def test_what_a_side_started_ends_with_it(backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging(tmp_path, plan_for(backbone), monkeypatch, ("time", "any", "hangs"))
    with SideProcess("any", sys.executable, threads=1, timeout=SECONDS) as side:
        assert side.ask("hello")["torch"] == "2"
        with pytest.raises(SideFailed, match=r"^timed out after 3 s \(see --peer-timeout\)$"):
            side.ask("time", method="hangs")
        assert has_ended(hanging.started()[0])
        assert side.ask("time", method="other")["seconds"] == 3.0
        assert side._process is not None
        last = side._process.pid
    assert has_ended(last)


@pytest.mark.slow
def test_an_answer_in_time_leaves_no_timer_behind(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hanging(tmp_path, plan_for(backbone), monkeypatch, None)
    with SideProcess("any", sys.executable, threads=1, timeout=SECONDS) as side:
        side.ask("hello")
        assert side._process is not None
        first = side._process.pid
        time.sleep(SECONDS + 0.5)
        side.ask("hello")
        assert side._process.pid == first


def test_a_progress_bar_says_which_side_is_running(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, shown = plan_for(backbone, peer_timeout=60), io.StringIO()
    Hanging(tmp_path, plan, monkeypatch, None)

    def bar(**options: Any) -> Any:
        assert options["disable"] is None, "bars are for terminals only"
        return tqdm(**{**options, "disable": False, "file": shown, "ncols": 150, "mininterval": 0})

    monkeypatch.setattr(comparison, "tqdm", bar)
    compare(plan)
    frames = shown.getvalue().split("\r")
    for what, count in (("loading", 2), ("counting bytes", 3), ("measuring", 6)):
        assert any(frame.startswith(what) and f"{count}/{count}" in frame for frame in frames)
    for side in ("locret locret", "transformers full", "transformers full_chunked"):
        assert any(frame.startswith("measuring") and f"{side}, 200 tokens" in frame for frame in frames)


def test_the_time_limit_is_in_the_resolved_config_and_belongs_to_peers(backbone: Path) -> None:
    assert plan_for(backbone).resolved()["peer_timeout"] == SECONDS
    assert BenchOptions().peer_timeout == 3600
    with pytest.raises(ValueError, match="--peer-timeout 0 is not a time to wait; give seconds above 0"):
        plan_for(backbone, peer_timeout=0)
    with pytest.raises(ValueError, match="--peer-timeout 3 is for peers, but none is run; add --vs, or drop it"):
        plan_for(backbone, vs=None)
