"""Starts several processes of one program on this machine. Imported by the tests beside it."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_FOREIGN = ("MASTER_", "ACCELERATE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC")
_FORKS = multiprocessing.get_context("forkserver")
_IMPORTED = (
    *("torch.distributed.fsdp", "torch.distributed.tensor", "accelerate", "safetensors.torch", "matplotlib.pyplot"),
    *("transformers.models.llama.modeling_llama", "transformers.integrations.tensor_parallel", "datasets"),
    *("locret.train.training_run", "locret.train.trainer", "locret.infer.reading", "locret.infer.evaluation.runner"),
)
"""What processes have at their start: imports would take more time than what the tests are about."""


def environment(**more: str) -> dict[str, str]:
    """Return an environment without a launcher's variables, in which each process has one thread."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    paths = [str(ROOT), *filter(None, [own.get("PYTHONPATH")])]
    return {
        **own,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "MKL_CBWR": "COMPATIBLE",
        "PYTHONPATH": os.pathsep.join(paths),
        **more,
    }


def alone(*line: object) -> str:
    """Run a command in one process, and return what it printed."""
    return done("-m", *line, processes=1)


def start(*line: object, processes: int = 2, **more: str) -> subprocess.Popen[str]:
    """Start a program with torchrun, on a port that is free."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    return subprocess.Popen(
        [*launch, *map(str, line)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**more),
    )


def finish(running: subprocess.Popen[str], seconds: float = 400) -> tuple[int, str, str]:
    """Return exit code, output and errors."""
    try:
        out, err = running.communicate(timeout=seconds)
    finally:
        running.terminate()  # torchrun ends its processes
    return running.returncode, out, err


def together(*line: object, processes: int = 2, seconds: float = 400, **more: str) -> tuple[int, str, str]:
    """Run a program in several processes, with the variables that torchrun gives; alone, without any.

    Nobody ends the others of one that fails, so they have to do it themselves.

    Returns:
        The largest exit code, output and errors of all processes.
    """
    from torch.distributed import TCPStore

    _serve()
    # Held here, as torchrun does, so that no port has to be found that nobody takes before it is used.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(processes)}
    address |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(processes):
            own = {**address, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            arguments = ([str(word) for word in line], environment(**own, **more), f"{folder}/{rank}")
            running.append(_FORKS.Process(target=_process, args=arguments))
        try:
            for process in running:
                process.start()
            deadline = time.monotonic() + seconds
            for process in running:
                process.join(max(0.0, deadline - time.monotonic()))
            late = [rank for rank, process in enumerate(running) if process.exitcode is None]
        finally:
            for process in running:
                with suppress(ValueError, AttributeError):
                    process.kill()
        out, err = (
            "".join(Path(f"{folder}/{rank}.{name}").read_text() for rank in range(processes)) for name in ("out", "err")
        )
    assert not late, f"processes {late} had not ended after {seconds} seconds: {err[-3000:]}"
    return max(abs(process.exitcode or 0) for process in running), out, err


def _serve() -> None:
    """Start the process that those of all launches are forked from, unless it runs."""
    own = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment())
    try:
        _FORKS.set_forkserver_preload(list(_IMPORTED))
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(own)


def _process(line: Sequence[str], variables: dict[str, str], files: str) -> None:
    """Be one process of a launch."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    for number, name in ((1, "out"), (2, "err")):
        opened = os.open(f"{files}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    sys.path[:0] = [path for path in variables["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    if line[0] == "-m":
        sys.argv = list(line[1:])
        runpy.run_module(line[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(line)
        sys.path.insert(0, str((ROOT / line[0]).parent))
        runpy.run_path(line[0], run_name="__main__")


def done(*line: object, processes: int = 2, **more: str) -> str:
    """Run a program in several processes, which must succeed; return what they printed."""
    code, out, err = together(*line, processes=processes, **more)
    assert code == 0, err[-3000:]
    return out


def short_text(folder: Path) -> Path:
    """Write a pass key in as much text as a test takes."""
    text, path = (ROOT / "recipes/infer/pass_key.txt").read_text(), folder / "pass_key.txt"
    key = text.index("pass key")
    path.write_text(text[:1500] + text[key - 300 : key + 600])
    return path


def found(*line: object, **more: str) -> dict[str, list[Any]]:
    """Return what `shard_checks.py` found: for every check, a value of each process."""
    out = done("tests/distributed/shard_checks.py", *line, **more)
    return dict(json.loads(next(text for text in out.splitlines() if text.startswith("{"))))


def assert_equal_to_one_process(found: dict[str, list[Any]]) -> None:
    """Check that two processes with a half each find what one process with the whole finds, to the last bit."""
    exact = {name: values for name, values in found.items() if name != "share"}
    assert all(value in (0.0, True) for values in exact.values() for value in values), exact
    assert set(exact) >= {"train_step", "kernels", "prefill", "generate", "alone"}
    assert all(0.49 < share < 0.52 for share in found["share"])
