"""Weights published by the authors of Locret (and of APB, same layout), read as retaining heads.

Keys are `model.layers.{i}.self_attn.fc1.weight` (d_R, (H + 2 K) * D) and `...fc2.weight` (K, d_R). A file may hold the
whole backbone. The original loader takes every entry with "fc" in its name and ignores what does not fit; this one
takes only entries of that exact form, so that a backbone whose MLP layers are called fc1 and fc2 is left alone.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from locret.base.fields import shown
from locret.base.files import shards
from locret.heads import checkpoint
from locret.heads.config import HeadsConfig
from locret.labels.logit import LOGIT

_ENTRY = re.compile(r"(?:module\.)?(?:model\.)?layers\.(\d+)\.self_attn\.(fc[12]\.(?:weight|bias))")


def read(path: Path, model_or_config: Any) -> tuple[HeadsConfig, dict[str, Tensor]]:
    """Read published weights for a backbone.

    Args:
        path: A `.bin` or `.safetensors` file, or a folder holding one or a sharded index.
        model_or_config: The backbone or its transformers config; d_R is taken from the file.

    Returns:
        The heads' config, and their float32 weights under the names that `RetainingHeads` uses.

    Raises:
        ValueError: If there are no retaining heads in it, or layers or shapes do not fit the backbone.
    """
    weights = tensors_of(_files(path), _our_name)
    if not weights:
        raise ValueError(
            f"{path} has no retaining heads: no entry like model.layers.0.self_attn.fc1.weight; give the weights "
            "published for Locret"
        )
    hidden_dim = next((len(w) for name, w in weights.items() if name.endswith("fc1.weight") and w.ndim and len(w)), 1)
    config = HeadsConfig.for_model(model_or_config, hidden_dim).annotated(
        label={"kind": LOGIT.name, "include_last_prompt_token": False},  # as the published code has it
        training={"source": f"weights published by the authors of Locret ({path.name})"},
    )
    return config, checkpoint.fitting(weights, config, str(path))


def _our_name(name: str) -> str | None:
    match = _ENTRY.fullmatch(name)
    return f"heads.{int(match[1])}.{match[2]}" if match else None


def _files(path: Path) -> list[Path]:
    """Return the files to read: the one given, or those of a folder."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"there is no file or folder '{path}'; download the published heads first (`hf download REPO`)"
        )
    for index in sorted(path.glob("*.index.json")):
        # Shards without heads are never opened: a backbone has gigabytes of them.
        files = sorted({file for name, file in shards(index).items() if _our_name(name)})
        if gone := [file.name for file in files if not file.is_file()]:
            raise ValueError(
                f"{index} names {shown(gone[0])}, which is not in its folder; download all parts that hold heads"
            )
        return files
    for suffix in ("safetensors", "bin"):
        files = sorted(path.glob(f"*.{suffix}"))
        if len(files) == 1:
            return files
        if files:
            raise ValueError(
                f"{path} has several .{suffix} files ({', '.join(f.name for f in files[:4])}); name one of them"
            )
    raise ValueError(f"{path} has no .safetensors or .bin file; give the file or folder of the published heads")


def tensors_of(files: Iterable[Path], ours: Callable[[str], str | None]) -> dict[str, Tensor]:
    """Return float32 weights of files that others published, under our names; those without one are left out.

    Raises:
        ValueError: If a file is damaged, a weight is there twice or is no plain tensor of finite numbers.
    """
    weights: dict[str, Tensor] = {}
    for file in files:
        for theirs, tensor in _wanted(file, ours):
            name = str(ours(theirs))
            if name in weights:
                raise ValueError(f"{file} has {name.removeprefix('heads.')} of a layer twice; keep one of the two")
            weights[name] = checkpoint.as_float32(tensor, theirs, str(file))
    return weights


def _wanted(file: Path, ours: Callable[[str], str | None]) -> list[tuple[str, Any]]:
    if file.suffix != ".safetensors":
        return [(name, value) for name, value in load_bin(file).items() if ours(name)]
    try:
        with safe_open(file, framework="pt") as tensors:
            return [(name, tensors.get_tensor(name)) for name in tensors.keys() if ours(name)]  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}); copy or download it again") from error


def load_bin(file: Path, also: Sequence[Any] = ()) -> dict[str, Any]:
    """Return what torch.save wrote, tensors and plain data by name; nothing in it is run.

    Args:
        file: The file.
        also: What else it may hold, as `torch.serialization.safe_globals` takes it.

    Raises:
        ValueError: If it is damaged, or holds anything else.
    """
    try:
        # Memory-mapped where the format allows it: the file may hold a backbone of which only the heads are read.
        with torch.serialization.safe_globals(list(also)):
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file) or None)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} holds more than tensors, and loading it could run code; convert it to safetensors"
        ) from error
    # What a damaged pickle makes the unpickler raise has no end: IndexError, KeyError, TypeError, ...
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{file} is not a file that torch.save wrote ({reason}); download it again") from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError(
            f"{file} holds a {type(state).__name__} and not weights by name; give a state dict of the heads"
        )
    return state
