"""Rock-Paper-Scissors: thousands of turns against a player who prefers one move, in one session that never restarts.

Paper:     SirLLM (arXiv 2405.12528), Section 4.3; Locret, Table 17.
Source:    Zoeyyao27/SirLLM: prompts, and a choice by the log-probability of the letter's first token.
Fields:    id, question.choices, user_choice ("A" rock, "B" paper, "C" scissors), answerKey (the move that beats it). A
           row is a turn; a file is one game, of its first `turns` turns, and one sample.
Deviates:  the special first token (bos) is written once, at the session's start, not at every turn. The official code
           runs one forward pass per letter from the same past and keeps the cache of the chosen one; here one pass
           gives all three log-probabilities, as only the letters' first tokens count, and the chosen letter is read
           with the next turn: the past is the same. Without the files, moves are drawn with their shares.

Whoever says the move that beats the preferred one in every turn wins half of the turns, without any memory. The
published Locret row equals "always rock" in all nine numbers. An answer that never changes is seen in `prediction`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from locret.data.tasks.published.base import Making, RowMaker
from locret.data.tasks.rows import Row
from locret.data.tasks.task import Sample, SampleSet, Wanted

MOVES = {"A": "rock", "B": "paper", "C": "scissors"}
BEATS = {"A": "B", "B": "C", "C": "A"}
"""The move that beats a move."""
_TURN = "USER: {}\n\nASSISTANT: "
_FIRST = "Let's play a game of Rock-Paper-Scissors. Choose one option from: (A) rock (B) paper (C) scissors. "
_LATER = (
    "I chose [{}]. Analyze my preferences to maximize your winning rate and proceed to the next round. Choices: (A) "
    "rock (B) paper (C) scissors. You choose:"
)
_SHARES = {"rock": (1000, 621, 379), "paper": (389, 1004, 607), "scissors": (545, 414, 1041)}
"""How often the published files' first 2,000 turns have each move."""


@dataclass(frozen=True, kw_only=True)
class RockPaperScissors(RowMaker):
    """A game against a player who prefers one move; an answer is the letters that were played, one for each turn."""

    settable: ClassVar[tuple[str, ...]] = ("turns",)

    turns: int = 2000
    """Turns of the game, if the file has as many; as many are played in the published runs."""

    def items(self, found: Iterable[Row]) -> Iterator[Sample]:
        """Yield the one game of a file."""
        moves = [row.one_of("user_choice", MOVES) for row, _ in zip(found, range(self.turns), strict=False)]
        if moves:
            yield from self.read(Row(0, "", {"moves": "".join(moves)}))

    def read(self, row: Row) -> list[Sample]:
        """Return the game of a made row, whose `moves` are letters, one for each turn."""
        moves = row.text("moves")
        best = "".join(BEATS[move] for move in moves)
        turns = (_FIRST, *(_LATER.format(MOVES[move]) for move in moves[:-1]))
        asked = tuple(map(_TURN.format, turns))
        return [Sample(id="0", content=asked[0], turns=asked, targets=(best,), reply=best, choices=tuple(MOVES))]

    def maker(self, of: Making) -> Callable[[int], dict[str, Any]]:
        """Return what makes a game; its length is `turns`, whatever the tokens."""
        dominant = self.name.partition("/")[2]

        def make(index: int) -> dict[str, Any]:
            drawn = random.Random(f"rock-paper-scissors/{dominant}/{of.seed + index}")
            return {"moves": "".join(drawn.choices("ABC", _SHARES[dominant], k=self.turns))}

        return make

    def made(self, wanted: Wanted) -> tuple[str, dict[int, SampleSet]]:
        """Return one game, whose length comes from its turns."""
        return "turns", {0: self.set_of(Making(None, seed=wanted.seed))}

    def score(self, prediction: str, sample: Sample) -> float:
        best = sample.targets[0]
        return sum(mine == right for mine, right in zip(prediction, best, strict=True)) / len(best)


TASKS = tuple(
    RockPaperScissors(
        name=f"sirllm/{move}",
        source="Rock-Paper-Scissors (SirLLM, arXiv 2405.12528), Zoeyyao27/SirLLM",
        metric="turns won",
        max_new_tokens=1,
        chat=False,
        file=f"rock_paper_scissors/rock_paper_scissors_dominant_{move}.jsonl",
        size=1,
        session=True,
    )
    for move in MOVES.values()
)
