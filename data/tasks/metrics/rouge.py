"""ROUGE in the three variants that the benchmarks use; their figures differ by points, so none replaces another.

Source:    ROUGE-1.5.5 (Lin, 2004) as rewritten by two packages: `rouge-score` (Google), which InfiniteBench calls
           through Hugging Face's `evaluate` and L-Eval calls itself, and `rouge` (pltrdy), which LongBench calls.
Variants:  InfiniteBench E.Sum: ROUGE-Lsum of rouge-score, lines as sentences, no stemmer.
           L-Eval: ROUGE-1, -2 and -L of rouge-score, no stemmer; their geometric mean over a task (`geometric_mean`).
           LongBench: ROUGE-L of rouge: sentences end at ".", words are sets and not bags, F has 1e-8 in its
           denominator, case and punctuation count.
           LooGLE: recall of ROUGE-1, -2 or -L of rouge.
Quirks:    rouge-score reads the letters a-z and digits only, so a Chinese text has no words in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from locret.data.tasks.metrics.f1 import cut_chinese
from locret.data.tasks.metrics.libraries import library

Parts = tuple[float, float, float]
"""ROUGE-1, -2 and -L of one answer, each from 0 to 1."""
_CALLS = 1000
"""Calls within each other that Python allows when it starts."""


@lru_cache(maxsize=2)
def _google_scorer(*kinds: str) -> Any:
    module = library("rouge_score.rouge_scorer", "ROUGE of InfiniteBench and L-Eval")
    return module.RougeScorer(list(kinds), use_stemmer=False)


@lru_cache(maxsize=4)
def _set_scorer(kind: str, part: str) -> Any:
    return library("rouge", "ROUGE of LongBench and LooGLE").Rouge(metrics=[kind], stats=[part])


def rouge_lsum(prediction: str, references: Sequence[str]) -> float:
    """Return F of ROUGE-Lsum, the best over the references: InfiniteBench's E.Sum.

    Raises:
        ValueError: If rouge-score is not installed.
    """
    return float(_google_scorer("rougeLsum").score_multi(references, prediction)["rougeLsum"].fmeasure)


def rouge_1_2_l(prediction: str, references: Sequence[str]) -> Parts:
    """Return F of ROUGE-1, -2 and -L, each the best over the references: L-Eval.

    Raises:
        ValueError: If rouge-score is not installed.
    """
    best = _google_scorer("rouge1", "rouge2", "rougeL").score_multi(references, prediction)
    one, two, longest = (float(best[kind].fmeasure) for kind in ("rouge1", "rouge2", "rougeL"))
    return one, two, longest


def geometric_mean(answers: Sequence[Parts]) -> float:
    """Return L-Eval's score of a task: the geometric mean of the three averages over its answers, from 0 to 1.

    It is not the average of the answers' geometric means, which a single 0 pulls down.
    """
    if not answers:
        return 0.0
    one, two, longest = (sum(parts) / len(answers) for parts in zip(*answers, strict=True))
    return float((one * two * longest) ** (1 / 3))


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """Return F of ROUGE-L, the best over the references: LongBench's summaries.

    A text without any sentence scores 0, and so does one with sentences so long (a thousand words in prediction and
    reference together) that the package's recursion ends at Python's limit: the official code catches both.

    Raises:
        ValueError: If rouge is not installed.
    """
    return max((_of_sets(prediction, reference, "rouge-l", "f") for reference in references), default=0.0)


def rouge_recall(prediction: str, reference: str, kind: str) -> float:
    """Return recall of ROUGE: LooGLE's. A text without any sentence scores 0, where the official code stops.

    Args:
        prediction: The generated text.
        reference: The reference.
        kind: "rouge-1", "rouge-2" or "rouge-l".

    Raises:
        ValueError: If rouge is not installed.
    """
    return _of_sets(prediction, reference, kind, "r")


def _of_sets(prediction: str, reference: str, kind: str, part: str) -> float:
    scorer = _set_scorer(kind, part)
    try:
        with _usual_depth():
            return float(scorer.get_scores([prediction], [reference], avg=True)[kind][part])
    except (ValueError, RecursionError):
        return 0.0


@contextmanager
def _usual_depth() -> Iterator[None]:
    """Allow as many calls within each other as Python does when it starts, and the official runs did, from here on.

    What else is imported raises the limit (PyTorch's compiler, networkx), and a score would depend on it.
    """
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + _CALLS)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def chinese_rouge_l(prediction: str, references: Sequence[str]) -> float:
    """Return F of ROUGE-L over jieba's words, the best over the references: LongBench's dureader and vcsum.

    Raises:
        ValueError: If rouge or jieba is not installed.
    """
    return rouge_l(" ".join(cut_chinese(prediction)), [" ".join(cut_chinese(text)) for text in references])
