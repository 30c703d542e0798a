"""The pictures of an evaluation that need the backbone: what is kept step by step, and how consistent scores are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tqdm.auto import tqdm

from locret.infer.evaluation import consistency
from locret.infer.evaluation.consistency_figure import write_consistency
from locret.infer.evaluation.methods import Setup, knows_answers, make_scorer
from locret.infer.evaluation.presses import is_press
from locret.infer.evaluation.protocols import AWARE
from locret.infer.evaluation.retention_steps import write_retention_steps
from locret.infer.evaluation.runner import Case, Run, ask

TEXTS = 3
"""Texts that the consistency is averaged over."""
MOST_TOKENS = 6144
"""Longest text whose consistency is measured (Locret, Figure 1: 6K tokens); its time grows with the square."""


def write(setup: Setup, output: Path, cases: Sequence[Case], runs: Sequence[Run], *, quiet: bool = False) -> list[str]:
    """Draw what each method keeps of one sample, and the consistency of its scores.

    Args:
        setup: The backbone and what scorers are made from.
        output: Folder that exists.
        cases: The samples of the evaluation.
        runs: Its methods and policies; each method is shown with its smallest budget.
        quiet: Show no progress bar, which is only seen in a terminal anyway.

    Returns:
        Names of the files written; none if only the plain cache, or published tasks alone, were evaluated.
    """
    shown = [case for case in cases if case.task.pictured and not case.question]
    if not shown:
        return []
    smallest: dict[str, Run] = {}
    for run in runs:
        # The first tier of some shows nothing of the method, and what a press keeps stays in its process.
        if run.policy is None or run.method.adapt is not None or is_press(run.method):
            continue
        name = run.method.name if run.protocol == AWARE else f"{run.method.name}, {run.protocol}"
        held = smallest.get(name)
        if held is None or held.policy is None or run.policy.budget < held.policy.budget:
            smallest[name] = run
    if not smallest:
        return []
    longest = max(case.tokens for case in shown)
    candidates = [case for case in shown if case.tokens == longest and case.task is shown[0].task]
    prompt, _ = ask(setup, candidates[len(candidates) // 3])
    names: list[str] = []
    off = True if quiet else None
    for name, run in tqdm(smallest.items(), desc="drawing what is kept", unit="method", disable=off):
        read = prompt if run.protocol == AWARE else prompt.document
        policy = run.policy_of(read.ids_1N.shape[1])
        assert policy is not None
        if read.ids_1N.shape[1] <= policy.chunk_size + policy.local_len:
            continue  # one chunk: nothing is ever evicted step by step
        names += write_retention_steps(output, read, {name: make_scorer(run.method, read)}, policy)
    short = [case for case in shown if case.task.name == shown[0].task.name and case.tokens <= MOST_TOKENS]
    if short:
        names += _consistency(setup, output, short, list(smallest.values()), off)
    return names


def _consistency(setup: Setup, output: Path, cases: Sequence[Case], runs: Sequence[Run], off: bool | None) -> list[str]:
    longest = max(case.tokens for case in cases)
    prompts = [ask(setup, case)[0] for case in cases if case.tokens == longest][:TEXTS]
    # Prompts fill the length asked for to within a sentence; means need prefixes that all of them have.
    prefixes = consistency.default_prefixes(min(prompt.ids_1N.shape[1] for prompt in prompts))
    measured = []
    for prompt in tqdm(prompts, desc="comparing scores of prefixes", unit="text", disable=off):
        policy = runs[0].policy_of(prompt.ids_1N.shape[1])
        assert policy is not None
        own = [run.method for run in runs if not knows_answers(run.method.name)]
        methods = {method.name: make_scorer(method, prompt) for method in own}
        measured.append(consistency.measure(setup.model, prompt.ids_1N, methods, policy, prefixes, prompt.labels))
    return write_consistency(output, consistency.average(prefixes, measured))
