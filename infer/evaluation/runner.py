"""One engine for all methods: the same prompt, the same budget, greedy decoding, and everything counted."""
# N prompt tokens

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from locret import RetentionCache, generate, prefill
from locret.backbone.adapters import input_device, ranks_of, unwrap
from locret.backbone.passes import gathering_root
from locret.data.tasks import Sample, Task
from locret.data.tasks.prompts import BuiltPrompt, build_prompt
from locret.data.tasks.task import SampleSet, Selection
from locret.infer.evaluation.allotment import Allotment
from locret.infer.evaluation.methods import Prompt, Setup, make_scorer
from locret.infer.evaluation.records import key, second_tier
from locret.infer.evaluation.sessions import answer_turns
from locret.infer.methods import Method
from locret.policy.policy import RetentionPolicy

_ALWAYS = ("budget", "chunk_size", "stabilizers", "local_len")
# What options and modifiers may change besides; recorded where it is not the default.
_USUAL = {f.name: f.default for f in fields(RetentionPolicy) if f.name not in _ALWAYS}


@dataclass(frozen=True)
class Run:
    """One method with one policy; the plain cache has none."""

    method: Method
    policy: RetentionPolicy | None
    """Of the longest prompt, where the budget is a share of each."""
    allotment: Allotment | None = field(default=None, compare=False)
    """Where the budget is a share."""
    chosen: Collection[str] = field(default=(), compare=False)
    """Names of the numbers that the user set."""
    asked: RetentionPolicy | None = field(default=None, compare=False)
    """The policy as it was before the method made its own of it, where that is not the same."""

    def policy_of(self, tokens: int) -> RetentionPolicy | None:
        """Return the policy of a prompt of so many tokens."""
        if self.allotment is None:
            return self.policy
        return self.method.policy(self.allotment.policy(tokens), self.chosen)

    @property
    def axes(self) -> dict[str, Any]:
        """The method and the numbers that vary, as they stand in a record; what follows the prompt is None."""
        policy, shared, asked = self.policy, self.allotment, self.asked or self.policy
        numbers: dict[str, Any] = {
            name: shared.own.get(name) if shared else asked and int(getattr(asked, name))
            for name in ("budget", "chunk_size", "stabilizers")
        }
        if self.method.keeps_all:
            numbers |= {"budget": None, "stabilizers": None}
        return {
            "method": self.method.name,
            **numbers,
            **({"budget_share": shared.share} if shared else {}),
            **{name: getattr(policy, name) for name in _USUAL if policy and getattr(policy, name) != _USUAL[name]},
        }

    def resolved(self, tokens: int) -> dict[str, Any]:
        """Return what a record says besides of the policy of a prompt of so many tokens."""
        policy = self.policy_of(tokens)
        if self.allotment is None or policy is None:
            return {}
        return {"resolved": {name: int(getattr(policy, name)) for name in _ALWAYS}}


@dataclass(frozen=True)
class Case:
    """One sample that every run answers."""

    samples: SampleSet = field(compare=False, repr=False)
    task: Task
    number: int
    """Of the sample in its set."""
    index: int
    tokens: int
    """Most tokens of a prompt, or of prompt and answer together where rows have a length; 0 where nothing limits it."""
    seed: int
    template: str = "chat"

    @property
    def axes(self) -> dict[str, Any]:
        """What tells the sample from others, as it stands in a record."""
        depth = self.task.depth(self.index, len(self.samples.chosen))
        return {
            "task": self.task.name,
            "version": self.task.version,
            "tokens": self.tokens,
            "index": self.index,
            **({} if depth is None else {"depth": depth}),
            "seed": self.seed,
        }

    def sample(self, tokenizer: Any) -> Sample:
        """Return the sample."""
        return self.samples.sample(self.number, tokenizer)

    def built(self, tokenizer: Any, sample: Sample) -> BuiltPrompt:
        """Return the sample's prompt, truncated and framed as the task's protocol says.

        Raises:
            ValueError: If the tokenizer has no chat template, or the prompt cannot be cut.
        """
        return build_prompt(self.task, sample, tokenizer, template=self.template)


