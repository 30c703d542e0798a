"""Starts several processes of one program on this machine. Imported by the tests beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_FOREIGN = ("MASTER_", "ACCELERATE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC")


def start(*line: object, processes: int = 2, **more: str) -> subprocess.Popen[str]:
    """Start a program with torchrun, on a port that is free; a single process without it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    places = [*(str(ROOT / folder) for folder in ("", "tests", "tests/core")), own.get("PYTHONPATH")]
    paths = os.pathsep.join(filter(None, places))
    own |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"] if processes > 1 else []
    return subprocess.Popen(
        [sys.executable, *launch, *map(str, line)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**own, "MKL_CBWR": "COMPATIBLE", **more},
    )


def finish(running: subprocess.Popen[str], seconds: float = 400) -> tuple[int, str, str]:
    """Return exit code, output and errors."""
    try:
        out, err = running.communicate(timeout=seconds)
    finally:
        running.terminate()  # torchrun ends its processes
    return running.returncode, out, err


def done(*line: object, processes: int = 2, **more: str) -> str:
    """Run a program in several processes, which must succeed; return what they printed."""
    code, out, err = finish(start(*line, processes=processes, **more))
    assert code == 0, err[-3000:]
    return out


def alone(*line: object) -> str:
    """Run a command in one process, and return what it printed."""
    return done("-m", *line, processes=1)


def found(shard: str, folder: Path, **more: str) -> dict[str, list[Any]]:
    """Return what `worker.py` found: for every check, a value of each process."""
    out = done("tests/distributed/worker.py", shard, folder, **more)
    return dict(json.loads(next(text for text in out.splitlines() if text.startswith("{"))))
