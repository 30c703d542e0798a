"""L-Eval: long documents with several questions each, asked one at a time, answered in a given number of words.

Paper:     arXiv 2307.11088; protocol of arXiv 2410.01805, Section 4.1, which runs six of the twenty tasks.
Source:    OpenLMLab/LEval (GPL-3.0), data set L4NLP/LEval; prompts and turns of its Llama-2-chat script, which the
           Locret release took over for Llama-3.1 and Phi-3.
Fields:    input (document), instructions and outputs (lists of the same length), source, evaluation.
Deviates:  prompt_style=fixed, the default, writes proper turns with the tokenizer's chat template;
           prompt_style=official writes the malformed turns of the official runs (a user header before the system
           header, two begin-of-text tokens, no assistant header after code). Both give away the reference's length in
           words, as published.
Metrics:   Evaluation/auto_eval.py at cd34b05 and em.py; rouge.py and f1.py are those of SCROLLS. An answer to
           topic_retrieval_longchat counts the same at each of its three places; newer official code averages each place
           apart, whose mean is the same for the published set (50 conversations, 3 topics each).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

from locret.data.tasks.metrics.choice import LETTERS, chosen_letters
from locret.data.tasks.metrics.overlap import Parts, bare_words, geometric_mean, rouge_1_2_l, word_f1
from locret.data.tasks.published.base import PublishedTask, first, over, prompts_of
from locret.data.tasks.rows import Row
from locret.data.tasks.task import Sample

_PROMPTS = prompts_of("leval")
"""System turns, and by a token that tells a family of models how the official runs open and close its turns."""
_BARE = ("gsm100", "codeU", "topic_retrieval_longchat")
"""Tasks whose prompt is the document, an empty line and the question."""
_IN_THE_STORY = "based on the world described in the document."
_IN_THE_WORLD = "based on the real-world knowledge and facts up until your last training"
_FACT = "[fact:"
_FILLERS = ("will be", "of the code", "is", "would be", "the value of", "the result of", "printed")


def exact_match(prediction: str, reference: str) -> float:
    """Return what L-Eval calls exact match, from 0 to 1.

    A reference of the capitals A to D alone: 1 for the same letters, 0.25 for a part of them. Any other: 1 for the same
    number; where either is none, 1 for an answer that has the reference in it, spaces and case aside.
    """
    letters = " ".join(bare_words(reference))
    if set(letters) <= set(LETTERS):
        chosen = " ".join(bare_words(prediction))
        return 1.0 if chosen == letters else 0.25 if set(chosen) <= set(letters) else 0.0
    try:
        return float(float(prediction) == float(reference))
    except ValueError:
        return float(reference.lower().replace(" ", "") in prediction.lower().replace(" ", ""))


def final_number(text: str) -> str:
    """Return the digits of gsm100's answer: of the word after "The answer is", else of the first paragraph's last word
    that has a digit. Signs, commas and currency are dropped, and so is everything after a full stop.
    """
    said = re.search(r"The answer is (\S+)", text)
    if said:
        word = said[1]
    else:
        words = text.split("\n\n")[0].split(" ")
        word = next((word for word in reversed(words) if any(map(str.isdigit, word))), "")
    return "".join(filter(str.isdigit, word.split(".")[0]))


def plain_output(text: str) -> str:
    """Return a program's output as codeU compares it: without commas, quotes, backslashes, ".0" and inner spaces of
    brackets.
    """
    text = re.sub(r"\s+", " ", text)
    for old in (",", "'", "\\", ".0"):
        text = text.replace(old, "")
    return text.replace("] [", "][").replace("[ [", "[[").replace("] ]", "]]")


def final_output(prediction: str, reference: str) -> str:
    """Return the part of codeU's answer that is compared: the reference's number of words and 3 more.

    They are taken after the last "the final output" if it occurs, else from the answer's end, once some filler words
    are cut out. "is" is cut out of words too: "this" becomes "th".
    """
    text = plain_output(prediction)
    for filler in _FILLERS:
        text = text.replace(filler, "")
    room = len(reference.split()) + 3
    _, mark, after = text.rpartition("the final output")
    words = re.split(r"\s+", after)
    return " ".join(words[:room] if mark else words[-room:])


def verdict(prediction: str) -> str:
    """Return sci_fi's "true" or "false" from the first word that has either in it, in any case; "<error>" for none.

    "true" wins in a word that has both, such as "false/true".
    """
    words = prediction.lower().split()
    return next((said for word in words for said in ("true", "false") if said in word), "<error>")


@lru_cache(maxsize=1024)
def rouge_parts(prediction: str, reference: str) -> Parts:
    """Return ROUGE-1, -2 and -L of an answer, each from 0 to 1."""
    return rouge_1_2_l(prediction, [reference])


def _exam(several: bool) -> Callable[[str, str], float]:
    def metric(said: str, right: str) -> float:
        expected = re.sub("[^A-D]", "", right.split()[0]) or "A"  # the letters of the reference's first word
        return exact_match(chosen_letters(said, several), expected)

    return metric


@dataclass(frozen=True, kw_only=True)
class LEvalTask(PublishedTask):
    """One file of L-Eval."""

    settable: ClassVar[tuple[str, ...]] = (*PublishedTask.settable, "prompt_style")

    task: str
    """The file's name in the published set."""
    exam: bool
    """Whether it is one of the closed-ended tasks."""
    prompt_style: Literal["fixed", "official"] = "fixed"
    """Turns of the tokenizer's chat template, or those of the official runs (Llama-3 and Phi-3 tokenizers only)."""

    def read(self, row: Row) -> list[Sample]:
        """Return a sample for each question of a row; none for a row that only judges score."""
        if row.text("evaluation") not in ("exam", "f1", "rouge"):
            return []
        document, questions, answers = row.text("input"), row.texts("instructions"), row.texts("outputs")
        if len(questions) != len(answers):
            raise row.bad(
                f"has {len(questions)} instructions and {len(answers)} outputs where it needs as many of both"
            )
        asked = enumerate(zip(questions, answers, strict=True))
        return [sample for number, pair in asked for sample in self._asked(row, number, document, *pair)]

    def _asked(self, row: Row, number: int, document: str, question: str, answer: str) -> list[Sample]:
        name, right, second = f"{row.number}/{number}", answer, list[Sample]()
        if self.task == "sci_fi":
            if _FACT not in answer:
                raise row.bad(f"holds {answer!r} in field 'outputs' without its [fact: ...] part")
            right, _, world = answer.partition(_FACT)
            right, truth = right.strip(), world.strip().removesuffix("]").strip()
            content = question.replace(_IN_THE_STORY, _IN_THE_WORLD)
            content += "Please directly answer without any additional output or explanation. \nAnswer:"
            second = [Sample(id=f"{name}/fact", content=content, targets=(truth,), reply=truth, plain=True)]
        head, tail, lead = self._frame(question, answer)
        system = _PROMPTS["systems"].get(self.task, _PROMPTS["exam" if self.exam else "generation"])
        return [self.sample_of(row, head, document, tail, (right,), id=name, system=system, lead=lead), *second]

    def _frame(self, question: str, answer: str) -> tuple[str, str, str]:
        """Return what stands before and after the document, and what opens the answer."""
        if self.task in _BARE:
            return "", f"\n\n{question}", ""
        if self.exam:
            asked = f" \nQuestion: {question}.  Please directly give the answer without any additional output or "
            return "Document is as follows. ", asked + "explanation ", "\nAnswer:"
        words = len(answer.split())
        return "Document is as follows. ", f" Instruction: {question} \nAnswer this question with {words} words.", ""

    def framed(self, sample: Sample, content: str, tokenizer: Any) -> str | None:
        if self.prompt_style == "fixed":
            return None
        vocabulary = tokenizer.get_vocab()
        for marker, turns in _PROMPTS["turns"].items():
            if marker in vocabulary:
                closing = "" if self.task in ("gsm100", "codeU") else turns["assistant"] + sample.lead
                return str(turns["user"] + turns["system"] + sample.system + turns["end_system"] + content + closing)
        raise ValueError(
            f"task {self.name}: prompt_style=official is known for Llama-3 and Phi-3 tokenizers only; "
            "use prompt_style=fixed for this one"
        )

    def summarise(self, scores: Sequence[float], answers: Sequence[tuple[str, tuple[str, ...]]]) -> float:
        """Return the task's score: for ROUGE the geometric mean of three means over the samples, else the mean."""
        if self.metric != _ROUGE[0]:
            return super().summarise(scores, answers)
        return geometric_mean([rouge_parts(said, targets[0]) for said, targets in answers])


