"""RULER's variable tracking: chains of assignments, all variables with one value asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from locret.data.tasks.generated.base import Draw, GeneratedTask, Planted, Question
from locret.data.tasks.metrics.retrieval import all_contained
from locret.data.tasks.task import Sample


@dataclass(frozen=True, kw_only=True)
class VariableTracking(GeneratedTask):
    """Find all variables that hold a value, through assignments from variable to variable."""

    settable: ClassVar[tuple[str, ...]] = ("hops", "chains", "digits")
    in_order: ClassVar[bool] = True
    name: str = "variable_tracking"
    source: str = "RULER vt (arXiv 2404.06654), two hops and a second chain"
    metric: str = "string match, all"
    introduction: str = "Memorize and track the chain of variable assignment hidden in the following text."
    version: int = 2
    max_new_tokens: int = 64

    hops: int = 2
    """Assignments from variable to variable in a chain."""
    chains: int = 2
    """Chains in the text; one of them is asked."""
    digits: int = 5
    """Digits of each value."""

    def plant(self, draw: Draw) -> Planted:
        """Return the assignments of all chains, chain by chain, and a question for each chain."""
        statements: list[str] = []
        questions = []
        for _ in range(self.chains):
            value = draw.number(self.digits)
            names = tuple(draw.variable() for _ in range(self.hops + 1))
            sources = (value, *(f"VAR {name}" for name in names[:-1]))
            pairs = list(zip(names, sources, strict=True))
            statements += [f"VAR {name} = {source}." for name, source in pairs]
            questions.append(
                Question(
                    text=f"Find all variables that are assigned the value {value} in the text above.",
                    targets=names,
                    # What is looked for, then what is found: each step repeats the words of the text.
                    reply=f"The variables are: {', '.join(f'= {source}: {name}' for name, source in pairs)}.",
                )
            )
        return Planted(statements=tuple(statements), questions=tuple(questions))

    def arranged(self, depths: list[float]) -> list[float]:
        """Return the depths with those of each chain ascending: a variable is assigned before it is used."""
        length = self.hops + 1
        return [depth for start in range(0, len(depths), length) for depth in sorted(depths[start : start + length])]

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the share of the chain's variables that the prediction contains."""
        return all_contained(prediction, sample.targets)
