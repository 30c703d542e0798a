"""InfiniteBench in the form the Locret paper runs it: completion prompts, no chat template, 128K tokens.

Paper:     arXiv 2402.13718; protocol of arXiv 2410.01805, Section 4.1.
Source:    OpenBMB/InfiniteBench (MIT), data set xinrongzhang2022/InfiniteBench, prompts of its Yarn-Mistral set in the
           wording of the Locret release, which says **MASK** for $$MASK$$.
Fields:    id, context, input, answer (list; a bare text or number in older copies), options (four where one is asked).
Metrics:   src/compute_scores.py at 88b3daa; the Locret release's copy (benchmark/infinite_bench) for scorer "locret".
Deviates:  M.Find cuts a fraction off where the official code stops with an error, see `numbers.first_number`. The
           Locret release's loop emits one token more than `max_new_tokens` says; set it to reproduce that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from locret.data.tasks.metrics.choice import book_choice, code_choice
from locret.data.tasks.metrics.overlap import character_f1, rouge_lsum, word_f1
from locret.data.tasks.metrics.retrieval import (
    LOCRET_MARKS,
    first_integer,
    first_number,
    last_word_as_integer,
    leading_values,
    name_among_words,
    value_among_words,
)
from locret.data.tasks.published.base import PublishedTask, prompts_of, row_id
from locret.data.tasks.task import Sample
from locret.data.training.json_rows import BadRow, text_of, texts_of

LETTERS = "ABCD"
CONTEXT_LENGTH = 131072
ANSWER_ROOM = 50
"""The Locret release leaves this many tokens at most for the reference when it truncates."""

# Text before and after the context; the names in braces are fields of the row or made from them.
_FORMS: dict[str, list[str]] = prompts_of("infinitebench")


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
    """
    return (_LOCRET if variant == "locret" else _METRICS)[task](prediction, targets)