def plan_runs(
    methods: Sequence[Method], allotments: Sequence[Allotment], tokens: int = 1, chosen: Collection[str] = ()
) -> list[Run]:
    """Return the runs of every sample; what keeps every unit is run once, whatever the budgets.

    Args:
        methods: The methods.
        allotments: How much of a prompt stays.
        tokens: Of the longest prompt; matters for shares alone.
        chosen: Names of the numbers that the user set.
    """
    runs: list[Run] = []
    for method in methods:
        if method.plain:
            runs.append(Run(method, None))
            continue
        for one in allotments:
            asked = one.policy(tokens)
            shared = None if one.share is None or method.keeps_all else one
            adapted = None if method.adapt is None else asked
            runs.append(Run(method, method.policy(asked, chosen), shared, tuple(chosen), adapted))
    return [run for nth, run in enumerate(runs) if not run.method.keeps_all or run not in runs[:nth]]


def plan_cases(selections: Iterable[Selection], seed: int, template: str = "chat") -> list[Case]:
    """Return all samples, task by task and length by length; texts that are made here are always chat turns."""
    return [
        Case(samples, one.task, number, index, tokens, seed, "chat" if one.task.pictured else template)
        for one in selections
        for tokens, samples in one.samples.items()
        for index, number in enumerate(samples.chosen)
    ]


def evaluate(setup: Setup, cases: Sequence[Case], runs: Sequence[Run], done: set[Any]) -> Iterator[dict[str, Any]]:
    """Yield the record of every run that is not done yet; each sample is written and tokenised once.

    A sample that cannot be made is passed over: chance decides what a sample holds, and not all fit a short length.

    Raises:
        ValueError: If a row of a file, or the tokenizer, is unfit.
    """
    ranks = ranks_of(setup.model)
    shared = {} if ranks is None else {"kv_ranks": ranks.size}
    for case in cases:
        missing = [run for run in runs if key(case.axes | run.axes) not in done]
        if not missing:
            continue
        try:
            prompt, facts = ask(setup, case)
        except ValueError:
            if not case.samples.made:
                raise
            continue
        digest = hashlib.sha256(prompt.ids_1N.cpu().numpy().tobytes()).hexdigest()
        for run in missing:
            measured = _answered(prompt, run, case.task)
            yield {
                **case.axes,
                **run.axes,
                **run.resolved(prompt.ids_1N.shape[1]),
                **facts,
                "prompt_tokens": prompt.ids_1N.shape[1],
                "prompt_sha256": digest,
                "targets": list(prompt.sample.targets),
                "score": case.task.score(measured["prediction"], prompt.sample),
                **measured,
                **shared,
            }


def ask(setup: Setup, case: Case) -> tuple[Prompt, dict[str, Any]]:
    """Return a case's prompt on the backbone's device, and what its record says of the row it comes from.

    Raises:
        ValueError: If a row or the tokenizer is unfit.
    """
    sample = case.sample(setup.tokenizer)
    built = case.built(setup.tokenizer, sample)
    facts: dict[str, Any] = {}
    if sample.id:
        facts = {"item": sample.id, "tokens_before": built.tokens_before, "tokens_after": built.tokens_after}
        facts |= {"depth": sample.depths[0]} if sample.depths else {}
    return Prompt(torch.tensor([built.ids], device=input_device(setup.model)), sample, setup), facts


def unasked(tokenizer: Any, cases: Sequence[Case], runs: Sequence[Run], done: set[Any]) -> list[dict[str, Any]]:
    """Return which samples could not be made, and why; each of them has no record at all.

    Args:
        tokenizer: The backbone's.
        cases: All samples.
        runs: All runs.
        done: Keys of the records.
    """
    found = []
    for case in cases:
        if case.samples.made and not any(key(case.axes | run.axes) in done for run in runs):
            try:
                case.built(tokenizer, case.sample(tokenizer))
            except ValueError as error:
                found.append({"task": case.task.name, "tokens": case.tokens, "index": case.index, "reason": str(error)})
    return found


def _answered(prompt: Prompt, run: Run, task: Task) -> dict[str, Any]:
    if prompt.sample.turns:
        return answer_turns(prompt, run.method, run.policy_of(prompt.ids_1N.shape[1]), task.name)
    measured = answer(prompt, run, task.max_new_tokens, task.stop, task.min_new_tokens)
    prediction = measured["prediction"]
    ends = [prediction.find(text) for text in task.stop if text in prediction]
    return {**measured, "prediction": prediction[: min(ends, default=len(prediction))]}


