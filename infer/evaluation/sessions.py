"""Turn after turn in one cache: a game, whose turns are answered by one of a few choices, and a talk about a text."""

# V vocabulary

from __future__ import annotations

import copy
import json
import time
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from locret import RetentionCache, generate, prefill
from locret.backbone.adapters import input_device, unwrap
from locret.chunked_prefill import read_turn
from locret.conversation.text import decode, encode, leading_special_ids
from locret.conversation.turns import MARK, Message, Transcript
from locret.data.tasks import Task
from locret.generation import FiniteLogits, check_finite_logits
from locret.infer.evaluation.answering import bytes_of, settings_of
from locret.infer.evaluation.methods import Prompt, knows_answers, make_scorer
from locret.infer.evaluation.records import second_tier


def _cache_of(prompt: Prompt, run: Any) -> Any:
    if run.method.plain:
        return DynamicCache(config=unwrap(prompt.setup.model).config)
    policy = run.policy_of(prompt.ids_1N.shape[1])
    return RetentionCache(prompt.setup.model, make_scorer(run.method, prompt), policy)


def _units(cache: Any) -> int:
    return cache.memory().units if isinstance(cache, RetentionCache) else int(cache.get_seq_length())


def _held(cache: Any) -> dict[str, int]:
    """Return what a record says of a cache at a session's end."""
    if isinstance(cache, RetentionCache):
        memory = cache.memory()
        return {"cache_bytes": memory.actual, "peak_bytes": memory.peak, **second_tier(memory)}
    return dict.fromkeys(("cache_bytes", "peak_bytes"), bytes_of(cache))


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
        check_finite_logits(self.model, logits_V)
        self.most_units = max(self.most_units, _units(self.cache))
        chances = torch.log_softmax(logits_V, dim=-1)[[ids[0] for ids in self._choices.values()]].tolist()
        rated = dict(zip(self._choices, chances, strict=True))
        self._unread = self._choices[likeliest(rated)]
        return rated

    def _read(self, ids: Tensor) -> Tensor:
        if isinstance(self.cache, RetentionCache):
            return prefill(self.model, ids, self.cache)
        ids = ids.to(input_device(self.model))
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]  # type: ignore[no-any-return]


def likeliest(rated: dict[str, float]) -> str:
    """Return the choice with the highest log-probability, the first of equals."""
    return max(rated, key=lambda choice: rated[choice])


def answer_turns(prompt: Prompt, run: Any, task: Task) -> dict[str, Any]:
    """Answer all turns of a sample in one cache that is never emptied; return the answers, units, bytes and seconds.

    Raises:
        ValueError: If the method rates the units of one prompt only, or the tokenizer cannot tell the choices apart.
    """
    sample, name = prompt.sample, run.method.name
    if knows_answers(name):
        raise ValueError(f"method {name} knows the answer to one prompt, and {task.name} is a session; leave one out")
    cache = _cache_of(prompt, run)
    session = Session(prompt.setup.model, prompt.setup.tokenizer, cache, sample.turns[-1], sample.choices)
    start = time.perf_counter()
    answers = [likeliest(session.rate(turn)) for turn in sample.turns]
    return {
        "prediction": "".join(answers),
        "prompt_tokens": cache.seen if isinstance(cache, RetentionCache) else cache.get_seq_length(),
        "generated_tokens": len(answers),
        "kept_units": session.most_units,
        "peak_units": session.most_units,
        **_held(cache),
        "prefill_seconds": time.perf_counter() - start,
        "decode_seconds": 0.0,
    }


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
        cache = self.cache if stands else self.cache.copy()
        seen = cache.seen
        new: list[int] = generate(self.model, cache=cache, **self.settings)[0].tolist()
        return new, new[cache.seen - seen :], cache


class _Plain:
    """A talk in the plain cache of transformers, which keeps everything."""

    def __init__(self, prompt: Prompt, cache: DynamicCache, settings: dict[str, Any]) -> None:
        self.model, self.settings, self.ids_1N = unwrap(prompt.setup.model), settings, prompt.ids_1N[:, :0]
        self.cache = cache
        self.read(prompt.ids_1N[0].tolist())

    @property
    def seen(self) -> int:
        """Tokens of the talk that were read or written."""
        return self.ids_1N.shape[1]

    def read(self, ids: list[int]) -> None:
        """Read all but the last token, which `generate` takes."""
        self.ids_1N = torch.cat([self.ids_1N, self.ids_1N.new_tensor([ids])], dim=1)
        rest_1L = self.ids_1N[:, self.cache.get_seq_length() : -1]
        if rest_1L.shape[1]:
            self.model(input_ids=rest_1L, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def write(self, *, stands: bool) -> tuple[list[int], list[int], Any]:
        cache = self.cache if stands else copy.deepcopy(self.cache)
        out_1N = self.model.generate(
            self.ids_1N,
            attention_mask=torch.ones_like(self.ids_1N),
            past_key_values=cache,
            logits_processor=[FiniteLogits(self.model)],
            **self.settings,
        )
        new: list[int] = out_1N[0, self.seen :].tolist()
        held = cache.get_seq_length() - self.seen
        if stands:
            self.ids_1N = out_1N[:, : cache.get_seq_length()]
        return new, new[held:], cache


@torch.no_grad()
def answer_conversation(prompt: Prompt, run: Any, task: Task) -> dict[str, Any]:
    """Answer all turns of a sample in one cache; return the answers as a JSON list, units, bytes and seconds.

    Where the sample says what stands as the answer to a turn (`said`), the model's own answer is written on a fork.

    Args:
        prompt: Of the first turn.
        run: How it is read.
        task: Says how long an answer may be, and where it ends.

    Raises:
        ValueError: If the chat template refuses the turns.
    """
    sample, tokenizer, settings = prompt.sample, prompt.setup.tokenizer, settings_of(prompt, task)
    ends = settings["eos_token_id"] if isinstance(settings["eos_token_id"], list) else [settings["eos_token_id"]]
    template = "chat" if prompt.text is None else prompt.text.template
    # The first turn has been rendered with the document in it; a mark stands for it here.
    transcript = Transcript(tokenizer, template, sample.system or None, (Message("user", MARK),))
    start, writing, answers, count = time.perf_counter(), 0.0, list[str](), 0
    talk = (_Plain if run.method.plain else _Bounded)(prompt, _cache_of(prompt, run), settings)
    kept = most = talk.seen if run.method.plain else _units(talk.cache)
    unread: list[int] = []
    for number, turn in enumerate(sample.turns):
        if number:
            said = sample.said[number - 1] if sample.said else answers[-1]
            transcript.answered(said)
            talk.read([*unread, *encode(tokenizer, f"{said if sample.said else ''}{transcript.ask(turn)}")])
        begun = time.perf_counter()
        new, unread, cache = talk.write(stands=not sample.said)
        writing, most, count = writing + time.perf_counter() - begun, max(most, _units(cache)), count + len(new)
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
        **_held(talk.cache),
        "prefill_seconds": time.perf_counter() - start - writing,
        "decode_seconds": writing,
    }


def until(answer: str, stop: tuple[str, ...]) -> str:
    """Return an answer up to the first of the texts that end it."""
    return answer[: min((answer.find(text) for text in stop if text in answer), default=len(answer))]
