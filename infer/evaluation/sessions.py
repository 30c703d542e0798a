"""A session: turn after turn is read into one cache, and every turn is answered by one of a few choices."""

# V vocabulary

from __future__ import annotations

import time
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from locret import RetentionCache, prefill
from locret.backbone.adapters import input_device, unwrap
from locret.conversation.templates import encode, leading_special_ids
from locret.infer.evaluation.methods import Prompt, knows_answers, make_scorer
from locret.infer.evaluation.records import second_tier
from locret.infer.methods import Method
from locret.policy.policy import RetentionPolicy


class Session:
    """Reads turns into one cache and answers each by the choice whose first token is the likeliest.

    A RetentionCache evicts what exceeds its budget before it reads a turn, so that it never holds more than
    `budget + max(chunk_size, local_len)` units; a cache of transformers grows with every turn.

    Args:
        model: The backbone of the cache.
        tokenizer: The backbone's.
        cache: An empty cache.
        turn: A turn's text, after which the choices are tokenised.
        choices: The texts to choose from.

    Raises:
        ValueError: If two choices begin with the same token, so that their first tokens decide nothing.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, cache: Cache, turn: str, choices: tuple[str, ...]) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.most_units = 0
        """Most units per KV head held after any turn."""
        self._unread = list(leading_special_ids(tokenizer))
        self._choices = {choice: self._after(turn.rstrip(" "), choice) for choice in choices}
        if len({ids[0] for ids in self._choices.values()}) < len(choices):
            raise ValueError(
                f"this tokenizer begins two of the choices {', '.join(choices)} with the same token, so the first "
                "token cannot decide between them; use another backbone"
            )

    def _after(self, context: str, choice: str) -> list[int]:
        """Return the tokens that a choice adds to a text; the space before it is the choice's."""
        before, both = encode(self.tokenizer, context), encode(self.tokenizer, f"{context} {choice}")
        return both[len(commonprefix([before, both])) :]

    @torch.no_grad()
    def rate(self, turn: str) -> dict[str, float]:
        """Read a turn and return the log-probability of each choice's first token; the likeliest is remembered."""
        ids = self._unread + encode(self.tokenizer, turn.rstrip(" "))
        logits_V = self._read(torch.tensor([ids]))[0].float()
        chances = torch.log_softmax(logits_V, dim=-1)[[ids[0] for ids in self._choices.values()]].tolist()
        rated = dict(zip(self._choices, chances, strict=True))
        self._unread = self._choices[likeliest(rated)]
        return rated

    def _read(self, ids: Tensor) -> Tensor:
        if isinstance(self.cache, RetentionCache):
            logits = prefill(self.model, ids, self.cache)
            self.most_units = max(self.most_units, self.cache.memory().units)
            return logits
        device = input_device(self.model)
        out = self.model(input_ids=ids.to(device), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.most_units = max(self.most_units, self.cache.get_seq_length())
        return out.logits[:, -1]  # type: ignore[no-any-return]


def likeliest(rated: dict[str, float]) -> str:
    """Return the choice with the highest log-probability, the first of equals."""
    return max(rated, key=lambda choice: rated[choice])


def answer_turns(prompt: Prompt, method: Method, policy: RetentionPolicy | None, task: str) -> dict[str, Any]:
    """Answer all turns of a sample in one cache that is never emptied; return the answers, units, bytes and seconds.

    Raises:
        ValueError: If the method rates the units of one prompt only, or the tokenizer cannot tell the choices apart.
    """
    model, tokenizer, sample = prompt.setup.model, prompt.setup.tokenizer, prompt.sample
    if knows_answers(method.name):
        raise ValueError(f"method {method.name} knows the answer to one prompt, and {task} is a session; leave one out")
    cache: Any
    if method.plain:
        cache = DynamicCache(config=unwrap(model).config)
    else:
        cache = RetentionCache(model, make_scorer(method, prompt), policy)
    session, start = Session(model, tokenizer, cache, sample.turns[-1], sample.choices), time.perf_counter()
    answers = [likeliest(session.rate(turn)) for turn in sample.turns]
    seconds = time.perf_counter() - start
    if isinstance(cache, RetentionCache):
        memory = cache.memory()
        held, peak, read = memory.actual, memory.peak, cache.seen
        tiers = second_tier(memory)
    else:
        held = peak = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        read, tiers = cache.get_seq_length(), {}
    return {
        "prediction": "".join(answers),
        "prompt_tokens": read,
        "generated_tokens": len(answers),
        "kept_units": session.most_units,
        "peak_units": session.most_units,
        "cache_bytes": held,
        "peak_bytes": peak,
        **tiers,
        "prefill_seconds": seconds,
        "decode_seconds": 0.0,
    }
