"""Rock-Paper-Scissors: thousands of turns against a player who prefers one move, in one session that never restarts.

Paper:     SirLLM (arXiv 2405.12528), Section 4.3; Locret, Table 17.
Source:    Zoeyyao27/SirLLM: prompts, and a choice by the log-probability of the letter's first token.
Fields:    id, question.choices, user_choice ("A" rock, "B" paper, "C" scissors), answerKey (the move that beats it).
Deviates:  the special first token (bos) is written once, at the session's start, not at every turn. The official code
           runs one forward pass per letter from the same past and keeps the cache of the chosen one; here one pass
           gives all three log-probabilities, as only the letters' first tokens count, and the chosen letter is read
           with the next turn: the past is the same.

A player who says the same move in every turn wins as often as the other side plays the move it beats: up to half of
the turns of these files. So every report carries what the three constant policies score on the same turns, and flags
an answer that never changes. The published Locret row equals "always rock" in all nine numbers; it is no target.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from locret.data.tasks.published.base import BadRow, Record
from locret.data.tasks.published.records import text_of

LETTERS = "ABC"
MOVES = ("rock", "paper", "scissors")
TURNS = 2000
"""Turns of each file that the published runs play."""
FIRST = "Let's play a game of Rock-Paper-Scissors. Choose one option from: (A) rock (B) paper (C) scissors. "
LATER = (
    "I chose [{move}]. Analyze my preferences to maximize your winning rate and proceed to the next round. Choices: "
    "(A) rock (B) paper (C) scissors. You choose:"
)
TEMPLATES = ("vicuna", "none")
FILES = {name: f"rock_paper_scissors/rock_paper_scissors_dominant_{name}.jsonl" for name in MOVES}
_SHARES = {"rock": (1000, 621, 379), "paper": (389, 1004, 607), "scissors": (545, 414, 1041)}
"""How often the published files' first 2,000 turns have each move."""


class Player(Protocol):
    """Whoever answers."""

    def choose(self, prompt: str) -> Sequence[float]:
        """Return the log-probability of each letter after a turn's prompt; the largest is played, and remembered."""


def read_turns(
    records: Iterable[tuple[str, Record]], limit: int = TURNS, on_bad: Callable[[BadRow], None] | None = None
) -> list[int]:
    """Return the moves of the other side, 0 to 2 for rock, paper, scissors, of the first `limit` rows.

    Args:
        records: Rows, each with its place.
        limit: Turns to play.
        on_bad: Called with each row that cannot be played, which is then left out; if None, it is raised.

    Raises:
        BadRow: If a field is missing or contradicts another.
    """
    turns: list[int] = []
    for place, record in records:
        if len(turns) == limit:
            break
        try:
            turns.append(_move(place, record))
        except BadRow as bad:
            if on_bad is None:
                raise
            on_bad(bad)
    return turns


def _move(place: str, record: Record) -> int:
    if isinstance(record, BadRow):
        raise record
    found = []
    for field in ("user_choice", "answerKey"):
        letter = text_of(record, place, field)
        if letter not in tuple(LETTERS):
            raise BadRow(place, f"unknown {field}", f"field {field!r} is {letter!r} where A, B or C is needed")
        found.append(LETTERS.index(letter))
    if found[1] != beating(found[0]):
        detail = f"field 'answerKey' is {record['answerKey']!r}, which does not beat {record['user_choice']!r}"
        raise BadRow(place, "wrong answerKey", detail)
    return found[0]


def drawn_turns(dominant: str, turns: int = TURNS, seed: int = 0) -> list[int]:
    """Return moves with the shares of a published file, for runs without it; `dominant` is its preferred move.

    Raises:
        ValueError: If there is no such move.
    """
    if dominant not in MOVES:
        raise ValueError(f'dominant="{dominant}" is no move; choose one of {", ".join(MOVES)}')
    return random.Random(f"rock-paper-scissors/{dominant}/{seed}").choices(range(3), _SHARES[dominant], k=turns)


def beating(move: int) -> int:
    """Return the move that beats a move."""
    return (move + 1) % 3


def prompts(turns: Sequence[int], template: str = "vicuna") -> Iterator[str]:
    """Yield each turn's prompt; from the second on it tells what the other side has just played.

    Args:
        turns: Moves of the other side.
        template: "vicuna" for USER and ASSISTANT around each question, "none" for the question alone (Yi-Chat).

    Raises:
        ValueError: If there is no such template.
    """
    if template not in TEMPLATES:
        raise ValueError(f'template="{template}" is unknown; choose one of {", ".join(TEMPLATES)}')
    for number in range(len(turns)):
        asked = LATER.format(move=MOVES[turns[number - 1]]) if number else FIRST
        yield f"USER: {asked}\n\nASSISTANT: " if template == "vicuna" else asked


def play(turns: Sequence[int], player: Player, template: str = "vicuna") -> list[int]:
    """Play all turns in one session and return the player's moves. The move of a turn is not known when it is asked."""
    moves = []
    for prompt in prompts(turns, template):
        scores = list(player.choose(prompt))
        moves.append(scores.index(max(scores)))
    return moves


@dataclass(frozen=True)
class Rates:
    """Shares of turns won, tied and lost, 0 to 1."""

    win: float
    tie: float
    lose: float


def rates(turns: Sequence[int], moves: Sequence[int]) -> Rates:
    """Return how often the moves win, tie and lose.

    Raises:
        ValueError: If there are no turns, or not as many moves.
    """
    if not turns or len(turns) != len(moves):
        raise ValueError(
            f"{len(moves)} moves for {len(turns)} turns; give one move for each turn, and at least one turn"
        )
    outcomes = Counter((mine - theirs) % 3 for theirs, mine in zip(turns, moves, strict=True))
    return Rates(*(outcomes[kind] / len(turns) for kind in (1, 0, 2)))


def constant_policies(turns: Sequence[int]) -> dict[str, Rates]:
    """Return what saying the same move in every turn would score, computed from the turns."""
    return {f"always {name}": rates(turns, [move] * len(turns)) for move, name in enumerate(MOVES)}


def report(turns: Sequence[int], moves: Sequence[int]) -> dict[str, Any]:
    """Return the result and what it has to be seen beside, as plain data.

    Returns:
        turns; win, tie, lose; answers (share of each letter); constant (whether the answer never changed);
        constant_policies (rates of always rock, paper, scissors); best_constant (their best win rate); beats_constant
        (whether the result is above it); uniform (1/3, and a standard deviation of it over so many turns).
    """
    own, fixed = rates(turns, moves), constant_policies(turns)
    shares = {letter: moves.count(place) / len(moves) for place, letter in enumerate(LETTERS)}
    best = max(rate.win for rate in fixed.values())
    return {
        "turns": len(turns),
        **vars(own),
        "answers": shares,
        "constant": max(shares.values()) == 1.0,
        "constant_policies": {name: dict(vars(rate)) for name, rate in fixed.items()},
        "best_constant": best,
        "beats_constant": own.win > best,
        "uniform": {"win": 1 / 3, "deviation": (2 / 9 / len(turns)) ** 0.5},
    }


def sentence(result: Mapping[str, Any]) -> str:
    """Return a report as one line to print: the result, and what it must not be mistaken for."""
    said = ", ".join(f"{letter} {share:.0%}" for letter, share in result["answers"].items())
    text = (
        f"{result['turns']} turns: win {result['win']:.2%}, tie {result['tie']:.2%}, lose {result['lose']:.2%} "
        f"(answers {said}; best constant answer wins {result['best_constant']:.2%})"
    )
    if result["constant"]:
        text += "; the answer never changed, so this says nothing about memory"
    return text
