"""Reading a prompt of any length into a bounded cache: Algorithm 1 of the Locret paper, as its code behaves."""

# B batch, L new tokens

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from locret.backbone.adapters import find_decoder, input_device, unwrap
from locret.backbone.computation import computation, different_computation
from locret.backbone.passes import keeping_step, run_decoder
from locret.cache.cache import RetentionCache
from locret.cache.reader import Reader, answering, going_on, reading
from locret.policy.schedule import lookahead
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
    progress: bool = False,
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
        progress: Show a progress bar on standard error.
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
    logits = read_prompt(model, prompt, cache, Way(new_tokens=new_tokens, progress=progress, on_chunk=on_chunk))
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
    model: nn.Module, cache: RetentionCache, input_ids: Any, attention_mask: Any = None, *, seen: int = 0
) -> Prompt:
    """Return a prompt that the cache may read, or has read `seen` tokens of."""
    check_usable(model, cache)
    prompt = checked_prompt(model, input_ids, attention_mask, seen=seen)
    rows = prompt.ids.shape[0] if isinstance(prompt.ids, Tensor) else 1
    if cache.seen and rows != cache.rows:
        raise ValueError(f"input_ids has {rows} rows but the cache has read {cache.rows}; give as many, or a new cache")
    cache.check_rows(cache.protected, rows)
    return prompt


