"""The README's Python runs on a text of one's own, and every make target it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_python_example_finds_the_pass_key_in_a_text_of_ones_own(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    lines = (ROOT / "LICENSE").read_text().split("\n")
    (needle,) = re.findall(r"`(The pass key is [^`]*)`", TEXT)
    lines.insert(60, needle)
    (tmp_path / "book.txt").write_text("\n".join(lines))
    assert '"book.txt"' in code
    code = code.replace("book.txt", str(tmp_path / "book.txt"))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("The pass key is 71432.")


def test_every_make_target_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", TEXT, re.MULTILINE)
    assert targets == ["demo", "test"]
    assert [target for target in targets if f"\n{target}:" not in makefile] == []


def test_its_links_work_on_a_package_index() -> None:
    assert [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if not link.startswith("https://")] == []
