"""What an evaluation left behind is read strictly: damage is one sentence, or the end of the file."""

from __future__ import annotations

import json
from typing import Any

import mutations
from eval_runs import RECORD
from hypothesis import given
from hypothesis import strategies as st

from locret.infer.evaluation.records import SAMPLES, SampleLog


@given(data=st.data())
def test_damaged_records_are_refused_or_read(tmp_path_factory: Any, data: st.DataObject) -> None:
    lines = [json.dumps({**RECORD, "index": number}).encode() for number in range(3)]
    at = data.draw(st.integers(0, 2))
    if data.draw(st.booleans()):
        lines[at] = json.dumps(mutations.values_of(data.draw, RECORD)).encode()
    else:
        lines[at] = mutations.bytes_of(data.draw, lines[at])
    folder = tmp_path_factory.getbasetemp() / "records"
    path = mutations.put(folder, SAMPLES, b"\n".join(lines) + b"\n")
    mutations.loaded_or_refused(SampleLog(folder).load)
    assert path.is_file()
