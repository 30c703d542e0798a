"""Turn after turn in one cache: a game, whose turns are answered by one of a few choices, and a talk about a text."""

# V vocabulary

from __future__ import annotations

import json
import time
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from locret import RetentionCache, generate, prefill
from locret.backbone.adapters import input_device, unwrap
from locret.chunked_prefill import read_turn
from locret.conversation.document import decode, encode, leading_special_ids
from locret.conversation.turns import MARK, Message, Transcript
from locret.generation import check_finite_logits
from locret.infer.evaluation.answering import cache_of, fork, held, settings_of, units_of, until, written
from locret.infer.evaluation.methods import Prompt


@torch.no_grad()
def answer_turns(prompt: Prompt, run: Any) -> dict[str, Any]:
    """Answer every turn of a sample by the choice whose first token is the likeliest; what it says is read with the
    next turn. All are read into one cache that is never emptied.

    A RetentionCache evicts what exceeds its budget before it reads a turn, so that it never holds more than
    `budget + max(chunk_size, local_len)` units; a cache of transformers grows with every turn.
    """
    model, tokenizer, sample = prompt.setup.model, prompt.setup.tokenizer, prompt.sample
    cache, start, most, answers = cache_of(prompt, run), time.perf_counter(), 0, list[str]()
    said = {choice: _after(tokenizer, sample.turns[-1].rstrip(" "), choice) for choice in sample.choices}
    if len({ids[0] for ids in said.values()}) < len(said):
        raise ValueError(
            f"this tokenizer begins two of the choices {', '.join(said)} with the same token, so the first token "
            "cannot decide between them; use another backbone"
        )
    unread = leading_special_ids(tokenizer)
    for turn in sample.turns:
        logits_V = _last_logits(model, cache, torch.tensor([unread + encode(tokenizer, turn.rstrip(" "))]))
        check_finite_logits(model, logits_V)
        chances = torch.log_softmax(logits_V, dim=-1)
        answers.append(max(said, key=lambda choice: float(chances[said[choice][0]])))  # the first of equals
        unread, most = said[answers[-1]], max(most, units_of(cache))
    return {
        "prediction": "".join(answers),
        "prompt_tokens": cache.seen if isinstance(cache, RetentionCache) else cache.get_seq_length(),
        "generated_tokens": len(answers),
        "kept_units": most,
        "peak_units": most,
        **held(cache),
        "prefill_seconds": time.perf_counter() - start,
        "decode_seconds": 0.0,
    }


def _after(tokenizer: Any, context: str, choice: str) -> list[int]:
    """Return the tokens that a choice adds to a text; the space before it is the choice's."""
    before, both = encode(tokenizer, context), encode(tokenizer, f"{context} {choice}")
    return both[len(commonprefix([before, both])) :]


def _last_logits(model: Any, cache: Any, ids_1N: Tensor) -> Tensor:
    if isinstance(cache, RetentionCache):
        return prefill(model, ids_1N, cache)[0].float()
    out = model(input_ids=ids_1N.to(input_device(model)), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1].float()  # type: ignore[no-any-return]


class _Bounded:
    """A talk in a RetentionCache; a turn is read as the policy's `turns` says."""

    def __init__(self, prompt: Prompt, cache: RetentionCache, settings: dict[str, Any]) -> None:
        self.model, self.settings, self.cache = prompt.setup.model, settings, cache
        prefill(self.model, prompt.ids_1N, cache, new_tokens=settings["max_new_tokens"])

    @property
    def seen(self) -> int:
        """Tokens of the talk that were read or written."""
        return self.cache.seen

    def read(self, ids: list[int]) -> None:
        read_turn(self.model, torch.tensor([ids]), self.cache, new_tokens=self.settings["max_new_tokens"])

    def write(self, *, stands: bool) -> tuple[list[int], list[int], Any]:
        """Return the tokens of an answer, those of them that its cache does not hold, and the cache."""
        cache = self.cache if stands else fork(self.cache)
        seen = cache.seen
        new: list[int] = generate(self.model, cache=cache, **self.settings)[0].tolist()
        return new, new[cache.seen - seen :], cache


class _Plain:
    """A talk in the plain cache of transformers, which keeps everything."""

    def __init__(self, prompt: Prompt, cache: DynamicCache, settings: dict[str, Any]) -> None:
        self.model, self.settings, self.ids_1N = prompt.setup.model, settings, prompt.ids_1N[:, :0]
        self.cache = cache
        self.read(prompt.ids_1N[0].tolist())

    @property
    def seen(self) -> int:
        return self.ids_1N.shape[1]

    def read(self, ids: list[int]) -> None:
        """Read all but the last token, which `generate` takes."""
        self.ids_1N = torch.cat([self.ids_1N, self.ids_1N.new_tensor([ids])], dim=1)
        rest_1L = self.ids_1N[:, self.cache.get_seq_length() : -1]
        if rest_1L.shape[1]:
            model: Any = unwrap(self.model)
            model(input_ids=rest_1L, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def write(self, *, stands: bool) -> tuple[list[int], list[int], Any]:
        cache = self.cache if stands else fork(self.cache)
        new = written(self.model, cache, self.ids_1N, self.settings)
        read = cache.get_seq_length() - self.seen
        if stands:
            self.ids_1N = torch.cat([self.ids_1N, self.ids_1N.new_tensor([new[:read]])], dim=1)
        return new, new[read:], cache


@torch.no_grad()
def answer_conversation(prompt: Prompt, run: Any) -> dict[str, Any]:
    """Answer all turns of a sample in one cache; return the answers as a JSON list, units, bytes and seconds.

    Where the sample says what stands as the answer to a turn (`said`), the model's own answer is written on a fork.
    """
    sample, tokenizer, task = prompt.sample, prompt.setup.tokenizer, prompt.text.task
    settings = settings_of(prompt)
    ends = settings["eos_token_id"] if isinstance(settings["eos_token_id"], list) else [settings["eos_token_id"]]
    # The first turn has been rendered with the document in it; a mark stands for it here.
    transcript = Transcript(tokenizer, prompt.text.template, sample.system or None, (Message("user", MARK),))
    start, writing, answers, count = time.perf_counter(), 0.0, list[str](), 0
    talk = (_Plain if run.method.plain else _Bounded)(prompt, cache_of(prompt, run), settings)
    kept = most = talk.seen if run.method.plain else units_of(talk.cache)
    unread: list[int] = []
    for number, turn in enumerate(sample.turns):
        if number:
            said = sample.said[number - 1] if sample.said else answers[-1]
            transcript.answered(said)
            talk.read([*unread, *encode(tokenizer, f"{said if sample.said else ''}{transcript.ask(turn)}")])
        begun = time.perf_counter()
        new, unread, cache = talk.write(stands=not sample.said)
        writing, most, count = writing + time.perf_counter() - begun, max(most, units_of(cache)), count + len(new)
        if sample.said:
            unread = []
        elif unread and unread[-1] in ends:  # the template writes its own end of a turn
            unread.pop()
        answers.append(until(decode(tokenizer, new), task.stop))
    return {
        "prediction": json.dumps(answers, ensure_ascii=False),
        "generated_tokens": count,
        "kept_units": kept,
        "peak_units": most,
        "prompt_tokens": talk.seen,
        **held(talk.cache),
        "prefill_seconds": time.perf_counter() - start - writing,
        "decode_seconds": writing,
    }
