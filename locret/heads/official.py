"""Weights published by the authors of Locret (and of APB, same layout), read as retaining heads.

Keys are `model.layers.{i}.self_attn.fc1.weight` (d_R, (H + 2 K) * D) and `...fc2.weight` (K, d_R). A file may hold the
whole backbone. The original loader takes every entry with "fc" in its name and ignores what does not fit; this one
takes only entries of that exact form, so that a backbone whose MLP layers are called fc1 and fc2 is left alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from locret.base.fields import shown
from locret.base.files import shards
from locret.heads import checkpoint
from locret.heads.config import HeadsConfig
from locret.labels.kinds import LOGIT

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
    weights = checkpoint.tensors_of(_files(path), _our_name)
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
    return config, checkpoint.fitting(weights, config, str(path), f"the config of {config.base_name}")


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