@dataclass(frozen=True, kw_only=True)
class InfiniteBenchTask(PublishedTask):
    """One file of InfiniteBench."""

    settable: ClassVar[tuple[str, ...]] = (*PublishedTask.settable, "answer_room", "replace_mask", "scorer")

    form: str
    """Which prompt of `_FORMS`: the file's name in the published set."""
    has_options: bool = False
    """Whether the row has four options and the answer is one of them."""
    answer_room: bool = True
    """Leave room for up to 50 tokens of the reference when truncating, as the Locret, SirLLM and 2-bit scripts do."""
    replace_mask: bool = True
    """Write **MASK** for $$MASK$$ everywhere, as all scripts but the 2-bit one do."""

    scorer: Literal["official", "locret"] = "official"
    """The benchmark's own scorer, or the Locret release's copy, which differs in C.Debug and R.KV."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("scorer", ("official", "locret"))

    @property
    def asks_first(self) -> bool:
        """Whether the words before the context are made from the row's question."""
        return "{" in _FORMS[self.form][0]

    def read(self, index: int, where: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return the sample of a row."""
        context = text_of(record, where, "context")
        # Only the question of some tasks goes into the prompt, yet every published row has one.
        question = text_of(record, where, "input", may_be_empty=self.form not in _ASKED)
        targets = texts_of(record, where, "answer")
        options = texts_of(record, where, "options") if self.has_options else ()
        if self.has_options:
            targets = _choice(where, targets, options)
        for target in targets:
            if not re.search(_NUMBERS.get(self.form, ""), target):
                raise BadRow(where, "wrong answer", f"holds {target!r} in field 'answer' where a number is needed")
        values = {
            "input": question,
            **dict(zip(LETTERS, options, strict=False)),
            **_derived(self.form, where, question),
        }
        head, tail = (part.format_map(values) for part in _FORMS[self.form])
        head, context, tail = (self._masked(part) for part in (head, context, tail))
        more = {"reply": _reply(self.form, targets), "choices": options, "extra": row_id(record)}
        return [self.sample_of(index, head, context, tail, targets, **more)]

    def _masked(self, text: str) -> str:
        return text.replace("$$MASK$$", "**MASK**") if self.replace_mask else text

    def allowed(self, sample: Sample, count: Callable[[str], int]) -> int | None:
        """Return the tokens of the prompt: the limit, less the first reference's tokens (50 at most)."""
        if self.limit is None or not self.answer_room:
            return self.limit
        return max(2, self.limit - min(ANSWER_ROOM, count(sample.targets[0])))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the task's own metric."""
        return score(self.form, prediction, sample.targets, self.scorer)


# What a reference must be, where the metric reads a number out of it.
_NUMBERS = {"code_run": r"^-?\d+$", "math_calc": r"^-?\d+$", "math_find": r"^-?\d+(\.\d+)?$"}
# Tasks whose `input` stands in the prompt.
_ASKED = {name for name, parts in _FORMS.items() if "{input}" in parts[1]} | {"code_run"}


def _choice(where: str, targets: tuple[str, ...], options: tuple[str, ...]) -> tuple[str, ...]:
    """The right option's text and its letter."""
    if len(options) != len(LETTERS):
        raise BadRow(where, "wrong options", f"has {len(options)} entries in field 'options' where 4 are needed")
    if len(targets) == 2 and targets[1] in tuple(LETTERS):
        return targets
    if len(targets) != 1 or targets[0] not in options:
        raise BadRow(where, "wrong answer", f"has {list(targets)!r} in field 'answer', which is not one of the options")
    return targets[0], LETTERS[options.index(targets[0])]


def _derived(form: str, where: str, question: str) -> dict[str, str]:
    """Values that the official prompt takes out of the question."""
    if form == "code_run":
        call = re.search(r"func_[0-9]+\(-?[0-9]+\)", question)
        if call is None:
            raise BadRow(where, "no call", f"names no call such as func_1(2) in field 'input': {question[:80]!r}")
        return {"call": call[0], "function": call[0].split("(")[0]}
    if form == "math_find":
        sought = re.search(r"The (.+) of", question)
        if sought is None:
            raise BadRow(where, "no number", f"does not say \"The ... of\" in field 'input': {question[:80]!r}")
        return {"sought": f"the {sought[1].lower()}"}
    return {}


def _reply(form: str, targets: tuple[str, ...]) -> str:
    if form == "longbook_choice_eng":
        return targets[1]
    if form == "code_debug":
        return f"{targets[1]}. {targets[0]}"
    if form == "math_calc":
        return f"[{', '.join(targets)}]"
    return targets[0]


def _task(name: str, size: int | None, new: int, metric: str, **more: Any) -> InfiniteBenchTask:
    form = more.pop("form", name)
    return InfiniteBenchTask(
        name=f"infinitebench/{name}",
        source="InfiniteBench, arXiv 2402.13718; protocol of arXiv 2410.01805",
        metric=metric,
        max_new_tokens=new,
        chat=False,
        limit=more.pop("context_length", CONTEXT_LENGTH) - new,
        truncation="middle",
        file=f"data/{name}.jsonl",
        hub_file=f"{name}.jsonl",
        repo=more.pop("repo", "xinrongzhang2022/InfiniteBench"),
        revision="90f0394333616266d9fe85824ceaf505093cbaa5",
        size=size,
        form=form,
        **more,
    )


_SHORTER = {
    f"passkey_{length}": _task(f"passkey_{length}", None, 6, "first integer", form="passkey", repo="")
    for length in (8192, 16384, 32768, 65536)
}

TASKS: tuple[InfiniteBenchTask, ...] = (
    _task("passkey", 590, 6, "first integer"),
    _task("number_string", 590, 12, "first integer"),
    _task("kv_retrieval", 500, 50, "value among the words"),
    _task("longbook_sum_eng", 103, 1200, "ROUGE-Lsum"),
    _task("longbook_qa_eng", 351, 40, "token F1"),
    _task("longbook_choice_eng", 229, 40, "accuracy of the letter", has_options=True),
    _task("longdialogue_qa_eng", 200, 40, "name among the words"),
    # Books of two million tokens on average: lines of 5 MB and more are the published data.
    _task("longbook_qa_chn", 175, 40, "character F1", max_row_bytes=64 << 20),
    _task("code_debug", 394, 5, "accuracy of the option", has_options=True),
    _task("code_run", 400, 5, "last word as integer"),
    _task("math_find", 350, 3, "first number"),
    _task("math_calc", 50, 30000, "share of leading values"),
    # The authors' shorter PassKey files: in their repository's history only, not on the Hub.
    *_SHORTER.values(),
)
