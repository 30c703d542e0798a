"""What `--suite world` asks: parts that answer a question each, nine hours of one core, an hour of ten.

A part is a grid of tasks, methods, lengths, budgets and one protocol, asked with one seed or several. Each part and
seed is a unit, or several with some of the methods each, so that many cores share the work; a unit is an ordinary
evaluation with a folder, a recipe and a record of its own. All methods at every budget on 42 texts per cell, with three
seeds and both protocols, would take a laptop a day. So:

    field           every method at one budget on 42 texts per cell, of three seeds: the table, whether trained
                    heads are ahead, and whether the order of the methods is stable. Agnostic: one read per text, two
                    questions of forks. Aware (`field_aware`): one question per text, and 63 texts.
    presses         kvpress's presses on one text per cell, in both protocols
    best_presses    those of them that do best on the bytes of the budget, on all of the field's texts; where the
                    question is known, `best_presses_aware`
    budgets         the methods at every budget, on the texts of `presses`: accuracy against bytes
    press_budgets   the presses at the other budgets, on those texts
    capacity        facts recalled per kept unit as a text states more of them (`locret.infer.evaluation.capacity`)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from locret.conversation.rules import QUESTION, SYSTEM, rules_of
from locret.data.tasks.published import suites
from locret.infer.evaluation import methods, presses
from locret.infer.evaluation.eval_options import BudgetOptions, EvalOptions, numbers, words
from locret.infer.evaluation.protocols import AGNOSTIC, AWARE
from locret.infer.methods import FULL, LOCRET
from locret.scorers.retaining_heads import RetainingHeadScorer

BUDGETS = (32, 64, 256)
"""The first is the table's: with 64 units, heads that share out the layers answer all that the full cache does."""
AWARE_BUDGET = 64
"""The table's where the question is known: its units count to the budget, up to 22 in every layer, which those that
measured shares make smaller could not hold beside the stabilizers."""
LENGTH = 1024
POLICY = {"chunk_size": 128, "stabilizers": 8, "local_len": 8}
"""What every method is read with: chunks that evict several times in a text, and little that stays by right. Questions
are longer than what is local, so that methods which look at the last queries see them; where one is known while its
text is read, its units are protected, and take their places of the budget."""
OPTIONS = {"snapkv": "snapkv:window=8"}
"""Methods whose defaults would fill a budget with a window."""
SHARED = "+shares"
SHARES = f"{LOCRET}{SHARED}"
"""Trained heads with layers that hold as much as their training has measured."""
_ORACLES = (methods.ORACLE, methods.ORACLE_AGNOSTIC)
ORACLES_SHARED = tuple(f"{name}{SHARED}" for name in _ORACLES)
"""Oracles with the layers of the heads: what those lose, the budget so shared out loses."""
MORE = (SHARES, "locret+adaptive_heads", "locret+recall:host_budget=512", *ORACLES_SHARED)
"""What our engine can do besides, with trained heads."""
PLACED = "+original"
AT_PLACES = tuple(f"{name}{PLACED}" for name in (LOCRET, SHARES, *_ORACLES, *ORACLES_SHARED))
"""Heads and oracles with keys turned to their positions in the text, as the other methods have theirs. Their own
default are ranks in the cache, which read texts of any length and fit every engine; which of the two tells the newest
of several statements from the others depends on the backbone."""
SEEDS = 3
TEXTS = 14
"""Of the field, per task, length and seed: 42 in all. Fourteen with two questions each put the methods in more nearly
the same order with every seed than seven with four, which are as many answers."""
AWARE_TEXTS = 21
"""Where a text has one question. More methods answer all there, and the noise decides their order."""
BATCH = 8
"""Answers that are written side by side."""
MOST_METHODS = 12
"""Of one unit of the field; a unit takes about half an hour then."""
BEST = 3
"""Presses that are asked on all of the field's texts."""


@dataclass(frozen=True)
class Part:
    """One question to the methods."""

    name: str
    protocol: str
    texts: int
    """Per task, length and seed."""
    questions: int | None = None
    """Most questions of a text; None for the one that is its own."""
    seeds: int = 1
    presses: bool = False
    """Whether the methods are kvpress's."""
    asks: Literal["first", "others", "all"] = "first"
    """Which of the budgets; more than the first only where there are several."""
    after: str = ""
    """The part whose best methods are asked."""
    capacity: bool = False
    """Whether it is a run of `locret.infer.evaluation.capacity`."""


