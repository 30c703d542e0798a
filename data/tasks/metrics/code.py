"""Code completion: how similar the predicted line is to the true one.

Source:    LongBench, metrics.py, which calls `fuzz.ratio` of fuzzywuzzy: difflib's ratio, rounded to whole percent.
Quirks:    with python-Levenshtein installed fuzzywuzzy takes another similarity (insertions and deletions only), which
           gives other figures: 59.82 instead of the published 57.61 on LongAlpaca-7B-16k's lcc answers.
"""

from __future__ import annotations

from difflib import SequenceMatcher


def first_code_line(prediction: str) -> str:
    """Return the first line that has no backtick, # or // in it; empty if there is none, or if that line is empty.

    Empty lines at the very start are passed over.
    """
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")


def edit_similarity(prediction: str, reference: str) -> float:
    """Return difflib's similarity of the first code line and the reference, in steps of 0.01."""
    ratio = SequenceMatcher(None, first_code_line(prediction), reference).ratio()
    return round(100 * ratio) / 100
