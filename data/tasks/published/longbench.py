"""LongBench: 21 tasks in English, Chinese and code, with the prompts and lengths of its own configuration.

Paper:     arXiv 2308.14508.
Source:    THUDM/LongBench (MIT), now zai-org/LongBench on the Hub, whose data.zip unpacks to data/<task>.jsonl; prompts
           and generation lengths of its config/dataset2prompt.json and dataset2maxlen.json.
Fields:    input (question, may be empty), context, answers, length, dataset, language, all_classes, _id.
Metrics:   eval.py and metrics.py.
Deviates:  never. The prompt limit belongs to the model: `limit`, none by default; published runs had 3,500 tokens for
           backbones of 4K, 7,500 of 8K, 15,500 of 16K, 31,500 of 32K.

LongBench v2: 503 multiple-choice questions about texts of 8 thousand to 2 million words.

Paper:     arXiv 2412.15204.
Source:    THUDM/LongBench (MIT), data set THUDM/LongBench-v2, now zai-org/LongBench-v2: one file, data.json; prompts of
           its prompts/ folder, lengths of pred.py and config/model2maxlen.json, which allows 120,000 tokens of prompt.
Fields:    _id, domain, sub_domain, difficulty (easy, hard), length (short, medium, long), question, choice_A ...
           choice_D, answer (a letter), context.
Metrics:   pred.py and result.py: accuracy of the letter after "The correct answer is".
Deviates:  greedy, where the official runs sample at temperature 0.1. An empty answer counts as wrong; the official runs
           leave the question out.

Each row is in three tasks: all of them, those of its difficulty, and those of its length, as in the paper's table,
without a chain of thought.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from locret.data.tasks.metrics.choice import LETTERS, one_class, stated_letter
from locret.data.tasks.metrics.overlap import chinese_rouge_l, chinese_word_f1, edit_similarity, rouge_l, word_f1
from locret.data.tasks.metrics.retrieval import share_of_numbers
from locret.data.tasks.published.base import Metric, PublishedTask, best, first, over, prompts_of
from locret.data.tasks.rows import Row
from locret.data.tasks.task import Sample

# Text before and after the context: the benchmark's own config/dataset2prompt.json, as it is, misprints included.
_FORMS = {name: prompt.split("{context}") for name, prompt in prompts_of("longbench").items()}
_CLASSIFIED = ("trec", "lsht")
_NO_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
"""Tasks of which only the answer's first line counts, after empty lines at its start."""
# What a reference must be, where the metric reads something out of it.
_REFERENCES = {"passage_count": r"^\d+$", "passage_retrieval_en": r"Paragraph \d+", "passage_retrieval_zh": r"段落\d+"}


def _paragraph(label: str) -> Callable[[str, str], float]:
    """Return the share of the answer's integers that are the number after the label in the reference."""

    def metric(prediction: str, target: str) -> float:
        number = re.search(rf"{label}(\d+)", target)
        assert number is not None
        return share_of_numbers(prediction, number[1])

    return metric


def _class(prediction: str, sample: Sample) -> float:
    return max((one_class(prediction, target, sample.choices) for target in sample.targets), default=0.0)


@dataclass(frozen=True, kw_only=True)
class LongBenchTask(PublishedTask):
    """One file of LongBench."""

    task: str
    """The file's name in the published set."""

    def read(self, row: Row) -> list[Sample]:
        before, after = _FORMS[self.task]
        context = row.text("context")
        question = row.text("input", may_be_empty="{input}" not in after)
        targets = row.texts("answers")
        classes = row.texts("all_classes", may_be_empty=True) if "all_classes" in row.fields else ()
        for target in targets:
            if not re.search(_REFERENCES.get(self.task, ""), target):
                needed = _REFERENCES[self.task].strip("^$").replace(r"\d+", "12")
                raise row.bad(f"holds {target!r} in field 'answers' where {needed!r} is right")
        if self.task in _CLASSIFIED and not classes:
            raise row.bad("has an empty field 'all_classes', and the metric looks for classes")
        dataset = row.fields.get("dataset", self.task)
        if dataset not in (self.task, f"{self.task}_e"):
            raise row.bad(f"says {dataset!r} in field 'dataset' where {self.task!r} is read")
        head, tail = (part.format(input=question) for part in (before, after))
        return [self.sample_of(row, head, context, tail, targets, choices=classes)]

    def score(self, prediction: str, sample: Sample) -> float:
        if self.task in _FIRST_LINE:
            prediction = prediction.lstrip("\n").split("\n")[0]
        return super().score(prediction, sample)


