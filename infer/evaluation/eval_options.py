"""The options of `locret-eval`: a field is a flag and a key of a recipe; lists are written `a,b` or as YAML lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from locret.base import method_spec
from locret.base.fields import OptionClass, Range, check_ranges
from locret.conversation.protect import TEMPLATES
from locret.data import tasks
from locret.data.tasks import Task
from locret.data.tasks.published import suites
from locret.data.tasks.task import Wanted
from locret.infer.evaluation.plan import Allotment
from locret.infer.evaluation.records import AWARE, PROTOCOLS
from locret.infer.infer_options import ShardedModelOptions
from locret.policy.planned_bytes import share_of
from locret.policy.policy import RetentionPolicy
from locret.policy.resolve import PolicyFlags

if TYPE_CHECKING:
    from locret.infer.methods import Method

LONGEST, MOST_SAMPLES, MOST_QUESTIONS = 1 << 27, 1_000_000, 10_000
"""Tokens of a prompt, samples of a task and questions of a text beyond which an evaluation would take months."""

ALL_METHODS = "full,locret,random,streaming"
Numbers = int | str | list[int | str]
Names = str | list[str]
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class EvalOptions(
    OptionClass,
    usual=("suite", "heads", "methods", "tasks", "lengths", "samples", "protocol", "data_dir", "max_prompt"),
):
    """What is compared, and on what."""

    heads: str | None = None
    """Trained retaining heads: a folder, or a Hub id; `locret` needs them."""
    allow_other_base: bool = False
    """Accept heads of another backbone of the same shape (a fine-tuned one, say)."""
    methods: Names = ALL_METHODS
    """Methods, with options and modifiers, such as full,snapkv:kernel=7,pooling=max,locret+pyramid; scorers of your own
    as package.module:Class or file.py:Class. --list names ours. If not given, those that need heads are left out
    without --heads."""
    tasks: Names = "passkey,number,multikey"
    """Tasks; --list names them."""
    suite: str | None = None
    """Instead of --tasks: the tasks of a published table with its order and average; --list names them. The suite real
    has options of its own: locret-eval --suite real --help."""
    published: bool = False
    """Show the rows that papers print for the suite next to ours."""
    task_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of tasks, in a recipe: {leval/codeU: {prompt_style: official}}."""
    lengths: Numbers = 2048
    """Tokens of prompt and answer together where prompts are made to a length, such as 2048,8192."""
    samples: int | None = None
    """Samples per task and length, needles at evenly spread depths; rows of a published task, taken evenly from its
    file. None: 100 samples, all rows."""
    questions: int | None = None
    """Most questions of each text, of all that its task could ask of it; none: as many as its published protocol asks,
    else the one that is the sample's own."""
    protocol: Names = AWARE
    """aware: the question stands in the prompt while that is read; agnostic: the document is read and evicted to the
    budget first, and each question comes afterwards, on a fork; or both, aware,agnostic."""
    data_dir: Names | None = None
    """Local copies of published data, such as ~/data or ~/infinitebench,~/leval; none: the Hub, at pinned revisions."""
    max_prompt: int | None = None
    """Most tokens of a published task's prompt; none: its protocol's, or the backbone's positions if they are fewer."""
    max_new_tokens: int | None = None
    """Longest answer, where its protocol's is longer."""
    template: str = "chat"
    """How tasks that are chat turns become text: chat, original or none. Completion tasks get no template."""
    seed: int = 0
    """Seed of the samples, and of random eviction."""
    exclusive: ClassVar = (("suite", "tasks"),)

    def __post_init__(self) -> None:
        bounds = {"samples": Range(1, MOST_SAMPLES), "questions": Range(1, MOST_QUESTIONS)}
        bounds |= {"max_prompt": Range(2, LONGEST), "max_new_tokens": Range(1, LONGEST)}
        check_ranges(self, {"template": TEMPLATES, **bounds})
        numbers(self.lengths, "--lengths")
        if self.published and self.suite is None:
            raise ValueError("--published shows the rows of a suite's table; give --suite, or drop it")
        for name in self.chosen_protocols():
            if name not in PROTOCOLS:
                raise ValueError(
                    f"--protocol {name} is unknown; choose {' or '.join(PROTOCOLS)}, or {','.join(PROTOCOLS)}"
                )
        names = [task.name for task in self.chosen_tasks()]
        for name in self.task_options:
            if tasks.get(name).name not in names:
                raise ValueError(f"--task-options speaks of {name}, which is not among --tasks; add it or drop them")

    def chosen_suite(self) -> suites.Suite | None:
        """Return the suite; one of that name that there is not is refused."""
        return None if self.suite is None else suites.get(self.suite)

    def token_lengths(self) -> list[int]:
        suite = self.chosen_suite()
        return numbers(self.lengths, "--lengths") if suite is None or suite.tokens is None else [suite.tokens]

    def chosen_protocols(self) -> list[str]:
        """Return what is known of a question while its text is read."""
        return words(self.protocol, "--protocol")

    def chosen_tasks(self) -> list[Task]:
        """Return the tasks with their options; unknown ones are refused."""
        suite = self.chosen_suite()
        named = words(self.tasks, "--tasks") if suite is None else suite.tasks
        own = {tasks.get(name).name: options for name, options in self.task_options.items()}
        return [tasks.get(name, **own.get(tasks.get(name).name, {})) for name in named]

    def wanted(self, tokenizer: Callable[[], Any], positions: int | None = None) -> Wanted:
        """Return what is asked of every task, of a backbone with so many positions."""
        return Wanted(
            tokenizer=tokenizer,
            lengths=self.token_lengths(),
            samples=self.samples,
            seed=self.seed,
            folders=None if self.data_dir is None else words(self.data_dir, "--data-dir"),
            positions=positions,
            max_prompt=self.max_prompt,
            max_new_tokens=self.max_new_tokens,
            template=self.template,
        )

    def chosen_methods(self) -> list[Method]:
        from locret.infer.evaluation import methods  # imports torch

        chosen = list({method.name: method for method in map(methods.get, method_spec.split(self.methods))}.values())
        if not chosen:
            raise ValueError("--methods is empty; name at least one (--list shows what there is)")
        for method in chosen:
            if method.needs_heads and not self.heads:
                raise ValueError(f"--methods {method.name} needs trained heads; give --heads, or leave it out")
        return chosen


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(PolicyFlags, usual=("budget", "budget_share")):
    """How many units stay, for every method; NAME+pyramid and the like change one. What is not given follows."""

    budget: Numbers | None = None  # type: ignore[assignment]
    """Cache units kept per KV head and layer after a chunk, such as 256,128; the same for every method. If
    neither given nor recommended by heads, at most an eighth of the shortest prompt that is made here."""
    budget_share: float | str | list[float] | None = None
    """Instead of --budget: shares of every prompt's tokens, such as 0.1,0.2. Stabilizers are then at most a quarter of
    what a prompt gets."""
    exclusive: ClassVar = (("budget", "budget_share"),)

    def fitted(self, recommended: dict[str, Any], shortest: int) -> BudgetOptions:
        """Return the options with a budget that fits prompts of `shortest` tokens, where nobody gave one.

        The default is the paper's, for prompts of 128K tokens; it would hold a short prompt whole.
        """
        given = self.budget is not None or self.budget_share is not None or "budget" in recommended
        fits = max(1, shortest // 8)
        return self if given or fits >= RetentionPolicy.budget else replace(self, budget=fits)

    def allotments(self, chosen: Collection[str], recommended: dict[str, Any]) -> list[Allotment]:
        """Return what stays, for every budget or share, with what heads recommend."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name in chosen and f.name != "budget_share"}
        if self.budget is not None:
            own["budget"] = self.budget
        if self.budget_share is not None:
            found = listed(self.budget_share, lambda text: float(share_of(text)), "--budget-share", "0.1,0.2")
            return [Allotment(own, recommended, share) for share in found]
        budgets = [] if own.get("budget") is None else numbers(own["budget"], "--budget")
        return [Allotment({**own, "budget": one}, recommended) for one in budgets] or [Allotment(own, recommended)]


@dataclass(frozen=True, kw_only=True)
class ReportOptions(OptionClass, usual=("output", "resume", "list", "json", "dry_run", "quiet")):
    """What is written, and how a run goes on."""

    output: str = ""
    """Folder for samples.jsonl, results.json, results.md. If not given, one in runs/ whose name says
    the backbone and the first task, with the start of the configuration's hash."""
    resume: bool = False
    """Go on with an interrupted run in the output folder; it may have more methods then."""
    overwrite: bool = False
    """Replace what an earlier run left in the output folder."""
    list: bool = False
    """Print the tasks and methods there are, and stop."""
    json: bool = False
    """Print results.json on standard output instead of the table."""
    dry_run: bool = False
    """Print the resolved options, the number of runs and the planned cache bytes; load and write nothing."""
    quiet: bool = False
    """No progress bar and no warnings."""

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise ValueError("--resume and --overwrite exclude each other; drop one of them")


OPTION_CLASSES = (ShardedModelOptions, EvalOptions, BudgetOptions, ReportOptions)


def listed(value: Any, read: Callable[[str], Value], flag: str, example: str) -> list[Value]:
    """Return the parts of `a,b`, [a, b] or a number, without repeats."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    try:
        found = list(dict.fromkeys(read(text) for part in parts if (text := str(part).strip())))
    except ValueError as error:
        raise ValueError(
            f"{flag} {value} is not possible ({str(error).partition(';')[0]}); write it like {example}"
        ) from None
    if not found:
        raise ValueError(f"{flag} is empty; write it like {example} (--list shows what there is)")
    return found


def numbers(value: Numbers, flag: str, least: int = 1) -> list[int]:
    """Return the numbers of `1,2`, `2K` (2,048), `1M`, 1 or [1, 2]; errors are those of all lists."""

    def number(text: str) -> int:
        found = re.fullmatch(r"(\d{1,12})([KM]?)", text.upper().replace("_", ""))
        count = int(found[1]) * {"": 1, "K": 1024, "M": 1024**2}[found[2]] if found else -1
        if not least <= count <= LONGEST:
            raise ValueError(f"{text} is not a whole number of {least:,} to {LONGEST:,}")
        return count

    return listed(value, number, flag, "256,128 or 2K")


def words(value: str | list[Any], flag: str) -> list[str]:
    """Return the names of `a,b` or [a, b]; errors are those of all lists."""
    return listed(value, str, flag, "a,b")
