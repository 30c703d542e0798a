"""Code: how similar a completed line is to the true one, and which of several functions an answer repeats.

Source:    LongBench, metrics.py, which calls `fuzz.ratio` of fuzzywuzzy: difflib's ratio, rounded to whole percent;
           SCBench, scbench/repo_qa_utils.py, which is RepoQA's.
Quirks:    with python-Levenshtein installed fuzzywuzzy takes another similarity (insertions and deletions only), which
           gives other figures: 59.82 instead of the published 57.61 on LongAlpaca-7B-16k's lcc answers.
Deviates:  RepoQA cuts the first function out of an answer's code blocks with tree-sitter; here the first block is
           compared whole, which is the same for answers that repeat the function and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache

from locret.data.tasks.metrics.overlap import bleu


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


def first_code_block(prediction: str) -> str:
    """Return what stands in the first block between lines of three backticks; the whole answer if there is none."""
    text = prediction.strip()
    found = re.search(r"^```(?:\w+)?\s*\n(.*?)(?=^```)```", text, re.DOTALL | re.MULTILINE)
    return found[1] if found else text


def repeated_function(prediction: str, functions: Sequence[tuple[str, str]]) -> tuple[str, float]:
    """Return the name of the function that an answer is most like, and how much: RepoQA's retrieval.

    Likeness is smoothed BLEU over what white space separates, from 0 to 1. The first of equals counts.

    Args:
        prediction: The generated text.
        functions: Name and code of each function that it could be.

    Raises:
        ValueError: If nltk is not installed.
    """
    code = first_code_block(prediction).strip()
    best, most = "", 0.0
    for name, function in functions:
        likeness = _likeness(code, function.strip())
        if likeness > most:
            best, most = name, likeness
    return best, most


@lru_cache(maxsize=2**14)  # the error of a task's score leaves out one text after the other, and asks the same again
def _likeness(code: str, function: str) -> float:
    return bleu(re.split(r"\s+", code), re.split(r"\s+", function), smooth=True)
