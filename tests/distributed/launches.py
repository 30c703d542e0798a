"""Starts several processes of one program on this machine, as torchrun does. Imported by the tests beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_FOREIGN = ("MASTER_", "ACCELERATE", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def environment(**more: str) -> dict[str, str]:
    """Return an environment without a launcher's variables, in which each process has one thread."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    paths = [str(ROOT), *filter(None, [own.get("PYTHONPATH")])]
    return {
        **own,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MKL_CBWR": "COMPATIBLE",
        "PYTHONPATH": os.pathsep.join(paths),
        **more,
    }


def alone(*line: object) -> str:
    """Run a command in one process, and return what it printed."""
    command = [sys.executable, "-m", *map(str, line)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def start(*line: object, processes: int = 2, **more: str) -> subprocess.Popen[str]:
    """Start a program in several processes, on a port that is free."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    return subprocess.Popen(
        [*launch, *map(str, line)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**more),
    )


def finish(running: subprocess.Popen[str], seconds: float = 200) -> tuple[int, str, str]:
    """Return exit code, output and errors."""
    try:
        out, err = running.communicate(timeout=seconds)
    finally:
        running.terminate()  # torchrun ends its processes
    return running.returncode, out, err


def found(*line: object, **more: str) -> dict[str, list[Any]]:
    """Return what `shard_checks.py` found: for every check, a value of each process."""
    code, out, err = finish(start("tests/distributed/shard_checks.py", *line, **more))
    assert code == 0, "\n".join(line for line in err.splitlines() if "[rank" in line)[-3000:] or err[:3000]
    return dict(json.loads(next(text for text in out.splitlines() if text.startswith("{"))))


def assert_equal_to_one_process(found: dict[str, list[Any]]) -> None:
    """Check that two processes with a half each find what one process with the whole finds, to the last bit."""
    exact = {name: values for name, values in found.items() if name != "share"}
    assert all(value in (0.0, True) for values in exact.values() for value in values), exact
    assert set(exact) >= {"train_step", "evict_while_training", "kernels", "prefill", "generate", "alone"}
    assert all(0.49 < share < 0.52 for share in found["share"])
