"""What `config.json` and the model card say about how heads were trained; of a local path, only its last part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from locret import backbone_names, shipped
from locret.data.training.sources import ALIASES
from locret.train.training_options import BackboneOptions, DataOptions, LossOptions, OptimizerOptions


def label_notes(loss: LossOptions) -> dict[str, Any]:
    """Return the definition of the labels."""
    queries = {
        "last": "the answer's tokens",
        "each": "the tokens of the answers to all questions, each asked by itself",
    }[loss.answers]
    return {
        "kind": loss.label_kind,
        "include_last_prompt_token": loss.include_last_prompt_token,
        "reduction": f"maximum over {queries} and the query heads of the group",
    }


def training_notes(
    backbone: BackboneOptions,
    data: DataOptions,
    loss: LossOptions,
    optimizer: OptimizerOptions,
    earlier: dict[str, Any] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Return a summary of the run: its options, `earlier` ones of the heads it went on from, and other `facts`."""
    published = {name.lower(): entry for name, entry in ALIASES.items()}.get(data.dataset.lower())
    pinned = published.revision if published else None
    o = optimizer
    return {
        "dataset": published.repo if published else _public(data.dataset),
        "dataset_revision": data.dataset_revision or pinned,
        "backbone": _public(backbone.model),
        **({"weights": f"dequantised from {backbone.gguf}, so rounded as that file is"} if backbone.gguf else {}),
        "adapter": backbone.adapter and _public(backbone.adapter),
        "template": data.template,
        "max_prompt_tokens": data.max_prompt_tokens,
        "steps": o.steps,
        "optimizer": f"AdamW, lr {o.lr}, betas {list(o.betas)}, weight decay {o.weight_decay}",
        "schedule": f"linear warm-up over {o.warmup} steps, linear decay to 0 at {o.steps}",
        "clip": "none" if o.clip == "none" else f"by {o.clip}, {o.clip_limit}",
        "objective": loss.objective,
        "alpha": loss.alpha,
        "seed": o.seed,
        **facts,
        **({"went_on_from": _public(backbone.init_from)} if backbone.init_from else {}),
        **({"earlier": earlier} if backbone.init_from and earlier else {}),
    }


def _public(name: str) -> str:
    """Return a Hub id as it is, and the last part of a path, which tells nothing about this machine."""
    name = shipped.find(backbone_names.find(name))
    return Path(name).name if os.path.exists(name) or name.count("/") > 1 else name