PARTS = (
    Part("field", AGNOSTIC, texts=TEXTS, questions=2, seeds=SEEDS),
    Part("field_aware", AWARE, texts=AWARE_TEXTS, seeds=SEEDS),
    Part("presses", AGNOSTIC, texts=1, questions=4, presses=True),
    Part("best_presses", AGNOSTIC, texts=TEXTS, questions=2, seeds=SEEDS, presses=True, after="presses"),
    Part("budgets", AGNOSTIC, texts=1, questions=2, asks="all"),
    Part("capacity", AGNOSTIC, texts=3, questions=16, capacity=True),
    Part("presses_aware", AWARE, texts=1, presses=True),
    Part("best_presses_aware", AWARE, texts=AWARE_TEXTS, seeds=SEEDS, presses=True, after="presses_aware"),
    Part("press_budgets", AGNOSTIC, texts=1, questions=2, presses=True, asks="others"),
)


FACTS = (4, 8, 16, 32, 64, 128, 256, 512)
CAPACITY_TOKENS = 8192
_FACT_TOKENS, _OTHER_TOKENS = 15, 40
"""Room for a fact in a text and for what stands around, so that the line of facts ends where a short text does."""
_HEARD = frozenset(
    (
        *("suite", "parts", "seeds", "heads", "allow_other_base", "methods", "lengths", "samples", "questions"),
        *("batch_size", "protocol", "protect", "seed", "max_new_tokens", "kvpress_python"),
    )
)
"""What the part of capacity hears of the options of an evaluation."""
UNEQUAL_LAYERS = "kvpress/pyramidkv"
"""A press that fails at some of the other budgets, after an hour of the suite: the table's has it."""
OF_CAPACITY = (
    *(FULL, methods.ORACLE_AGNOSTIC, f"{methods.ORACLE_AGNOSTIC}{SHARED}", LOCRET, SHARES),
    *("expected_attention", "h2o", "key_difference", "random"),
)


@dataclass(frozen=True)
class Unit:
    """A part with one seed, or with some of the methods of it."""

    part: Part
    seed: int
    options: Mapping[str, Any]
    """Of `locret-eval`, besides those of the backbone."""
    piece: int | None = None
    """Which of the methods it asks, from 1; None where it asks all."""

    @property
    def name(self) -> str:
        """The unit's folder."""
        return f"{self.part.name}-{self.seed}" + ("" if self.piece is None else f".{self.piece}")


@dataclass(frozen=True)
class Asked:
    """What the user changed of the plan."""

    parts: Sequence[Part]
    budgets: Sequence[int]
    aware_budgets: Sequence[int]
    """Where the question is known while a text is read."""
    lengths: Sequence[int]
    capacity_tokens: int
    """Of the texts with more and more facts."""
    methods: Sequence[str]
    """All methods, presses included."""
    own_choice: bool
    """Whether the user named the methods, so that no part chooses its own."""
    texts: int | None
    questions: int | None
    batch: int
    seed: int
    seeds: int | None
    """Of the field, and the most of any part; None for the plan's."""
    policy: Mapping[str, Any]
    protect: Sequence[str]
    """What of each prompt stays besides."""
    kvpress: str | None
    without: Mapping[str, str]
    """Methods that are not asked, and why."""


def asked(evaluation: EvalOptions, budgets: BudgetOptions, chosen: Collection[str]) -> Asked:
    """Return what of the plan is asked.

    Raises:
        ValueError: For a part that there is not, or an option that would change nothing.
    """
    without: dict[str, str] = {}
    lengths = numbers(evaluation.lengths, "--lengths") if "lengths" in chosen else []
    if "methods" in chosen:
        named = [method.name for method in evaluation.named_methods()]
    else:
        named, without = _all_methods(evaluation, evicts_answers="decode_budget" in chosen)
    protocols = evaluation.chosen_protocols() if "protocol" in chosen else (AGNOSTIC, AWARE)
    given = numbers(budgets.budget, "--budget") if budgets.budget is not None else []
    if budgets.budget_share is not None:
        raise ValueError(f"--budget-share {budgets.budget_share}: --suite world compares equal units; give --budget")
    if any(rule.what == QUESTION for rule in evaluation.protected_rules()):
        raise ValueError(f"--protect {QUESTION}: --suite world does so wherever it is known; drop it")
    parts = [part for part in _named_parts(evaluation.parts) if part.protocol in protocols]
    if len(lengths) > 1 and all(part.capacity for part in parts):
        raise ValueError(f"--lengths {evaluation.lengths}: --parts capacity has texts of one length; give one")
    _check_single(budgets, chosen)
    own = {name: getattr(budgets, name) for name in chosen if hasattr(budgets, name) and name != "budget"}
    own = {name: value for name, value in own.items() if value is not None}
    return Asked(
        parts=parts,
        budgets=given or BUDGETS,
        aware_budgets=given or [AWARE_BUDGET],
        lengths=lengths or [LENGTH],
        capacity_tokens=max(lengths, default=CAPACITY_TOKENS),
        methods=named,
        own_choice="methods" in chosen,
        texts=evaluation.samples,
        questions=evaluation.questions,
        batch=evaluation.batch_size if "batch_size" in chosen else 1 if budgets.writes_alone else BATCH,
        seed=evaluation.seed,
        seeds=evaluation.seeds,
        policy={**POLICY, **own},
        protect=evaluation.protect,
        kvpress=evaluation.kvpress_python,
        without=without,
    )


