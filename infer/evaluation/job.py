"""From the options of `locret-eval` to a job: resolved and checked, before any weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from locret import loading, scorers
from locret.backbone.adapters import describe
from locret.base import method_spec
from locret.cache.limits import BLOCK_SCORER, Limits, check_named
from locret.data.tasks.task import SAMPLES, NoSamples, Selection
from locret.distributed.ranks import Ranks
from locret.infer.evaluation.eval_options import ALL_METHODS, BudgetOptions, EvalOptions, ReportOptions
from locret.infer.evaluation.methods import ORACLE, document_tokens, rule
from locret.infer.evaluation.plan import Allotment, Case, Run, plan_cases, plan_runs, settled
from locret.infer.evaluation.records import AGNOSTIC, check_output, fingerprint
from locret.infer.infer_options import ModelOptions
from locret.infer.methods import Method, check_heard
from locret.infer.reading import warn_of_recency
from locret.infer.sizing import PlannedRun
from locret.loading.options import LOCRET, ScorerOptions
from locret.policy.resolve import check_no_turns, check_used
from locret.scorers.chosen import check_matches, chosen_heads, load_scorer
from locret.scorers.retaining_heads import as_scorer

_UNKNOWN = 2**17
"""Tokens of the longest prompt, for a plan, where neither the tasks nor the backbone have a limit."""


@dataclass
class Job:
    """What the options come to."""

    model: ModelOptions
    evaluation: EvalOptions
    report: ReportOptions
    processes: Ranks
    selections: list[Selection]
    """What is asked, task by task."""
    missing: dict[str, str]
    """Tasks of the suite whose rows there are not, and why."""
    cases: list[Case]
    runs: list[Run]
    allotments: list[Allotment]
    base: PlannedRun
    """The backbone and the heads, whatever is read."""
    unmade: dict[str, str] = field(default_factory=dict)
    """Tasks of the suite that cannot be made at a length, each with a sentence."""
    notes: list[str] = field(default_factory=list)
    """What the user may not have expected, in sentences."""

    @property
    def own_device(self) -> torch.device:
        return self.processes.own_device(self.base.device)

    def check(self, tokenizer: Any) -> None:
        """Refuse what cannot be asked of texts; a suite leaves out, and names, tasks that a length cannot hold."""
        self.cases, self.unmade = settled(self.cases, tokenizer)
        if self.unmade and (self.evaluation.suite is None or not self.cases):
            raise ValueError(f"{next(iter(self.unmade.values()))}; raise --lengths, or leave the task out")
        left = {case.task.name for case in self.cases}
        self.missing |= {task: reason for task, reason in self.unmade.items() if task not in left}
        self.selections = [one for one in self.selections if one.task.name in left]
        for one in self.selections:
            case = next(case for case in self.cases if case.task is one.task)
            sample = case.sample()
            one.task.score(sample.reply, sample)
            if AGNOSTIC in self.evaluation.chosen_protocols():
                document_tokens(tokenizer, one.task, sample, case.built(tokenizer, sample))
        several = self.evaluation.questions or 0
        if several > 1 and not any(case.question for case in self.cases):
            raise ValueError(
                f"--questions {several} asks several questions of a text, but no text of {', '.join(sorted(left))} has "
                "more than one; drop it, or add such a task (scbench/kv_requests, say)"
            )

    def settings(self) -> dict[str, Any]:
        """Return everything that results depend on, resolved."""
        model, evaluation = self.model, self.evaluation
        return {
            "model": model.model,
            "revision": model.revision,
            "adapter": model.adapter,
            "device": str(self.base.device),
            "dtype": str(self.base.dtype).removeprefix("torch."),
            "attn": model.attn,
            **model.given(),
            "heads": evaluation.heads,
            "methods": [method.name for method in evaluation.chosen_methods()],
            "tasks": {one.task.name: one.facts for one in self.selections},
            "lengths": evaluation.token_lengths(),
            "samples": evaluation.samples or f"{SAMPLES} that are made, or all",
            "questions": evaluation.questions,
            "protocols": evaluation.chosen_protocols(),
            "seed": evaluation.seed,
            "policies": [one.record() for one in self.allotments],
            "decoding": "greedy",
            **({} if evaluation.suite is None else {"suite": evaluation.suite}),
        }

    def plan(self) -> dict[str, Any]:
        """Return what would be done: runs, tokens, and the bytes of each policy's cache."""
        longest, planned = max(case.tokens for case in self.cases) or None, []
        answer = max(one.task.max_new_tokens for one in self.selections)
        for policy in dict.fromkeys(one.policy for one in self.runs if one.policy is not None):
            run = replace(self.base, prompt_tokens=longest if policy.plans_by_length else None, new_tokens=answer)
            planned.append({**policy.to_dict(), "not_given": policy.following(), **run.plan(policy)})
        return {
            "runs": len(self.runs) * len(self.cases),
            "tokens": sum(case.tokens for case in self.cases) * len(self.runs),
            "weights": replace(self.base, device=self.own_device).weights.to_dict(),
            "policies": planned,
            "missing": self.missing,
            "output": self.report.output,
            "notes": self.notes,
            "config": self.settings(),
        }


