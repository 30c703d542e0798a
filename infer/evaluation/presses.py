"""kvpress's presses as methods of `locret-eval`, `kvpress/NAME`: on the same prompts, by the same scores.

kvpress pins an older transformers than ours, so its half (`kvpress_side.py`) runs in an environment of its own, which
`--kvpress-python` names. A press prunes once, after it has read a context in one pass; what comes behind the context
sees what is left. Aware, the context is the prompt but its last `local_len` tokens, which stay, and the press keeps
`budget` units; agnostic, it is the document, and the press keeps `budget` and `local_len` units: as many as ours hold
when they have read the same. Windows of presses, which look at the last queries, are `local_len` tokens wide.
"""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from locret.infer.methods import Method
from locret.infer.speed.peers.environments import PEERS
from locret.infer.speed.peers.process import SideFailed, SideProcess
from locret.method_spec import MethodSpec
from locret.nearest import nearest
from locret.policy.policy import FOLLOWING, RetentionPolicy

if TYPE_CHECKING:
    from locret.data.tasks import Task
    from locret.infer.evaluation.job import Job
    from locret.infer.evaluation.methods import Prompt
    from locret.infer.evaluation.runner import Run

PREFIX = "kvpress/"
_LEAST = 2
"""Tokens that a press reads of any prompt: one, and a window of one."""
PRESSES: Mapping[str, str] = {
    "random": "units drawn at random",
    "streaming_llm": "the first and the last units",
    "knorm": "short keys",
    "keydiff": "keys unlike the others",
    "tova": "what the last token looks at",
    "snapkv": "what the last queries look at, and its neighbours",
    "pyramidkv": "the same, more of it in lower layers",
    "observed_attention": "what has been attended most (H2O)",
    "expected_attention": "what coming queries are expected to look at",
    "cap": "what coming queries are expected to look at, as CapPress has it",
    "lagkv": "what differs from the passage after it",
    "leverage": "keys that span their space",
    "non_causal": "what a passage looks at, later words included",
    "compactor": "both of these",
    "cur": "keys and values that span their space",
    "finch": "what a window of the question looks at, by rank",
    "kvzip": "what a repetition of the text looks at; masks what goes",
    "kvzip_plus": "the same, weighed by values",
    "kvgrad": "what a repetition of the text depends on, by gradients; masks what goes",
    "adakv_snapkv": "SnapKV, shared out over the heads of a layer; masks what goes",
    "adakv_expected_attention": "expected attention, shared out over the heads of a layer; masks what goes",
    "criticalkv_snapkv": "SnapKV, weighed by what values write",
    "critical_adakv_snapkv": "the same, shared out over the heads of a layer; masks what goes",
    "chunkkv_snapkv": "SnapKV, by whole passages",
    "entropy_gated_chunkkv_snapkv": "the same, shorter passages where scores differ",
    "block_keydiff": "keys unlike the others, block by block",
    "chunk_snapkv": "SnapKV, an equal share of each passage",
    "rerotated_snapkv": "SnapKV, with positions by rank",
    "merging_snapkv": "SnapKV, what goes merged into what stays",
}
"""The presses that read a Llama on a CPU and keep as many units as they are told, and what each keeps."""
LEFT_OUT: Mapping[str, str] = {
    "DMS, KVzap, FastKVzip, RestoreKV, QFilter, ExpectedAttentionStats": "need weights trained for one backbone",
    "LU-KV, DuoAttention": "need patterns measured for one backbone, from the network",
    "SimLayerKV": "a threshold decides how much it keeps, not a budget",
    "ThinK": "prunes channels, not units",
    "KVCompose": "has to be given the questions before it reads, apart from the prompt",
    "Decoding, PrefillDecoding, CompressionRatioDecoding, CAM": "compress what is written, not what is read",
    "Composed, PerLayerCompression": "combine others",
}
"""What kvpress has besides, and why it is not among them."""
_SIDE = Path(__file__).with_name("kvpress_side.py")


def is_press(method: Method) -> bool:
    """Return whether a method is one of kvpress's."""
    return method.name.startswith(PREFIX)


def names() -> list[str]:
    """Return the names of the methods."""
    return [f"{PREFIX}{name}" for name in PRESSES]


def find(spec: MethodSpec) -> Method:
    """Return the method of a spec.

    Raises:
        ValueError: If there is no such press, or it is written with options or modifiers.
    """
    name = spec.name.removeprefix(PREFIX)
    if name not in PRESSES:
        near = nearest(spec.name, names()) or names()
        raise ValueError(f'method "{spec.name}" is unknown; did you mean {" or ".join(near)}?')
    if spec.options or spec.modifiers:
        raise ValueError(
            f'method "{spec}": a press of kvpress runs as kvpress ships it; drop what follows {spec.name}, or run a '
            "press in our engine, as kvpress:SnapKVPress:window_size=32 (docs/scorers.md)"
        )
    # Of a policy it takes how much stays; how ours are read beside it may be said all the same.
    ignored = frozenset(one.name for one in fields(RetentionPolicy)) - {"budget", *FOLLOWING}
    return Method(spec.name, f"{PRESSES[name]} (kvpress)", sets=ignored)


