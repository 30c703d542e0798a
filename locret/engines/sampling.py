"""How an engine chooses the tokens of an answer; each answer draws for itself."""

# V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from locret.base.fields import Range, Refusal, check_fields, check_ranges, check_sampling


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of an answer are chosen."""

    temperature: float = 0.0
    """0 takes the likeliest token, and the next three have no effect."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0 is all."""
    seed: int | None = None
    """Equal seeds give equal answers whatever else is answered meanwhile; None draws another one each time."""
    top_logprobs: int | None = None
    """Likeliest tokens to name at each step with their log-probabilities, which are the backbone's, before temperature,
    top_p and top_k; with 0 only the chosen token's is given, with None none."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.temperature:
            check_sampling("temperature", self.temperature)
        check_ranges(self, {"top_k": Range(0), "top_logprobs": Range(0)})
        if not 0 < self.top_p <= 1:
            raise Refusal("top_p", self.top_p, "is no share of the probability; give more than 0, up to 1")


class Draws:
    """Chooses the tokens of one answer."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator: torch.Generator | None = None
        self._processors = LogitsProcessorList()
        """What `generate` does to scores before it draws."""
        if sampling.temperature not in (0.0, 1.0):
            self._processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self._processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._processors.append(TopPLogitsWarper(sampling.top_p))

    def next(self, logits_V: Tensor) -> tuple[int, tuple[Any, ...]]:
        """Return the next token, and its log-probability and the likeliest ones where they are asked for."""
        sampling, token = self._sampling, int(logits_V.argmax())
        if sampling.temperature:
            if self._generator is None:
                self._generator = torch.Generator(logits_V.device)
                if sampling.seed is None:
                    self._generator.seed()
                else:
                    self._generator.manual_seed(sampling.seed)
            scores = self._processors(torch.empty(1, 0, dtype=torch.long), logits_V[None])
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        if sampling.top_logprobs is None:
            return token, ()
        logprobs = logits_V.log_softmax(-1)
        best = logprobs.topk(sampling.top_logprobs)
        return token, (float(logprobs[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
