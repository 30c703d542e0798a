"""Token ids and masks as users give them, checked once where they enter."""

# B batch, N tokens

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locret.backbone.adapters import unwrap
from locret.base.fields import shown

_WAY_OUT = "give a tensor or lists of token ids, what a tokenizer returns, or an iterator of ids"
_WHOLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_TOKENIZED = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Prompt:
    """A prompt that was checked: a tensor, or ids that come piece by piece and are checked as they come."""

    ids: Tensor | Iterator[Any]
    """(B, N) int64 of at least one token, wherever the caller has it; or an iterator of ids or of pieces."""
    mask: Tensor | None
    """(B, N) int64 on the CPU, 0 for padding, on the left of each text; None where all tokens count."""

    def lengths(self) -> list[int]:
        """Return how many tokens each row has; nothing for an iterator."""
        if not isinstance(self.ids, Tensor):
            return []
        return [self.ids.shape[1]] * len(self.ids) if self.mask is None else self.mask.sum(1).tolist()


def checked_prompt(model: nn.Module, input_ids: Any, attention_mask: Any = None, *, seen: int = 0) -> Prompt:
    """Return a prompt that may be read.

    Args:
        model: The backbone, for its vocabulary and its pad token.
        input_ids: (B, N) or (N,) ids as a tensor, an array or lists; the mapping that a tokenizer returns; or an
            iterator of ids or of pieces.
        attention_mask: (B, N) or (N,), 1 or True for a token, 0 or False for padding. None: left padding is recognised
            if the model has a pad token of its own, as transformers does.
        seen: Tokens of it that were read before, each text of them with padding of its own.
    """
    if isinstance(input_ids, Mapping):
        input_ids, attention_mask = _tokenized(input_ids, attention_mask)
    if isinstance(input_ids, str | bytes):
        raise ValueError(
            f"input_ids is a {type(input_ids).__name__}; give token ids, such as tokenizer(text).input_ids"
        )
    # An iterator hands out its items once; what has a shape, and lists, can be looked at first.
    if isinstance(input_ids, Iterable) and not (hasattr(input_ids, "shape") or isinstance(input_ids, list | tuple)):
        if attention_mask is not None:
            raise ValueError("attention_mask belongs to a tensor of ids; leave it out where ids come from an iterator")
        return Prompt(iter(input_ids), None)
    ids = _tensor(input_ids, "input_ids", _WAY_OUT)
    check_ids(ids, vocabulary(model))
    if attention_mask is None:
        return Prompt(ids, _left_padding(model, ids, seen))
    return Prompt(ids, _mask(attention_mask, ids, seen))


def check_ids(ids: Tensor, known: int | None) -> None:
    """Check ids of any shape."""
    if ids.dtype not in _WHOLE:
        raise ValueError(f"input_ids holds {str(ids.dtype).removeprefix('torch.')} numbers; {_WAY_OUT}")
    if not ids.numel():
        return
    least, most = torch.stack(torch.aminmax(ids)).tolist()
    if least < 0:
        raise ValueError(f"input_ids holds {least}; token ids are 0 or more (-100 marks labels, not ids)")
    if known is not None and most >= known:
        raise ValueError(
            f"input_ids holds {most}, but the backbone knows {known} tokens; use the tokenizer of this backbone"
        )


def vocabulary(model: nn.Module) -> int | None:
    """Return how many tokens a backbone knows, or None if it does not say."""
    known = getattr(unwrap(model).get_input_embeddings(), "num_embeddings", None)
    return known if isinstance(known, int) else None


def _tokenized(given: Mapping[str, Any], attention_mask: Any) -> tuple[Any, Any]:
    """Return ids and mask of what a tokenizer has returned."""
    if "input_ids" not in given:
        raise ValueError(f"input_ids is a mapping without a key 'input_ids' (it has {', '.join(map(str, given))})")
    if others := [str(name) for name in given if name not in _TOKENIZED]:
        raise ValueError(f"{', '.join(others)} would be ignored; give input_ids and attention_mask only")
    if attention_mask is not None and "attention_mask" in given:
        raise ValueError("attention_mask is given twice, in input_ids and on its own; leave one of them out")
    return given["input_ids"], given.get("attention_mask", attention_mask)


