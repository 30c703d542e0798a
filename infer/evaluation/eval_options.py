"""The options of `locret-eval`: a field is a flag and a key of a recipe; lists are written `a,b` or as YAML lists."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from locret.base import method_spec
from locret.base.fields import check_threads
from locret.conversation.protect import QUESTION, SYSTEM, TEMPLATES, Rule, rules_of
from locret.data import tasks
from locret.data.tasks import Task
from locret.data.tasks.published import suites
from locret.infer.evaluation.allotment import Allotment
from locret.infer.evaluation.records import AGNOSTIC, AWARE, PROTOCOLS
from locret.infer.infer_options import ModelOptions
from locret.policy.budget import units_of_share
from locret.policy.policy import RetentionPolicy
from locret.policy.resolve import PolicyFlags

if TYPE_CHECKING:
    from locret.infer.methods import Method

MOST_QUESTIONS = 10_000
"""Of a text; those that are made here have some 40, one full of facts as many as it has lines."""

Numbers = int | str | list[int]
Shares = float | str | list[float]
Names = str | list[str]
Methods = str | list[str | dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PublishedOptions:
    """Published tasks: where their rows lie, and what may differ from their protocols."""

    usual: ClassVar[tuple[str, ...]] = ("suite", "data_dir")

    suite: str | None = None
    """Instead of --tasks: the tasks of a published table with its order and average; --list names them. The suite real
    has options of its own: locret-eval --suite real --help."""
    published: bool = False
    """Show the rows that papers print for the suite next to ours."""
    data_dir: Names | None = None
    """Local copies of published data, such as ~/data or ~/infinitebench,~/leval; none: the Hub, at pinned revisions."""
    data_revision: str | None = None
    """Branch, tag or commit of published data on the Hub, instead of the pinned one."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be asked (no answer, empty context, wrong type), and count them."""
    max_prompt: int | None = None
    """Most tokens of a published task's prompt; none: its protocol's, or the backbone's positions if they are fewer."""
    max_new_tokens: int | None = None
    """Longest answer: instead of a generated task's own limit, which fits the embedded backbone's tokenizer; for a
    published task only where its protocol's is longer."""
    template: str = "chat"
    """How published tasks that are chat turns become text: chat, original or none. Completion tasks get no template."""

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise ValueError(f"--template {self.template} is unknown; choose one of {', '.join(TEMPLATES)}")
        for name, least in (("max_prompt", 2), ("max_new_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} {value} is too small; give {least} or more")
        if self.published and self.suite is None:
            raise ValueError("--published shows the rows of a suite's table; give --suite, or drop it")
        if self.data_revision and self.data_dir is not None:
            raise ValueError(f"--data-revision {self.data_revision} is of no use with --data-dir; drop one of them")

    def data_folders(self) -> list[str] | None:
        """Return the local copies, None for the Hub."""
        return None if self.data_dir is None else words(self.data_dir, "--data-dir")

    def chosen_suite(self) -> suites.Suite | None:
        """Return the suite.

        Raises:
            ValueError: If there is none of that name.
        """
        return None if self.suite is None else suites.get(self.suite)


@dataclass(frozen=True, kw_only=True)
class EvalOptions(PublishedOptions):
    """What is compared, and on what."""

    usual: ClassVar[tuple[str, ...]] = ("heads", "methods", "tasks", "lengths", "samples", "protocol")

    heads: str | None = None
    """Trained retaining heads: a folder, or a Hub id; `locret` needs them."""
    allow_other_base: bool = False
    """Accept heads of another backbone of the same shape (a fine-tuned one, say)."""
    methods: Methods = "full,locret,untrained,random,streaming"
    """Methods, with options and modifiers, such as full,snapkv:kernel=7,pooling=max,locret+pyramid, or in a recipe
    {snapkv: {kernel: 7}}; scorers of your own as package.module:Class or file.py:Class. --list names ours. If not
    given, those that need heads are left out without --heads."""
    tasks: Names = "passkey,number,multikey"
    """Tasks; --list names them."""
    task_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of tasks, in a recipe: {multikey: {keys: 12}}."""
    lengths: Numbers = 2048
    """Tokens of the whole chat prompt, such as 2048,8192."""
    samples: int | None = None
    """Samples per task and length, the needle of sample i at depth (i + 0.5) / samples; rows of a published task, taken
    evenly from its file. None: 100 samples, all rows."""
    questions: int | None = None
    """Most questions of each text, of all that its task could ask of it; none: as many as its published protocol asks,
    else the one that is the sample's own."""
    batch_size: int = 1
    """Most answers that are written side by side, of one task and method: faster where one does not keep the processor
    busy, for the room of as many forks. Each is read by itself; transformers' own cache and answers that are
    evicted while they are written take one at a time. The seconds of an answer are its share."""
    protocol: Names = AWARE
    """aware: the question stands in the prompt while that is read; agnostic: the document is read and evicted to the
    budget first, and each question comes afterwards, on a fork; or both, aware,agnostic."""
    protect: list[str] = field(default_factory=list)
    """What of each prompt stays whatever its scores, in every method of ours that evicts, each with a --protect of its
    own: system, the system message of tasks that have one; question, where it is known while its text is read; or
    tokens:A-B; with a least share of the budget, as system=0.25, instead of all its units."""
    seed: int = 0
    """Seed of the samples, of random eviction and of untrained heads."""
    exclusive: ClassVar = (("suite", "tasks"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"--samples {self.samples} leaves nothing to measure; give 1 or more")
        if min(numbers(self.lengths, "--lengths")) < 1:
            raise ValueError(f"--lengths {self.lengths} holds a text without tokens; give 1 or more")
        if self.batch_size < 1:
            raise ValueError(f"--batch-size {self.batch_size} answers nothing; give 1 or more")
        if (asked := self.questions) is not None and asked < 1:
            raise ValueError(f"--questions {asked} asks nothing; give 1 or more, or leave it out")
        if asked is not None and asked > MOST_QUESTIONS:
            raise ValueError(f"--questions {asked} are more than any text has; give {MOST_QUESTIONS} or less")
        self.chosen_protocols()
        self.protected_rules()
        names = [task.name for task in self.chosen_tasks()]
        for name in self.task_options:
            if name not in names:
                raise ValueError(f"--task-options speaks of {name}, which is not among --tasks; add it or drop them")

    def token_lengths(self) -> list[int]:
        """Return the prompt lengths in tokens."""
        suite = self.chosen_suite()
        return numbers(self.lengths if suite is None or suite.tokens is None else suite.tokens, "--lengths")

    def chosen_protocols(self) -> list[str]:
        """Return what is known of a question while its text is read.

        Raises:
            ValueError: For an unknown protocol.
        """
        named = words(self.protocol, "--protocol")
        for name in named:
            if name not in PROTOCOLS:
                raise ValueError(
                    f"--protocol {name} is unknown; choose {' or '.join(PROTOCOLS)}, or {','.join(PROTOCOLS)}"
                )
        return named

    def protected_rules(self) -> tuple[Rule, ...]:
        """Return what of each prompt is protected.

        Raises:
            ValueError: If that is nothing that a task's prompt has.
        """
        try:
            rules = rules_of(self.protect)
        except ValueError as error:
            raise ValueError(str(error).replace("protect=", "--protect ")) from None
        for rule in rules:
            if rule.what not in (SYSTEM, QUESTION, "tokens"):
                raise ValueError(
                    f"--protect {rule} is no part that every prompt has; give {SYSTEM}, {QUESTION}, or tokens:A-B"
                )
            if rule.what == QUESTION and self.chosen_protocols() == [AGNOSTIC]:
                raise ValueError(
                    f"--protect {rule} changes nothing, for --protocol {AGNOSTIC} asks when all has been evicted; add "
                    f"{AWARE}, or drop it"
                )
        return rules

    def chosen_tasks(self) -> list[Task]:
        """Return the tasks with their options.

        Raises:
            ValueError: For an unknown task or option.
        """
        suite = self.chosen_suite()
        names = words(self.tasks, "--tasks") if suite is None else suite.tasks
        return [tasks.get(name, **self.task_options.get(name, {})) for name in names]

    def without_heads(self) -> tuple[EvalOptions, list[str]]:
        """Return the options with methods that need no heads, and the names of those that were left out."""
        named = self.named_methods()
        kept: Methods = [method.name for method in named if not method.needs_heads]
        return replace(self, methods=kept), [method.name for method in named if method.needs_heads]

    def chosen_methods(self) -> list[Method]:
        """Return the methods.

        Raises:
            ValueError: For an unknown method, or one that needs --heads.
        """
        chosen = self.named_methods()
        for method in chosen:
            if method.needs_heads and not self.heads:
                raise ValueError(f"--methods {method.name} needs trained heads; give --heads, or leave it out")
        return chosen

    def named_methods(self) -> list[Method]:
        """Return the methods, whether or not there are heads for them.

        Raises:
            ValueError: For an unknown method.
        """
        from locret.infer.evaluation import methods  # imports torch

        named = method_spec.split(self.methods)
        if not named:
            raise ValueError("--methods is empty; name at least one (--list shows what there is)")
        return list({method.name: method for method in map(methods.get, named)}.values())


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(PolicyFlags):
    """How many units stay, for every method; NAME+pyramid and the like change one. What is not given follows."""

    usual: ClassVar[tuple[str, ...]] = ("budget", "budget_share")

    budget: Numbers | None = None  # type: ignore[assignment]
    """Cache units kept per KV head and layer after a chunk, such as 256,128; the same for every method. If
    neither given nor recommended by heads, at most an eighth of the shortest prompt that is made here."""
    budget_share: Shares | None = None
    """Instead of --budget: shares of every prompt's tokens, such as 0.1,0.2. Stabilizers are then at most a quarter of
    what a prompt gets."""
    chunk_size: Numbers | None = None  # type: ignore[assignment]
    """Prompt tokens per forward pass; several make an ablation."""
    stabilizers: Numbers | None = None  # type: ignore[assignment]
    """Newest units kept unconditionally after every chunk but the last; several make an ablation."""

    def fitted(self, recommended: dict[str, Any], shortest: int) -> BudgetOptions:
        """Return the options with a budget that fits prompts of `shortest` tokens, where nobody gave one.

        The default is the paper's, for prompts of 128K tokens; it would hold a short prompt whole.
        """
        given = self.budget is not None or self.budget_share is not None or "budget" in recommended
        fits = max(1, shortest // 8)
        return self if given or fits >= RetentionPolicy.budget else replace(self, budget=fits)

    def allotments(self, chosen: Collection[str], recommended: dict[str, Any]) -> list[Allotment]:
        """Return every combination of budget or share, stabilizers and chunk size.

        Args:
            chosen: Names of the options that the user set.
            recommended: The heads' policy; may be empty.

        Raises:
            ValueError: If numbers are out of range, or a budget is smaller than the units that are protected.
        """
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name in chosen and f.name != "budget_share"}
        if self.budget is not None:
            own["budget"] = self.budget
        if self.budget_share is not None and "budget" in own:
            both = f"--budget {self.budget} and --budget-share {self.budget_share}"
            raise ValueError(f"{both} exclude each other; drop one of them")
        flags = {name: f"--{name.replace('_', '-')}" for name in ("budget", "stabilizers", "chunk_size")}
        lists = {name: numbers(own[name], flag) for name, flag in flags.items() if own.get(name) is not None}
        parts = [None] if self.budget_share is None else shares(self.budget_share)
        return [
            Allotment({**own, **dict(zip(lists, values, strict=True))}, recommended, share)
            for share, *values in product(parts, *lists.values())
        ]


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What is written, and how a run goes on."""

    usual: ClassVar[tuple[str, ...]] = ("output", "resume", "list", "json", "dry_run", "quiet")

    output: str = ""
    """Folder for samples.jsonl, results.json, results.md and the pictures. If not given, one in runs/ whose name says
    the backbone and the first task, with the start of the configuration's hash."""
    resume: bool = False
    """Go on with an interrupted run in the output folder."""
    overwrite: bool = False
    """Replace what an earlier run left in the output folder."""
    figures: str = "all"
    """all or none. Pictures need locret[eval]; without it the rest is written all the same."""
    list: bool = False
    """Print the tasks and methods there are, and stop."""
    json: bool = False
    """Print results.json on standard output instead of the table."""
    dry_run: bool = False
    """Print the resolved options, the number of runs and the planned cache bytes; load and write nothing."""
    threads: int = 0
    """CPU threads; 0 leaves them to PyTorch."""
    quiet: bool = False
    """No progress bar and no warnings."""

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ValueError(f"--threads {self.threads} is negative; give 1 or more, or 0 to leave it to PyTorch")
        check_threads(self.threads)
        if self.figures not in ("all", "none"):
            raise ValueError(f"--figures {self.figures} is unknown; choose all or none")
        if self.resume and self.overwrite:
            raise ValueError("--resume and --overwrite exclude each other; drop one of them")


OPTION_CLASSES = (ModelOptions, EvalOptions, BudgetOptions, ReportOptions)


def _parts(value: Any) -> list[str]:
    """Return the parts of `a,b`, [a, b] or a number."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return [str(part).strip() for part in parts]


def numbers(value: Numbers, flag: str) -> list[int]:
    """Return the numbers of `1,2`, `2K` (2,048), 1 or [1, 2], without repeats.

    Raises:
        ValueError: For anything else.
    """
    try:
        found = [int(text[:-1]) * 1024 if text[-1:] in ("k", "K") else int(text) for text in _parts(value)]
    except ValueError:
        raise ValueError(f"{flag} {value} is not a list of whole numbers; write it like 256,128 or 2K") from None
    return list(dict.fromkeys(found))


def shares(value: Shares) -> list[float]:
    """Return the shares of `0.1,0.2`, 0.1 or [0.1, 0.2], without repeats.

    Raises:
        ValueError: For anything else, or a share that is not above 0 and at most 1.
    """
    try:
        found = [float(text) for text in _parts(value)]
    except ValueError:
        raise ValueError(f"--budget-share {value} is not a list of numbers; write it like 0.1,0.2") from None
    for share in found:
        try:
            units_of_share(share, 1)
        except ValueError as error:
            raise ValueError(f"--budget-share: {error}") from None
    return list(dict.fromkeys(found))


def words(value: Names, flag: str) -> list[str]:
    """Return the names of `a,b` or [a, b], without repeats.

    Raises:
        ValueError: If there are none.
    """
    found = list(dict.fromkeys(part for part in _parts(value) if part))
    if not found:
        raise ValueError(f"{flag} is empty; name at least one (--list shows what there is)")
    return found
