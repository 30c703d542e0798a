"""One engine for all methods: the same prompt, the same budget, greedy decoding, and everything counted.

Prompts with one answer; questions that are asked on forks of a text that was read once; and turn after turn in one
cache: a game, whose turns are answered by one of a few choices, and a talk about a text.
"""

# N prompt tokens, D of them of the document
# V vocabulary

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from os.path import commonprefix
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from locret import RetentionCache, generate, prefill
from locret.backbone.adapters import input_device, ranks_of, unwrap
from locret.backbone.passes import gathering_root
from locret.chunked_prefill import read_turn
from locret.conversation.chat import GREEDY, now
from locret.conversation.document import decode, encode, leading_special_ids
from locret.conversation.head_shares import sharing
from locret.conversation.turns import MARK, Message, Transcript
from locret.generation import FiniteLogits, check_finite_logits
from locret.infer.evaluation.methods import ORACLE, Prompt, Setup, make_scorer, rule, text_tokens
from locret.infer.evaluation.plan import Case, Run, texts_of
from locret.infer.evaluation.records import AWARE, key


def evaluate(setup: Setup, cases: Iterable[Case], runs: Sequence[Run], done: set[Any]) -> Iterator[dict[str, Any]]:
    """Yield the record of every run that is not done yet; each sample is written and tokenised once."""
    ranks = ranks_of(setup.model)
    shared = {} if ranks is None else {"kv_ranks": ranks.size}
    for group in texts_of(cases):
        missing = [(case, [run for run in runs if key(case.axes | run.axes) not in done]) for case in group]
        for record in _answers_about(setup, [(case, own) for case, own in missing if own], runs):
            yield {**record, **shared}


def _answers_about(
    setup: Setup, missing: Sequence[tuple[Case, list[Run]]], runs: Sequence[Run]
) -> Iterator[dict[str, Any]]:
    """Yield the records of a text's questions, each with the runs that are missing."""
    text, asked = None, list[tuple[Case, list[Run], Prompt, dict[str, Any]]]()
    for case, own in missing:
        prompt, facts = ask(setup, case, text)
        text = prompt.text
        asked.append((case, own, prompt, facts))
    for case, own, prompt, facts in asked:
        for run in own:
            if run.protocol == AWARE:
                yield _record(case, run, prompt, facts, _answered(prompt, run))
            elif rule(run.method) == ORACLE:  # it reads the document for one question
                yield _record(case, run, prompt, facts, next(answers_on_forks([prompt], run)))
        vars(prompt).pop("labels", None)  # which are large
    for run in runs:
        own_of = [(case, prompt, facts) for case, own, prompt, facts in asked if run in own]
        if run.protocol != AWARE and rule(run.method) != ORACLE and own_of:
            found = answers_on_forks([prompt for _, prompt, _ in own_of], run)
            for (case, prompt, facts), measured in zip(own_of, found, strict=True):
                yield _record(case, run, prompt, facts, measured)


