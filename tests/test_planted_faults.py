"""Every planted fault still has its text, so that none is lost when code moves; what catches them is noted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from tests.planted_faults import CAUGHT, FAULTS, ROOT


def test_every_fault_changes_a_text_that_is_there_once() -> None:
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, fault


def test_what_catches_each_fault_is_noted() -> None:
    assert sorted(json.loads(CAUGHT.read_text())) == sorted(fault.name for fault in FAULTS)
