"""What a training run left behind is read strictly: damage is one sentence, or what was cut off is left out."""

from __future__ import annotations

import io
import json
from dataclasses import fields
from typing import Any

import mutations
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locret.train import checkpointing, resumed
from locret.train.run_log import records_until
from locret.train.training_options import OPTION_CLASSES

KNOWN = {field.name for cls in OPTION_CLASSES for field in fields(cls)}
RECORD = {
    "config": {"model": "checkpoints/tiny", "steps": 5, "lr": 1e-3, "betas": [0.9, 0.95], "policy": {"budget": 8}},
    "chosen": ["model", "steps"],
    "versions": {"torch": "2"},
}


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_a_damaged_run_record_is_refused_or_read(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp() / "run"
    mutations.put(folder, resumed.RECORD, mutations.json_text_of(data.draw, RECORD))
    mutations.loaded_or_refused(lambda: resumed.read_record(folder, KNOWN))


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_a_damaged_log_is_refused_or_read(tmp_path_factory: Any, data: st.DataObject) -> None:
    lines = [json.dumps({"step": step, "total": 1.5, "lr": 1e-3}).encode() + b"\n" for step in (5, 10, 15)]
    at = data.draw(st.integers(0, 2))
    if data.draw(st.booleans()):
        lines[at] = json.dumps(mutations.values_of(data.draw, json.loads(lines[at]))).encode() + b"\n"
    else:
        lines[at] = mutations.bytes_of(data.draw, lines[at])
    path = mutations.put(tmp_path_factory.getbasetemp() / "run", "log.jsonl", b"".join(lines))
    mutations.loaded_or_refused(lambda: records_until(path, 10))


def state(values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_a_damaged_state_is_refused_or_read(tmp_path_factory: Any, data: st.DataObject) -> None:
    values = {"step": 5, "random": {"python": [3, [1, 2], None]}, "scheduler": {"last_epoch": 5}, "options": RECORD}
    content = state({**values, "optimizer": {"m": torch.ones(3)}})
    if data.draw(st.booleans()):
        content = mutations.bytes_of(data.draw, content)
    else:
        content = state(mutations.values_of(data.draw, values))
    folder = tmp_path_factory.getbasetemp() / "checkpoint-5"
    mutations.put(folder, checkpointing.STATE, content)
    mutations.loaded_or_refused(lambda: checkpointing.read(folder))
