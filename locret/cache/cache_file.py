"""A compressed context on disk: one safetensors file with the kept units and the counters that go with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from locret._version import __version__
from locret.cache.cache import RetentionCache
from locret.files import written_whole
from locret.heads.heads import RetainingHeads
from locret.policy.policy import RetentionPolicy
from locret.scorers import Scorer

FORMAT = "locret-cache-1"
_MOST_NOTES = 16 * 2**20
"""Characters of notes; a safetensors header, where they are written, may take 100 MB."""


def save_cache(cache: RetentionCache, path: str | Path, *, notes: Mapping[str, Any] | None = None) -> None:
    """Write what a cache holds to one file, so that the same context can be asked again later.

    Args:
        cache: A cache that has read something.
        path: File to write; an existing one is replaced once the new one is complete.
        notes: Whatever else the caller wants to find again with `read_notes`: plain JSON values by name.

    Raises:
        ValueError: If the cache is empty, a read of it was interrupted, or the notes are no JSON values.
        OSError: If the file cannot be written; nothing half-written stays.

    Examples:
        >>> cache = RetentionCache(model, scorer=heads, policy=policy)
        >>> logits = prefill(model, ids, cache)
        >>> save_cache(cache, "book.safetensors")
    """
    cache.check_whole()
    if not cache.seen:
        raise ValueError(f"{path}: the cache has read nothing yet; call locret.prefill before saving it")
    kept = _notes(notes or {})
    tensors, numbers = cache.state()
    state = {
        "format": FORMAT,
        "toolkit_version": __version__,
        "backbone": asdict(cache.backbone),
        "policy": cache.policy.to_dict(),
        "scorer": cache.scorer.name,
        **numbers,
    }
    with written_whole(path) as fresh:
        metadata = {"state": json.dumps(state), "notes": kept}
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, fresh, metadata=metadata)


def _notes(notes: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(dict(notes), allow_nan=False)
        same = json.loads(text) == notes
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"notes cannot be saved ({error}); give numbers, texts, lists and mappings") from error
    if not same:
        raise ValueError("notes would come back changed; give lists instead of tuples, and texts as names")
    if len(text) > _MOST_NOTES:
        raise ValueError(f"notes take {len(text):,} characters, more than {_MOST_NOTES:,}; save long texts elsewhere")
    return text


def read_notes(path: str | Path) -> dict[str, Any]:
    """Return the notes that `save_cache` was given, without reading the units; empty if there were none.

    Raises:
        ValueError: If the file is not a saved cache.
    """
    return _header(path)[1]


def load_cache(path: str | Path, model: nn.Module, scorer: RetainingHeads | Scorer | str) -> RetentionCache:
    """Read a cache back, ready for `generate` or for more text.

    Args:
        path: File written by `save_cache`.
        model: The backbone it was made with.
        scorer: Scores the units of further tokens.

    Raises:
        ValueError: If the file is not a cache, or belongs to a backbone of another shape; the message shows both sides.
        OSError: If the file cannot be read.

    Examples:
        >>> cache = RetentionCache(model, scorer=heads, policy=policy)
        >>> logits = prefill(model, ids, cache)
        >>> save_cache(cache, "book.safetensors")
        >>> cache = load_cache("book.safetensors", model, heads)
        >>> answer = generate(model, cache=cache, max_new_tokens=16)
        >>> tokenizer.decode(answer[0], skip_special_tokens=True)
        'The pass key is 71432.'
    """
    state, tensors = _read(path)
    cache = RetentionCache(model, scorer, RetentionPolicy.from_dict(state["policy"], f"{path}: policy"))
    saved, here = state["backbone"], json.loads(json.dumps(asdict(cache.backbone)))
    different = [
        f"{key} {saved.get(key)} in the file, {here[key]} in the model" for key in here if saved.get(key) != here[key]
    ]
    if different:
        raise ValueError(f"{path} was made with another backbone ({'; '.join(different)}); load that backbone")
    cache.load(tensors, state)
    return cache


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    state, _ = _header(path)
    with safe_open(path, framework="pt") as file:
        tensors: dict[str, torch.Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return state, tensors


def _header(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    if not Path(path).is_file():
        raise ValueError(f"{path} does not exist; give a file written by save_cache")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        state, notes = (json.loads(metadata.get(name, "{}")) for name in ("state", "notes"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a saved cache ({error}); give a file written by save_cache") from error
    if not isinstance(state, dict) or not isinstance(notes, dict):
        raise ValueError(f"{path} is not a saved cache; give a file written by save_cache")
    if state.get("format") != FORMAT:
        raise ValueError(f"{path} has format {state.get('format')} instead of {FORMAT}; save the cache again")
    return state, notes
