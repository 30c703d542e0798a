"""`model.generate(..., past_key_values=cache)` and `pipeline(...)` for a RetentionCache: sent to `locret.generate`.

`generate` of transformers gives a prompt to the model as a whole, where its memory would grow with it. So as long as a
model has a RetentionCache, it has a `generate` of its own that hands calls with such a cache to `locret.generate`, and
all others on as they are. It goes with the last of the model's caches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from threading import RLock
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize, ref

from torch import nn

from locret.backbone.adapters import unwrap

if TYPE_CHECKING:
    from transformers import Cache

_CACHES: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
"""Identities of the caches that each model has."""
_LOCK = RLock()
_PROMPT = ("input_ids", "attention_mask", "token_type_ids")


def route(model: nn.Module, cache: Cache) -> None:
    """Let the model's `generate` take this cache, as long as the cache lives."""
    base = unwrap(model)
    if not hasattr(base, "generate"):
        return
    with _LOCK:
        _CACHES.setdefault(base, set()).add(id(cache))
        own = vars(base).get("generate")
        if not isinstance(own, Routed):
            base.generate = Routed(base, own)
        finalize(cache, _forget, ref(base), id(cache)).atexit = False


def _forget(model: ref[Any], cache: int) -> None:
    base = model()
    if base is None:
        return
    with _LOCK:
        _CACHES[base].discard(cache)
        routed = vars(base).get("generate")
        # Somebody may have put another one over ours, which then goes on handing calls on.
        if _CACHES[base] or not isinstance(routed, Routed):
            return
        if routed.before is None:
            del base.generate
        else:
            base.generate = routed.before


class Routed:
    """A model's `generate` that knows caches of ours. It is copied and pickled with its model.

    Args:
        model: Whose method it is.
        before: What stood in its place; None: the method of the model's class.
    """

    def __init__(self, model: Any, before: Callable[..., Any] | None) -> None:
        self.model, self.before = model, before

    @property
    def _method(self) -> Callable[..., Any]:
        return MethodType(type(self.model).generate, self.model)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._method)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Answer from a RetentionCache, unless an answer from it is in progress; else do what was done before."""
        from locret.cache.cache import RetentionCache

        cache = named.get("past_key_values")
        if (
            not isinstance(cache, RetentionCache)
            or cache.reader is not None
            or named.get("custom_generate") is not None
        ):
            return (self.before or self._method)(*args, **named)
        given = dict(self.__signature__.bind(*args, **named).arguments)
        given |= given.pop("kwargs", {})
        del given["past_key_values"]
        prompt = {name: given.pop(name) for name in _PROMPT if name in given}
        inputs = given.pop("inputs", None)
        if inputs is not None:
            prompt["input_ids"] = inputs
        options = {name: value for name, value in given.items() if value is not None}
        # Answering is above this room, which only hands a call on.
        generate = import_module("locret.generation").generate
        return generate(self.model, prompt or None, cache=cache, **options)
