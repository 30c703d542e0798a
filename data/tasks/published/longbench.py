"""LongBench: 21 tasks in English, Chinese and code, with the prompts and lengths of its own configuration.

Paper:     arXiv 2308.14508.
Source:    THUDM/LongBench (MIT), now zai-org/LongBench on the Hub, whose data.zip unpacks to data/<task>.jsonl; prompts
           and generation lengths of its config/dataset2prompt.json and dataset2maxlen.json.
Fields:    input (question, may be empty), context, answers, length, dataset, language, all_classes, _id.
Metrics:   eval.py and metrics.py.
Deviates:  never. The prompt limit belongs to the model: `limit`, none by default; published runs had 3,500 tokens for
           backbones of 4K, 7,500 of 8K, 15,500 of 16K, 31,500 of 32K.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from locret.data.tasks.metrics.choice import one_class
from locret.data.tasks.metrics.overlap import chinese_rouge_l, chinese_word_f1, edit_similarity, rouge_l, word_f1
from locret.data.tasks.metrics.retrieval import share_of_numbers
from locret.data.tasks.published.base import PublishedTask, prompts_of, row_id
from locret.data.tasks.task import Sample
from locret.data.training.json_rows import BadRow, text_of, texts_of

# Text before and after the context: the benchmark's own config/dataset2prompt.json, as it is, misprints included.
_FORMS = {name: prompt.split("{context}") for name, prompt in prompts_of("longbench").items()}
_CLASSIFIED = ("trec", "lsht")
_NO_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
# What a reference must be, where the metric reads something out of it.
_REFERENCES = {
    "passage_count": r"^\d+$",
    "passage_retrieval_en": r"Paragraph \d+",
    "passage_retrieval_zh": r"段落\d+",
}


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


@dataclass(frozen=True, kw_only=True)
class LongBenchTask(PublishedTask):
    """One file of LongBench."""

    task: str
    """The file's name in the published set."""

    @property
    def compares(self) -> tuple[str, ...]:
        """Classifications compare an answer with all classes."""
        return ("choices",) if self.task in _CLASSIFIED else ()

    def read(self, index: int, where: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return the sample of a row."""
        context = text_of(record, where, "context")
        question = text_of(record, where, "input", may_be_empty="{input}" not in _FORMS[self.task][1])
        targets = texts_of(record, where, "answers")
        classes = texts_of(record, where, "all_classes", may_be_empty=True) if "all_classes" in record else ()
        for target in targets:
            if not re.search(_REFERENCES.get(self.task, ""), target):
                needed = _REFERENCES[self.task].strip("^$").replace(r"\d+", "12")
                raise BadRow(where, "wrong answer", f"holds {target!r} in field 'answers' where {needed!r} is right")
        if self.task in _CLASSIFIED and not classes:
            raise BadRow(where, "no classes", "has an empty field 'all_classes', and the metric looks for classes")
        dataset = record.get("dataset", self.task)
        if dataset not in (self.task, f"{self.task}_e"):
            raise BadRow(where, "other task", f"says {dataset!r} in field 'dataset' where {self.task!r} is read")
        head, tail = (part.format(input=question) for part in _FORMS[self.task])
        extra = row_id(record, "_id")
        return [self.sample_of(index, head, context, tail, targets, choices=classes, extra=extra)]

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the task's own metric, the best over the references."""
        return score(self.task, prediction, sample.targets, sample.choices)


def _task(name: str, new: int, metric: str, size: int = 200) -> LongBenchTask:
    return LongBenchTask(
        name=f"longbench/{name}",
        source="LongBench, arXiv 2308.14508",
        metric=metric,
        max_new_tokens=new,
        # samsum's answers end with their line, which has one token at least.
        min_new_tokens=1 if name == "samsum" else 0,
        stop=("\n",) if name == "samsum" else (),
        chat=name not in _NO_CHAT,
        truncation="middle",
        reencode=True,
        file=f"data/{name}.jsonl",
        hub_file=f"data.zip!data/{name}.jsonl",
        repo="zai-org/LongBench",
        revision="5e628be450b7e67fb7ae6e201bd6d8f7056f7672",
        size=size,
        task=name,
    )


_F1, _ROUGE, _CLASS = "token F1", "ROUGE-L", "classification"
TASKS: tuple[LongBenchTask, ...] = (
    _task("narrativeqa", 128, _F1),
    _task("qasper", 128, _F1),
    _task("multifieldqa_en", 64, _F1, 150),
    _task("multifieldqa_zh", 64, _F1 + " of jieba's words"),
    _task("hotpotqa", 32, _F1),
    _task("2wikimqa", 32, _F1),
    _task("musique", 32, _F1),
    _task("dureader", 128, _ROUGE + " of jieba's words"),
    _task("gov_report", 512, _ROUGE),
    _task("qmsum", 512, _ROUGE),
    _task("multi_news", 512, _ROUGE),
    _task("vcsum", 512, _ROUGE + " of jieba's words"),
    _task("trec", 64, _CLASS),
    _task("triviaqa", 32, _F1),
    _task("samsum", 128, _ROUGE),
    _task("lsht", 64, _CLASS),
    _task("passage_count", 32, "share of the numbers that are the count"),
    _task("passage_retrieval_en", 32, "share of the numbers that are the paragraph"),
    _task("passage_retrieval_zh", 32, "share of the numbers that are the paragraph"),
    _task("lcc", 64, "edit similarity", 500),
    _task("repobench-p", 64, "edit similarity", 500),
)