def _tensor(given: Any, name: str, way_out: str) -> Tensor:
    """Return (B, N) of at least one token."""
    if isinstance(given, list | tuple) and any(isinstance(item, Tensor) for item in given):
        given = [item.tolist() if isinstance(item, Tensor) else item for item in given]
    try:
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = "rows of different length" if "length" in str(error) else type(given).__name__
        if reason == "rows of different length":
            way_out = "pad them on the left, or give an iterator if they are pieces of one text"
        raise ValueError(f"{name} is not a table of numbers ({reason}); {way_out}") from None
    if found.ndim == 1:
        found = found[None]
    if found.ndim != 2:
        raise ValueError(f"{name} has {found.ndim} dimensions; give (batch, tokens) or (tokens,)")
    if not found.numel():
        raise ValueError(f"{name} is empty; a prompt needs at least one token")
    return found


def _left_padding(model: nn.Module, ids: Tensor, seen: int) -> Tensor | None:
    config = getattr(unwrap(model), "generation_config", None)
    pad, eos = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
    if pad is None or pad == eos or (isinstance(eos, list) and pad in eos) or ids.shape[0] == 1:
        return None
    return _checked((ids != pad).long().cummax(dim=1).values.cpu(), seen)


def _mask(given: Any, ids: Tensor, seen: int) -> Tensor | None:
    mask = _tensor(given, "attention_mask", "give one 0 or 1 per token")
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} but input_ids {tuple(ids.shape)}; give one 0 or 1 per token"
        )
    mask = mask.cpu()
    if ((mask != 0) & (mask != 1)).any():
        value = mask[(mask != 0) & (mask != 1)][0].item()
        raise ValueError(f"attention_mask holds {value}; give 1 for a token and 0 for padding")
    return _checked(mask.long(), seen)


def _checked(mask: Tensor, seen: int) -> Tensor | None:
    unread = mask[:, seen:]
    if (unread.diff(dim=1) < 0).any():
        raise ValueError('attention_mask has padding on the right; pad on the left (tokenizer.padding_side = "left")')
    lengths = unread.sum(dim=1)
    if unread.shape[1] and (lengths == 0).any():
        raise ValueError(f"row {int(lengths.argmin())} of input_ids is padding only; drop it from the batch")
    return None if mask.all() else mask


class Stream:
    """Hands out a prompt's tokens in order, looking ahead no further than asked.

    Args:
        source: (B, N) ids that were checked, or an iterator of ids or of pieces, which are checked as they come.
        device: Where the tokens are wanted.
        known: How many tokens the backbone knows.
        ahead: Tokens of an iterator that are looked at to learn whether there are as many.
    """

    def __init__(self, source: Tensor | Iterator[Any], device: torch.device, known: int | None, ahead: int = 0) -> None:
        self.device, self.known, self.ahead = device, known, ahead
        self.length = source.shape[1] if isinstance(source, Tensor) else None
        self._pending = source if isinstance(source, Tensor) else torch.empty(1, 0, dtype=torch.long)
        self.rows = len(self._pending)
        self._more: Iterator[Any] = iter(()) if isinstance(source, Tensor) else source

    def planned_length(self) -> int | None:
        """Return how many tokens there are; None where nobody knows, but that there are at least `ahead`."""
        if self.length is None and self.ahead > (there := self.available(self.ahead)):
            return there
        return self.length

    def available(self, count: int) -> int:
        """Return how many tokens are left, or `count` if there are at least that many."""
        fresh: list[int] = []
        while self._pending.shape[1] + len(fresh) < count:
            try:
                item = next(self._more)
            except StopIteration:
                break
            fresh.extend(ids_of(item))
        if fresh:
            tokens = _tensor(fresh, "input_ids", _WAY_OUT)
            check_ids(tokens, self.known)
            self._pending = torch.cat([self._pending, tokens], dim=1)
        return min(count, self._pending.shape[1])

    def take(self, count: int) -> Tensor:
        """Return the next `count` tokens, (B, count), on the device."""
        tokens, self._pending = self._pending[:, :count], self._pending[:, count:]
        return tokens.to(self.device, torch.long)


def ids_of(item: Any) -> list[int]:
    """Return the ids of what an iterator yields: one, or a piece of several, as numbers of Python, NumPy or torch."""
    if type(item) is int:
        return [item]
    try:
        ids = torch.as_tensor(None if isinstance(item, str | bytes | Mapping) else item)
        if ids.numel() and ids.dtype not in _WHOLE:
            raise TypeError
        return ids.flatten().tolist()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(
            f"input_ids yields {shown(item)}, which is not a token id; yield ids, or lists of ids"
        ) from None