def prepare(
    model: ModelOptions,
    evaluation: EvalOptions,
    budgets: BudgetOptions,
    report: ReportOptions,
    chosen: set[str],
    processes: Ranks,
) -> Job:
    """Resolve the options, and refuse what needs neither tokenizer nor weights to be refused."""
    named = [one.partition("+")[0].partition(":")[0] for one in method_spec.split(evaluation.methods)]
    usual = "methods" not in chosen or LOCRET in named
    evaluation = replace(evaluation, heads=chosen_heads(evaluation.heads, model, usual=usual))
    headless = not evaluation.heads and "methods" not in chosen
    if headless:
        evaluation = replace(evaluation, methods=ALL_METHODS.replace("locret,", ""))
    methods = evaluation.chosen_methods()
    _check_choices(evaluation, budgets, methods, chosen)
    device = loading.device_of_source(model)
    # Something has to be chosen; without heads it is not used.
    scorer = ScorerOptions(
        heads=evaluation.heads,
        scorer=None if evaluation.heads else "streaming",
        allow_other_base=evaluation.allow_other_base,
    )
    heads, recommended = load_scorer(scorer)
    allotments = budgets.allotments(chosen, recommended)
    for one in allotments:  # refuses numbers that need no prompt to be refused
        one.policy(1)
    config = loading.load_config(model)
    check_matches(scorer, heads, config)
    for method in methods:
        if method.scorer is not None:
            method.scorer.check_backbone(config)
    dtype = loading.resolve_dtype(model.dtype, config, device)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    found, missing = _selected(evaluation, positions, cache(partial(loading.load_tokenizer, model)))
    cases = plan_cases(found, evaluation.seed, evaluation.template, evaluation.questions)
    made = [case.tokens for case in cases if case.samples.made and case.tokens]
    if made:
        allotments = budgets.fitted(recommended, min(made)).allotments(chosen, recommended)
    longest = max(case.tokens for case in cases) or positions or _UNKNOWN
    runs = plan_runs(methods, allotments, longest, chosen, evaluation.chosen_protocols())
    _check_used(budgets, found, runs, chosen)
    for run in runs:
        if run.policy is not None:
            check_named(run.policy)
            try:
                # A scorer that is made of each prompt keeps nothing of its own by right.
                rates = as_scorer(heads) if run.method.needs_heads else run.method.scorer
                Limits.of(describe(config), rates or scorers.get(BLOCK_SCORER), run.policy)
            except ValueError as error:
                raise ValueError(f"method {run.method.name}: {error}") from error
    base = PlannedRun(config=config, scorer=heads, dtype=dtype, device=device, source=model)
    job = Job(model, evaluation, report, processes, found, missing, cases, runs, allotments, base)
    if not report.output:
        first = (evaluation.suite or found[0].task.name).replace("/", "-")
        configuration = fingerprint(job.settings())[:8]
        job.report = replace(report, output=f"runs/{Path(model.model).name or 'backbone'}-{first}-{configuration}")
    job.notes = _notes(job, headless)
    if not report.dry_run:
        check_output(job.report.output, job.settings(), resume=report.resume, overwrite=report.overwrite)
    for method in methods:
        warn_of_recency(method.name, method.recent, [r.policy for r in job.runs if r.method is method and r.policy])
    return job


