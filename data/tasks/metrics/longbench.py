"""LongBench: which metric each task has.

Paper:     arXiv 2308.14508.
Source:    THUDM/LongBench, eval.py and metrics.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from locret.data.tasks.metrics.choice import one_class
from locret.data.tasks.metrics.code import edit_similarity
from locret.data.tasks.metrics.f1 import chinese_word_f1, word_f1
from locret.data.tasks.metrics.retrieval import share_of_numbers
from locret.data.tasks.metrics.rouge import chinese_rouge_l, rouge_l

Metric = Callable[[str, Sequence[str], Sequence[str]], float]


def _over_references(metric: Callable[[str, Sequence[str]], float]) -> Metric:
    """A metric that takes all references at once and knows no classes."""
    return lambda prediction, targets, classes: metric(prediction, targets)


def _best(metric: Callable[[str, str], float]) -> Metric:
    """The best over the references of a metric that takes one."""
    return lambda prediction, targets, classes: max((metric(prediction, target) for target in targets), default=0.0)


def _paragraph(label: str) -> Callable[[str, str], float]:
    """Share of the answer's integers that are the number after the label in the reference."""

    def metric(prediction: str, target: str) -> float:
        number = re.search(rf"{label}(\d+)", target)
        if number is None:
            raise ValueError(f"reference {target!r} names no paragraph; it must be such as '{label}12'")
        return share_of_numbers(prediction, number[1])

    return metric


def _classification(prediction: str, targets: Sequence[str], classes: Sequence[str]) -> float:
    return max((one_class(prediction, target, classes) for target in targets), default=0.0)


_WORD_F1 = ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa")
_METRICS: dict[str, Metric] = {
    **dict.fromkeys(_WORD_F1, _over_references(word_f1)),
    "multifieldqa_zh": _over_references(chinese_word_f1),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), _over_references(rouge_l)),
    **dict.fromkeys(("dureader", "vcsum"), _over_references(chinese_rouge_l)),
    **dict.fromkeys(("trec", "lsht"), _classification),
    "passage_count": _best(share_of_numbers),
    "passage_retrieval_en": _best(_paragraph("Paragraph ")),
    "passage_retrieval_zh": _best(_paragraph("段落")),
    **dict.fromkeys(("lcc", "repobench-p"), _best(edit_similarity)),
}
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
"""Tasks of which only the answer's first line counts, after empty lines at its start."""


def score(task: str, prediction: str, targets: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Return the score of an answer, from 0 to 1, the best over the references.

    Args:
        task: The file's name in the published set, such as "qasper".
        prediction: The generated text, as decoded.
        targets: The references.
        classes: All classes, for trec and lsht.

    Raises:
        ValueError: If the metric's library is not installed, or a reference of paragraph retrieval names no paragraph.
    """
    if task in FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return _METRICS[task](prediction, targets, classes)
