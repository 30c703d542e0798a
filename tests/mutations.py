"""Damage for files: hypothesis strategies that the property tests of loaders share."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

DEEP: Any = "deep"
for _ in range(400):
    DEEP = [DEEP]
ODD = (
    *(None, True, False, -1, 0, 1, 3, 10**12, -(10**12), 2**63, 10**400, 0.5, 1e308, float("nan"), float("inf")),
    *("", "5", "nan", "no such name", "../../etc/passwd", "/dev/zero", "x" * 300, "\ud800", "a\nb"),
    *([], {}, [1], [None], ["a"], {"a": 1}, {"rope_type": "no such"}, DEEP),
)
"""Values that a loader may meet where it expects another."""
_DTYPES = (
    *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)


def bytes_of(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the bytes of a file with a few of them changed, left out or repeated."""
    damaged = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        if not damaged:
            break
        # Headers are at the front: half of the damage is there.
        end = draw(st.sampled_from((min(len(damaged), 400), len(damaged)))) - 1
        at = draw(st.integers(0, end))
        kind = draw(st.sampled_from(("flip", "set", "cut", "drop", "insert")))
        if kind == "flip":
            damaged[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set":
            damaged[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del damaged[at:]
        elif kind == "drop":
            del damaged[at : at + draw(st.integers(1, 9))]
        else:
            damaged[at:at] = draw(st.binary(min_size=1, max_size=9))
    return bytes(damaged)


def values_of(draw: st.DrawFn, values: Any) -> Any:
    """Return JSON data with one value somewhere in it replaced, left out, renamed or added."""
    changed = copy.deepcopy(values)
    node = changed
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        kind = draw(st.sampled_from(("replace", "replace", "replace", "drop", "add", "rename")))
        if not keys or kind == "add":
            if isinstance(node, dict):
                node[draw(st.sampled_from(("surplus", "hidden_dim", "")))] = draw(st.sampled_from(ODD))
            else:
                node.append(draw(st.sampled_from(ODD)))
            return changed
        key = draw(st.sampled_from(keys))
        if isinstance(node[key], (dict, list)) and node[key] and draw(st.booleans()):
            node = node[key]
            continue
        if kind == "drop":
            del node[key]
        elif kind == "rename" and isinstance(node, dict):
            node[f"{key}s"] = node.pop(key)
        else:
            node[key] = draw(st.sampled_from(ODD))
        return changed


def json_text_of(draw: st.DrawFn, values: dict[str, Any]) -> bytes:
    """Return a JSON file with odd values, a key given twice, or damaged bytes."""
    kind = draw(st.sampled_from(("values", "values", "values", "twice", "bytes")))
    if kind == "values":
        return json.dumps(values_of(draw, values), indent=2).encode()
    text = json.dumps(values, indent=2)
    if kind == "bytes":
        return bytes_of(draw, text.encode())
    key, value = draw(st.sampled_from(sorted(values))), draw(st.sampled_from(ODD))
    return (text[:-2] + f",\n  {json.dumps(key)}: {json.dumps(value)}\n}}").encode()


def tensors_of(draw: st.DrawFn, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of which one has another shape, type, value or name, is missing or is added."""
    changed = dict(tensors)
    name = draw(st.sampled_from(sorted(tensors)))
    tensor = tensors[name]
    kind = draw(st.sampled_from(("shape", "type", "value", "name", "drop", "add", "swap")))
    if kind == "shape":
        # Not the same bytes in another shape: no damage does that to a header, and to its checksum.
        shapes = [tensor[:0], tensor[:1].clone(), tensor[..., :-1], torch.zeros(())]
        changed[name] = draw(st.sampled_from(shapes)).contiguous().clone()
    elif kind == "type":
        changed[name] = tensor.to(draw(st.sampled_from(_DTYPES)))
    elif kind == "value":
        flat = tensor.clone().flatten()
        strange = (float("nan"), float("inf"), -float("inf"), -1.0, 1e30)
        odd = strange if flat.is_floating_point() else (-1, 2**31 - 1, 0)
        if len(flat):
            flat[draw(st.integers(0, len(flat) - 1))] = draw(st.sampled_from(odd))
        changed[name] = flat.reshape(tensor.shape)
    elif kind == "swap":
        other = draw(st.sampled_from(sorted(tensors)))
        changed[name], changed[other] = tensors[other], tensor
    else:
        if kind != "add":
            del changed[name]
        if kind != "drop":
            changed[draw(st.sampled_from((f"{name}s", "layers.99.keys", "x", "rows.pad", "layers.0.row_start")))] = (
                tensor.clone()
            )
    return changed


def loaded_or_refused(load: Callable[[], Any]) -> Any:
    """Return what a loader returns; None if it refuses in one line that says something. Any other error is a failure.

    Raises:
        AssertionError: If it raises what no loader may.
    """
    try:
        return load()
    except Exception as error:
        text = str(error)
        clean = 20 < len(text) < 1500 and not set("\n\r\0") & set(text)
        if not isinstance(error, (ValueError, OSError)) or not clean:
            raise AssertionError(f"not one sentence: {error!r}") from error
        return None


def put(folder: Path, name: str, content: bytes) -> Path:
    """Write a file over whatever is there, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name
