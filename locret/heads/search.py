"""`--heads auto`: the heads on the Hub that are for a backbone, and the most used of them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi

from locret import backbone_names, hub, shipped
from locret.base.files import read_json

TAG = "retaining-heads"
_MOST = 200
"""Repositories to look at."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Found:
    """Heads that were chosen, and why."""

    heads: str
    reason: str


def find_heads(model: str) -> Found:
    """Return the heads for a backbone: those that are shipped with it, or the most downloaded on the Hub.

    On the Hub these are repositories with the tag `retaining-heads` whose card names the backbone as `base_model`. What
    a card says is its author's word; the weights are safetensors and run no code.

    Args:
        model: The backbone's folder, or its Hub id.

    Raises:
        ValueError: If the backbone's name on the Hub is unknown, or there are no heads for it.
        OSError: If the Hub refuses or cannot be reached.
    """
    if embedded := shipped.embedded_heads(model):
        return Found(embedded, "which are shipped with this toolkit")
    name = backbone_names.hub_id(model) or _hub_name(model)
    with hub.one_sentence("search for heads of", name):
        candidates = list(HfApi().list_models(filter=[TAG, f"base_model:{name}"], full=True, limit=_MOST))
    if not candidates:
        raise ValueError(
            f"--heads auto: the Hub has no retaining heads for {name}; train some with locret-train, or leave --heads "
            "out for a training-free scorer"
        )
    best = max(candidates, key=lambda info: (info.downloads or 0, info.id))
    return Found(best.id, f"the most downloaded of {len(candidates)} for {name} on the Hub")


def _hub_name(model: str) -> str:
    """Return the Hub id of a backbone; a folder may remember it."""
    if not os.path.isdir(model):
        if _HUB_ID.fullmatch(model):
            return model
        raise ValueError(f"--heads auto: {model} is neither a folder nor a name on the Hub; check --model")
    try:
        name = read_json(Path(model, "config.json"), "a config").get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        name = None
    if isinstance(name, str) and _HUB_ID.fullmatch(name) and not os.path.exists(name):
        return name
    raise ValueError(
        f"--heads auto: the folder {model} does not say which backbone of the Hub it is; name the heads, or give the "
        "backbone by its Hub id"
    )
