"""Reading a prompt of any length into a bounded cache: Algorithm 1 of the Locret paper, as its code behaves."""

# B batch, L new tokens

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from locret.backbone.adapters import find_decoder, unwrap
from locret.cache.cache import RetentionCache
from locret.cache.reader import answering, reading
from locret.policy.schedule import lookahead


@torch.inference_mode(False)
@torch.no_grad()
def prefill(
    model: nn.Module,
    input_ids: Tensor | Iterable[int] | Iterable[list[int]],
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
        input_ids: (B, N) or (N,) token ids; or an iterator of ids, or of lists of ids, which is never held as a whole.
        cache: Filled in place.
        attention_mask: (B, N), 0 for padding, which must be on the left. None: left padding is recognised if the model
            has a pad token of its own, as transformers does.
        new_tokens: Tokens that will be generated afterwards, so that their memory is allocated at once.
        progress: Show a progress bar on standard error.
        on_chunk: Called with the cache after every chunk's eviction, to record what is kept (not for ragged batches).

    Returns:
        (B, vocabulary) logits of the last prompt token, in the model's dtype.

    Raises:
        ValueError: For an empty prompt, padding on the right, or an iterator where the policy must know the length.

    Examples:
        >>> cache = RetentionCache(model, scorer=heads, policy=policy)
        >>> prefill(model, ids, cache).shape
        torch.Size([1, 900])
    """
    feed_held_back(model, cache)
    logits = read_prompt(
        model, input_ids, cache, attention_mask, new_tokens=new_tokens, progress=progress, on_chunk=on_chunk
    )
    assert logits is not None
    return logits


def read_prompt(
    model: nn.Module,
    input_ids: Tensor | Iterable[Any],
    cache: RetentionCache,
    attention_mask: Tensor | None = None,
    *,
    new_tokens: int = 0,
    progress: bool = False,
    hold_last: bool = False,
    on_chunk: Callable[[RetentionCache], None] | None = None,
) -> Tensor | None:
    """Do what `prefill` says; with `hold_last` leave the last token for the caller to feed, and return None."""
    cache.check_whole()
    device = next(model.parameters()).device
    if not isinstance(input_ids, Tensor):
        return _read(model, _Stream(input_ids, device), cache, new_tokens, progress, hold_last, on_chunk)
    ids = (input_ids[None] if input_ids.ndim == 1 else input_ids).to(device)
    lengths = row_lengths(model, ids, attention_mask)
    # Layers that share memory by what they retain do so for each row on its own.
    apart = cache.policy.memory == "adaptive" and ids.shape[0] > 1
    if cache.pad is None and not apart and (lengths == ids.shape[1]).all():
        return _read(model, _Stream(ids, device), cache, new_tokens, progress, hold_last, on_chunk)
    logits, rows, width = [], cache.split(ids.shape[0]), cache.seen + ids.shape[1]
    for row, row_ids, length in zip(rows, ids, lengths.tolist(), strict=True):
        logits.append(_read(model, _Stream(row_ids[None, ids.shape[1] - length :], device), row, 0, progress, False))
    cache.join(rows, width, new_tokens)
    if hold_last:
        cache.take_back()
        return None
    return torch.cat(logits)  # type: ignore[arg-type]


def feed_held_back(model: nn.Module, cache: RetentionCache) -> None:
    """Feed the last token of an earlier prompt, if an answer that was to begin with it did not begin."""
    if cache.held_back and cache.last_tokens is not None:
        with answering(model, cache):
            find_decoder(model)(input_ids=cache.last_tokens, past_key_values=cache, use_cache=True)


def row_lengths(model: nn.Module, ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return (B,) real tokens of each row.

    Raises:
        ValueError: If the mask has another shape, or a row has padding on the right or nothing else.
    """
    if attention_mask is None:
        config = getattr(unwrap(model), "generation_config", None)
        pad, eos = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
        if pad is None or pad == eos or (isinstance(eos, list) and pad in eos) or ids.shape[0] == 1:
            return torch.full((ids.shape[0],), ids.shape[1])
        attention_mask = (ids != pad).long().cummax(dim=1).values
    if attention_mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)} but input_ids {tuple(ids.shape)}; "
            "give one 0 or 1 per token"
        )
    mask = attention_mask.to("cpu", torch.long)
    if (mask.diff(dim=1) < 0).any():
        raise ValueError('attention_mask has padding on the right; pad on the left (tokenizer.padding_side = "left")')
    lengths = mask.sum(dim=1)
    if (lengths == 0).any():
        raise ValueError(f"row {int(lengths.argmin())} of input_ids is padding only; drop it from the batch")
    return lengths