def _check_single(budgets: BudgetOptions, chosen: Collection[str]) -> None:
    """Refuse lists of numbers that the table would take the mean over."""
    for name in ("chunk_size", "stabilizers"):
        flag, given = f"--{name.replace('_', '-')}", getattr(budgets, name)
        if name in chosen and given is not None and len(numbers(given, flag)) > 1:
            raise ValueError(f"{flag} {given}: --suite world reads every method with the same numbers; give one")


def _named_parts(given: str | list[str]) -> list[Part]:
    known = {part.name: part for part in PARTS}
    found = list(known) if given == "all" else words(given, "--parts")
    for name in found:
        if name not in known:
            raise ValueError(f"--parts {name} is unknown; choose of {', '.join(known)}, or all")
    return [part for part in PARTS if part.name in found]


def _all_methods(evaluation: EvalOptions, *, evicts_answers: bool) -> tuple[list[str], dict[str, str]]:
    """Return all methods that need nothing but the backbone and the heads, and the others with the reason."""
    found, without = [], {}
    shares = evaluation.heads and RetainingHeadScorer(heads=evaluation.heads).layer_shares is not None
    for name in (*(OPTIONS.get(name, name) for name in methods.names()), *MORE, *AT_PLACES, *presses.names()):
        try:
            method = methods.get(name)
        except ValueError as error:  # gates of others are trained for one backbone, and lie where the user says
            without[name] = str(error)
            continue
        if method.needs_heads and not evaluation.heads:
            without[name] = "needs trained heads; give --heads"
        elif SHARED in name and not shares:
            without[name] = "no heads recommend shares of the layers; train some with --layer-shares"
        elif name == methods.RANDOM_ANSWER and not evicts_answers:
            without[name] = "evicts what is written; give --decode-budget"
        else:
            found.append(method.name)
    return found, without


def units(what: Asked) -> tuple[list[Unit], dict[str, str]]:
    """Return the units, and the parts and methods that are missing with the reason.

    The methods of a part that waits for another are not known yet: as many as there will be stand for them.
    """
    found, missing = [], dict(what.without)
    missing |= {part.name: "left out by --parts or --protocol" for part in PARTS if part not in what.parts}
    for part in what.parts:
        own = [name for name in what.methods if name.startswith(presses.PREFIX) == part.presses]
        if part.capacity and not what.own_choice:
            own = [name for name in own if name in OF_CAPACITY]
        taken = _budgets(part, what.aware_budgets if part.protocol == AWARE else what.budgets)
        if part.presses and what.kvpress is None:
            missing[part.name] = "no --kvpress-python, so kvpress's presses are not asked"
        elif not own or not taken:
            missing[part.name] = "nothing of --methods" if not own else "--budget names one budget only"
        elif part.capacity and not _facts(what):
            missing[part.name] = f"--lengths {what.capacity_tokens} holds no {FACTS[0]} facts of {_FACT_TOKENS} tokens"
        else:
            if part.after and not what.own_choice:
                own = own[:BEST]
            if part.asks != "first" and UNEQUAL_LAYERS in own and not what.own_choice:
                own.remove(UNEQUAL_LAYERS)
                missing[f"{UNEQUAL_LAYERS} in {part.name}"] = (
                    "one mask serves all layers in transformers, and this press keeps unequal numbers in them"
                )
            found += [
                Unit(part, seed, _options(what, part, some, taken, seed), piece)
                for seed in range(what.seed, what.seed + _seeds(what, part))
                for piece, some in _pieces(what, part, own)
            ]
    return found, missing


