"""Numbers: what a program returns, which number of a list is sought, the values of an expression.

Source:    InfiniteBench, src/compute_scores.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def last_word_as_integer(prediction: str, value: int) -> float:
    """Return 1 if the answer's last word is the integer: InfiniteBench's C.Run.

    Full stops, colons and quotation marks separate words, so 2.0 ends with the word 0.
    """
    words = re.sub("[\n.`'\":]", " ", prediction).split()
    try:
        return float(bool(words) and int(words[-1]) == value)
    except ValueError:
        return 0.0


def first_number(prediction: str, value: int | float) -> float:
    """Return 1 if the first number of the answer is the one sought: InfiniteBench's M.Find.

    For an integer the fraction is cut off, so 3.9 is 3, as in the Locret release; the official code stops with an error
    there and scores nothing. A minus sign is not part of a number, so -3 is 3.
    """
    found = re.search(r"\d+\.\d+|\d+", prediction)
    if found is None:
        return 0.0
    number = float(found[0])
    if isinstance(value, float):
        return float(number == value)
    # Digits alone are compared as integers: as floats, numbers above 2**53 would be rounded.
    return float((int(number) if "." in found[0] else int(found[0])) == value)


def leading_values(prediction: str, values: Sequence[int]) -> float:
    """Return the share of values that the answer lists correctly before its first mistake: InfiniteBench's M.Calc.

    Runs of digits are the answer's values; as signs are lost, a negative value is always a mistake. For GPT-4 the
    official code leaves out the answer's first number, which repeats the expression's; for other models it does not.
    """
    found = [int(digits) for digits in re.findall("[0-9]+", prediction)]
    right = 0
    for one, other in zip(found, values, strict=False):
        if one != other:
            break
        right += 1
    return right / len(values)
