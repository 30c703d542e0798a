"""Answering from a bounded cache: transformers' own `generate` does the decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from locret.backbone.adapters import unwrap
from locret.cache.cache import RetentionCache
from locret.cache.compiled_step import check_can_compile, compiled_steps
from locret.cache.reader import answering
from locret.chunked_prefill import feed_held_back, read_prompt


@torch.inference_mode(False)
@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor | Iterable[Any] | None = None,
    *,
    cache: RetentionCache,
    attention_mask: Tensor | None = None,
    progress: bool = False,
    compile: bool | str | Callable[..., Any] = False,
    **options: Any,
) -> Tensor:
    """Continue a prompt with `model.generate`, reading first what the cache has not seen yet.

    Args:
        model: The backbone of the cache.
        input_ids: (B, N) ids of the whole conversation, of which the cache may have read a beginning; or an iterator
            of ids; or None to go on from what `prefill` has read.
        cache: Holds prompt and answer afterwards (with beams or several answers per prompt: only the prompt).
        attention_mask: (B, N), 0 for padding on the left.
        progress: Show a progress bar while the prompt is read.
        compile: Run each step as one program, by `torch.compile` (or a backend of it that is given). The first answer
            waits for the compiler; for retaining heads on a backbone of full attention, one answer per prompt.
        **options: Whatever `model.generate` takes: max_new_tokens, do_sample, num_beams, streamer, stop_strings, ...

    Returns:
        (B * returned sequences, N + new) prompt and new ids; only the new ids where the prompt was not a tensor. With
        return_dict_in_generate=True the output object of transformers, whose `sequences` are these.

    Raises:
        ValueError: If the cache has read more than `input_ids`, there is nothing to go on from, an earlier read of the
            cache was interrupted, or the step cannot be compiled.

    Examples:
        >>> cache = RetentionCache(model, scorer=heads, policy=policy)
        >>> answer = generate(model, ids, cache=cache, max_new_tokens=16)
        >>> tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
        'The pass key is 71432.'
    """
    cache.check_whole()
    base = unwrap(model)
    config = options.get("generation_config") or base.generation_config
    new_tokens = options.get("max_new_tokens") or getattr(config, "max_new_tokens", None) or 0
    copies = max(
        options.get(name) or getattr(config, name, None) or 1 for name in ("num_beams", "num_return_sequences")
    )
    if compile:
        check_can_compile(cache, new_tokens, copies)
    if isinstance(input_ids, Tensor):
        input_ids = (input_ids[None] if input_ids.ndim == 1 else input_ids).to(base.device)
        _read_rest(model, input_ids, cache, attention_mask, new_tokens, progress, hold_last=copies == 1)
    elif input_ids is not None:
        feed_held_back(model, cache)
        read_prompt(model, input_ids, cache, new_tokens=new_tokens, progress=progress)
    if copies > 1:
        cache = cache.copy()
        cache.batch_repeat_interleave(copies)
    last_tokens, full = cache.last_tokens, isinstance(input_ids, Tensor)
    if not isinstance(input_ids, Tensor) or cache.seen == input_ids.shape[1]:
        if last_tokens is None:
            raise ValueError("there is no prompt to go on from; give input_ids, or call prefill first")
        cache.take_back()
    cache.reserve(0, new_tokens + 1)
    if isinstance(input_ids, Tensor):
        tokens = input_ids
    else:
        assert last_tokens is not None
        tokens = last_tokens[::copies]
    # transformers slices off what the cache has seen if the mask is as long as the ids; a mask of another length says
    # that only the new token is given.
    width = tokens.shape[1] if full else tokens.shape[1] + 1
    mask = torch.ones(tokens.shape[0], width, dtype=torch.long, device=base.device)
    steps: AbstractContextManager[Any]
    if compile:
        check_can_compile(cache, new_tokens, copies)  # once more: what has been read may differ by row or layer
        steps = compiled_steps(model, cache, new_tokens, "inductor" if compile is True else compile)
    else:
        steps = answering(model, cache)
    with steps:
        ids = base.generate(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
    if not full:
        if isinstance(ids, Tensor):
            ids = ids[:, 1:]
        else:
            ids.sequences = ids.sequences[:, 1:]
    return cast(Tensor, ids)


def _read_rest(
    model: nn.Module,
    ids: Tensor,
    cache: RetentionCache,
    attention_mask: Tensor | None,
    new_tokens: int,
    progress: bool,
    hold_last: bool,
) -> None:
    """Read all of `ids` that the cache has not seen, but for the last token if it is to be held back."""
    missing = ids.shape[1] - cache.seen
    if missing < 0:
        raise ValueError(
            f"the cache has read {cache.seen} tokens but input_ids has {ids.shape[1]}; give the whole conversation, "
            "or a new cache"
        )
    if missing > (1 if hold_last and cache.seen else 0):
        mask = None if attention_mask is None else attention_mask[:, cache.seen :]
        read_prompt(
            model, ids[:, cache.seen :], cache, mask, new_tokens=new_tokens, progress=progress, hold_last=hold_last
        )