_F1 = "token F1", over(word_f1)
# Of one answer its own three figures, which tells answers apart; see `summarise`.
_ROUGE = "geometric mean of ROUGE-1, -2 and -L", first(lambda said, right: geometric_mean([rouge_parts(said, right)]))
_EXACT = "exact match"
# Questions, metric; the six of the Locret paper come first, in its order.
_TASKS = {
    "codeU": (90, (_EXACT, first(lambda said, right: exact_match(final_output(said, right), plain_output(right))))),
    "natural_question": (104, _F1),
    "legal_contract_qa": (130, _F1),
    "narrative_qa": (182, _F1),
    "meeting_summ": (156, _ROUGE),
    "review_summ": (120, _ROUGE),
    "coursera": (172, (_EXACT, first(_exam(several=True)))),
    "gsm100": (100, (_EXACT, first(lambda said, right: exact_match(final_number(said), final_number(right))))),
    "quality": (202, (_EXACT, first(_exam(several=False)))),
    "sci_fi": (
        None,
        (
            f"{_EXACT}, in the story and in the world",
            first(lambda said, right: exact_match(verdict(said), right.lower())),
        ),
    ),
    "topic_retrieval_longchat": (150, (_EXACT, first(exact_match))),
    "tpo": (269, (_EXACT, first(_exam(several=False)))),
    **dict.fromkeys(("financial_qa", "multidoc_qa", "scientific_qa"), (None, _F1)),
    **dict.fromkeys(("gov_report_summ", "news_summ", "paper_assistant", "patent_summ", "tv_show_summ"), (None, _ROUGE)),
}
TASKS: tuple[LEvalTask, ...] = tuple(
    LEvalTask(
        name=f"leval/{name}",
        version=2 if name == "topic_retrieval_longchat" else 1,
        source="L-Eval, arXiv 2307.11088; protocol of arXiv 2410.01805",
        metric=metric,
        scored=scored,
        max_new_tokens=512,
        limit=128_000 - 512,
        truncation="words",
        cut_start=name == "codeU",
        file=f"LEval-data/{'Closed' if (exam := metric.startswith(_EXACT)) else 'Open'}-ended-tasks/{name}.jsonl",
        hub_file=f"LEval/{'Exam' if exam else 'Generation'}/{name}.jsonl",
        repo="L4NLP/LEval",
        # The newest change of its rows: "update codeU", October 2023.
        revision="4c8b0cebe802c1b5eb49ba83e98264bf0d14078a",
        size=size,
        task=name,
        exam=exam,
    )
    for name, (size, (metric, scored)) in _TASKS.items()
)
