"""From the options of `locret-eval` to a job: resolved and checked, before any weights are loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from locret import loading, scorers
from locret.backbone.adapters import describe
from locret.base import method_spec
from locret.cache.limits import BLOCK_SCORER, Limits, check_named, with_shares
from locret.conversation.protect import QUESTION, SYSTEM
from locret.data.tasks.generated.base import GeneratedTask
from locret.data.tasks.task import SAMPLES, NoSamples, Selection, Wanted
from locret.distributed.ranks import Ranks
from locret.infer.evaluation import feasible, output_folder, runner
from locret.infer.evaluation.allotment import Allotment
from locret.infer.evaluation.eval_options import BudgetOptions, EvalOptions, ReportOptions
from locret.infer.evaluation.methods import (
    ORACLE,
    ORACLE_AGNOSTIC,
    RANDOM_ANSWER,
    Prompt,
    Setup,
    protects,
    writes_beside,
)
from locret.infer.evaluation.records import AGNOSTIC, AWARE
from locret.infer.evaluation.runner import Case, Run, Unmade
from locret.infer.evaluation.shared_text import SharedText, check_asked, document_tokens
from locret.infer.infer_options import ModelOptions
from locret.infer.methods import ANY_BUDGET, Method, check_heard
from locret.infer.reading import warn_of_recency
from locret.infer.sizing import PlannedRun
from locret.loading.options import ScorerOptions
from locret.loading.weights import plan_weights
from locret.policy.policy import RetentionPolicy
from locret.policy.protection import Span
from locret.policy.resolve import check_no_turns, check_used
from locret.scorers.chosen import check_matches, chosen_heads, load_scorer
from locret.scorers.retaining_heads import as_scorer

_OF_ROWS = ("data_dir", "data_revision", "skip_bad_rows", "max_prompt", "template")
"""Options of published tasks alone."""
_UNKNOWN = 2**17
"""Tokens of the longest prompt, for a plan, where neither the tasks nor the backbone have a limit."""


@dataclass
class Job:
    """What the options come to."""

    model: ModelOptions
    scorer: ScorerOptions
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
    heads: Any
    config: Any
    device: torch.device
    dtype: torch.dtype
    unmade: list[Unmade] = field(default_factory=list)
    """Tasks of the suite that cannot be made at a length."""
    notes: list[str] = field(default_factory=list)
    """What the user may not have expected, in sentences."""

    @property
    def own_device(self) -> torch.device:
        """The device of this process."""
        return self.processes.own_device(self.device)

    def check(self, tokenizer: Any) -> None:
        """Make all texts once, and refuse what cannot be asked of them: nothing is found out after hours.

        A suite leaves out a task at a length at which one of its samples cannot be made, and says so.

        Args:
            tokenizer: The backbone's.

        Raises:
            ValueError: If a text cannot be made, the tokenizer cannot express a task or its turns, the library of a
                metric is missing, or a protocol or method means nothing to a task; saying what to change.
        """
        for one in self.selections:
            one.task.check(tokenizer)
        self.cases, self.unmade = runner.settled(self.cases, tokenizer)
        if self.unmade and (self.evaluation.suite is None or not self.cases):
            raise ValueError(f"{self.unmade[0]}; raise --lengths, or leave the task out")
        left = {case.task.name for case in self.cases}
        self.missing |= {one.task: one.reason for one in self.unmade if one.task not in left}
        self.selections = [one for one in self.selections if one.task.name in left]
        names, systems = {method_spec.parse(run.method.name).name for run in self.runs}, False
        for one in self.selections:
            case = next(case for case in self.cases if case.task is one.task)
            sample = case.sample(tokenizer)
            systems = systems or bool(sample.system)
            one.task.score(sample.reply, sample)
            if ORACLE_AGNOSTIC in names:
                check_asked(one.task, sample)
            divided = AGNOSTIC in self.evaluation.chosen_protocols() or ORACLE_AGNOSTIC in names
            if divided or any(rule.what == QUESTION for rule in self.evaluation.protected_rules()):
                document_tokens(tokenizer, one.task, sample, case.built(tokenizer, sample))
            if self.evaluation.protect and one.task.follow_up(sample, sample.reply) is not None:
                warnings.warn(
                    f"--protect keeps nothing of the second prompts of {one.task.name}, which have the thought instead "
                    "of the text",
                    stacklevel=2,
                )
        if not systems and any(rule.what == SYSTEM for rule in self.evaluation.protected_rules()):
            raise ValueError(
                f"--protect {SYSTEM} changes nothing, for no text of {', '.join(sorted(left))} has a system message; "
                "drop it, or add such a task (niah/needle, say)"
            )
        if self.evaluation.protect:
            for one in self.selections:
                self._check_protected(tokenizer, [case for case in self.cases if case.task is one.task])
        several = self.evaluation.questions or 0
        if several > 1 and not any(case.question for case in self.cases):
            raise ValueError(
                f"--questions {several} asks several questions of a text, but no text of "
                f"{', '.join(sorted(left))} has more than one; drop it, or add such a task (multikey, say)"
            )

    def _check_protected(self, tokenizer: Any, cases: Sequence[Case]) -> None:
        """Refuse more protected units of a task's prompts than some layer may keep."""
        for case in cases:
            tokens, protected = self._protected(tokenizer, case)
            for run in self.runs:
                if run.policy is not None and protects(run.method) and protected[run.protocol]:
                    self._check_room(run, case, tokens, protected[run.protocol])

    def _check_room(self, run: Run, case: Case, tokens: int, spans: tuple[Span, ...]) -> None:
        policy = run.policy_of(tokens)
        assert policy is not None
        limits = _limits(run.method, policy, self.heads, self.config)
        limits.protect((spans,))
        try:
            limits.check_protected(0)
            limits.begin(limits.plan(tokens), [0] * limits.layers)
        except ValueError as error:
            raise ValueError(
                f"--protect, method {run.method.name}, text {case.index} of task {case.task.name}: {error}"
            ) from None

    def _protected(self, tokenizer: Any, case: Case) -> tuple[int, dict[str, tuple[Span, ...]]]:
        """Return the tokens of a prompt, and by protocol what of it is protected; the prompt itself is not kept."""
        setup = Setup(nn.Module(), tokenizer, None, 0, protect=self.evaluation.protected_rules())
        sample = case.sample(tokenizer)
        text = SharedText(setup, case.task, sample, case.template)
        prompt = Prompt(torch.tensor([case.built(tokenizer, sample).ids]), sample, setup, text)
        read = {AWARE: lambda: prompt, AGNOSTIC: lambda: prompt.document}
        rules = [rule for rule in self.evaluation.protected_rules() if rule.what == "tokens"]
        for name in self.evaluation.chosen_protocols() if rules else ():
            tokens = read[name]().ids_1N.shape[1]
            for rule in rules:
                if max(rule.start or 0, (rule.end or 0) - 1) >= tokens:
                    raise ValueError(
                        f"--protect {rule}: text {case.index} of task {case.task.name} has {tokens:,} tokens to read, "
                        f"protocol {name}; name tokens that every text has"
                    )
        spans = {name: tuple(read[name]().protected()) for name in self.evaluation.chosen_protocols()}
        return prompt.ids_1N.shape[1], spans

    def settings(self) -> dict[str, Any]:
        """Return everything that results depend on, resolved."""
        model, evaluation = self.model, self.evaluation
        usual = SAMPLES if any(one.task.family == "generated" for one in self.selections) else "all"
        return {
            "model": model.model,
            "revision": model.revision,
            "adapter": model.adapter,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "attn": model.attn,
            **model.given(),
            "heads": evaluation.heads,
            "methods": [method.name for method in evaluation.chosen_methods()],
            "tasks": {one.task.name: one.facts for one in self.selections},
            "lengths": evaluation.token_lengths(),
            "samples": evaluation.samples or usual,
            "questions": evaluation.questions,
            "batch_size": evaluation.batch_size,
            "protocols": evaluation.chosen_protocols(),
            "protect": [str(rule) for rule in evaluation.protected_rules()],
            "seed": evaluation.seed,
            "policies": [one.record() for one in self.allotments],
            "decoding": "greedy",
            **({} if evaluation.suite is None else {"suite": evaluation.suite}),
        }

    def plan(self) -> dict[str, Any]:
        """Return what would be done: runs, tokens, and the bytes of each policy's cache."""
        longest = max(case.tokens for case in self.cases) or None
        planned = []
        for policy in dict.fromkeys(one.policy for one in self.runs if one.policy is not None):
            grows = policy.plans_by_length or policy.budget == ANY_BUDGET
            run = PlannedRun(
                config=self.config,
                scorer=self.heads,
                dtype=self.dtype,
                device=self.device,
                prompt_tokens=longest if grows else None,
                new_tokens=max(one.task.max_new_tokens for one in self.selections),
                source=self.model,
            )
            planned.append({**policy.to_dict(), "not_given": policy.following(), **run.plan(policy)})
        return {
            "runs": len(self.runs) * len(self.cases),
            "tokens": sum(case.tokens for case in self.cases) * len(self.runs),
            "weights": plan_weights(self.model, self.config, self.own_device, self.dtype).to_dict(),
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
    """Resolve the options, and refuse what needs neither tokenizer nor weights to be refused.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub or a disk fails.
    """
    evaluation = replace(evaluation, heads=chosen_heads(evaluation.heads, model.model))
    _check_choices(evaluation, budgets, chosen)
    left: list[str] = []
    if not evaluation.heads and "methods" not in chosen:
        evaluation, left = evaluation.without_heads()
    methods = evaluation.chosen_methods()
    if report.threads:
        torch.set_num_threads(report.threads)
    device = loading.device_of_source(model)
    # Something has to be chosen; without heads it is not used.
    scorer = ScorerOptions(
        heads=evaluation.heads,
        scorer=None if evaluation.heads else "streaming",
        allow_other_base=evaluation.allow_other_base,
    )
    heads, recommended = load_scorer(scorer)
    allotments = budgets.allotments(chosen, recommended)
    # Refuses numbers that need no prompt to be refused.
    long = any(one.policy(1).decode_budget is not None for one in allotments)
    evaluation, methods, floor = _with_floor(evaluation, methods, long)
    config = loading.load_config(model)
    check_matches(scorer, heads, config)
    for method in methods:
        if method.scorer is not None:
            method.scorer.check_backbone(config)
    dtype = loading.resolve_dtype(model.dtype, config, device)
    feasible.check(evaluation, methods, allotments, config, device, dtype)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    found, missing = _selected(evaluation, positions, partial(loading.load_tokenizer, model))
    cases = runner.plan_cases(found, evaluation.seed, evaluation.template, evaluation.questions)
    made = [case.tokens for case in cases if case.samples.made and case.tokens]
    if made:
        allotments = budgets.fitted(recommended, min(made)).allotments(chosen, recommended)
    longest = max(case.tokens for case in cases) or positions or _UNKNOWN
    runs = runner.plan_runs(methods, allotments, longest, chosen, evaluation.chosen_protocols())
    _check_used(budgets, found, runs, chosen)
    for run in runs:
        if run.policy is not None:
            check_named(run.policy)
            try:
                _limits(run.method, run.policy, heads, config)
            except ValueError as error:
                raise ValueError(f"method {run.method.name}: {error}") from error
    asked = found, missing, cases, runs, allotments
    job = Job(model, scorer, evaluation, report, processes, *asked, heads, config, device, dtype)
    if not report.output:
        job.report = replace(report, output=_default_output(job))
    job.notes = [*floor, *_notes(job, left)]
    if not report.dry_run:
        output_folder.check_output(job.report.output, job.settings(), resume=report.resume, overwrite=report.overwrite)
    _warn_about_positions(positions, job.runs, [case.tokens for case in cases])
    for method in methods:
        warn_of_recency(method.name, method.recent, [r.policy for r in job.runs if r.method is method and r.policy])
    return job


def _limits(method: Method, policy: RetentionPolicy, heads: Any, config: Any) -> Limits:
    """Return what every layer may keep, as far as it is known before scores are.

    Raises:
        ValueError: If the method and the numbers do not go together.
    """
    scorer = as_scorer(heads) if method.needs_heads else method.scorer
    if scorer is None:  # it is made of each prompt, and keeps nothing of its own by right
        scorer = scorers.get(BLOCK_SCORER)
    shapes = describe(config).full_shapes
    return Limits(with_shares(policy, scorer, [shape.num_kv_heads for shape in shapes]), scorer, len(shapes))


def _with_floor(
    evaluation: EvalOptions, methods: list[Method], long: bool
) -> tuple[EvalOptions, list[Method], list[str]]:
    """Return the options and methods with the floor that methods must beat, where answers are evicted too, and a note.

    Args:
        evaluation: The options.
        methods: Its methods.
        long: Whether units are evicted while an answer is written.

    Raises:
        ValueError: If the floor was asked for and nothing is evicted then.
    """
    named = any(method_spec.parse(method.name).name == RANDOM_ANSWER for method in methods)
    if named and not long:
        raise ValueError(
            f"--methods {RANDOM_ANSWER} evicts an answer's units at random while it is written, but without "
            "--decode-budget none are; give it, or take random"
        )
    if named or not long or not any(map(_evicts, methods)):
        return evaluation, methods, []
    wider = replace(evaluation, methods=[*(method.name for method in methods), RANDOM_ANSWER])
    note = f"{RANDOM_ANSWER} is compared too: what random eviction scores when the prompt is kept"
    return wider, wider.chosen_methods(), [note]


def _evicts(method: Method) -> bool:
    """Return whether a method can evict what is written."""
    return not (method.keeps_all or method.plain)


def _default_output(job: Job) -> str:
    """Return a folder for the results that is the same for the same configuration, and another for any other."""
    first = job.evaluation.suite or job.selections[0].task.name
    backbone = Path(job.model.model).name or "backbone"
    return f"runs/{backbone}-{first.replace('/', '-')}-{output_folder.fingerprint(job.settings())[:8]}"


def _notes(job: Job, left: Sequence[str]) -> list[str]:
    """Return what the user may not have expected, in sentences."""
    notes = []
    if left:
        notes.append(f"--methods without {', '.join(left)}, as trained heads are needed for that; give --heads")
    own = {case.task.name: case.samples.label(0) for case in _longest(job.cases) if case.samples.made}
    named = [label for name, label in own.items() if label != name]
    if named:
        notes.append(
            f"{', '.join(named)}: our own texts stand in for the published ones, so scores are comparable with each "
            "other only; give --data-dir with the essays, and the task option words=wonderwords"
        )
    bounded = [run for run in job.runs if run.policy is not None]
    if bounded and all(_holds(run, case.tokens) for run in bounded for case in _longest(job.cases)):
        notes.append(
            "no prompt is longer than the budget and --local-len together, so nothing is evicted and all methods read "
            "alike; lower --budget, or raise --lengths"
        )
    notes += _more_than_a_share(bounded, job.cases)
    return notes


def _more_than_a_share(runs: Sequence[Run], cases: Sequence[Case]) -> list[str]:
    """Return a sentence where local tokens make up much of what stays besides a share; one is always read last."""
    shortest = min((case.tokens for case in cases if case.tokens), default=0)
    for run in runs:
        policy = run.policy_of(shortest) if run.allotment is not None and shortest else None
        if policy is not None and policy.local_len > max(1, policy.budget // 20):
            kept = min(1.0, (policy.budget + policy.local_len) / shortest)
            return [
                f"the last {policy.local_len} tokens (--local-len) stay besides a share: of {shortest:,} tokens "
                f"{kept:.0%} do; give --local-len 1 for the share alone"
            ]
    return []


def _longest(cases: Sequence[Case]) -> list[Case]:
    """Return a case of every task and length."""
    return list({(case.task.name, case.tokens): case for case in cases}.values())


def _holds(run: Run, tokens: int) -> bool:
    """Return whether a run keeps a prompt of at most so many tokens whole; 0 tokens are a prompt without a limit."""
    policy = run.policy_of(tokens) if tokens else None
    return policy is not None and policy.budget + policy.local_len >= tokens


def _selected(
    evaluation: EvalOptions, positions: int | None, tokenizer: Callable[[], Any]
) -> tuple[list[Selection], dict[str, str]]:
    """Return what is asked of every task, and which tasks of a suite are left out because their rows are missing.

    Raises:
        ValueError: If rows are missing (of a suite only if all are), bad, or leave no room.
        OSError: If the Hub or a file cannot be read.
    """
    folders, found, missing = evaluation.data_folders(), list[Selection](), dict[str, str]()
    wanted = Wanted(
        tokenizer=tokenizer,
        lengths=evaluation.token_lengths(),
        samples=evaluation.samples,
        seed=evaluation.seed,
        folders=folders,
        revision=evaluation.data_revision,
        skip_bad_rows=evaluation.skip_bad_rows,
        positions=positions,
        max_prompt=evaluation.max_prompt,
        max_new_tokens=evaluation.max_new_tokens,
        template=evaluation.template,
    )
    # Tasks that need no data come first.
    for task in sorted(evaluation.chosen_tasks(), key=lambda task: task.family != "generated"):
        try:
            found.append(task.select(wanted))
        except NoSamples as error:
            if evaluation.suite is None:
                raise
            missing[task.name] = error.reason
    if not found:
        where = "the Hub" if folders is None else f"--data-dir {', '.join(folders)}"
        name, reason = next(iter(missing.items()))
        raise ValueError(
            f"{where} has no rows of any task of --suite {evaluation.suite} ({name}: {reason}); give the folder of a "
            "local copy in its published layout"
        )
    return found, missing


def _check_choices(evaluation: EvalOptions, budgets: BudgetOptions, chosen: set[str]) -> None:
    """Refuse options that contradict a suite or a task."""
    if budgets.budget_share is not None:
        for task in evaluation.chosen_tasks():
            if task.session:
                raise ValueError(
                    f"--budget-share {budgets.budget_share} is a share of a whole prompt, and {task.name} is a session "
                    "that goes on; give --budget"
                )
    methods = [method.name for method in evaluation.named_methods()]
    if evaluation.protect and not any(map(protects, evaluation.named_methods())):
        raise ValueError(
            f"--protect {evaluation.protect[0]} changes nothing, for none of {', '.join(methods)} evicts as ours do; "
            "add a method, or drop it"
        )
    if evaluation.batch_size > 1:
        _check_batch(evaluation, budgets)
    for task in evaluation.chosen_tasks():
        if (task.session or task.asks_first) and AGNOSTIC in evaluation.chosen_protocols():
            why = "is a session, whose turns follow each other" if task.session else "asks before its document"
            raise ValueError(
                f"--protocol {AGNOSTIC} reads a document before its question, and {task.name} {why}; leave one out"
            )
        if not task.session:
            continue
        if oracles := {ORACLE, ORACLE_AGNOSTIC} & {name.partition("+")[0] for name in methods}:
            raise ValueError(
                f"method {min(oracles)} knows the answer to one prompt, and {task.name} is a session; leave one out"
            )
        if evaluation.protect:
            raise ValueError(
                f"--protect {evaluation.protect[0]} is part of one prompt, and {task.name} is a session; leave one out"
            )
    own = [name for name in _OF_ROWS if name in chosen and getattr(evaluation, name) != getattr(EvalOptions, name)]
    if own and all(isinstance(task, GeneratedTask) for task in evaluation.chosen_tasks()):
        flag, named = f"--{own[0].replace('_', '-')}", ", ".join(task.name for task in evaluation.chosen_tasks())
        raise ValueError(f"{flag} is for published tasks, but {named} are made here; add such a task, or drop {flag}")
    suite = evaluation.chosen_suite()
    if suite is None:
        return
    if "tasks" in chosen:
        raise ValueError(f"--suite {suite.name} and --tasks exclude each other; drop one of them")
    if suite.tokens is not None and "lengths" in chosen:
        raise ValueError(f"--suite {suite.name} reads {suite.tokens:,} tokens; drop --lengths, or choose another suite")


def _check_batch(evaluation: EvalOptions, budgets: BudgetOptions) -> None:
    """Refuse answers side by side where each is written alone anyway."""
    named, why = evaluation.named_methods(), ""
    if not any(map(writes_beside, named)):
        why = f"{', '.join(method.name for method in named)} write one answer at a time"
    elif all(task.session for task in evaluation.chosen_tasks()):
        why = "the turns of a session follow each other"
    elif budgets.decode_budget is not None:
        why = f"--decode-budget {budgets.decode_budget} evicts for each answer by itself"
    if why:
        raise ValueError(f"--batch-size {evaluation.batch_size} changes nothing, for {why}; drop it")


def _check_used(budgets: BudgetOptions, selections: Sequence[Selection], runs: Sequence[Run], chosen: set[str]) -> None:
    """Refuse options that change nothing, now that prompts and policies are known."""
    numbers = {name: getattr(budgets, name) for name in chosen if hasattr(budgets, name)}
    check_used(numbers, [run.policy for run in runs if run.policy is not None])
    check_no_turns(numbers)
    check_heard(numbers, {run.method.name: run.method for run in runs}.values())
    limits = {one.facts.get("prompt", {}).get("limit_from", "length") for one in selections}
    if "lengths" in chosen and "length" not in limits:
        named = ", ".join(one.task.name for one in selections)
        raise ValueError(
            f"--lengths is for prompts that are made here, but those of {named} are as long as their rows; drop it, or "
            "cut them with --max-prompt"
        )


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
