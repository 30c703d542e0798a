"""Rock-Paper-Scissors as tasks: one item is a whole game, played turn by turn in one session.

Paper:     SirLLM (arXiv 2405.12528), Section 4.3; Locret, Table 17. Prompts and rules: `rock_paper_scissors`.
Fields:    a row of the published files is a turn; a file is one game, of its first `turns` turns.
Deviates:  without the files, moves are drawn with their shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from locret.data.tasks.published import rock_paper_scissors as game
from locret.data.tasks.published.base import BadRow, Item, OnBadRow, Record
from locret.data.tasks.published.generated import GeneratedTask
from locret.data.tasks.published.records import text_of


@dataclass(frozen=True, kw_only=True)
class GameTask(GeneratedTask):
    """A game against a player who prefers one move; an answer is the letters that were played, one for each turn."""

    settable: ClassVar[tuple[str, ...]] = ("turns", "template", "max_row_bytes")

    turns: int = game.TURNS
    """Turns of the game, if the file has as many."""
    template: str = "vicuna"
    """"vicuna" for USER and ASSISTANT around each question, "none" for the question alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.turns) is not int or self.turns < 1:
            raise ValueError(f"task {self.name}: turns={self.turns!r} must be a whole number, 1 or more")
        next(game.prompts([0], self.template))

    @property
    def dominant(self) -> str:
        """The move that the other side prefers."""
        return self.name.partition("/")[2]

    def items(self, records: Iterable[tuple[str, Record]], on_bad: OnBadRow | None = None) -> Iterator[Item]:
        """Yield the one game of a file.

        Raises:
            BadRow: Naming file, line and field.
        """
        moves = game.read_turns(records, self.turns, on_bad)
        if moves:
            yield self._item(moves)

    def read(self, index: int, place: str, record: Mapping[str, Any]) -> list[Item]:
        """Return the game of a made row, whose `moves` are letters, one for each turn.

        Raises:
            BadRow: If there is another letter.
        """
        letters = text_of(record, place, "moves")
        if set(letters) - set(game.LETTERS):
            raise BadRow(place, "unknown moves", f"field 'moves' is {letters[:20]!r}... where A, B and C are needed")
        return [self._item([game.LETTERS.index(letter) for letter in letters])]

    def _item(self, moves: list[int]) -> Item:
        best = "".join(game.LETTERS[game.beating(move)] for move in moves)
        first = next(game.prompts(moves, self.template))
        return Item(id="0", content=first, targets=(best,), reply=best, choices=tuple(game.LETTERS))

    def maker(
        self, tokenizer: Any, tokens: int | None, *, samples: int, seed: int, data_dir: Path | None
    ) -> Callable[[int], dict[str, Any]]:
        """Return what makes a game; its length is `turns`, whatever `tokens`."""

        def make(index: int) -> dict[str, Any]:
            moves = game.drawn_turns(self.dominant, self.turns, seed + index)
            return {"moves": "".join(game.LETTERS[move] for move in moves)}

        return make

    def moves(self, item: Item) -> list[int]:
        """Return the other side's moves."""
        return [(game.LETTERS.index(letter) - 1) % 3 for letter in item.targets[0]]

    def score(self, prediction: str, item: Item) -> float:
        """Return the share of turns won.

        Raises:
            ValueError: If the prediction has not one letter for each turn.
        """
        return game.rates(self.moves(item), [game.LETTERS.find(letter) for letter in prediction]).win


TASKS = tuple(
    GameTask(
        name=f"sirllm/{move}",
        source="Rock-Paper-Scissors (SirLLM, arXiv 2405.12528), Zoeyyao27/SirLLM",
        metric="turns won",
        max_new_tokens=1,
        chat=False,
        file=game.FILES[move],
        repo="",
        revision="",
        size=1,
    )
    for move in game.MOVES
)
