"""Every planted fault still has its text, so that none is lost when code moves; what catches them is noted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from tests.planted_faults import CAUGHT, FAULTS, ROOT, Fault, plant


def test_every_fault_changes_a_text_that_is_there_once() -> None:
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, fault


def test_a_fault_whose_text_has_moved_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("one\none\n")
    fault = Fault("moved", "code.py", "one", "two", "nothing", "")
    with pytest.raises(ValueError, match="moved: code.py holds 'one' 2 times; mend the table"):
        plant(fault, tmp_path)


def test_what_catches_each_fault_is_noted() -> None:
    assert sorted(json.loads(CAUGHT.read_text())) == sorted(fault.name for fault in FAULTS)


def test_every_test_file_has_a_name_of_its_own_as_folders_without_packages_ask_for() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
