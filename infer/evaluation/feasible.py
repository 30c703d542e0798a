"""What an evaluation would take: what cannot fit, or would take months, is refused before any text is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from locret.backbone.adapters import describe
from locret.data.tasks import Task
from locret.data.tasks.task import SAMPLES
from locret.infer.evaluation.allotment import Allotment
from locret.infer.evaluation.eval_options import EvalOptions
from locret.infer.evaluation.methods import writes_beside
from locret.infer.methods import Method
from locret.infer.sizing import free_bytes
from locret.policy.budget import cache_bytes

MOST_ANSWERS = 1_000_000
"""Of one run: at one a second they take twelve days."""
MOST_TOKENS = 10**12
"""Of all prompts together: at 100,000 a second they take four months."""
_TOKEN_BYTES = 64
"""Host memory of a prompt's token while it is made: its text, its id in a list of Python, its id in a tensor."""


def check(
    evaluation: EvalOptions,
    methods: Sequence[Method],
    allotments: Sequence[Allotment],
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Refuse an evaluation that cannot end.

    Args:
        evaluation: What is compared.
        methods: Its methods.
        allotments: How much of a prompt stays.
        config: The backbone's.
        device: Where it computes.
        dtype: Of keys and values.

    Raises:
        ValueError: Naming the option that asks too much.
    """
    made = [task for task in evaluation.chosen_tasks() if type(task).sampler is not Task.sampler]
    if not made:
        return
    lengths = evaluation.token_lengths()
    samples = evaluation.samples or SAMPLES
    runs = sum(1 if method.plain or method.keeps_all else len(allotments) for method in methods)
    answers = samples * len(lengths) * len(made) * runs
    if answers > MOST_ANSWERS:
        raise ValueError(
            f"--samples {samples} comes to {answers:,} answers, which would take months; "
            f"give --samples {max(1, MOST_ANSWERS * samples // answers)} or less"
        )
    if (tokens := samples * sum(lengths) * len(made) * runs) > MOST_TOKENS:
        raise ValueError(
            f"--lengths {evaluation.lengths} comes to {tokens:,} prompt tokens, which would take months; lower "
            "--lengths or --samples"
        )
    longest = max(lengths)
    asked = evaluation.questions or max(task.questions or 1 for task in made)
    beside = min(evaluation.batch_size, samples * asked)
    host = torch.device("cpu")
    _fits(f"--lengths {longest}: the text of a prompt", longest * _TOKEN_BYTES, host, "give shorter --lengths")
    new = max(evaluation.max_new_tokens or 0, *(task.max_new_tokens for task in made))
    for method in methods:
        policies = [None] if method.plain else [method.policy(one.policy(longest)) for one in allotments]
        for policy in policies:
            # At least so many: chunks and workspaces come on top.
            units = longest if policy is None or policy.when == "prompt_end" else min(policy.budget, longest)
            shape = describe(config)
            size = cache_bytes(shape, [units + new] * len(shape.layers), dtype.itemsize)
            what = f"--methods {method.name} with --lengths {longest} and {new:,} new tokens: its cache"
            _fits(what, size, device, "leave the method out, or lower the lengths, --max-new-tokens or --budget")
            if beside > 1 and writes_beside(method):
                what = f"--batch-size {evaluation.batch_size} of {method.name} with --lengths {longest}: what it holds"
                _fits(what, beside * size, device, "lower it")


def _fits(what: str, size: int, device: torch.device, way_out: str) -> None:
    free = free_bytes(device)
    if free is not None and size > free:
        raise ValueError(
            f"{what} takes at least {size / 1e9:,.1f} GB, and {device} has {free / 1e9:,.1f} GB left; {way_out}"
        )
