"""The README's Python runs, its commands parse, and every path it names exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for kind, block in BLOCKS
    if kind == "bash"
    for line in block.splitlines()
    if line.startswith("locret-")
]
MODULES = {
    "locret-train": "locret.train.command",
    "locret-infer": "locret.infer.command",
    "locret-eval": "locret.infer.evaluation.command",
    "locret-bench": "locret.infer.speed.command",
    "locret-push": "locret.heads.push",
}


@pytest.mark.slow
def test_the_python_example_runs_and_finds_the_pass_key(tmp_path: Path) -> None:
    (code,) = [block for kind, block in BLOCKS if kind == "python"]
    assert "/tmp/book.safetensors" in code
    code = code.replace("/tmp/book.safetensors", str(tmp_path / "book.safetensors"))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    answer, right = run.stdout.splitlines()[0].split("| right:")
    assert answer.startswith(right.strip())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_parses(words: list[str]) -> None:
    line = [sys.executable, "-m", MODULES[words[0]], *words[1:], "--print_config"]
    run = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    assert ":" in run.stdout


def test_every_target_and_file_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", TEXT, re.MULTILINE):
        assert f"\n{target}:" in makefile
    paths = re.findall(r"`((?:locret|train|infer|data|recipes|tests|checkpoints)/[\w./-]*)`", TEXT)
    paths += [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []
