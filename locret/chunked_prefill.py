"""Reading a prompt of any length into a bounded cache: Algorithm 1 of the Locret paper, as its code behaves."""

# B batch, L new tokens

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locret.backbone.adapters import input_device, unwrap
from locret.backbone.passes import keeping_step, run_decoder
from locret.cache.cache import RetentionCache
from locret.cache.checks import check_usable
from locret.cache.protected import check_inside
from locret.cache.reader import Reader, answering, reading
from locret.token_ids import Prompt, Stream, checked_prompt, vocabulary


@torch.inference_mode(False)
@torch.no_grad()
@keeping_step
def prefill(
    model: nn.Module,
    input_ids: Tensor | Mapping[str, Any] | Iterable[Any],
    cache: RetentionCache,
    attention_mask: Tensor | None = None,
    *,
    new_tokens: int = 0,
    on_chunk: Callable[[RetentionCache], None] | None = None,
) -> Tensor:
    """Read a prompt chunk by chunk, evicting after each chunk, then the local tokens (Locret, Algorithm 1).

    A cache that holds something already reads on: what it holds competes with the new text for the budget.

    Args:
        model: The backbone of the cache.
        input_ids: (B, N) or (N,) token ids, as a tensor, an array or lists, or as a tokenizer returns them; or an
            iterator of ids, or of pieces (lists of ids), which is never held as a whole.
        cache: Filled in place.
        attention_mask: (B, N), 0 for padding, which must be on the left. None: left padding is recognised if the model
            has a pad token of its own, as transformers does.
        new_tokens: Tokens that will be generated afterwards, so that their memory is allocated at once.
        on_chunk: Called with the cache after every chunk's eviction, to record what is kept (not for ragged batches).

    Returns:
        (B, vocabulary) logits of the last prompt token, in the model's dtype.

    Raises:
        ValueError: For an empty prompt, padding on the right, ids that the backbone does not know, a model that the
            cache was not made for, or an iterator where the policy must know the length.

    Examples:
        >>> cache = RetentionCache(model, scorer=heads, policy=policy)
        >>> prefill(model, ids, cache).shape
        torch.Size([1, 900])
    """
    prompt = checked(model, cache, input_ids, attention_mask)
    feed_held_back(model, cache)
    logits = read_prompt(model, prompt, cache, Way(new_tokens=new_tokens, on_chunk=on_chunk))
    assert logits is not None
    return logits


@torch.inference_mode(False)
@torch.no_grad()
@keeping_step
def read_turn(model: nn.Module, input_ids: Tensor, cache: RetentionCache, *, new_tokens: int = 0) -> None:
    """Read what follows a text, such as a question, as the policy's `turns` says; arguments as for `prefill`."""
    prompt = checked(model, cache, input_ids)
    feed_held_back(model, cache)
    read_prompt(model, prompt, cache, Way(new_tokens=new_tokens, turn=True))


def checked(
    model: nn.Module, cache: RetentionCache, input_ids: Any, attention_mask: Any = None, *, again: bool = False
) -> Prompt:
    """Return a prompt that the cache may read, or of which it has read the beginning (`again`)."""
    check_cache(cache)
    prompt = checked_prompt(model, input_ids, attention_mask, seen=cache.seen if again else 0)
    check_usable(cache, model, len(prompt.ids) if isinstance(prompt.ids, Tensor) else 1)
    return prompt


