"""From the options of `locret-eval` to a job: resolved and checked, before any weights are loaded."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from locret import loading
from locret.data.tasks import Task
from locret.infer.evaluation import output_folder, published, runner
from locret.infer.evaluation.options import SAMPLES, BudgetOptions, EvalOptions, ReportOptions
from locret.infer.evaluation.processes import Processes
from locret.infer.evaluation.published import PublishedPlan
from locret.infer.evaluation.runner import AnyPlace, Run
from locret.infer.options import ModelOptions
from locret.infer.reading_warnings import warn_of_recency
from locret.load_options import ScorerOptions
from locret.policy.policy import RetentionPolicy


@dataclass
class Job:
    """What the options come to."""

    model: ModelOptions
    scorer: ScorerOptions
    evaluation: EvalOptions
    report: ReportOptions
    processes: Processes
    tasks: list[Task]
    """The generated ones."""
    published: PublishedPlan
    """The published ones."""
    places: list[AnyPlace]
    runs: list[Run]
    policies: list[RetentionPolicy]
    heads: Any
    config: Any
    device: torch.device
    dtype: torch.dtype

    @property
    def own_device(self) -> torch.device:
        """The device of this process: CUDA devices are dealt out to the processes of a machine."""
        if self.processes.count > 1 and self.device.type == "cuda" and self.device.index is None:
            return torch.device("cuda", self.processes.local_rank % torch.cuda.device_count())
        return self.device

    def settings(self) -> dict[str, Any]:
        """Return everything that results depend on, resolved."""
        model, evaluation = self.model, self.evaluation
        longest = {} if evaluation.max_new_tokens is None else {"max_new_tokens": evaluation.max_new_tokens}
        return {
            "model": model.model,
            "revision": model.revision,
            "adapter": model.adapter,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "attn": model.attn,
            "heads": evaluation.heads,
            "methods": [method.name for method in evaluation.chosen_methods()],
            "tasks": {
                **{task.name: {"version": task.version, **task.options(), **longest} for task in self.tasks},
                **self.published.facts,
            },
            "lengths": evaluation.token_lengths(),
            "samples": evaluation.samples or (SAMPLES if self.tasks else "all"),
            "seed": evaluation.seed,
            "policies": [policy.to_dict() for policy in self.policies],
            "decoding": "greedy",
            **({} if evaluation.suite is None else {"suite": evaluation.suite}),
        }

    def plan(self) -> dict[str, Any]:
        """Return what would be done: runs, tokens, and the bytes of each policy's cache."""
        new_tokens = max(place.new_tokens for place in self.places)
        planned = []
        for policy in dict.fromkeys(one.policy for one in self.runs if one.policy is not None):
            scorer, _ = loading.load_scorer(self.scorer)
            grows = policy.needs_length or policy.when == "prompt_end"
            tokens = max(place.tokens for place in self.places) or None if grows else None
            size = loading.planned_bytes(
                self.model, self.config, self.dtype, scorer, policy, new_tokens, prompt_tokens=tokens
            )
            planned.append({**policy.to_dict(), "planned_cache_bytes": size})
        return {
            "runs": len(self.runs) * len(self.places),
            "tokens": sum(place.tokens for place in self.places) * len(self.runs),
            "policies": planned,
            "missing": self.published.missing,
            "config": self.settings(),
        }


def prepare(
    model: ModelOptions,
    evaluation: EvalOptions,
    budgets: BudgetOptions,
    report: ReportOptions,
    chosen: set[str],
    processes: Processes,
) -> Job:
    """Resolve the options, and refuse what needs neither tokenizer nor weights to be refused.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub or a disk fails.
    """
    _check_choices(evaluation, chosen)
    methods, tasks = evaluation.chosen_methods(), evaluation.chosen_tasks()
    if report.threads:
        torch.set_num_threads(report.threads)
    device = loading.resolve_device(model.device)
    # Something has to be chosen; without heads it is not used.
    scorer = ScorerOptions(
        heads=evaluation.heads,
        scorer=None if evaluation.heads else "streaming",
        allow_other_base=evaluation.allow_other_base,
    )
    heads, recommended = loading.load_scorer(scorer)
    policies = budgets.policies(chosen, recommended)
    config = loading.load_config(model)
    loading.check_matches(scorer, heads, config)
    dtype = loading.resolve_dtype(model.dtype, config, device)
    runs = runner.plan_runs(methods, policies, chosen)
    own = [task for task in tasks if isinstance(task, Task)]
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    theirs = [task for task in tasks if not isinstance(task, Task)]
    found = published.plan(theirs, evaluation, positions, partial(loading.load_tokenizer, model))
    samples, lengths = evaluation.samples or SAMPLES, evaluation.token_lengths()
    made = runner.plan_places(own, lengths, samples, evaluation.seed, evaluation.max_new_tokens)
    places: list[AnyPlace] = [*made, *found.places]
    job = Job(
        model, scorer, evaluation, report, processes, own, found, places, runs, policies, heads, config, device, dtype
    )
    if not report.dry_run:
        output_folder.check_output(report.output, job.settings(), resume=report.resume, overwrite=report.overwrite)
    _warn_about_positions(positions, runs, [place.tokens for place in places])
    for method in methods:
        warn_of_recency(method.name, method.recent, [r.policy for r in runs if r.method is method and r.policy])
    return job


def _check_choices(evaluation: EvalOptions, chosen: set[str]) -> None:
    """Refuse options that contradict a suite."""
    suite = evaluation.chosen_suite()
    if suite is None:
        return
    if "tasks" in chosen:
        raise ValueError(f"--suite {suite.name} and --tasks exclude each other; drop one of them")
    if suite.tokens is not None and "lengths" in chosen:
        raise ValueError(f"--suite {suite.name} reads {suite.tokens:,} tokens; drop --lengths, or choose another suite")


def _warn_about_positions(limit: int | None, runs: Sequence[Run], lengths: Sequence[int]) -> None:
    """Say what happens where positions go beyond what the backbone was trained on."""
    if limit is None or max(lengths) <= limit:
        return
    late = [r.method.name for r in runs if r.policy is None or r.policy.positions == "original"]
    if late:
        warnings.warn(
            f"prompts of {max(lengths):,} tokens go beyond the {limit:,} positions of this backbone, where its answers "
            f"usually fall apart; {', '.join(dict.fromkeys(late))} count positions in the text and will show it, "
            "--positions compact numbers the kept units only",
            stacklevel=2,
        )
