"""One folder that every side loads: weights, prompt, and a configuration that older transformers understand too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file

from locret import shipped
from locret.infer.speed.shapes import random_model

if TYPE_CHECKING:
    from locret.infer.speed.plan import BenchPlan

PROMPT = "prompt.safetensors"
_FIRST = 3
"""Ids below are often special."""


def write_files(folder: Path, plan: BenchPlan) -> str:
    """Write the prompt, and random weights where the plan names no backbone; return the backbone's folder.

    Raises:
        OSError: If the folder cannot take them, or a Hub cannot be reached.
    """
    generator = torch.Generator().manual_seed(plan.seed)
    vocabulary = plan.config.get_text_config().vocab_size
    ids_BL = torch.randint(_FIRST, vocabulary, (1, max(plan.lengths)), generator=generator)
    save_file({"prompt": ids_BL}, folder / PROMPT)
    if plan.model is not None:
        model = shipped.find(plan.model)
        return model if Path(model).is_dir() else str(snapshot_download(model))
    free, needed = shutil.disk_usage(folder).free, plan.sizes.weight_bytes
    if free < needed:
        raise OSError(
            f"the peers' backbone takes {needed:,} bytes, but {folder.parent} has {free:,} left; "
            "set TMPDIR to a folder with more room"
        )
    backbone = folder / "backbone"
    random_model(plan.config, plan.seed, plan.dtype, plan.device or "cpu").save_pretrained(backbone)
    if plan.device is not None and plan.device.type == "cuda":
        torch.cuda.empty_cache()  # the device belongs to the sides now
    path = backbone / "config.json"
    path.write_text(json.dumps(in_both_spellings(json.loads(path.read_text())), indent=1))
    return str(backbone)


def in_both_spellings(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json that says what rotary embedding is meant to transformers 4 as well.

    Since version 5 everything is in `rope_parameters`; before, the base was `rope_theta` and the rest `rope_scaling`.
    """
    rope = config.get("rope_parameters")
    if not rope or "rope_theta" not in rope:
        return config
    older = {"rope_theta": rope["rope_theta"], "torch_dtype": config.get("dtype")}
    if "partial_rotary_factor" in rope:
        older["partial_rotary_factor"] = rope["partial_rotary_factor"]
    kind = rope.get("rope_type", "default")
    if kind == "longrope":  # three fields, no more, were allowed
        older["rope_scaling"] = {"type": kind, **{name: rope[name] for name in ("short_factor", "long_factor")}}
    elif kind != "default":
        older["rope_scaling"] = {
            name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")
        }
    return {**config, **older}