def check(methods: Sequence[Method], python: str | None, model: Any) -> None:
    """Refuse presses that cannot run, and an environment that none of the methods needs.

    Args:
        methods: What is compared.
        python: kvpress's interpreter, as the user gave it.
        model: Options of the backbone, `ModelOptions`.

    Raises:
        ValueError: Saying what to change.
    """
    asked = [method.name for method in methods if is_press(method)]
    if not asked:
        if python is not None:
            raise ValueError(
                f"--kvpress-python {python} runs methods such as kvpress/snapkv, and there is none; add one, or drop it"
            )
        return
    advice = f"make one with `python -m venv kvpress-env` and `kvpress-env/bin/pip install {PEERS['kvpress']} torch`"
    if python is None:
        raise ValueError(f"--methods {asked[0]} needs an environment with kvpress; {advice}, and give --kvpress-python")
    if shutil.which(python) is None:
        raise ValueError(f"--kvpress-python {python} is not a program; {advice}")
    loaded = {name: value for name, value in model.given().items() if value}
    if model.adapter:
        loaded["adapter"] = model.adapter
    if loaded:
        name = next(iter(loaded))
        raise ValueError(
            f"--{name.replace('_', '-')} changes the backbone, and kvpress reads the plain one; drop it, or {asked[0]}"
        )


def started(job: Job) -> Presses | None:
    """Return what runs the presses of a job, None if it has none; its process has loaded the backbone then.

    Raises:
        ValueError: If it does not start, or cannot load the backbone.
    """
    if not any(is_press(run.method) for run in job.runs):
        return None
    model, python = job.model.model, job.evaluation.kvpress_python
    assert python is not None
    backbone = os.path.abspath(model) if os.path.isdir(model) else model
    dtype = str(job.dtype).removeprefix("torch.")
    found = Presses(python, backbone, torch.get_num_threads(), dtype, str(job.own_device))
    assert found.versions
    return found


class Presses:
    """kvpress's process: started when the first press is asked, ended with ours.

    Args:
        python: Its interpreter.
        backbone: Folder or Hub id of the backbone.
        threads: That it computes with.
        dtype: Of its weights, as PyTorch calls it.
        device: Where they are.
    """

    def __init__(self, python: str, backbone: str, threads: int, dtype: str, device: str) -> None:
        self.python, self.threads = python, threads
        self.load = {"backbone": backbone, "threads": threads, "dtype": dtype, "device": device}

    @cached_property
    def _process(self) -> SideProcess:
        process = SideProcess("kvpress", self.python, self.threads, program=[str(_SIDE)])
        atexit.register(process.stop)
        return process

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions of what runs there.

        Raises:
            ValueError: If it does not start, or cannot load the backbone.
        """
        try:
            return dict(self._process.ask("load", **self.load)["versions"])
        except SideFailed as error:
            raise ValueError(f"--kvpress-python {self.python} cannot run kvpress on this backbone: {error}") from error

    def answers(
        self, prompts: Sequence[Prompt], document: int | None, run: Run, task: Task
    ) -> Iterator[dict[str, Any]]:
        """Read what the prompts have in common under a press, ask each, and yield what `answering.answer` returns.

        Args:
            prompts: One prompt, or several that begin with the same document.
            document: Tokens of the document; None to read all of a single prompt but its last `local_len` tokens.
            run: The press and its budget.
            task: Says how long an answer may be, and where it ends.

        Raises:
            ValueError: If the press fails.
        """
        from locret.infer.evaluation.answering import ending, greedy

        assert self.versions
        setup, ids = prompts[0].setup, [prompt.ids_1N[0].tolist() for prompt in prompts]
        policy = run.policy_of(len(ids[0]) if document is None else document)
        assert policy is not None
        budget, local = int(policy.budget), int(policy.local_len)
        if document is None:  # a text that is hardly longer than what stays is read by the press all the same
            cut, keep = max(len(ids[0]) - local, min(_LEAST, len(ids[0]) - 1)), budget
        else:
            cut, keep = document, budget + local
        context = ids[0][:cut]
        settings = greedy(setup.model, setup.tokenizer, task.max_new_tokens)
        settings |= ending(setup.tokenizer, settings["eos_token_id"], task.stop, task.min_new_tokens)
        ends = settings["eos_token_id"]
        try:
            read = self._process.ask(
                "read",
                press=run.method.name.removeprefix(PREFIX),
                context=context,
                keep=keep,
                window=max(1, min(local, keep - 1, cut - 1)),
                free=next(token for token in range(cut + 1) if token not in context),
                asked=[one[cut:] for one in ids],
                max_new_tokens=task.max_new_tokens,
                ends=ends if isinstance(ends, list) else [ends],
                not_first=settings.get("begin_suppress_tokens", []),
            )
        except SideFailed as error:
            raise ValueError(f"method {run.method.name} failed in kvpress: {error}; leave it out") from error
        for answer in read["answers"]:
            prediction = setup.tokenizer.decode(
                answer["ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            yield {
                "prediction": str(prediction),
                "generated_tokens": len(answer["ids"]),
                "kept_units": round(read["kept_units"]["attended"]) + (len(ids[0]) - cut if document is None else 0),
                "peak_units": cut,
                "cache_bytes": read["cache_bytes"],
                "peak_bytes": max(read["peak_bytes"], answer["bytes"]),
                "prefill_seconds": read["prefill_seconds"] + answer["prefill_seconds"],
                "decode_seconds": answer["decode_seconds"],
            }