def _notes(job: Job, headless: bool) -> list[str]:
    """Return what the user may not have expected, in sentences."""
    notes = ["--methods without locret, as trained heads are needed for that; give --heads"] if headless else []
    bounded, lengths = [run for run in job.runs if run.policy is not None], {case.tokens for case in job.cases}
    reads = [(run.policy_of(tokens) if tokens else None, tokens) for run in bounded for tokens in lengths]
    if reads and all(policy is not None and policy.budget + policy.local_len >= tokens for policy, tokens in reads):
        notes.append(
            "no prompt is longer than the budget and --local-len together, so nothing is evicted and all methods read "
            "alike; lower --budget, or raise --lengths"
        )
    return notes


def _selected(
    evaluation: EvalOptions, positions: int | None, tokenizer: Callable[[], Any]
) -> tuple[list[Selection], dict[str, str]]:
    """Return what is asked of every task, and which tasks of a suite are left out because their rows are missing."""
    found, missing, wanted = list[Selection](), dict[str, str](), evaluation.wanted(tokenizer, positions)
    for task in evaluation.chosen_tasks():
        try:
            found.append(task.select(wanted))
        except NoSamples as error:
            if evaluation.suite is None:
                raise
            missing[task.name] = error.reason
    if not found:
        where = "the Hub" if wanted.folders is None else f"--data-dir {', '.join(wanted.folders)}"
        name, reason = next(iter(missing.items()))
        raise ValueError(
            f"{where} has no rows of any task of --suite {evaluation.suite} ({name}: {reason}); give the folder of a "
            "local copy in its published layout"
        )
    return found, missing


def _check_choices(
    evaluation: EvalOptions, budgets: BudgetOptions, methods: Sequence[Method], chosen: set[str]
) -> None:
    """Refuse options that contradict a suite or a task."""
    agnostic = AGNOSTIC in evaluation.chosen_protocols()
    for task in evaluation.chosen_tasks():
        clash = None
        if agnostic and (task.session or task.asks_first):
            clash = f"--protocol {AGNOSTIC} reads a document before its question", "asks before its document"
        elif task.session and budgets.budget_share is not None:
            clash = f"--budget-share {budgets.budget_share} is a share of a whole prompt", ""
        elif task.session and ORACLE in map(rule, methods):
            clash = f"method {ORACLE} knows the answer to one prompt", ""
        if clash is not None:
            why = "is a session, whose turns follow each other" if task.session else clash[1]
            raise ValueError(f"{clash[0]}, and {task.name} {why}; leave one out")
    suite = evaluation.chosen_suite()
    if suite is not None and suite.tokens is not None and "lengths" in chosen:
        raise ValueError(f"--suite {suite.name} reads {suite.tokens:,} tokens; drop --lengths, or choose another suite")


def _check_used(budgets: BudgetOptions, selections: Sequence[Selection], runs: Sequence[Run], chosen: set[str]) -> None:
    """Refuse options that change nothing, now that prompts and policies are known."""
    numbers = {name: getattr(budgets, name) for name in chosen if hasattr(budgets, name)}
    check_used(numbers, [run.policy for run in runs if run.policy is not None])
    check_no_turns(numbers)
    check_heard(numbers, {run.method.name: run.method for run in runs}.values())
    limits = {one.facts.get("limit_from", "length") for one in selections}
    if "lengths" in chosen and "length" not in limits:
        raise ValueError(
            f"--lengths is for prompts that are made here, but those of {', '.join(o.task.name for o in selections)} "
            "are as long as their rows; drop it, or cut them with --max-prompt"
        )