def check_cache(cache: object) -> None:
    """Refuse what is no cache of ours."""
    if not isinstance(cache, RetentionCache):
        raise ValueError(f"cache is a {type(cache).__name__}; give a locret.RetentionCache")


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a prompt is read; see `prefill` for what is not said here."""

    new_tokens: int = 0
    hold_last: bool = False
    """Leave the last token for the caller to feed."""
    turn: bool = False
    """It is a turn about what has been read: nothing is evicted for it where the policy and its length allow."""
    on_chunk: Callable[[RetentionCache], None] | None = None


def read_prompt(model: nn.Module, prompt: Prompt, cache: RetentionCache, way: Way) -> Tensor | None:
    """Do what `prefill` says; without logits where the last token is held back, or nothing was evicted for a turn."""
    check_inside(cache, prompt.lengths())
    ids, mask, device, known = prompt.ids, prompt.mask, input_device(model), vocabulary(model)
    stream = Stream(ids, device, known, cache.limits.lookahead)
    planned = stream.planned_length()
    # Layers that share memory by what they retain do so for each row on its own.
    apart = mask is not None or cache.pad is not None or (stream.rows > 1 and cache.policy.memory == "adaptive")
    if mask is None and way.turn and _add_turn(model, stream, cache, way):
        logits = None
    elif apart:
        logits = _read_rows(model, prompt, cache, way)
    else:
        if not stream.available(1):
            raise ValueError("input_ids is empty; a prompt needs at least one token")
        with reading(model, cache, planned, way.new_tokens) as reader:
            logits = _read_all(model, reader, stream, way)
    if stream.length is None:
        check_inside(cache, [0])
    return logits


def feed_held_back(model: nn.Module, cache: RetentionCache) -> None:
    """Feed the last token of an earlier prompt, if an answer that was to begin with it did not begin."""
    if cache.held_back and cache.last_tokens is not None:
        with answering(model, cache):
            run_decoder(model, cache.last_tokens, cache)


def _add_turn(model: nn.Module, stream: Stream, cache: RetentionCache, way: Way) -> bool:
    """Feed a turn after what is held, evicting nothing for it; return whether there was room for it."""
    room = cache.turn_room
    length = stream.available(room + 1)
    if not 0 < length <= room:
        return False
    cache.make_room(length + way.new_tokens)
    tokens = stream.take(length)
    fed = tokens[:, :-1] if way.hold_last else tokens
    if fed.shape[1]:
        with answering(model, cache):
            run_decoder(model, fed, cache)
    cache.last_tokens = None if way.hold_last else tokens[:, -1:].clone()
    return True


def _read_all(model: nn.Module, reader: Reader, stream: Stream, way: Way) -> Tensor | None:
    """Read the chunks, and the local tokens."""
    cache, logits = reader.cache, None
    at_end = cache.policy.when == "prompt_end"
    tail = reader.limits.tail
    while (left := stream.available((size := reader.limits.chunk_size) + tail + 1)) > tail:
        reader.begin_chunk(left <= size + tail)
        tokens = stream.take(min(size, left - tail))
        run_decoder(model, tokens, cache)
        if way.on_chunk is not None:
            way.on_chunk(cache)
    reader.begin_local()
    # Nothing is evicted before the last token, so the local tokens may go in pieces, the last one longest; only the
    # last token needs logits.
    size = cache.policy.chunk_size
    while (left := stream.available(tail)) > 0:
        last = left <= size
        tokens = stream.take(left if last else min(size, left - size))
        cache.last_tokens = tokens[:, -1:].clone()
        if last:
            reader.last = True
        if last and not way.hold_last:
            logits = unwrap(model)(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        elif last and not at_end:
            if tokens.shape[1] > 1:
                run_decoder(model, tokens[:, :-1], cache)
        else:
            run_decoder(model, tokens, cache)
    cache.held_back = way.hold_last and not at_end
    reader.end()
    if way.hold_last and at_end:  # it had to be read for the selection; it is fed once more for its logits
        cache.take_back()
    return None if logits is None else logits[:, -1]


def _read_rows(model: nn.Module, prompt: Prompt, cache: RetentionCache, way: Way) -> Tensor | None:
    """Read rows that cannot be read as one batch, each as if it were alone, and make one batch of them."""
    ids, own = prompt.ids, Way(turn=way.turn)
    assert isinstance(ids, Tensor)
    width, rows, logits = cache.seen + ids.shape[1], cache.split(len(ids)), list[Tensor]()
    for text, length, row in zip(ids, prompt.lengths(), rows, strict=True):
        last = read_prompt(model, Prompt(text[None, len(text) - length :], None), row, own)
        logits += [] if last is None else [last]
    cache.join(rows, width, way.new_tokens)
    if way.hold_last:
        cache.take_back()
    return None if way.hold_last or way.turn else torch.cat(logits)
