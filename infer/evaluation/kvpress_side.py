"""kvpress's presses on prompts that come in, in an environment of its own. Run by `presses.py`.

    python kvpress_side.py        # one JSON request per line, one JSON answer per line

It imports nothing but torch, transformers and kvpress. The steps are those of kvpress's own pipeline, without its
tokenizer: the decoder alone reads a context under the press; what is asked follows behind it, from a copy of the cache
for each question; a greedy loop calls the model at the positions that tokens have in the text.

Requests, by "do": load (backbone, threads) answers with versions; read (press, context, keep, asked, ...) answers with
the answers' token ids and what was held.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

PACKAGES = ("kvpress", "torch", "transformers")
_EAGER = {"observed_attention"}
"""Presses that read the weights of attention, which only eager attention returns."""


def _presses() -> dict[str, Callable[[float, int, int], Any]]:
    """Return what makes each press, from its compression ratio, the width of a window, and a free token id."""
    import kvpress as k

    def window(kind: Any, **options: Any) -> Callable[[float, int, int], Any]:
        return lambda ratio, width, _: kind(compression_ratio=ratio, window_size=width, **options)

    def plain(kind: Any, **options: Any) -> Callable[[float, int, int], Any]:
        return lambda ratio, _width, _: kind(compression_ratio=ratio, **options)

    def around(kind: Any, inner: Callable[[float, int, int], Any], **options: Any) -> Callable[[float, int, int], Any]:
        return lambda ratio, width, free: kind(press=inner(ratio, width, free), **options)

    def finch(ratio: float, _width: int, free: int) -> Any:
        press = k.FinchPress(compression_ratio=ratio)
        press.delimiter_token_id = free
        return press

    snapkv, expected = window(k.SnapKVPress), plain(k.ExpectedAttentionPress)
    return {
        "random": plain(k.RandomPress, seed=0),
        "streaming_llm": plain(k.StreamingLLMPress),
        "knorm": plain(k.KnormPress),
        "keydiff": plain(k.KeyDiffPress),
        "tova": plain(k.TOVAPress),
        "snapkv": snapkv,
        "pyramidkv": window(k.PyramidKVPress),
        "observed_attention": plain(k.ObservedAttentionPress),
        "expected_attention": expected,
        "cap": plain(k.CapPress),
        "lagkv": plain(k.LagKVPress),
        "leverage": plain(k.LeverageScorePress),
        "non_causal": plain(k.NonCausalAttnPress),
        "compactor": plain(k.CompactorPress),
        "cur": plain(k.CURPress),
        "finch": finch,
        "kvzip": plain(k.KVzipPress),
        "kvzip_plus": plain(k.KVzipPress, kvzip_plus_normalization=True),
        "kvgrad": plain(k.KVgradPress),
        "adakv_snapkv": around(k.AdaKVPress, snapkv),
        "adakv_expected_attention": around(k.AdaKVPress, plain(k.ExpectedAttentionPress, epsilon=1e-2)),
        "criticalkv_snapkv": around(k.CriticalKVPress, snapkv),
        "critical_adakv_snapkv": around(k.CriticalAdaKVPress, snapkv),
        "chunkkv_snapkv": around(k.ChunkKVPress, snapkv),
        "entropy_gated_chunkkv_snapkv": around(k.EntropyGatedChunkKVPress, snapkv),
        "block_keydiff": around(k.BlockPress, plain(k.KeyDiffPress)),
        "chunk_snapkv": around(k.ChunkPress, snapkv, chunk_length=256),
        "rerotated_snapkv": around(k.KeyRerotationPress, snapkv),
        "merging_snapkv": around(k.MergingPress, snapkv),
    }


class Worker:
    """What lives between requests: the backbone, once per kind of attention."""

    def load(self, backbone: str, threads: int, dtype: str, device: str) -> dict[str, Any]:
        """Load the backbone; return versions and the presses there are."""
        torch.set_num_threads(threads)
        self.backbone, self.dtype, self.device = backbone, getattr(torch, dtype), torch.device(device)
        self.models = dict[str, Any]()
        self.presses = _presses()
        self._model("sdpa")
        return {"versions": {name: version(name) for name in PACKAGES}, "presses": list(self.presses)}

    def read(self, press: str, context: list[int], keep: int, asked: list[list[int]], **wanted: Any) -> dict[str, Any]:
        """Read a context under a press, ask each question of a copy, and return answers, units, bytes and seconds."""
        model = self._model("eager" if press in _EAGER else "sdpa")
        cache, held = _cache(), dict[str, int]()
        made = self.presses[press](_ratio(len(context), keep), wanted["window"], wanted["free"])
        start = self._now()
        tokens = _delimited(context, wanted["free"], wanted["window"]) if press == "finch" else context
        ids = torch.tensor([tokens], device=self.device)
        with torch.no_grad(), _watched(model, cache, held), made(model):
            model.model(input_ids=ids, past_key_values=cache)
        seconds = self._now() - start
        units = _units(model, cache, len(context))
        return {
            "kept_units": units,
            "cache_bytes": _bytes(cache),
            "peak_bytes": max(held.get("peak", 0), _bytes(cache)),
            "prefill_seconds": seconds,
            "answers": [self._answer(model, copy.deepcopy(cache), len(context), ids, **wanted) for ids in asked],
        }

    def _now(self) -> float:
        if self.device.type == "cuda":  # which has only been told to begin
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @torch.no_grad()
    def _answer(self, model: Any, cache: Any, seen: int, asked: list[int], **wanted: Any) -> dict[str, Any]:
        moments, ids, new = [self._now()], asked, list[int]()
        while not new or (new[-1] not in wanted["ends"] and len(new) < wanted["max_new_tokens"]):
            positions = torch.arange(seen, seen + len(ids), device=self.device)[None]
            given = torch.tensor([ids], device=self.device)
            out = model(input_ids=given, past_key_values=cache, position_ids=positions, logits_to_keep=1)
            logits, seen = out.logits[0, -1], seen + len(ids)
            if not new:
                logits[wanted["not_first"]] = -torch.inf
                moments.append(self._now())
            ids = [int(logits.argmax())]
            new += ids
        start, first, end = *moments, self._now()
        return {"ids": new, "prefill_seconds": first - start, "decode_seconds": end - first, "bytes": _bytes(cache)}

    def _model(self, attention: str) -> Any:
        from transformers import AutoModelForCausalLM

        if attention not in self.models:
            model = AutoModelForCausalLM.from_pretrained(self.backbone, dtype=self.dtype, attn_implementation=attention)
            self.models[attention] = model.to(self.device).eval()
        return self.models[attention]


def _cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def _delimited(context: list[int], free: int, window: int) -> list[int]:
    """Return a context with the token that Finch takes for the end of the document, in front of its window."""
    return [*context[:-window], free, *context[-window:]]


class _watched:
    """Notes the most bytes that the cache holds while it is filled, before each layer is compressed."""

    def __init__(self, model: Any, cache: Any, held: dict[str, int]) -> None:
        self.model, self.cache, self.held, self.hooks = model, cache, held, list[Any]()

    def __enter__(self) -> None:
        for layer in self.model.model.layers:  # hooks run in the order of their registration: this one before a press's
            self.hooks.append(layer.self_attn.register_forward_hook(self._note))

    def _note(self, *_: Any) -> None:
        self.held["peak"] = max(self.held.get("peak", 0), _bytes(self.cache))

    def __exit__(self, *_: Any) -> None:
        for hook in self.hooks:
            hook.remove()


def _ratio(seen: int, keep: int) -> float:
    # kvpress rounds the kept share of `seen` down: half a unit more keeps exactly `keep`.
    return 0.0 if keep >= seen else 1 - (keep + 0.5) / seen


def _bytes(cache: Any) -> int:
    held = [one for layer in cache.layers for one in (layer.keys, layer.values) if one is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _units(model: Any, cache: Any, seen: int) -> dict[str, float]:
    """Return the units per KV head, over all layers and heads: those in memory, and those that are not masked."""
    heads = [layer.keys.shape[0] * layer.keys.shape[1] for layer in cache.layers]
    held = sum(count * layer.keys.shape[2] for count, layer in zip(heads, cache.layers, strict=True))
    masked = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]
    hidden = sum(len(one[0]) for one in masked if one is not None)
    return {"held": held / sum(heads), "attended": (held - hidden) / sum(heads)}


def _answered(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(getattr(worker, request.pop("do"))(**request))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}


def main() -> None:
    """Answer until the requests end."""
    # Whatever libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    worker = Worker()
    for line in sys.stdin:
        answers.write(json.dumps(_answered(worker, json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
