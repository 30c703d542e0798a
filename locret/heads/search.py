"""`--heads auto`: the heads on the Hub that are for a backbone, and the best of them."""

from __future__ import annotations

import json
import os
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locret import backbone_names, hub, shipped

TAG = "retaining-heads"
_MOST = 200
"""Repositories to look at."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_Key = tuple[str, str | None, str]


@dataclass(frozen=True)
class Found:
    """Heads that were chosen, and why."""

    heads: str
    reason: str


def find_heads(model: str) -> Found:
    """Return the heads for a backbone: those that are shipped with it, or the best on the Hub.

    On the Hub these are repositories with the tag `retaining-heads` whose card names the backbone as `base_model`.
    Those with recorded results come first: by their mean over the results that all of them record, or over their own
    where they have none in common. What decides between equals is how often they were downloaded. What a card records
    is its author's word; the weights are safetensors and run no code.

    Args:
        model: The backbone's folder, or its Hub id.

    Raises:
        ValueError: If the backbone's name on the Hub is unknown, or there are no heads for it.
        OSError: If the Hub refuses or cannot be reached.
    """
    if embedded := shipped.embedded_heads(model):
        return Found(embedded, "which are shipped with this toolkit")
    name = backbone_names.hub_id(model) or _hub_name(model)
    candidates = _on_hub(name)
    if not candidates:
        raise ValueError(
            f"--heads auto: the Hub has no retaining heads for {name}; train some with locret-train, or leave --heads "
            "out for a training-free scorer"
        )
    scores = _compared({info.id: _results(info) for info in candidates})
    best = max(candidates, key=lambda info: (scores.get(info.id, (-1.0, 0))[0], info.downloads or 0, info.id))
    of = f"of {len(candidates)} for {name} on the Hub"
    if best.id in scores:
        mean, results = scores[best.id]
        return Found(best.id, f"the best {of} by their recorded results (a mean of {mean:.1f} over {results})")
    return Found(best.id, f"the most downloaded {of}, none of which records results")


def _hub_name(model: str) -> str:
    """Return the Hub id of a backbone; a folder may remember it."""
    if not os.path.isdir(model):
        if _HUB_ID.fullmatch(model):
            return model
        raise ValueError(f"--heads auto: {model} is neither a folder nor a name on the Hub; check --model")
    try:
        name = json.loads(Path(model, "config.json").read_text(encoding="utf-8")).get("_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        name = None
    if isinstance(name, str) and _HUB_ID.fullmatch(name) and not os.path.exists(name):
        return name
    raise ValueError(
        f"--heads auto: the folder {model} does not say which backbone of the Hub it is; name the heads, or give the "
        "backbone by its Hub id"
    )


def _on_hub(name: str) -> list[Any]:
    from huggingface_hub import HfApi

    with hub.one_sentence("search for heads of", name):
        listed = HfApi().list_models(filter=[TAG, f"base_model:{name}"], cardData=True, full=True, limit=_MOST)
        return [info for info in listed if _is_for(info, name)]


def _is_for(info: Any, name: str) -> bool:
    """Return whether a repository says itself what the Hub's index says of it."""
    bases = getattr(info.card_data, "base_model", None)
    named = [bases] if isinstance(bases, str) else bases if isinstance(bases, list) else []
    tags = info.tags or getattr(info.card_data, "tags", None) or []
    return TAG in tags and name.lower() in (str(base).lower() for base in named)


def _results(info: Any) -> dict[_Key, float]:
    """Return the scores of a card's model-index, by what was measured."""
    found: dict[_Key, float] = {}
    for result in getattr(info.card_data, "eval_results", None) or []:
        value = result.metric_value
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 100:
            found[(str(result.dataset_type), result.dataset_config, str(result.metric_type))] = max(
                float(value), found.get((str(result.dataset_type), result.dataset_config, str(result.metric_type)), 0)
            )
    return found


def _compared(recorded: dict[str, dict[_Key, float]]) -> dict[str, tuple[float, str]]:
    """Return a mean score and what it is over, for the repositories that record any."""
    having = {name: results for name, results in recorded.items() if results}
    common = set.intersection(*map(set, having.values())) if having else set()
    return {
        name: (
            statistics.fmean(results[key] for key in common or results),
            f"the {len(common)} that all have" if common else f"{len(results)} of its own, as they have none in common",
        )
        for name, results in having.items()
    }