_F1, _ROUGE, _JIEBA = ("token F1", over(word_f1)), ("ROUGE-L", over(rouge_l)), " of jieba's words"
_ZH_ROUGE, _CLASS = ("ROUGE-L" + _JIEBA, over(chinese_rouge_l)), ("classification", _class)
_EDITS = ("edit similarity", best(edit_similarity))
_WHICH = "share of the numbers that are the paragraph"
# New tokens, metric.
_TASKS: dict[str, tuple[int, tuple[str, Metric]]] = {
    "narrativeqa": (128, _F1),
    "qasper": (128, _F1),
    "multifieldqa_en": (64, _F1),
    "multifieldqa_zh": (64, ("token F1" + _JIEBA, over(chinese_word_f1))),
    "hotpotqa": (32, _F1),
    "2wikimqa": (32, _F1),
    "musique": (32, _F1),
    "dureader": (128, _ZH_ROUGE),
    "gov_report": (512, _ROUGE),
    "qmsum": (512, _ROUGE),
    "multi_news": (512, _ROUGE),
    "vcsum": (512, _ZH_ROUGE),
    "trec": (64, _CLASS),
    "triviaqa": (32, _F1),
    "samsum": (128, _ROUGE),
    "lsht": (64, _CLASS),
    "passage_count": (32, ("share of the numbers that are the count", best(share_of_numbers))),
    "passage_retrieval_en": (32, (_WHICH, best(_paragraph("Paragraph ")))),
    "passage_retrieval_zh": (32, (_WHICH, best(_paragraph("段落")))),
    "lcc": (64, _EDITS),
    "repobench-p": (64, _EDITS),
}
_V1_TASKS: tuple[LongBenchTask, ...] = tuple(
    LongBenchTask(
        name=f"longbench/{name}",
        source="LongBench, arXiv 2308.14508",
        metric=metric,
        scored=scored,
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
        size={"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}.get(name, 200),
        task=name,
    )
    for name, (new, (metric, scored)) in _TASKS.items()
)


_SPLITS = {"difficulty": ("easy", "hard"), "length": ("short", "medium", "long")}
_V2_PROMPTS: dict[str, str] = prompts_of("longbench_v2")


@dataclass(frozen=True, kw_only=True)
class LongBenchV2Task(PublishedTask):
    """The rows of LongBench v2, or those of one difficulty or length."""

    split: str = ""
    """A difficulty or a length; empty for all rows."""

    def read(self, row: Row) -> list[Sample]:
        """Return the sample of a row; none for a row of another difficulty or length."""
        splits = [row.one_of(field, known) for field, known in _SPLITS.items()]
        if self.split and self.split not in splits:
            return []
        choices = tuple(row.text(f"choice_{letter}").strip() for letter in LETTERS)
        answer = row.one_of("answer", tuple(LETTERS))
        asked = _V2_PROMPTS["choices"].format(
            question=row.text("question").strip(), **dict(zip(LETTERS, choices, strict=True))
        )
        head, tail = _V2_PROMPTS["read"], _V2_PROMPTS["end"] + asked + _V2_PROMPTS["format"]
        more = {"reply": f"The correct answer is ({answer})", "choices": choices, "question": tail.removeprefix("\n")}
        return [self.sample_of(row, head, row.text("context").strip(), tail, (answer,), **more)]


_V2_SIZES = {"": 503, "easy": 192, "hard": 311, "short": 180, "medium": 215, "long": 108}
_V2_TASKS: tuple[LongBenchV2Task, ...] = tuple(
    LongBenchV2Task(
        name=f"longbench_v2/{split or 'all'}",
        source="LongBench v2, arXiv 2412.15204",
        metric="accuracy of the letter",
        scored=first(lambda said, letter: float(stated_letter(said) == letter)),
        max_new_tokens=128,
        limit=120_000,
        truncation="middle",
        reencode=True,
        file="data.jsonl",
        hub_file="data.json",
        repo="zai-org/LongBench-v2",
        revision="2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9",
        size=size,
        split=split,
    )
    for split, size in _V2_SIZES.items()
)

TASKS: tuple[PublishedTask, ...] = (*_V1_TASKS, *_V2_TASKS)
