"""InfiniteBench in the form the Locret paper runs it: completion prompts, no chat template, 128K tokens.

R.PassKey, R.Number and R.KV are made at any length too, as its own script does (`infinitebench_generated`).

Paper:     arXiv 2402.13718; protocol of arXiv 2410.01805, Section 4.1.
Source:    OpenBMB/InfiniteBench (MIT), data set xinrongzhang2022/InfiniteBench, prompts of its Yarn-Mistral set in the
           wording of the Locret release, which says **MASK** for $$MASK$$; for rows that are made its
           data/construct_synthetic_dataset.py, with the layout and spaces of the Hub files.
Fields:    id, context, input, answer (list; a bare text or number in older copies), options (four where one is asked).
Metrics:   src/compute_scores.py at 88b3daa.
Deviates:  M.Find cuts a fraction off where the official code stops with an error, see `first_number`. The Locret
           release's loop emits one token more than `max_new_tokens` says; set it to reproduce that. In rows that are
           made, needles stand evenly from the first line to the last, in as many places as there are rows (published:
           59 places, 10 rows each), and keys and values of R.KV are random uuids (published: of lost-in-the-middle).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from locret.data.tasks.made import NOISE_LINE, random_uuid
from locret.data.tasks.metrics.choice import LETTERS, book_choice, code_choice
from locret.data.tasks.metrics.overlap import character_f1, rouge_lsum, word_f1
from locret.data.tasks.metrics.retrieval import (
    first_integer,
    first_number,
    last_word_as_integer,
    leading_values,
    split_words,
)
from locret.data.tasks.published.base import Making, Metric, PublishedTask, RowMaker, first, over, prompts_of, spread
from locret.data.tasks.rows import Row
from locret.data.tasks.task import Sample

CONTEXT_LENGTH = 131072
ANSWER_ROOM = 50
"""The Locret release leaves this many tokens at most for the reference when it truncates."""
# Text before and after the context; the names in braces are fields of the row or made from them.
_FORMS: dict[str, list[str]] = prompts_of("infinitebench")
# What a reference must be, where the metric reads a number out of it.
_NUMBERS = {"code_run": r"^-?\d+$", "math_calc": r"^-?\d+$", "math_find": r"^-?\d+(\.\d+)?$"}
# Tasks whose `input` stands in the prompt; every published row has one.
_ASKED = {name for name, parts in _FORMS.items() if "{input}" in parts[1]} | {"code_run"}


@dataclass(frozen=True, kw_only=True)
class InfiniteBenchTask(PublishedTask):
    """One file of InfiniteBench."""

    form: str
    """The file's name in the published set."""

    def read(self, row: Row) -> list[Sample]:
        context, question = row.text("context"), row.text("input", may_be_empty=self.form not in _ASKED)
        targets, options = row.texts("answer"), tuple[str, ...]()
        if "{A}" in _FORMS[self.form][1]:
            options = row.texts("options")
            targets = _choice(row, targets, options)
        if not all(re.search(_NUMBERS.get(self.form, ""), target) for target in targets):
            raise row.bad(f"holds {targets!r} in field 'answer' where a number is needed")
        values = {"input": question, **dict(zip(LETTERS, options, strict=False)), **self._derived(row, question)}
        head, tail = (part.format_map(values) for part in _FORMS[self.form])
        head, context, tail = (part.replace("$$MASK$$", "**MASK**") for part in (head, context, tail))
        return [self.sample_of(row, head, context, tail, targets, reply=self._reply(targets), choices=options)]

    def _derived(self, row: Row, question: str) -> dict[str, str]:
        """Return what the official prompt takes out of the question."""
        if self.form == "code_run":
            if (call := re.search(r"func_[0-9]+\(-?[0-9]+\)", question)) is None:
                raise row.bad(f"names no call such as func_1(2) in field 'input': {question[:80]!r}")
            return {"call": call[0], "function": call[0].split("(")[0]}
        if self.form == "math_find":
            if (sought := re.search(r"The (.+) of", question)) is None:
                raise row.bad(f"does not say \"The ... of\" in field 'input': {question[:80]!r}")
            return {"sought": f"the {sought[1].lower()}"}
        return {}

    def _reply(self, targets: tuple[str, ...]) -> str:
        if self.form == "longbook_choice_eng":
            return targets[1]
        if self.form == "code_debug":
            return f"{targets[1]}. {targets[0]}"
        return f"[{', '.join(targets)}]" if self.form == "math_calc" else targets[0]

    def allowed(self, sample: Sample, count: Callable[[str], int]) -> int | None:
        """Return the tokens of the prompt: the limit, less the first reference's tokens (50 at most)."""
        return self.limit and max(2, self.limit - min(ANSWER_ROOM, count(sample.targets[0])))


def _choice(row: Row, targets: tuple[str, ...], options: tuple[str, ...]) -> tuple[str, ...]:
    if len(options) != len(LETTERS):
        raise row.bad(f"has {len(options)} entries in field 'options' where 4 are needed")
    if len(targets) == 2 and targets[1] in tuple(LETTERS):
        return targets
    if len(targets) != 1 or targets[0] not in options:
        raise row.bad(f"has {list(targets)!r} in field 'answer', which is not one of the options")
    return targets[0], LETTERS[options.index(targets[0])]


