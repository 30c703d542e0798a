"""How commands start, with nothing heavy before the options are known, and how signals end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from locret.__main__ import COMMANDS
from locret.base.files import LOCK

HEAVY = ("torch", "transformers", "datasets", "accelerate", "peft", "numpy", "tensorboard", "matplotlib", "fastapi")
WATCHED = f"""
import runpy, sys

class Watcher:
    def find_spec(self, name, path=None, target=None):
        if name in {HEAVY!r}:
            sys.stdout.write("imports " + name)

sys.meta_path.insert(0, Watcher())
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", WATCHED, module, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", [module for module, _ in COMMANDS.values()], ids=COMMANDS)
def test_help_and_a_misspelt_option_import_nothing_heavy(module: str) -> None:
    shown = run(module, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "imports " not in shown.stdout
    refused = run(module, "--modell", "x")
    assert (refused.returncode, refused.stdout) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("locret.train.command", "--model=m", "--dataset=d", "--output=o", "--lr=-1"), "--lr -1"),
        (("locret.infer.evaluation.command", "--model=m", "--output=o", "--tasks=passkeys"), "did you mean passkey"),
        (("locret.train.command", "--model=m/n", "--dataset=LongAlpacca", "--output=o"), "did you mean LongAlpaca"),
        (("locret.infer.command", "--model=m/n", "--budget=-1"), "--budget -1 is too small; it must be 1 or more"),
        (("locret.infer.command", "--model=m/n", "--prompt-file=no.txt"), "--prompt-file no.txt: no such file; check"),
    ],
)
def test_a_value_that_makes_no_sense_imports_nothing_heavy_and_asks_no_hub(
    arguments: tuple[str, ...], message: str
) -> None:
    refused = run(*arguments)
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1), refused
    assert message in refused.stderr


ROOT = Path(__file__).parents[2]
TINY = ("--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads")
LINES = {
    "locret-train": (
        "locret.train.command",
        *("--model", "checkpoints/tiny", "--dataset", "rows.json", "--output", "out", "--steps", "100000"),
        *("--warmup-steps", "0", "--save-every", "100000"),
    ),
    "locret-infer": ("locret.infer.command", *TINY, "--prompt-file", "text.txt", "--chunk-size", "8", "--quiet"),
    "locret-eval": ("locret.infer.evaluation.command", *TINY, "--samples", "1000", "--output", "out", "--quiet"),
    "locret-push": ("locret.heads.push", "--heads", "checkpoints/tiny-heads", "--repo", "org/name", "--dry-run"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("Snow fell on the long road. " * 200_000)
    row = '{"instruction": "The number of Oslo is 314. What is it?", "output": "It is 314."}'
    (tmp_path / "rows.json").write_text(f"[{', '.join([row] * 20)}]")
    return tmp_path


def start(folder: Path, *line: str) -> subprocess.Popen[str]:
    """Start a command in a folder, and return when it answers signals."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", *line],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background has SIGINT ignored, and children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            break
        time.sleep(0.005)
    return process


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see a handler")
def test_signals_are_answered_before_a_command_is_imported() -> None:
    code = "import sys, locret.__main__; print(*sorted(name for name in sys.modules if name.startswith('locret.')))"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    light = {"__main__", "_version", "backbone_names", "base", "base.nearest", "base.plugins", "shipped"}
    assert {name.removeprefix("locret.") for name in told.split()} <= light, "what takes longer is not answered"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see a handler")
@pytest.mark.long
@pytest.mark.parametrize("after", [0.0, 4.0])
@pytest.mark.parametrize("name", LINES)
def test_a_signal_at_any_moment_is_answered_by_one_line(folder: Path, name: str, after: float) -> None:
    process = start(folder, *LINES[name])
    time.sleep(after)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    if process.returncode == 0:
        assert name == "locret-push", out + err
        return
    assert process.returncode == 143, out + err
    said = [line for line in err.splitlines() if not line.startswith(("WARNING", f"{name}: warning"))]
    if name == "locret-train" and said and said[-1].startswith("stopped at step"):
        assert (folder / "out" / "run.json").exists()
    else:
        assert said[-1] == f"{name}: interrupted", err
    left = [path.name for path in folder.rglob("*") if path.name == LOCK or path.name.endswith(".partial")]
    assert left == []


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see a handler")
@pytest.mark.parametrize(("wait", "raises"), [("uninterrupted", False), ("unwinding", True)])
def test_a_block_can_hold_a_signal_back_or_have_it_raised(wait: str, raises: bool) -> None:
    code = f"""
import signal, sys
from locret.base import interrupts
interrupts.answer("x")
try:
    with interrupts.undone(lambda: print("undone", flush=True)), interrupts.{wait}():
        signal.raise_signal(signal.SIGTERM)
        print("after", flush=True)
except KeyboardInterrupt as error:
    print("raised", interrupts.code_of(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    expected = ("raised 143\n", "", 0) if raises else ("after\nundone\n", "x: interrupted\n", 143)
    assert (done.stdout, done.stderr, done.returncode) == expected


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see a handler")
def test_a_reader_that_goes_away_is_no_failure() -> None:
    line = [sys.executable, "-m", "locret.infer.command", "--help"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == ("", 1)
