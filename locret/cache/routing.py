"""`model.generate(..., past_key_values=cache)` and `pipeline(...)` for a RetentionCache: sent to `locret.generate`.

`generate` of transformers gives a prompt to the model as a whole, where its memory would grow with it. So the one
method that all models share looks at the cache first. It is wrapped once, when our cache is imported, and not when one
is made: Python looks the method up before it makes a cache that is written inside the call.
"""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from typing import Any

from transformers import Cache, GenerationMixin

_PROMPT = ("input_ids", "attention_mask", "token_type_ids")


def route(ours: type[Cache]) -> None:
    """Hand calls of `model.generate` with a cache of this class to `locret.generate`, all others on as they are."""
    theirs = GenerationMixin.generate

    @functools.wraps(theirs)
    def generate(self: Any, *args: Any, **named: Any) -> Any:
        cache: Any = named.get("past_key_values")
        # An answer that is in progress comes through here as well.
        if not isinstance(cache, ours) or cache.reader is not None:
            return theirs(self, *args, **named)
        given = dict(inspect.signature(theirs).bind(self, *args, **named).arguments)
        given |= given.pop("kwargs", {})
        del given["self"], given["past_key_values"]
        prompt = {name: given.pop(name) for name in _PROMPT if name in given}
        if (inputs := given.pop("inputs", None)) is not None:
            prompt["input_ids"] = inputs
        options = {name: value for name, value in given.items() if value is not None}
        # Answering is above this room, which only hands a call on.
        return import_module("locret.generation").generate(self, prompt or None, cache=cache, **options)

    GenerationMixin.generate = generate