@torch.no_grad()
def answer(
    prompt: Prompt, run: Run, max_new_tokens: int, stop: Sequence[str] = (), min_new_tokens: int = 0
) -> dict[str, Any]:
    """Read a prompt one way and answer it greedily; return the prediction, units, bytes and seconds.

    Args:
        prompt: The prompt.
        run: How it is read.
        max_new_tokens: Longest answer.
        stop: Texts that end the answer, which still includes them.
        min_new_tokens: 1 if the answer may not begin with its end.
    """
    ids_1N, model = prompt.ids_1N, prompt.setup.model
    settings = _greedy(model, prompt.setup.tokenizer, max_new_tokens)
    settings |= _ending(prompt.setup.tokenizer, settings["eos_token_id"], stop, min_new_tokens)
    if run.method.plain:
        new, measured = _plain(model, ids_1N, settings)
    else:
        scorer = make_scorer(run.method, prompt)
        new, measured = _retained(model, scorer, run.policy_of(ids_1N.shape[1]), ids_1N, settings)
    tokenizer = prompt.setup.tokenizer
    prediction = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {"prediction": str(prediction), "generated_tokens": len(new), **measured}


def _plain(model: nn.Module, ids_1N: Tensor, settings: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Answer with transformers alone: its cache, its `generate`, nothing of ours but a look at the cache in between."""
    from transformers import DynamicCache

    cache = DynamicCache(config=unwrap(model).config)
    if gathering_root(model) is not None:
        settings = {**settings, "synced_gpus": False}  # `in_step` keeps the processes together
    read: dict[str, Any] = {}

    def look(_ids: Tensor, logits: Tensor) -> Tensor:
        if not read:  # the prompt's last logits: it has been read, and nothing has been written
            read.update(seconds=_now(ids_1N.device), units=cache.get_seq_length(), size=_bytes(cache))
        return logits

    start = _now(ids_1N.device)
    out = unwrap(model).generate(
        ids_1N, attention_mask=torch.ones_like(ids_1N), past_key_values=cache, logits_processor=[look], **settings
    )
    return out[0, ids_1N.shape[1] :].tolist(), {
        "kept_units": read["units"],
        "peak_units": cache.get_seq_length(),
        "cache_bytes": read["size"],
        "peak_bytes": _bytes(cache),
        "prefill_seconds": read["seconds"] - start,
        "decode_seconds": _now(ids_1N.device) - read["seconds"],
    }


def _retained(
    model: nn.Module, scorer: Any, policy: RetentionPolicy | None, ids_1N: Tensor, settings: dict[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    """Answer from a bounded cache."""
    cache, meter = RetentionCache(model, scorer, policy), _UnitMeter()
    start = _now(ids_1N.device)
    prefill(model, ids_1N, cache, new_tokens=settings["max_new_tokens"], on_chunk=meter)
    read, memory = _now(ids_1N.device), cache.memory()
    kept = round(fmean(layer.fill for layer in cache.governed))
    new = generate(model, cache=cache, **settings)[0].tolist()
    end, after = _now(ids_1N.device), cache.memory()
    everything = ids_1N.shape[1] if cache.policy.when == "prompt_end" else 0
    return new, {
        "kept_units": kept,
        "peak_units": max(meter.peak, after.units, everything),
        "cache_bytes": memory.actual,
        "peak_bytes": after.peak,
        **second_tier(after),
        "prefill_seconds": read - start,
        "decode_seconds": end - read,
    }


class _UnitMeter:
    """Follows a read chunk by chunk: a layer attends to a chunk and to all that was kept before it evicts."""

    def __init__(self) -> None:
        self.peak = self._held = self._seen = 0

    def __call__(self, cache: RetentionCache) -> None:
        self.peak = max(self.peak, self._held + cache.seen - self._seen)
        self._held, self._seen = max((layer.fill for layer in cache.governed), default=0), cache.seen


def _greedy(model: nn.Module, tokenizer: Any, max_new_tokens: int) -> dict[str, Any]:
    """Return the settings of `generate`; neutral ones too, or the backbone's own sampling would fill them in."""
    ends = unwrap(model).generation_config.eos_token_id  # type: ignore[union-attr]
    ends = tokenizer.eos_token_id if ends is None else ends
    first = ends[0] if isinstance(ends, list) else ends
    return {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 50,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "eos_token_id": ends,
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else first,
    }


def _ending(tokenizer: Any, ends: Any, stop: Sequence[str], min_new_tokens: int) -> dict[str, Any]:
    """Return the settings of `generate` for texts that end an answer."""
    if not stop:
        return {}
    settings = {"stop_strings": list(stop), "tokenizer": tokenizer}
    if min_new_tokens:
        last = [tokenizer(text, add_special_tokens=False)["input_ids"][-1:] for text in stop]
        first = [*(ends if isinstance(ends, list) else [ends]), *(id for ids in last for id in ids)]
        settings["begin_suppress_tokens"] = [id for id in first if id is not None]
    return settings


def _bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
