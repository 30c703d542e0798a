"""Texts with the facts of several tasks, and questions about many of them.

Heads learn from what answers look at: with one short question per text most facts would be labelled as not needed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from locret.data.tasks.generated.base import Draw, GeneratedTask, Planted, Question, asked_about
from locret.data.tasks.generated.multikey import MultiKey
from locret.data.tasks.generated.multivalue import MultiValue
from locret.data.tasks.generated.number import Number
from locret.data.tasks.generated.passkey import PassKey
from locret.data.tasks.generated.two_stage import TwoStage
from locret.data.tasks.generated.variable_tracking import VariableTracking
from locret.data.tasks.task import Sample
from locret.data.text.filler import Filler, FillerOptions, Split, generator
from locret.data.text.haystack import count_tokens, hide


def varied(name: str, rng: random.Random) -> GeneratedTask:
    """Return the task called `name` with options drawn around those of evaluation.

    Raises:
        ValueError: For a task that cannot be mixed.
    """
    variants: dict[str, Callable[[], GeneratedTask]] = {
        "passkey": lambda: PassKey(digits=rng.choice((4, 5, 5, 6))),
        "number": lambda: Number(digits=rng.choice((8, 10, 10, 12))),
        "multikey": lambda: MultiKey(keys=rng.randint(1, 8), digits=rng.choice((6, 7, 7, 8))),
        # How many answers there are stays as in evaluation: to see that there are no more is a task of its own.
        "multivalue": lambda: MultiValue(others=rng.randint(0, 2), digits=rng.choice((6, 7, 7, 8))),
        "variable_tracking": lambda: VariableTracking(
            chains=rng.choice((1, 2, 2, 3, 4)), digits=rng.choice((4, 5, 5, 6))
        ),
        "two_stage": lambda: TwoStage(entries=rng.randint(8, 16), equations=rng.randint(1, 12)),
    }
    if name not in variants:
        raise ValueError(f'task "{name}" cannot be mixed into training rows; choose from {", ".join(variants)}')
    return variants[name]()


def mixture(
    tokenizer: Any,
    tasks: Sequence[str],
    tokens: int,
    *,
    seed: int | str = 0,
    split: Split = "train",
    density: float = 0.3,
    questions: int | None = None,
    filler: FillerOptions | None = None,
) -> Sample:
    """Return a text that hides facts of several tasks, with questions about them and the replies, one after the other.

    Args:
        tokenizer: Any tokenizer with a chat template.
        tasks: Names of the tasks to draw facts from; a task may come several times, or not at all in a short text.
        tokens: Length of the chat prompt, never exceeded.
        seed: Same seed, same text.
        split: Random stream and half of the keys.
        density: Share of the prompt taken by facts and questions, as far as whole tasks fit; at least one task.
        questions: How many are asked, drawn at random; all of them if None.
        filler: What the text around the facts looks like.

    Raises:
        ValueError: For an unknown task, or `tokens` too few for one task.
    """
    rng = generator(seed, split, "mixture", tokens, *tasks)
    planted = _plants(tokenizer, tasks, tokens, rng, Draw(rng, split), density)
    pool: list[tuple[Question, str]] = [
        (question, plant.introduction) for plant in planted for question in plant.facts.questions
    ]
    wanted = rng.sample(pool, len(pool) if questions is None else min(questions, len(pool)))
    introduction = wanted[0][1] if len(wanted) == 1 else ""
    question = " ".join(question.text for question, _ in wanted)
    _, depths = _hidden(planted)
    text = _surrounded(tokenizer, planted, introduction, question, Filler(rng, filler), tokens)
    content, end = asked_about(introduction, text, question)
    return Sample(
        content=content,
        question=question,
        targets=tuple(target for asked, _ in wanted for target in asked.targets),
        reply=" ".join(asked.reply for asked, _ in wanted),
        depths=tuple(depths),
        span=(0, end),
    )


_ONCE = ("passkey", "number", "two_stage")
"""Tasks of which a text holds one: a second pass key would leave the question open."""


@dataclass(frozen=True)
class _Plant:
    """The facts of one task in a text."""

    task: str
    introduction: str
    depths: tuple[float, ...]
    facts: Planted


def _plants(
    tokenizer: Any, tasks: Sequence[str], tokens: int, rng: random.Random, draw: Draw, density: float
) -> list[_Plant]:
    """Return facts of the tasks, in random order, as many as `density` has room for and one task's at least."""
    planted: list[_Plant] = []
    room = density * tokens
    waiting = [name for name in dict.fromkeys(tasks) for _ in range(1 if name in _ONCE else 3)]
    for name in rng.sample(waiting, len(waiting)):
        task = varied(name, rng)
        try:
            plant = task.plant(draw)
        except ValueError:  # no key is left for another one
            continue
        plant, cost = _fitting(tokenizer, plant, tokens)
        if planted and cost > room:
            continue
        room -= cost
        depths = task.arranged([rng.random() for _ in plant.statements])
        planted.append(_Plant(name, task.introduction, tuple(depths), plant))
    return planted


def _hidden(planted: Sequence[_Plant]) -> tuple[list[str], list[float]]:
    """Return all statements and their depths."""
    statements = [statement for plant in planted for statement in plant.facts.statements]
    return statements, [depth for plant in planted for depth in plant.depths]


def _surrounded(
    tokenizer: Any, planted: Sequence[_Plant], introduction: str, question: str, filler: Filler, tokens: int
) -> str:
    """Return the facts in a text so long that the chat prompt with this question has at most `tokens` tokens."""
    statements, depths = _hidden(planted)
    if filler.options.lookalike_share:
        filler.about = frozenset().union(*(plant.facts.things for plant in planted))
    return hide(
        tokenizer,
        statements,
        depths,
        filler=filler,
        tokens=tokens,
        around=lambda text: asked_about(introduction, text, question)[0],
    )


def _fitting(tokenizer: Any, plant: Planted, tokens: int) -> tuple[Planted, int]:
    """Return what is planted with as many of its questions as leave room for a text, and the tokens of both."""
    questions = list(plant.questions)
    while True:
        cost = count_tokens(tokenizer, " ".join((*plant.statements, *(question.text for question in questions))))
        if cost <= 0.7 * tokens or len(questions) == 1:
            return replace(plant, questions=tuple(questions)), cost
        questions.pop()
