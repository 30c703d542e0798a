"""Gates with random weights in the shapes, names and files of their authors. Imported by the tests beside it."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

SCORERS = {"kvzap-linear": "kvzap", "kvzap-mlp": "kvzap", "fast-kvzip": "fast_kvzip", "dms": "dms"}


def drawn(*shape: int, seed: int = 0, scale: float = 0.3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def kvzap(folder: Path, config: Any, width: int | None, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Write what `KVzapModel.save_pretrained` writes: a linear layer or an MLP per layer."""
    hidden, heads, tensors = config.hidden_size, config.num_key_value_heads, {}
    for layer in range(config.num_hidden_layers):
        parts = {"": (heads, hidden)} if width is None else {".0": (width, hidden), ".2": (heads, width)}
        for part, (rows, columns) in parts.items():
            tensors[f"layers.{layer}{part}.weight"] = drawn(rows, columns, seed=layer).to(dtype)
            tensors[f"layers.{layer}{part}.bias"] = drawn(rows, seed=layer + 50).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = {
        "architectures": ["KVzapModel"], "dtype": "bfloat16", "hidden_dim": width, "input_dim": hidden,
        "model_type": "kvzap", "n_modules": config.num_hidden_layers, "output_dim": heads,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    return tensors


def fast_kvzip(folder: Path, config: Any, width: int = 16, sinks: int = 16) -> list[dict[str, Tensor]]:
    """Write what the training of Fast KVzip writes, curves of losses included."""
    heads, hidden = config.num_key_value_heads, config.hidden_size
    group, modules = config.num_attention_heads // heads, []
    for layer in range(config.num_hidden_layers):
        modules.append(
            {
                "k_base": drawn(heads, 1, sinks, width, seed=layer, scale=1.0),
                "b": drawn(heads, 1, group, seed=layer + 10, scale=1.0).bfloat16(),
                "q_proj.weight": drawn(heads * group * width, hidden, seed=layer + 20).bfloat16(),
                "q_proj.bias": drawn(heads * group * width, seed=layer + 30).bfloat16(),
                "k_proj.weight": drawn(heads * width, hidden, seed=layer + 40).bfloat16(),
                "q_norm.weight": 1 + drawn(width, seed=layer + 50),
                "k_norm.weight": 1 + drawn(width, seed=layer + 60),
            }
        )
    curves = {name: np.array([[0.5, 0.4], [0.3, 0.2]]) for name in ("loss", "acc", "loss_train", "acc_train")}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"module": modules, **curves}, folder / f"q{group}_dim{width}_sink{sinks}.pt")
    return modules


def dms(folder: Path, config: Any, **changes: Any) -> dict[str, Tensor]:
    """Write a model with adapters of DMS, in two shards, with other weights of the model in them."""
    entries = {}
    for layer in range(config.num_hidden_layers):
        where = f"model.layers.{layer}.self_attn"
        entries[f"{where}.dms_proj_alpha.weight"] = drawn(config.num_key_value_heads, config.hidden_size, seed=layer)
        entries[f"{where}.dms_proj_alpha_norm.weight"] = 1 + drawn(config.hidden_size, seed=layer + 10)
    others = {"model.embed_tokens.weight": drawn(4, 4)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(entries, folder / "model-00001-of-00002.safetensors")
    save_file(others, folder / "model-00002-of-00002.safetensors")
    held = dict.fromkeys(entries, "model-00001-of-00002.safetensors")
    held |= dict.fromkeys(others, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": held}))
    numbers = {
        "dms_alpha_scale": 100.0, "dms_initial_alpha_offset": 5.0, "dms_window_size": 512, "dms_separate_alpha": True,
        "dms_alpha_per": "head", "dms_tau": 0.1, "dms_cr": 8,
    }  # fmt: skip
    values = {"model_type": config.model_type, "rms_norm_eps": config.rms_norm_eps, **numbers, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return entries


def write(gate: str, folder: Path, config: Any) -> Any:
    """Write a gate of `SCORERS` for a backbone, and return its weights by its authors' names."""
    if gate.startswith("kvzap"):
        return kvzap(folder, config, None if gate == "kvzap-linear" else 24)
    return fast_kvzip(folder, config) if gate == "fast-kvzip" else dms(folder, config)


_WRITTEN: dict[tuple[str, int, int, int], TemporaryDirectory[str]] = {}


def folder_of(scorer: str, model: Any) -> str:
    """Return a folder with gates of a scorer for a backbone, the same for all of its shape."""
    config = model.config.get_text_config()
    key = (scorer, config.hidden_size, config.num_hidden_layers, config.num_key_value_heads)
    if key not in _WRITTEN:
        _WRITTEN[key] = TemporaryDirectory(prefix="gates-")
        if scorer == "dms":  # at its usual scale of 100, rounding would be seen
            dms(Path(_WRITTEN[key].name), config, dms_alpha_scale=1.0)
        else:
            write(next(gate for gate, name in SCORERS.items() if name == scorer), Path(_WRITTEN[key].name), config)
    return _WRITTEN[key].name
