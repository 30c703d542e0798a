"""What is written for llama.cpp, against states that the real library gave out; llama.cpp itself is not needed."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from locret import LongContextModel, RetentionPolicy
from locret.engines.llamacpp import export
from locret.engines.prefix import Prefix

RECORDED = dict(np.load(Path(__file__).parent / "llamacpp_states.npz"))
"""Given out by llama-cpp-python 0.3.36: five tokens, read by two random models."""
SHAPES = {"llama": (2, 32), "qwen2": (1, 128)}
"""KV heads and head dim."""
UNITS = 5


def recorded(name: str) -> bytes:
    return RECORDED[name].tobytes()


def parsed(blob: bytes, head: str = "<Ii") -> dict[str, Any]:
    """Take a state apart, by the description of the format alone; nothing may be left over."""
    at = struct.calcsize(head)

    def take(form: str) -> Any:
        nonlocal at
        values = struct.unpack_from(f"<{form}", blob, at)
        at += struct.calcsize(f"<{form}")
        return values

    def rows() -> tuple[Any, bytes]:
        nonlocal at
        kind = take("iQ")
        at += (size := kind[1] * cells)
        return kind, blob[at - size : at]

    streams, cells = take("II")
    places = [take("iIi")[:2] for _ in range(cells)]
    transposed, layers = take("II")
    keys, values = [rows() for _ in range(layers)], [rows() for _ in range(layers)]
    state = {"streams": streams, "places": places, "transposed": transposed, "keys": keys, "values": values}
    assert at == len(blob)
    return state


def prefix_of(model_type: str, /, **changes: Any) -> Prefix:
    """The units that the library itself held, in transformers' order."""
    state, (heads, dim) = parsed(recorded(f"{model_type} f32")), SHAPES[model_type]

    def states(part: tuple[Any, bytes]) -> torch.Tensor:
        return torch.frombuffer(bytearray(part[1]), dtype=torch.float32).view(UNITS, heads, dim)

    keys = tuple(states(part) for part in state["keys"])
    if model_type == "llama":  # neighbours become halves
        keys = tuple(key.view(UNITS, heads, dim // 2, 2).transpose(2, 3).reshape(UNITS, heads, dim) for key in keys)
    values = tuple(states(part) for part in state["values"])
    facts = {"vocab_size": 199, "tokens": 60, "model_type": model_type, "rotary": {"rope_type": "default"}}
    return Prefix(**{"keys": keys, "values": values, **facts, **changes})


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_float32_units_are_written_as_the_library_wrote_them(model_type: str, tmp_path: Path) -> None:
    slot, _ = export(prefix_of(model_type), tmp_path / "a.bin", "f32")
    head, blob_head = struct.calcsize("<3I5i"), struct.calcsize("<Ii")
    assert slot.read_bytes()[head:] == recorded(f"{model_type} f32")[blob_head:]


def test_a_slot_file_is_the_librarys_but_for_the_ids(tmp_path: Path) -> None:
    """The second layer of a library with such a cache is another: it has read what the first one lost."""
    slot, _ = export(prefix_of("llama"), tmp_path / "a.bin")
    file, theirs = slot.read_bytes(), recorded("llama f16 file")
    assert file[:12] == theirs[:12]
    assert list(struct.unpack_from("<5i", file, 12)) == prefix_of("llama").placeholders
    assert len(file) == len(theirs)
    ours, wanted = parsed(file, "<3I5i"), parsed(theirs, "<3I5i")
    for field in ("streams", "places", "transposed"):
        assert ours[field] == wanted[field]
    for part in ("keys", "values"):
        assert ours[part][0] == wanted[part][0]


POLICY = RetentionPolicy(budget=64, chunk_size=96, stabilizers=16, local_len=16)


@pytest.fixture(scope="module")
def lm() -> LongContextModel:
    return LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy=POLICY)


@pytest.fixture(scope="module")
def saved(lm: LongContextModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("contexts") / "book.ctx"
    ids = torch.randint(10, 900, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    lm.read(ids, name="ids").save(path)
    return path


def test_an_export_says_all_that_a_client_and_the_server_need(saved: Path, tmp_path: Path) -> None:
    slot, record = export(saved, tmp_path / "book.bin", "bf16")
    assert (slot, record) == (tmp_path / "book.bin", tmp_path / "book.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.bin", "book.json"]
    facts, prefix = json.loads(record.read_text()), Prefix.from_file(saved)
    assert facts["bytes"] == slot.stat().st_size
    assert facts["placeholders"] == prefix.placeholders
    assert (facts["units"], facts["tokens"], facts["digest"]) == (80, prefix.tokens, prefix.digest.hex())
    said = " ".join(facts["server"])
    assert said == "--ctx-size 4176 --kv-unified --flash-attn on --cache-type-k bf16 --cache-type-v bf16"
    assert "/slots/0?action=restore" in facts["use"]


def test_a_context_tells_the_text_around_a_question_and_its_file_does_not(
    lm: LongContextModel, saved: Path, tmp_path: Path
) -> None:
    context = lm.load(saved)
    _, record = export(context, tmp_path / "book.bin")
    question = json.loads(record.read_text())["question"]
    turn = question["before"] + "What is the pass key?" + question["after"]
    assert turn == context.question_text("What is the pass key?")
    ids = lm.tokenizer(turn, add_special_tokens=False)["input_ids"]
    assert ids == context.question_ids("What is the pass key?")[0].tolist()
    _, record = export(saved, tmp_path / "book.bin")
    assert json.loads(record.read_text())["question"] is None
    with pytest.raises(ValueError, match="' ' is nothing to answer; give a question as text"):
        context.question_text(" ")


def test_a_new_export_takes_the_place_of_an_old_one_and_of_nothing_else(saved: Path, tmp_path: Path) -> None:
    slot, record = export(saved, tmp_path / "new" / "book.bin")
    export(saved, slot, "f32")
    assert json.loads(record.read_text())["server"][-1] == "f32"
    before = saved.read_bytes()
    with pytest.raises(ValueError, match=r"book.ctx is there already and is no slot file; choose another file"):
        export(saved, saved)
    assert saved.read_bytes() == before
    record.write_text('{"my": "notes"}')
    with pytest.raises(ValueError, match=r"book.json is there already and is no record"):
        export(saved, slot)
    with pytest.raises(ValueError, match=r"a.json is to be the slot file, and the record beside it ends in .json"):
        export(saved, tmp_path / "a.json")
    with pytest.raises(ValueError, match="is a folder; choose the name of a file, such as"):
        export(saved, tmp_path)


def filled(value: float, dim: int = 32) -> tuple[torch.Tensor]:
    return (torch.full((5, 2, dim), value),)


DYNAMIC, PARTIAL = {"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "default", "partial_rotary_factor": 0.5}
HELD = [
    ({"model_type": "qwen2_vl"}, "f16", "in which order llama.cpp holds the keys of 'qwen2_vl' is not known"),
    ({"rotary": PARTIAL}, "f16", "llama.cpp rotates whole heads and unscaled where this backbone"),
    ({}, "q6_k", 'cache_type="q6_k" is unknown; choose one of f32, f16, bf16'),
    ({"keys": filled(1e5)}, "f16", "beyond the range of float16; give cache_type=bf16 or f32"),
    ({"keys": filled(3.4e38)}, "bf16", "beyond the range of bfloat16; give cache_type=f32"),
    ({"values": filled(float("nan"))}, "f16", "some units are no finite numbers"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), HELD, ids=[message for *_, message in HELD])
def test_units_that_llamacpp_could_not_hold_are_refused(
    changes: dict[str, Any], kind: str, message: str, tmp_path: Path
) -> None:
    prefix = prefix_of("llama", **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        export(prefix, tmp_path / "book.bin", kind)
    assert not list(tmp_path.iterdir())
