"""Backbones by shape (shapes.json), with random weights, so that nothing has to be downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from locret import shipped

# Budgets, chunks, stabilizers, local tokens and d_R of the large ones are those of Locret, section 4.1.
_SHAPES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A backbone's config, and how it is measured unless told otherwise."""

    config: PretrainedConfig
    policy: dict[str, int]
    hidden_dim: int
    lengths: tuple[int, ...]
    gpu: bool = False
    """Whether it is too large for a CPU to say anything about."""


def shape_of(name: str) -> Shape:
    """Return a shape by its name."""
    if name not in _SHAPES:
        raise ValueError(f"--shape {name} is unknown; choose one of {', '.join(_SHAPES)}")
    values = dict(_SHAPES[name])
    own = values.pop("config")
    config = AutoConfig.from_pretrained(shipped.find(own)) if isinstance(own, str) else AutoConfig.for_model(**own)
    return Shape(**{**values, "config": config, "lengths": tuple(values["lengths"])})


def random_model(
    config: PretrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Return a model in evaluation mode whose weights come from the seed; they are made on the device."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
