"""Turn after turn in one cache: a game, whose turns are answered by one of a few choices, and a talk about a text."""

# V vocabulary

from __future__ import annotations

import json
import time
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from locret import RetentionCache, prefill
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


def _read(prompt: Prompt, cache: Any, ids_1N: Tensor, new_tokens: int) -> None:
    """Read what a cache lacks of a talk; the last token is left to the `generate` of a cache of transformers."""
    model: Any = prompt.setup.model
    if not isinstance(cache, RetentionCache):
        rest_1L = ids_1N[:, cache.get_seq_length() : -1]
        if rest_1L.shape[1]:
            unwrap(model)(input_ids=rest_1L, past_key_values=cache, use_cache=True, logits_to_keep=1)
    elif not cache.seen:
        prefill(model, ids_1N, cache, new_tokens=new_tokens)
    else:  # as the policy's `turns` says
        read_turn(model, ids_1N[:, cache.seen :], cache, new_tokens=new_tokens)


@torch.no_grad()
def answer_conversation(prompt: Prompt, run: Any) -> dict[str, Any]:
    """Answer all turns of a sample in one cache; return the answers as a JSON list, units, bytes and seconds.

    The model writes each answer on a fork; what stands as the answer (`said`, else its own) is read with the next turn.
    """
    sample, tokenizer, task = prompt.sample, prompt.setup.tokenizer, prompt.text.task
    settings, cache, ids_1N = settings_of(prompt), cache_of(prompt, run), prompt.ids_1N
    # The first turn has been rendered with the document in it; a mark stands for it here.
    transcript = Transcript(tokenizer, prompt.text.template, sample.system or None, (Message("user", MARK),))
    start, writing, answers, count, units = time.perf_counter(), 0.0, list[str](), 0, list[int]()
    for number, turn in enumerate(sample.turns):
        if number:
            said = sample.said[number - 1] if sample.said else answers[-1]
            transcript.answered(said)
            more = encode(tokenizer, f"{said}{transcript.ask(turn)}")
            ids_1N = torch.cat([ids_1N, ids_1N.new_tensor([more])], dim=1)
        _read(prompt, cache, ids_1N, settings["max_new_tokens"])
        begun, twin = time.perf_counter(), fork(cache)
        new = written(prompt.setup.model, twin, ids_1N, settings)
        writing, count = writing + time.perf_counter() - begun, count + len(new)
        units += [] if units else [ids_1N.shape[1] if run.method.plain else units_of(cache)]
        units.append(units_of(twin))
        answers.append(until(decode(tokenizer, new), task.stop))
    return {
        "prediction": json.dumps(answers, ensure_ascii=False),
        "generated_tokens": count,
        "kept_units": units[0],
        "peak_units": max(units),
        "prompt_tokens": ids_1N.shape[1],
        **held(cache),
        "prefill_seconds": time.perf_counter() - start - writing,
        "decode_seconds": writing,
    }
