"""Answering from a bounded cache: transformers' own `generate` does the decoding, and knows our cache from here on."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.generation import GenerationMode

from locret.backbone.adapters import input_device, unwrap
from locret.backbone.passes import gathering_root, keeping_step
from locret.base.nearest import check_retired, nearest
from locret.cache.cache import RetentionCache
from locret.cache.cache_file import load_cache as load_cache
from locret.cache.captured_step import capturing, obstacle
from locret.cache.checks import check_usable
from locret.cache.digest import digest_of
from locret.cache.limits import CacheMemory
from locret.cache.reader import answering
from locret.cache.transformers_cache import ASSISTED
from locret.chunked_prefill import Way, check_cache, checked, feed_held_back, read_prompt
from locret.token_ids import Prompt

_MOST = 10**15
"""What a number of tokens, beams or answers may be at most: torch counts in 64 bits, and memory ends sooner."""
_MODES = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE}


@torch.inference_mode(False)
@torch.no_grad()
@keeping_step
def generate(
    model: nn.Module,
    input_ids: Tensor | Mapping[str, Any] | Iterable[Any] | None = None,
    *,
    cache: RetentionCache,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Continue a prompt with `model.generate`, reading first what the cache has not seen yet.

    What follows a text that the cache has read, such as a question about it, is taken as the policy's `turns` says: by
    default all units stay and its tokens are added, so that the answer is that of any engine which holds the same units
    (see `RetentionCache.to_dynamic_cache`). On CUDA the step of one token is captured and replayed where it can be (see
    `locret.cache.captured_step`).

    Args:
        model: The backbone of the cache.
        input_ids: (B, N) ids of the whole conversation, of which the cache may have read a beginning, in any form that
            `prefill` takes; or an iterator of further ids; or None to go on from what `prefill` has read.
        cache: Holds prompt and answer afterwards (with beams or several answers per prompt: only the prompt).
        attention_mask: (B, N), 0 for padding on the left.
        **options: Whatever `model.generate` takes: max_new_tokens, do_sample, num_beams, streamer, stop_strings, ...

    Returns:
        (B * returned sequences, N + new) prompt and new ids; only the new ids where there was no prompt, or an
        iterator. With return_dict_in_generate=True the output object of transformers, whose `sequences` are these.

    Raises:
        ValueError: If the cache has read more than `input_ids` or something else, there is nothing to go on from, an
            earlier read of the cache was interrupted, an option has no effect, or the answer would reach positions that
            dynamic NTK rotates differently.

    Examples:
        >>> cache = RetentionCache(model, scorer=heads, policy=policy)
        >>> answer = generate(model, ids, cache=cache, max_new_tokens=16)
        >>> tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
        'The pass key is 71432.'
    """
    check_cache(cache)
    base, options = unwrap(model), dict(options)
    config = checked_options(base, options)
    new_tokens = _most_new_tokens(config, input_ids)
    copies = max(config.num_beams or 1, config.num_return_sequences or 1)
    if gathering_root(model) is not None:
        # Passes are kept equal here; transformers' own way feeds a finished answer more tokens.
        options["synced_gpus"] = False
    full = None
    if input_ids is None:
        check_usable(cache, model)
        if attention_mask is not None:
            raise ValueError("attention_mask has no effect without input_ids; leave it out")
    else:
        prompt = checked(model, cache, input_ids, attention_mask, again=True)
        if isinstance(prompt.ids, Tensor):
            full = prompt.ids.to(input_device(model), torch.long)
            _read_rest(model, prompt, cache, Way(new_tokens=new_tokens, hold_last=copies == 1, turn=True))
        else:
            feed_held_back(model, cache)
            read_prompt(model, prompt, cache, Way(new_tokens=new_tokens, turn=True))
    given = cache
    if copies > 1:
        cache = cache.copy()
        cache.batch_repeat_interleave(copies)
    last_tokens = cache.last_tokens
    if full is None or cache.seen == full.shape[1]:
        if last_tokens is None:
            raise ValueError("there is no prompt to go on from; give input_ids, or call prefill first")
        cache.take_back()
    fed = 1 + new_tokens  # the prompt's last token comes first
    cache.make_room(fed)
    tokens = full if full is not None else cast(Tensor, last_tokens)[::copies]
    # transformers slices off what the cache has seen if the mask is as long as the ids; a mask of another length says
    # that only the new token is given.
    width = tokens.shape[1] + (full is None)
    mask = torch.ones(tokens.shape[0], width, dtype=torch.long, device=tokens.device)
    as_written = obstacle(model, cache, config, new_tokens, copies)
    options["logits_processor"] = LogitsProcessorList([FiniteLogits(base), *(options.get("logits_processor") or ())])
    with answering(model, cache) if as_written else capturing(model, cache, new_tokens):
        ids = base.generate(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
    given.copies_memory = cache.counted() if copies > 1 else CacheMemory()
    if full is None:
        if isinstance(ids, Tensor):
            ids = ids[:, 1:]
        else:
            ids.sequences = ids.sequences[:, 1:]
    return cast(Tensor, ids)


class FiniteLogits(LogitsProcessor):
    """Refuses to choose a token by logits that say nothing."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores, (B, V), as they are."""
        check_finite_logits(self.model, scores)
        return scores


def check_finite_logits(model: Any, logits: Tensor) -> None:
    """Refuse logits (..., V) that are not finite: any token would be taken for an answer."""
    # NaN is the largest of all, and a vocabulary may be masked in part.
    largest = logits.amax(-1)
    if math.isfinite(largest.sum(dtype=torch.float32).item()) or torch.isfinite(largest).all():
        return
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    way_out = "check its weights" if dtype == "float32" else "load it with dtype=float32 (--dtype float32)"
    raise ValueError(f"the backbone's logits are not finite in {dtype}, so there is no answer; {way_out}")


def _most_new_tokens(config: GenerationConfig, input_ids: Any) -> int:
    """Return how many tokens an answer may have; 0 where an iterator does not tell how long the whole may be."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if config.max_length is None:
        return 20  # transformers' default
    if input_ids is None:
        return max(int(config.max_length) - 1, 0)
    ids = input_ids.get("input_ids") if isinstance(input_ids, Mapping) else input_ids
    return max(config.max_length - ids.shape[-1], 0) if isinstance(ids, Tensor) else 0


def _read_rest(model: nn.Module, prompt: Prompt, cache: RetentionCache, way: Way) -> None:
    """Read all of a prompt's ids that the cache has not seen, but for the last token if it is to be held back."""
    ids, mask, seen = prompt.ids, prompt.mask, cache.seen
    assert isinstance(ids, Tensor)
    missing = ids.shape[1] - seen
    if missing < 0:
        raise ValueError(
            f"the cache has read {seen} tokens but input_ids has {ids.shape[1]}; give the whole conversation, or a new "
            "cache"
        )
    if seen and cache.digest is not None:
        kept = mask
        if mask is None and cache.pad is not None:
            kept = (torch.arange(seen) >= cache.pad.cpu()[:, None]).long()
        given = digest_of(ids[:, :seen].cpu(), None if kept is None else kept[:, :seen])
        if not torch.equal(given, cache.digest.cpu()):
            raise ValueError(
                f"the first {seen} tokens of input_ids are not those that the cache has read; give the same "
                "conversation, or a new cache"
            )
    if missing > (1 if way.hold_last and seen else 0):
        rest = None if mask is None or mask[:, seen:].all() else mask[:, seen:]
        read_prompt(model, Prompt(ids[:, seen:], rest), cache, way)


_INSTEAD = {
    "inputs": "give them as input_ids",
    "inputs_embeds": "a prompt is read by its token ids; give input_ids",
    "past_key_values": "the cache is given as cache",
    "position_ids": "positions follow from the cache; leave it out",
    "output_attentions": "attention weights are never formed; leave it out",
    "guidance_scale": "it calls the backbone without this cache; use sampling or beams",
    "negative_prompt_ids": "it calls the backbone without this cache; leave it out",
    "negative_prompt_attention_mask": "it calls the backbone without this cache; leave it out",
    "cache_implementation": "the cache is a RetentionCache; leave it out",
    "custom_generate": "the answer is written by the loop of transformers; leave it out",
    "prefill_chunk_size": "the policy's chunk_size says how a prompt is read; leave it out",
    "token_healing": "it would change the prompt after it was read; leave it out",
    "assistant_model": ASSISTED,
    "assistant_early_exit": ASSISTED,
    "prompt_lookup_num_tokens": ASSISTED,
}
_NUMBERS = ("max_new_tokens", "max_length", "num_beams", "num_return_sequences")
_TAKEN = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "streamer", "tokenizer")


