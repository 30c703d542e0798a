"""InfiniteBench: which metric each task has.

Paper:     arXiv 2402.13718.
Source:    OpenBMB/InfiniteBench, src/compute_scores.py at 88b3daa; the Locret release's copy (benchmark/infinite_bench)
           for variant "locret".
Deviates:  M.Find cuts the fraction off where the official code stops with an error, see `numbers.first_number`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from locret.data.tasks.metrics.choice import book_choice, code_choice
from locret.data.tasks.metrics.f1 import character_f1, word_f1
from locret.data.tasks.metrics.numbers import first_number, last_word_as_integer, leading_values
from locret.data.tasks.metrics.retrieval import LOCRET_MARKS, first_integer, name_among_words, value_among_words
from locret.data.tasks.metrics.rouge import rouge_lsum

Metric = Callable[[str, Sequence[str]], float]
Variant = Literal["official", "locret"]


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


_METRICS: dict[str, Metric] = {
    "passkey": lambda prediction, targets: first_integer(prediction, targets[0]),
    "number_string": lambda prediction, targets: first_integer(prediction, targets[0]),
    "kv_retrieval": lambda prediction, targets: value_among_words(prediction, targets[0]),
    "longbook_sum_eng": rouge_lsum,
    "longbook_qa_eng": word_f1,
    "longbook_qa_chn": character_f1,
    "longbook_choice_eng": lambda prediction, targets: book_choice(prediction, targets[0], targets[1]),
    "longdialogue_qa_eng": lambda prediction, targets: name_among_words(prediction, targets[0]),
    "code_debug": lambda prediction, targets: code_choice(prediction, targets[0], targets[1]),
    "code_run": lambda prediction, targets: last_word_as_integer(prediction, int(targets[0])),
    "math_find": lambda prediction, targets: first_number(prediction, _number(targets[0])),
    "math_calc": lambda prediction, targets: leading_values(prediction, [int(target) for target in targets]),
}
_LOCRET: dict[str, Metric] = _METRICS | {
    "kv_retrieval": lambda prediction, targets: value_among_words(prediction, targets[0], LOCRET_MARKS),
    "code_debug": lambda prediction, targets: code_choice(prediction, targets[0], targets[1], line_end=True),
}


def score(task: str, prediction: str, targets: Sequence[str], variant: Variant = "official") -> float:
    """Return the score of an answer, from 0 to 1.

    Args:
        task: The file's name in the published set, such as "passkey".
        prediction: The generated text, as decoded.
        targets: The references; for E.MC and C.Debug the right option's text and its letter.
        variant: The benchmark's own code, or the Locret release's copy, which also takes a letter alone on its line in
            C.Debug and ends R.KV's words at "</s>", "The" and "To".

    Raises:
        ValueError: If the metric's library is not installed.
    """
    return (_LOCRET if variant == "locret" else _METRICS)[task](prediction, targets)