class _Stream:
    """Hands out a prompt's tokens in order, looking ahead no further than asked."""

    def __init__(self, source: Tensor | Iterable[Any], device: torch.device) -> None:
        self.device = device
        self.length = source.shape[1] if isinstance(source, Tensor) else None
        self._pending = source if isinstance(source, Tensor) else torch.empty(1, 0, dtype=torch.long)
        self._more: Iterator[Any] = iter(()) if isinstance(source, Tensor) else iter(source)

    def available(self, count: int) -> int:
        """Return how many tokens are left, or `count` if there are at least that many."""
        fresh: list[int] = []
        while self._pending.shape[1] + len(fresh) < count:
            item = next(self._more, None)
            if item is None:
                break
            # Ids may come one by one or in lists, as numbers of Python, NumPy or torch.
            if isinstance(item, int):
                fresh.append(item)
            else:
                fresh.extend(torch.as_tensor(item, dtype=torch.long).flatten().tolist())
        if fresh:
            self._pending = torch.cat([self._pending, torch.tensor([fresh])], dim=1)
        return min(count, self._pending.shape[1])

    def take(self, count: int) -> Tensor:
        """Return the next `count` tokens, (B, count), on the model's device."""
        tokens, self._pending = self._pending[:, :count], self._pending[:, count:]
        return tokens.to(self.device)


def _read(
    model: nn.Module,
    stream: _Stream,
    cache: RetentionCache,
    new_tokens: int,
    progress: bool,
    hold_last: bool,
    on_chunk: Callable[[RetentionCache], None] | None = None,
) -> Tensor | None:
    policy, decoder, logits = cache.policy, find_decoder(model), None
    at_end = policy.when == "prompt_end"
    tail = max(policy.local_len, cache.scorer.lookback) if at_end else policy.local_len
    if not stream.available(1):
        raise ValueError("input_ids is empty; a prompt needs at least one token")
    length = stream.length
    if length is None and (enough := lookahead(policy)) > (available := stream.available(enough)):
        length = available
    bar = tqdm(total=stream.length, unit="token", unit_scale=True, desc="reading", disable=not progress or None)
    with reading(model, cache, length, new_tokens) as reader, bar:
        while (left := stream.available((size := reader.chunk_size) + tail + 1)) > tail:
            final = left <= size + tail
            tokens = stream.take(min(size, left - tail))
            reader.begin_chunk(final)
            decoder(input_ids=tokens, past_key_values=cache, use_cache=True)
            bar.update(tokens.shape[1])
            if on_chunk is not None:
                on_chunk(cache)
        reader.begin_local()
        # Nothing is evicted before the last token, so the local tokens may go in pieces, the last one longest; only the
        # last token needs logits.
        while (left := stream.available(tail)) > 0:
            last = left <= policy.chunk_size
            tokens = stream.take(left if last else min(policy.chunk_size, left - policy.chunk_size))
            cache.last_tokens = tokens[:, -1:].clone()
            bar.update(tokens.shape[1])
            if last:
                reader.begin_last()
            if last and not hold_last:
                logits = unwrap(model)(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            elif last and not at_end:
                if tokens.shape[1] > 1:
                    decoder(input_ids=tokens[:, :-1], past_key_values=cache, use_cache=True)
            else:
                decoder(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache.held_back = hold_last and not at_end
        reader.end()
        if hold_last and at_end:  # it had to be read for the selection; it is fed once more for its logits
            cache.take_back()
    return None if logits is None else logits[:, -1]