def checked_options(base: Any, options: dict[str, Any]) -> GenerationConfig:
    """Return the settings of `base.generate` that options come to, before anything is read."""
    given = options.get("generation_config") or base.generation_config
    if not isinstance(given, GenerationConfig):
        raise ValueError(f"generation_config is a {type(given).__name__}; give a transformers.GenerationConfig")
    if options.pop("use_cache", True) is False:
        raise ValueError("use_cache=False has no effect here; leave it out, or call model.generate without a cache")
    config = copy.deepcopy(given)
    for name in _NUMBERS:
        value = options.get(name)
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if value is not None and not (whole and 1 <= value <= _MOST):
            raise ValueError(f"{name}={value!r} is not a whole number from 1 to 10^15; give one")
    unknown = config.update(**{name: value for name, value in options.items() if name != "generation_config"})
    for name, instead in _INSTEAD.items():
        value = options.get(name, getattr(config, name, None))
        if value is not None and value is not False and (name, value) != ("guidance_scale", 1):
            raise ValueError(f"{name} has no effect here: {instead}")
        options.pop(name, None)
    for name, value in unknown.items():
        if value is None:
            options.pop(name, None)
        elif name not in (*_TAKEN, *_INSTEAD):
            check_retired("option", name)
            near = nearest(name, [*_TAKEN, *config.to_dict()])
            hint = f"; did you mean {' or '.join(near)}?" if near else "; leave it out"
            raise ValueError(f"{name} is not an option of generate{hint}")
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise ValueError(f"decoding by {mode.value} is not supported; use greedy decoding, sampling or beams")
    return config