def _record(case: Case, run: Run, prompt: Prompt, facts: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    tokens = prompt.ids_1N.shape[1]
    document = {} if run.protocol == AWARE else {"document_tokens": prompt.text()}
    return {
        **case.axes,
        **run.axes,
        **run.resolved(document.get("document_tokens", tokens)),
        **facts,
        **document,
        "prompt_tokens": tokens,
        "prompt_sha256": hashlib.sha256(prompt.ids_1N.cpu().numpy().tobytes()).hexdigest(),
        "targets": list(prompt.sample.targets),
        "score": case.task.score(measured["prediction"], prompt.sample),
        **measured,
    }


def ask(setup: Setup, case: Case, text: Callable[[], int] | None = None) -> tuple[Prompt, dict[str, Any]]:
    """Return a case's prompt on the backbone's device, and what its record says of the row it comes from."""
    sample = case.sample()
    built = case.built(setup.tokenizer, sample)
    facts = {"item": sample.id, "tokens_before": built.tokens_before, "tokens_after": built.tokens_after}
    facts |= {"depth": sample.depths[0]} if len(sample.depths) == 1 else {}
    ids_1N = torch.tensor([built.ids], device=input_device(setup.model))
    text = text or lru_cache(partial(text_tokens, setup, case.task, sample, case.template))
    return Prompt(setup, case.task, ids_1N, sample, text, case.template), facts


def _answered(prompt: Prompt, run: Run) -> dict[str, Any]:
    if prompt.sample.turns:
        return (answer_turns if prompt.sample.choices else answer_conversation)(prompt, run)
    return answer(prompt, run)


@torch.no_grad()
def answer(prompt: Prompt, run: Run) -> dict[str, Any]:
    """Read a prompt as a whole, answer it greedily, and return the prediction, units, bytes and seconds."""
    if run.method.plain:  # read within `generate`: transformers alone, and nothing of ours but a look at it in between
        return _write(prompt, cache_of(prompt, run), {})
    return _write(prompt, *_read(prompt, run, prompt.task.max_new_tokens))


@torch.no_grad()
def answers_on_forks(prompts: Sequence[Prompt], run: Run) -> Iterator[dict[str, Any]]:
    """Read a document one way, ask each question on a fork of what was kept, and yield what `answer` returns, in order.

    The seconds of the read count for every question, as if it were the only one.
    """
    cache, measured = _read(prompts[0].document, run, 0)
    for prompt in prompts:
        yield _write(prompt, fork(cache), measured)


def _read(prompt: Prompt, run: Run, new_tokens: int) -> tuple[Any, dict[str, Any]]:
    """Return the cache of a prompt that has been read, and what is measured of that, by the names of a record."""
    ids_1N, cache = prompt.ids_1N, cache_of(prompt, run)
    kept = peak = ids_1N.shape[1]
    most = before = seen = 0

    def note(cache: RetentionCache) -> None:  # a layer attends to a chunk and to all that was kept before it evicts
        nonlocal most, before, seen
        most = max(most, before + cache.seen - seen)
        before, seen = max((layer.fill for layer in cache.governed), default=0), cache.seen

    start = now(ids_1N.device)
    if isinstance(cache, RetentionCache):
        prefill(prompt.setup.model, ids_1N, cache, new_tokens=new_tokens, on_chunk=note)
        kept = round(fmean(layer.fill for layer in cache.governed))
        peak = max(most, peak if cache.policy.when == "prompt_end" else 0)
    else:
        model: Any = unwrap(prompt.setup.model)
        model(input_ids=ids_1N, past_key_values=cache, use_cache=True, logits_to_keep=1)
    measured = {"kept_units": kept, "peak_units": peak, "cache_bytes": held(cache)["cache_bytes"]}
    return cache, {**measured, "prefill_seconds": now(ids_1N.device) - start}


def _write(prompt: Prompt, cache: Any, read: dict[str, Any]) -> dict[str, Any]:
    """Read what a cache lacks of a prompt, write the answer, and return what a record says; `read` was measured."""
    device, seen = prompt.ids_1N.device, dict[str, Any]()

    def look(_ids: Tensor, logits: Tensor) -> Tensor:
        if not seen:  # the prompt's last logits: it has been read, and nothing has been written
            seen.update(at=now(device), units=units_of(cache), size=held(cache)["cache_bytes"])
        return logits

    settings = {**settings_of(prompt), "logits_processor": [look]}
    start = now(device)
    new = written(prompt.setup.model, cache, prompt.ids_1N, settings)
    end, measured = now(device), {"kept_units": seen["units"], "cache_bytes": seen["size"], **read}
    return {
        "prediction": until(decode(prompt.setup.tokenizer, new), prompt.task.stop),
        "generated_tokens": len(new),
        **held(cache),
        **measured,
        "peak_units": max(measured.get("peak_units", 0), units_of(cache)),
        "prefill_seconds": measured.get("prefill_seconds", 0.0) + seen["at"] - start,
        "decode_seconds": end - seen["at"],
    }


def cache_of(prompt: Prompt, run: Run) -> RetentionCache | DynamicCache:
    """Return a new cache of a run, for a prompt of such a length."""
    if run.method.plain:
        return DynamicCache(config=unwrap(prompt.setup.model).config)
    setup, scorer, policy = prompt.setup, make_scorer(run.method, prompt), run.policy_of(prompt.ids_1N.shape[1])
    assert policy is not None
    policy = sharing(policy, scorer, setup.model, setup.tokenizer, prompt.template)
    return RetentionCache(setup.model, scorer, policy)


def fork(cache: Any) -> Any:
    """Return a copy of a cache that can be read and answered without changing it."""
    return cache.copy() if isinstance(cache, RetentionCache) else copy.deepcopy(cache)


def units_of(cache: Any) -> int:
    """Return the units that the fullest KV head holds."""
    return cache.memory().units if isinstance(cache, RetentionCache) else int(cache.get_seq_length())


def held(cache: Any) -> dict[str, int]:
    """Return what a record says of a cache's bytes."""
    if isinstance(cache, RetentionCache):
        memory = cache.memory()
        tier = {"host_bytes": memory.host, "moved_bytes": memory.moved} if memory.host_planned else {}
        return {"cache_bytes": memory.actual, "peak_bytes": memory.peak, **tier}
    plain = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return dict.fromkeys(("cache_bytes", "peak_bytes"), plain)


def written(model: Any, cache: Any, ids_1N: Tensor, settings: dict[str, Any]) -> list[int]:
    """Let the backbone's own `generate` read what a cache lacks of a prompt and go on; return the new tokens."""
    if isinstance(cache, RetentionCache):
        whole = cache.seen == ids_1N.shape[1]
        out_1N = generate(model, *(() if whole else (ids_1N,)), cache=cache, **settings)
        return out_1N[0, 0 if whole else ids_1N.shape[1] :].tolist()  # type: ignore[no-any-return]
    look = [*settings.get("logits_processor", ()), FiniteLogits(model)]
    given = {"attention_mask": torch.ones_like(ids_1N), "past_key_values": cache, **settings, "logits_processor": look}
    if gathering_root(model) is not None:
        given["synced_gpus"] = False  # `in_step` keeps the processes together
    return unwrap(model).generate(ids_1N, **given)[0, ids_1N.shape[1] :].tolist()  # type: ignore[operator]


def settings_of(prompt: Prompt) -> dict[str, Any]:
    """Return settings of greedy decoding; neutral ones too, or the backbone's own sampling would fill them in."""
    tokenizer, task = prompt.setup.tokenizer, prompt.task
    ends = unwrap(prompt.setup.model).generation_config.eos_token_id  # type: ignore[union-attr]
    ends = tokenizer.eos_token_id if ends is None else ends
    every = ends if isinstance(ends, list) else [ends]
    settings = {
        "max_new_tokens": task.max_new_tokens,
        "do_sample": False,
        **GREEDY,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "eos_token_id": ends,
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else every[0],
    }
    if task.stop:
        settings |= {"stop_strings": list(task.stop), "tokenizer": tokenizer}
    if task.stop and task.min_new_tokens:
        last = [id for text in task.stop for id in tokenizer(text, add_special_tokens=False)["input_ids"][-1:]]
        settings["begin_suppress_tokens"] = [id for id in (*every, *last) if id is not None]
    return settings


def until(answer: str, stop: Sequence[str]) -> str:
    """Return an answer up to the first of the texts that end it."""
    return answer[: min((answer.find(text) for text in stop if text in answer), default=len(answer))]


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


def _read_more(prompt: Prompt, cache: Any, ids_1N: Tensor, new_tokens: int) -> None:
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
    sample, tokenizer, task = prompt.sample, prompt.setup.tokenizer, prompt.task
    settings, cache, ids_1N = settings_of(prompt), cache_of(prompt, run), prompt.ids_1N
    # The first turn has been rendered with the document in it; a mark stands for it here.
    transcript = Transcript(tokenizer, prompt.template, sample.system or None, (Message("user", MARK),))
    start, writing, answers, count, units = time.perf_counter(), 0.0, list[str](), 0, list[int]()
    for number, turn in enumerate(sample.turns):
        if number:
            said = sample.said[number - 1] if sample.said else answers[-1]
            transcript.answered(said)
            more = encode(tokenizer, f"{said}{transcript.ask(turn)}")
            ids_1N = torch.cat([ids_1N, ids_1N.new_tensor([more])], dim=1)
        _read_more(prompt, cache, ids_1N, settings["max_new_tokens"])
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