def check_heard(evaluation: EvalOptions, found: Sequence[Unit], chosen: Collection[str]) -> None:
    """Refuse options that change nothing in the units that are asked.

    Raises:
        ValueError: Naming the option.
    """
    parts = list(dict.fromkeys(unit.part for unit in found))
    names = ", ".join(part.name for part in parts)
    if evaluation.questions is not None and not any(part.questions for part in parts):
        raise ValueError(
            f"--questions {evaluation.questions} changes nothing, for {names} ask one question of a text; drop it"
        )
    if evaluation.seeds is not None and not any(part.seeds > 1 for part in parts):
        raise ValueError(
            f"--seeds {evaluation.seeds} changes nothing, for {names} are asked with one seed; drop it, or add field"
        )
    asked_of = [methods.get(name) for unit in found for name in unit.options["methods"]]
    if evaluation.kvpress_python is not None and not any(part.presses for part in parts):
        raise ValueError(
            f"--kvpress-python {evaluation.kvpress_python} runs kvpress's presses, and {names} ask none; drop it, or "
            "add a part of theirs, such as presses"
        )
    if all(part.capacity for part in parts):
        for name in sorted({one.name for one in fields(EvalOptions)}.intersection(chosen) - _HEARD):
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(evaluation, name)} changes nothing in --parts {names}, which "
                "makes texts of its own; drop it"
            )
    if "batch_size" in chosen and not any(map(methods.writes_beside, asked_of)):
        raise ValueError(
            f"--batch-size {evaluation.batch_size} changes nothing, for every method here writes one answer at a time; "
            "drop it"
        )
    if evaluation.protect and not any(map(methods.protects, asked_of)):
        raise ValueError(
            f"--protect {evaluation.protect[0]} changes nothing, for no method here evicts as ours do; drop it"
        )


def _budgets(part: Part, given: Sequence[int]) -> Sequence[int]:
    if part.asks == "first":
        return list(given[:1])
    if len(given) == 1:
        return []
    return list(given if part.asks == "all" else given[1:])


def _seeds(what: Asked, part: Part) -> int:
    if what.seeds is None or part.seeds == SEEDS:
        return what.seeds or part.seeds
    return min(what.seeds, part.seeds)


def _pieces(what: Asked, part: Part, names: Sequence[str]) -> list[tuple[int | None, Sequence[str]]]:
    """Return the methods of each of a part's units of one seed, and the unit's number if there are several.

    Oracles come last, so that the labels of a text are made by as few units as can be. Where the user sets more than
    every method hears, there is one unit: others might have none that hears it, or each the floor of what is evicted.
    """
    shared = part.seeds == SEEDS and not part.presses and what.policy.keys() == POLICY.keys()
    count = math.ceil(len(names) / MOST_METHODS) if shared else 1
    if count == 1:
        return [(None, names)]
    ordered = sorted(names, key=methods.knows_answers)
    size = math.ceil(len(names) / count)
    return [(nth + 1, ordered[nth * size : (nth + 1) * size]) for nth in range(count)]


def _facts(what: Asked) -> list[int]:
    return [count for count in FACTS if count * _FACT_TOKENS + _OTHER_TOKENS <= what.capacity_tokens]


def _options(what: Asked, part: Part, own: Sequence[str], budgets: Sequence[int], seed: int) -> dict[str, Any]:
    questions = part.questions and (what.questions or part.questions)
    given = list(what.protect)
    if part.capacity:  # whose texts have no system message
        given = [rule for rule in given if rules_of([rule])[0].what != SYSTEM]
    protect = [*given, QUESTION] if part.protocol == AWARE else given
    if not any(methods.protects(methods.get(name)) for name in own):
        protect = []
    if part.capacity:
        return {
            "methods": list(own),
            "tokens": what.capacity_tokens,
            "facts": _facts(what),
            "budget": list(budgets),
            **what.policy,
            "samples": what.texts or part.texts,
            "questions": questions,
            **({"batch_size": what.batch} if any(methods.writes_beside(methods.get(name)) for name in own) else {}),
            **({"protect": protect} if protect or what.protect else {}),
            "seed": seed,
        }
    needs_kvpress = any(name.startswith(presses.PREFIX) for name in own)
    return {
        "methods": list(own),
        "tasks": list(suites.get(suites.WORLD).tasks),
        "lengths": list(what.lengths),
        "budget": list(budgets),
        **what.policy,
        "protocol": part.protocol,
        "samples": what.texts or part.texts,
        **({} if questions is None else {"questions": questions}),
        **({"kvpress_python": what.kvpress} if needs_kvpress else {}),
        **({"protect": protect} if protect or what.protect else {}),
        **({"batch_size": what.batch} if any(methods.writes_beside(methods.get(name)) for name in own) else {}),
        "seed": seed,
    }