_PROMPT = ("input_ids", "attention_mask", "token_type_ids")


def _route() -> None:
    """Hand calls of `model.generate(..., past_key_values=cache)` and `pipeline(...)` with ours to `locret.generate`.

    `generate` of transformers gives a prompt to the model as a whole, where its memory would grow with it. So the one
    method that all models share looks at the cache first. It is wrapped once, when `locret` hands our cache out:
    when one is made would be late, for Python looks the method up before a cache that is written inside the call.
    """
    theirs = GenerationMixin.generate

    @functools.wraps(theirs)
    def routed(self: Any, *args: Any, **named: Any) -> Any:
        cache: Any = named.get("past_key_values")
        # An answer that is in progress comes through here as well.
        if not isinstance(cache, RetentionCache) or cache.reader is not None:
            return theirs(self, *args, **named)
        given = dict(inspect.signature(theirs).bind(self, *args, **named).arguments)
        given |= given.pop("kwargs", {})
        del given["self"], given["past_key_values"]
        prompt = {name: given.pop(name) for name in _PROMPT if name in given}
        if (inputs := given.pop("inputs", None)) is not None:
            prompt["input_ids"] = inputs
        options = {name: value for name, value in given.items() if value is not None}
        return generate(self, prompt or None, cache=cache, **options)

    GenerationMixin.generate = routed


_route()
