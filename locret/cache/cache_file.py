"""A compressed context on disk: one safetensors file with the kept units and the counters that go with them."""

from __future__ import annotations

import json
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


def save_cache(cache: RetentionCache, path: str | Path) -> None:
    """Write what a cache holds to one file, so that the same context can be asked again later.

    Args:
        cache: A cache that has read something.
        path: File to write; an existing one is replaced once the new one is complete.

    Raises:
        ValueError: If the cache is empty, or a read of it was interrupted.
        OSError: If the file cannot be written; nothing half-written stays.

    Examples:
        >>> cache = RetentionCache(model, scorer=heads, policy=policy)
        >>> logits = prefill(model, ids, cache)
        >>> save_cache(cache, "book.safetensors")
    """
    cache.check_whole()
    if not cache.seen:
        raise ValueError(f"{path}: the cache has read nothing yet; call locret.prefill before saving it")
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
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, fresh, metadata={"state": json.dumps(state)})


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
    if not Path(path).is_file():
        raise ValueError(f"{path} does not exist; give a file written by save_cache")
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads((file.metadata() or {}).get("state", "{}"))
            tensors: dict[str, torch.Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a saved cache ({error}); give a file written by save_cache") from error
    if state.get("format") != FORMAT:
        raise ValueError(f"{path} has format {state.get('format')} instead of {FORMAT}; save the cache again")
    return state, tensors
