"""Values: whether a generated text holds what was hidden, the number that is sought, the values of an expression.

Source:    InfiniteBench, src/compute_scores.py; LongBench, metrics.py; the needle and two-stage tasks of IMDC and
           OmniKV; RULER, scripts/eval/synthetic/constants.py, whose cleaning of answers replaces control characters by
           newlines, which changes no score: no reference has one in it; SCBench, scbench/compute_scores.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

_MARKS = ("\n", ":", '"', "'", ".", ",", "?", "!", "{", "}")


def first_integer(prediction: str, target: str) -> float:
    """Return 1 if the first run of digits is the target (InfiniteBench, R.PassKey and R.Number)."""
    pieces = [piece for piece in re.split(r"[^0-9]", prediction) if piece]
    return float(bool(pieces) and pieces[0] == target)


def all_contained(prediction: str, targets: Sequence[str]) -> float:
    """Return the share of targets that occur in the prediction, whatever the case (RULER, string match "all")."""
    low = prediction.lower()
    return sum(target.lower() in low for target in targets) / len(targets)


def split_words(text: str) -> list[str]:
    """Return the pieces of a text between white space and marks."""
    for mark in _MARKS:
        text = text.replace(mark, " ")
    return text.split()


def any_contained(prediction: str, targets: Sequence[str]) -> float:
    """Return 1 if any target occurs in the prediction, whatever the case (RULER's "part", needle, 2StageRetr)."""
    low = prediction.lower()
    return float(any(target.lower() in low for target in targets))


def share_of_numbers(prediction: str, number: str) -> float:
    """Return the share of the answer's integers that are the number: LongBench's counts and paragraph retrieval.

    The digits are compared as text: "08" is not 8, and "-8" is 8. An answer without digits scores 0.
    """
    found = re.findall(r"\d+", prediction)
    return found.count(number) / len(found) if found else 0.0


def last_word_as_integer(prediction: str, target: str) -> float:
    """Return 1 if the answer's last word is the integer: InfiniteBench's C.Run.

    Full stops, colons and quotation marks separate words, so 2.0 ends with the word 0.
    """
    words, value = re.sub("[\n.`'\":]", " ", prediction).split(), int(target)
    try:
        return float(bool(words) and int(words[-1]) == value)
    except ValueError:
        return 0.0


def first_number(prediction: str, target: str) -> float:
    """Return 1 if the first number of the answer is the one sought: InfiniteBench's M.Find.

    For an integer the fraction is cut off, so 3.9 is 3, as in the Locret release; the official code stops with an error
    there and scores nothing. A minus sign is not part of a number, so -3 is 3.
    """
    found, value = re.search(r"\d+\.\d+|\d+", prediction), float(target) if "." in target else int(target)
    if found is None:
        return 0.0
    if isinstance(value, float):
        return float(float(found[0]) == value)
    # Digits alone are compared as integers: as floats, numbers above 2**53 would be rounded.
    return float((int(float(found[0])) if "." in found[0] else int(found[0])) == value)


def leading_values(prediction: str, values: Sequence[str]) -> float:
    """Return the share of values that the answer lists correctly before its first mistake: InfiniteBench's M.Calc.

    Runs of digits are the answer's values; as signs are lost, a negative value is always a mistake. For GPT-4 the
    official code leaves out the answer's first number, which repeats the expression's; for other models it does not.
    """
    found = map(int, re.findall("[0-9]+", prediction))
    right = takewhile(lambda pair: pair[0] == int(pair[1]), zip(found, values, strict=False))
    return len(list(right)) / len(values)