def check_usable(model: nn.Module, cache: RetentionCache) -> None:
    """Refuse a cache that cannot be used, or not with this model."""
    if not isinstance(cache, RetentionCache):
        raise ValueError(f"cache is a {type(cache).__name__}; give a locret.RetentionCache")
    cache.check_whole()
    if find_decoder(model) is not find_decoder(cache.model):
        raise ValueError(
            "the cache was made for another model than the one it is used with; make one with "
            "RetentionCache(model, ...), or load it with load_cache(path, model, ...)"
        )
    now = computation(model)
    if cache.seen and (found := different_computation(cache.computation or now, now)):
        raise ValueError(
            f"the cache was read by a model that computed something else ({found}); set it back, adapters too, or read "
            "the text again"
        )
    cache.computation = now
    if model.training and getattr(unwrap(model), "is_gradient_checkpointing", False):
        raise ValueError(
            "the model is being trained with gradient checkpointing, which uses no cache; call model.eval()"
        )


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a prompt is read; see `prefill` for what is not said here."""

    new_tokens: int = 0
    progress: bool = False
    hold_last: bool = False
    """Leave the last token for the caller to feed."""
    turn: bool = False
    """It is a turn about what has been read: nothing is evicted for it where the policy and its length allow."""
    on_chunk: Callable[[RetentionCache], None] | None = None


def read_prompt(model: nn.Module, prompt: Prompt, cache: RetentionCache, way: Way) -> Tensor | None:
    """Do what `prefill` says; without logits where the last token is held back, or nothing was evicted for a turn."""
    device, known = input_device(model), vocabulary(model)
    if not isinstance(prompt.ids, Tensor):
        stream, of_last = Stream(prompt.ids, device, known), None
        if not _add_turn(model, stream, cache, way):
            of_last = _read(model, stream, cache, way)
        _check_inside(cache, [cache.seen])
        return of_last
    ids, mask = prompt.ids, prompt.mask
    if cache.protected:
        before = [cache.seen] * len(ids) if cache.pad is None else (cache.seen - cache.pad).tolist()
        own = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
        _check_inside(cache, [read + tokens for read, tokens in zip(before, own, strict=True)])
    # Layers that share memory by what they retain do so for each row on its own.
    apart = cache.policy.memory == "adaptive" and ids.shape[0] > 1
    if mask is None and _add_turn(model, Stream(ids, device, known), cache, way):
        return None
    if cache.pad is None and not apart and mask is None:
        return _read(model, Stream(ids, device, known), cache, way)
    width = cache.seen + ids.shape[1]
    texts = [row[None] if mask is None else row[None, len(row) - int(mask[i].sum()) :] for i, row in enumerate(ids)]
    # Before the first text nothing is a turn.
    if cache.pad is None and not apart and not (way.turn and cache.seen):
        rows, logits = _read_together(model, texts, cache, way.progress)
    else:
        rows, logits = cache.split(len(texts)), []
        for text, row in zip(texts, rows, strict=True):
            stream = Stream(text, device, known)
            if not _add_turn(model, stream, row, Way(turn=way.turn)):
                last = _read(model, stream, row, Way())
                assert last is not None
                logits.append(last)
    cache.join(rows, width, way.new_tokens)
    if way.hold_last:
        cache.take_back()
        return None
    return torch.cat(logits) if logits and not way.turn else None


def _check_inside(cache: RetentionCache, tokens: Sequence[int]) -> None:
    """Refuse protected spans of what a text of so many tokens, in each row, does not have."""
    for row, total in enumerate(tokens):
        for span in cache.protected[row if len(cache.protected) > 1 else 0] if cache.protected else ():
            if (span.start if span.end is None else span.end - 1) >= total:
                raise ValueError(
                    f"{span.label} cannot be protected, for the text has {total:,} tokens; give positions within it"
                )


def feed_held_back(model: nn.Module, cache: RetentionCache) -> None:
    """Feed the last token of an earlier prompt, if an answer that was to begin with it did not begin."""
    if cache.held_back and cache.last_tokens is not None:
        with answering(model, cache):
            run_decoder(model, cache.last_tokens, cache)


def _add_turn(model: nn.Module, stream: Stream, cache: RetentionCache, way: Way) -> bool:
    """Feed a turn after what is held, evicting nothing for it; return whether it is one, and there was room for it."""
    room = cache.turn_room if way.turn else 0
    length = stream.available(room + 1) if way.turn else 0
    if not 0 < length <= room:
        return False
    tokens, coming = stream.take(length), length + way.new_tokens
    cache.check_reach(max(layer.held for layer in cache.governed) + coming, coming)
    cache.reserve(0, coming)
    fed = tokens[:, :-1] if way.hold_last else tokens
    if fed.shape[1]:
        with answering(model, cache):
            run_decoder(model, fed, cache)
    cache.last_tokens = None if way.hold_last else tokens[:, -1:].clone()
    return True


def _read(model: nn.Module, stream: Stream, cache: RetentionCache, way: Way) -> Tensor | None:
    policy = cache.policy
    if not stream.available(1):
        raise ValueError("input_ids is empty; a prompt needs at least one token")
    length = stream.length
    if length is None and (enough := lookahead(policy)) > (available := stream.available(enough)):
        length = available
    with reading(model, cache, length, way.new_tokens) as reader, _bar(stream.length, way.progress) as bar:
        return _read_on(model, reader, stream, bar, way)


def _bar(tokens: int | None, progress: bool) -> tqdm[Any]:
    return tqdm(total=tokens, unit="token", unit_scale=True, desc="reading", disable=not progress or None)


def _read_on(model: nn.Module, reader: Reader, stream: Stream, bar: tqdm[Any], way: Way) -> Tensor | None:
    """Read the chunks that are left, and the local tokens."""
    cache, logits = reader.cache, None
    at_end = cache.policy.when == "prompt_end"
    tail = reader.limits.tail
    while (left := stream.available((size := reader.chunk_size) + tail + 1)) > tail:
        reader.begin_chunk(left <= size + tail)
        tokens = stream.take(min(size, left - tail))
        run_decoder(model, tokens, cache)
        bar.update(tokens.numel())
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
        bar.update(tokens.numel())
        if last:
            reader.begin_last()
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


def _read_together(
    model: nn.Module, texts: Sequence[Tensor], cache: RetentionCache, progress: bool
) -> tuple[list[RetentionCache], list[Tensor]]:
    """Read rows of different length: in one batch as long as their chunks are alike, then each length by itself.

    A row is cut into chunks and evicted as if it were alone, so nothing is padded, and the results are the same.

    Returns:
        A cache of each row, and its (1, vocabulary) logits.
    """
    device, known = input_device(model), vocabulary(model)
    order = sorted(range(len(texts)), key=lambda row: texts[row].shape[1])
    of_length = {n: list(rows) for n, rows in groupby(order, key=lambda row: texts[row].shape[1])}
    streams = {n: Stream(torch.cat([texts[row] for row in rows]), device, known) for n, rows in of_length.items()}
    caches, logits = [cache] * len(texts), [torch.empty(0)] * len(texts)

    def finish(length: int, reader: Reader) -> None:
        last = _read_on(model, reader, streams[length], bar, Way())
        assert last is not None
        parts = [reader.cache] if len(last) == 1 else reader.cache.split(len(last))
        for row, one, its in zip(of_length[length], parts, last.split(1), strict=True):
            caches[row], logits[row] = one, its

    waiting, batch = list(of_length), cache.take_rows(torch.tensor(order))
    with _bar(sum(text.shape[1] for text in texts), progress) as bar, reading(model, batch, waiting[-1], 0) as reader:
        while len(waiting) > 1:
            staying = [n for n in waiting if n == waiting[-1] or reader.goes_on_like(n)]
            if len(staying) == len(waiting):
                size = reader.chunk_size
                reader.begin_chunk(final=False)
                tokens = torch.cat([streams[n].take(size) for n in waiting])
                run_decoder(model, tokens, batch)
                bar.update(tokens.numel())
                continue
            in_batch = torch.tensor([n for n in waiting for _ in of_length[n]])
            for length in (n for n in waiting if n not in staying):
                part = batch.take_rows((in_batch == length).nonzero()[:, 0])
                with going_on(model, part, reader, length) as own:
                    finish(length, own)
            batch.keep_rows(torch.isin(in_batch, torch.tensor(staying)).nonzero()[:, 0])
            waiting = staying
        finish(waiting[0], reader)
    return caches, logits
