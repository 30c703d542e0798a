"""A model that plays Rock-Paper-Scissors: all turns in one cache that stays within its budget."""

# V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from locret import RetentionCache, prefill
from locret.data.tasks.published.rock_paper_scissors import LETTERS
from locret.data.training.chat import encode, leading_special_ids


class ModelPlayer:
    """Reads turn after turn into one cache and rates the letters that may follow.

    A RetentionCache evicts what exceeds its budget before it reads a turn, so that it never holds more than
    `budget + max(chunk_size, local_len)` units; a cache of transformers grows with every turn.

    Args:
        model: The backbone of the cache.
        tokenizer: The backbone's.
        cache: An empty cache.

    Raises:
        ValueError: If two letters begin with the same token, so that their first tokens decide nothing.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, cache: Cache) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.most_units = 0
        """Most units per KV head held after any turn."""
        self._unread = list(leading_special_ids(tokenizer))
        self._letters = [self._after("You choose:", letter) for letter in LETTERS]
        if len({ids[0] for ids in self._letters}) < len(LETTERS):
            raise ValueError(
                "this tokenizer begins two of the letters A, B and C with the same token, so the first token cannot "
                "decide between them; use another backbone"
            )

    def _after(self, context: str, letter: str) -> list[int]:
        """Return the tokens that a letter adds to a text; the space before it is the letter's."""
        before, both = encode(self.tokenizer, context), encode(self.tokenizer, f"{context} {letter}")
        same = len(commonprefix([before, both]))
        return both[same:]

    @torch.no_grad()
    def choose(self, prompt: str) -> Sequence[float]:
        """Return the log-probability of each letter's first token, and remember the likeliest letter as the answer."""
        ids = self._unread + encode(self.tokenizer, prompt.rstrip(" "))
        logits_V = self._read(torch.tensor([ids]))[0].float()
        scores = torch.log_softmax(logits_V, dim=-1)[[ids[0] for ids in self._letters]].tolist()
        self._unread = self._letters[scores.index(max(scores))]
        return scores

    def _read(self, ids: Tensor) -> Tensor:
        if isinstance(self.cache, RetentionCache):
            logits = prefill(self.model, ids, self.cache)
            self.most_units = max(self.most_units, self.cache.memory().units)
            return logits
        device = next(self.model.parameters()).device
        out = self.model(input_ids=ids.to(device), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.most_units = max(self.most_units, self.cache.get_seq_length())
        return out.logits[:, -1]  # type: ignore[no-any-return]
