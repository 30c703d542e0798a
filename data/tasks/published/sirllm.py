"""Rock-Paper-Scissors: thousands of turns against a player who prefers one move, in one session that never restarts.

Paper:     SirLLM (arXiv 2405.12528), Section 4.3; Locret, Table 17.
Source:    Zoeyyao27/SirLLM: prompts, and a choice by the log-probability of the letter's first token.
Fields:    id, question.choices, user_choice ("A" rock, "B" paper, "C" scissors), answerKey (the move that beats it). A
           row is a turn; a file is one game, of its first `turns` turns, and one sample.
Deviates:  the special first token (bos) is written once, at the session's start, not at every turn. The official code
           runs one forward pass per letter from the same past and keeps the cache of the chosen one; here one pass
           gives all three log-probabilities, as only the letters' first tokens count, and the chosen letter is read
           with the next turn: the past is the same. Without the files, moves are drawn with their shares.

Whoever says the move that beats the preferred one in every turn wins half of the turns, without any memory: 50.00 % of
the published games against rock, 50.20 % against paper, 52.05 % against scissors. The published Locret row equals
"always rock" in all nine numbers; it is not a target. An answer that never changes is seen in `prediction`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from locret.data.tasks.published.row_maker import RowMaker
from locret.data.tasks.task import MadeSamples, Sample, SampleSet, Wanted
from locret.data.training.json_rows import BadRow, Entry, text_of

LETTERS = "ABC"
MOVES = ("rock", "paper", "scissors")
TEMPLATES = ("vicuna", "none")
_FIRST = "Let's play a game of Rock-Paper-Scissors. Choose one option from: (A) rock (B) paper (C) scissors. "
_LATER = (
    "I chose [{move}]. Analyze my preferences to maximize your winning rate and proceed to the next round. Choices: "
    "(A) rock (B) paper (C) scissors. You choose:"
)
_SHARES = {"rock": (1000, 621, 379), "paper": (389, 1004, 607), "scissors": (545, 414, 1041)}
"""How often the published files' first 2,000 turns have each move."""


@dataclass(frozen=True, kw_only=True)
class RockPaperScissors(RowMaker):
    """A game against a player who prefers one move; an answer is the letters that were played, one for each turn."""

    settable: ClassVar[tuple[str, ...]] = ("turns", "template", "max_row_bytes")

    turns: int = 2000
    """Turns of the game, if the file has as many; as many are played in the published runs."""
    template: str = "vicuna"
    """"vicuna" for USER and ASSISTANT around each question, "none" for the question alone (Yi-Chat)."""

    @property
    def session(self) -> bool:
        """A game is a session."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.turns) is not int or self.turns < 1:
            raise ValueError(f"task {self.name}: turns={self.turns!r} must be a whole number, 1 or more")
        self.check_choice("template", TEMPLATES)

    def items(self, rows: Iterable[Entry], on_bad: Callable[[BadRow], None] | None = None) -> Iterator[Sample]:
        """Yield the one game of a file."""
        moves: list[int] = []
        for row in rows:
            if len(moves) == self.turns:
                break
            try:
                moves.append(_move(row.where, row.load()))
            except BadRow as bad:
                if on_bad is None:
                    raise
                on_bad(bad)
        if moves:
            yield self._game(moves)

    def read(self, index: int, where: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return the game of a made row, whose `moves` are letters, one for each turn."""
        return [self._game([_number(where, "moves", letter) for letter in text_of(record, where, "moves")])]

    def _game(self, moves: Sequence[int]) -> Sample:
        best = "".join(LETTERS[beating(move)] for move in moves)
        turns = tuple(self._prompt(None if number == 0 else moves[number - 1]) for number in range(len(moves)))
        return Sample(id="0", content=turns[0], turns=turns, targets=(best,), reply=best, choices=tuple(LETTERS))

    def _prompt(self, last: int | None) -> str:
        """Return a turn's prompt; from the second on it tells what the other side has just played."""
        asked = _FIRST if last is None else _LATER.format(move=MOVES[last])
        return f"USER: {asked}\n\nASSISTANT: " if self.template == "vicuna" else asked

    def maker(
        self, tokenizer: Any, tokens: int | None, *, samples: int, seed: int, data_dir: Path | None
    ) -> Callable[[int], dict[str, Any]]:
        """Return what makes a game; its length is `turns`, whatever `tokens`."""
        dominant = self.name.partition("/")[2]

        def make(index: int) -> dict[str, Any]:
            drawn = random.Random(f"rock-paper-scissors/{dominant}/{seed + index}")
            return {"moves": "".join(drawn.choices(LETTERS, _SHARES[dominant], k=self.turns))}

        return make

    def made(self, wanted: Wanted) -> tuple[str, dict[int, SampleSet]]:
        """Return one game, whose length comes from its turns."""
        return "turns", {0: MadeSamples(self, 0, 1, wanted.seed)}

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the share of turns won.

        Raises:
            ValueError: If the prediction has not one letter for each turn.
        """
        best = sample.targets[0]
        if len(prediction) != len(best):
            raise ValueError(f"{len(prediction)} moves for {len(best)} turns; give one move for each turn")
        return sum(mine == right for mine, right in zip(prediction, best, strict=True)) / len(best)


def beating(move: int) -> int:
    """Return the move that beats a move."""
    return (move + 1) % 3


def _move(where: str, record: Mapping[str, Any]) -> int:
    chosen, best = (_number(where, field, text_of(record, where, field)) for field in ("user_choice", "answerKey"))
    if best != beating(chosen):
        detail = f"has the answerKey {record['answerKey']!r}, which does not beat {record['user_choice']!r}"
        raise BadRow(where, "wrong answerKey", detail)
    return chosen


def _number(where: str, field: str, letter: str) -> int:
    if letter not in tuple(LETTERS):
        raise BadRow(where, f"unknown {field}", f"holds {letter!r} in field {field!r} where A, B or C is needed")
    return LETTERS.index(letter)


TASKS = tuple(
    RockPaperScissors(
        name=f"sirllm/{move}",
        source="Rock-Paper-Scissors (SirLLM, arXiv 2405.12528), Zoeyyao27/SirLLM",
        metric="turns won",
        max_new_tokens=1,
        chat=False,
        file=f"rock_paper_scissors/rock_paper_scissors_dominant_{move}.jsonl",
        size=1,
    )
    for move in MOVES
)
