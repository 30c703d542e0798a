"""Refusals of a scorer's options, in one form."""

from __future__ import annotations

from locret.base.registry import Chosen

REDUCTIONS = ("mean", "max", "sum")


def check_choice(scorer: str, option: str, value: str, choices: tuple[str, ...] = REDUCTIONS) -> None:
    """Refuse a value that is none of its choices.

    Raises:
        ValueError: Naming them.
    """
    if value not in choices:
        raise ValueError(f'scorer {scorer}: {option}="{value}" is unknown; choose one of {", ".join(choices)}')


def check_at_least(scorer: str, least: int, **options: int) -> None:
    """Refuse numbers below `least`.

    Raises:
        ValueError: Naming the first.
    """
    for option, value in options.items():
        if value < least:
            raise ValueError(f"scorer {scorer}: {option}={value} is too small; it must be {least} or more")


def check_at_most(scorer: str, most: int, **options: int) -> None:
    """Refuse numbers above `most`.

    Raises:
        ValueError: Naming the first.
    """
    for option, value in options.items():
        if value > most:
            raise ValueError(f"scorer {scorer}: {option}={value} is too large; it must be {most:,} or less")


def check_effect(scorer: Chosen, needed: str, *options: str) -> None:
    """Refuse options that are not at their defaults, where nothing reads them.

    Args:
        scorer: Holds the options.
        needed: The setting that would let them have an effect.
        *options: Their names.

    Raises:
        ValueError: Naming the first.
    """
    for option in options:
        value = getattr(scorer, option)
        if value != getattr(type(scorer), option):
            raise ValueError(
                f"scorer {scorer.name}: {option}={value} has no effect without {needed}; set that, or leave it out"
            )


def check_seed(scorer: str, seed: int) -> None:
    """Refuse a seed that the arithmetic of the draw cannot hold.

    Raises:
        ValueError: Naming it.
    """
    if abs(seed) >= 2**32:
        raise ValueError(f"scorer {scorer}: seed={seed} has more than 32 bits; choose a smaller one")


def check_shares(scorer: str, **options: float) -> None:
    """Refuse shares outside 0 .. 1.

    Raises:
        ValueError: Naming the first.
    """
    for option, value in options.items():
        if not 0 <= value <= 1:
            raise ValueError(f"scorer {scorer}: {option}={value} is not a share; it must lie between 0 and 1")