# --- rows that are made ---

_LINES, _PAIRS = 5220, 2500
"""Noise lines of the published PassKey and Number, and pairs of KV."""
_KINDS = {
    "passkey": ("The pass key is {0}. Remember it. {0} is the pass key.", "What is the pass key?"),
    "number_string": (
        "The sequence of digits is {0}. Remember it. {0} is the sequence of digits.",
        "What is the sequence of digits?",
    ),
}


def needle(form: str, rng: random.Random) -> tuple[str, str, str]:
    """Return the line that hides a pass key of five digits or a sequence of ten, what is asked, and the answer.

    A sequence begins as five digits; then, five times, a copy of one of its digits is put next to it, so digits repeat
    and the sequence has to be read exactly.
    """
    digits = [rng.choice("0123456789") for _ in range(5)]
    for _ in range(5 if form == "number_string" else 0):
        place = rng.randrange(len(digits))
        digits.insert(place, digits[place])
    line, question = _KINDS[form]
    return line.format("".join(digits)), question, "".join(digits)


@dataclass(frozen=True, kw_only=True)
class MadeInfiniteBench(RowMaker, InfiniteBenchTask):
    """A published task whose rows are made; a prompt has its length from the start and is never cut."""

    settable: ClassVar[tuple[str, ...]] = ("max_new_tokens",)

    def maker(self, of: Making) -> Callable[[int], dict[str, Any]]:
        least, published = (2, _PAIRS) if self.form == "kv_retrieval" else (1, _LINES)

        def row(rng: random.Random, index: int, size: int) -> dict[str, Any]:
            depth = spread(of.samples, index)
            if self.form == "kv_retrieval":
                pairs = {random_uuid(rng): random_uuid(rng) for _ in range(size)}
                key = list(pairs)[round(depth * (size - 1))]
                asked = f'\nKey: "{key}"\nThe value associated with the specified key is: '
                context, answer = f"JSON data:\n{json.dumps(pairs)}", pairs[key]
            else:
                line, asked, answer = needle(self.form, rng)
                lines = [NOISE_LINE] * size
                lines.insert(round(depth * size), line)
                context = "".join(f"{line} " for line in lines)
            return {"id": index, "context": context, "input": asked, "answer": [answer], "options": [], "depth": depth}

        if of.tokens is None:
            return lambda index: row(self.stream(of, index), index, published)
        return self.filled(of, row, guess=max(least, of.tokens // 25), least=least)


# Rows, new tokens, metric.
_TASKS: dict[str, tuple[int, int, str, Metric]] = {
    "passkey": (590, 6, "first integer", first(first_integer)),
    "number_string": (590, 12, "first integer", first(first_integer)),
    "kv_retrieval": (500, 50, "value among the words", first(lambda said, value: float(value in split_words(said)))),
    "longbook_sum_eng": (103, 1200, "ROUGE-Lsum", over(rouge_lsum)),
    "longbook_qa_eng": (351, 40, "token F1", over(word_f1)),
    "longbook_choice_eng": (229, 40, "accuracy of the letter", over(lambda said, right: book_choice(said, *right))),
    # The name is taken as it stands: one in small letters or of several words is never found.
    "longdialogue_qa_eng": (200, 40, "name among the words", first(lambda said, one: one in split_words(said.upper()))),
    "longbook_qa_chn": (175, 40, "character F1", over(character_f1)),
    "code_debug": (394, 5, "accuracy of the option", over(lambda said, right: code_choice(said, *right))),
    "code_run": (400, 5, "last word as integer", first(last_word_as_integer)),
    "math_find": (350, 3, "first number", first(first_number)),
    "math_calc": (50, 30000, "share of leading values", over(leading_values)),
}
_PUBLISHED = tuple(
    InfiniteBenchTask(
        name=f"infinitebench/{name}",
        source="InfiniteBench, arXiv 2402.13718; protocol of arXiv 2410.01805",
        metric=metric,
        scored=scored,
        max_new_tokens=new,
        chat=False,
        limit=CONTEXT_LENGTH - new,
        truncation="middle",
        file=f"data/{name}.jsonl",
        hub_file=f"{name}.jsonl",
        repo="xinrongzhang2022/InfiniteBench",
        revision="90f0394333616266d9fe85824ceaf505093cbaa5",
        size=size,
        asks_first="{" in _FORMS[name][0],
        form=name,
    )
    for name, (size, new, metric, scored) in _TASKS.items()
)
TASKS: tuple[InfiniteBenchTask, ...] = (
    *_PUBLISHED,
    *(
        MadeInfiniteBench(
            name=f"infinitebench_generated/{task.form}",
            source=task.source,
            metric=task.metric,
            scored=task.scored,
            max_new_tokens=task.max_new_tokens,
            chat=task.chat,
            file=task.file,
            form=task.form,
        )
        for task in _PUBLISHED
        if task.form in ("passkey", "number_string", "kv_retrieval")
    ),
)
