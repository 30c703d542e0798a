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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

from locret.data.tasks.metrics.choice import LETTERS, chosen_letters, expected_letters, letters_match
from locret.data.tasks.metrics.overlap import Parts, bare_words, geometric_mean, rouge_1_2_l, word_f1
from locret.data.tasks.published.base import PublishedTask, prompts_of
from locret.data.tasks.task import Sample
from locret.data.training.json_rows import BadRow, text_of, texts_of

SCORED = ("exam", "f1", "rouge")
"""Rows with another `evaluation` are for judges; the automatic scores leave them out."""
MAX_NEW_TOKENS = 512
LIMIT = 128_000 - MAX_NEW_TOKENS

_PROMPTS = prompts_of("leval")
"""System turns, and by a token that tells a family of models how the official runs open and close its turns."""
_SYSTEMS: dict[str, str] = _PROMPTS["systems"]
_BARE = ("gsm100", "codeU", "topic_retrieval_longchat")
"""Tasks whose prompt is the document, an empty line and the question."""
_IN_THE_STORY = "based on the world described in the document."
_IN_THE_WORLD = "based on the real-world knowledge and facts up until your last training"


_QUESTIONS = ("natural_question", "legal_contract_qa", "narrative_qa", "financial_qa", "multidoc_qa", "scientific_qa")
_SUMMARIES = ("meeting_summ", "review_summ", "gov_report_summ", "news_summ", "patent_summ", "tv_show_summ")
F1_TASKS, ROUGE_TASKS = _QUESTIONS, (*_SUMMARIES, "paper_assistant")
_FILLERS = ("will be", "of the code", "is", "would be", "the value of", "the result of", "printed")


def exact_match(prediction: str, reference: str) -> float:
    """Return what L-Eval calls exact match, from 0 to 1.

    A reference of the capitals A to D alone: 1 for the same letters, 0.25 for a part of them. Any other: 1 for the same
    number; where either is none, 1 for an answer that has the reference in it, spaces and case aside.
    """
    letters = " ".join(bare_words(reference))
    if set(letters) <= set(LETTERS):
        return letters_match(" ".join(bare_words(prediction)), letters)
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
    before, mark, after = text.rpartition("the final output")
    words = re.split(r"\s+", after)
    return " ".join(words[:room] if mark else words[-room:])


def verdict(prediction: str) -> str:
    """Return sci_fi's "true" or "false" from the first word that has either in it, in any case; "<error>" for none.

    "true" wins in a word that has both, such as "false/true".
    """
    for word in prediction.lower().split():
        for said in ("true", "false"):
            if said in word:
                return said
    return "<error>"


def _exam(several: bool) -> Callable[[str, str], float]:
    return lambda prediction, reference: exact_match(chosen_letters(prediction, several), expected_letters(reference))


_METRICS: dict[str, Callable[[str, str], float]] = {
    "coursera": _exam(several=True),
    "quality": _exam(several=False),
    "tpo": _exam(several=False),
    "gsm100": lambda prediction, reference: exact_match(final_number(prediction), final_number(reference)),
    "codeU": lambda prediction, reference: exact_match(final_output(prediction, reference), plain_output(reference)),
    "topic_retrieval_longchat": exact_match,
    "sci_fi": lambda prediction, reference: exact_match(verdict(prediction), reference.lower()),
    **dict.fromkeys(F1_TASKS, lambda prediction, reference: word_f1(prediction, [reference])),
}


def score(task: str, prediction: str, reference: str) -> float:
    """Return the score of an answer, from 0 to 1.

    For ROUGE tasks it is the geometric mean of the answer's own three figures, which tells answers apart; the task's
    score comes from `rouge_parts` and `geometric_mean` instead.

    Args:
        task: The file's name in the published set, such as "codeU".
        prediction: The generated text, as decoded.
        reference: The reference; of sci_fi the story's or the world's truth alone.
    """
    if task in ROUGE_TASKS:
        return geometric_mean([rouge_parts(prediction, reference)])
    return _METRICS[task](prediction, reference)


@lru_cache(maxsize=1024)
def rouge_parts(prediction: str, reference: str) -> Parts:
    """Return ROUGE-1, -2 and -L of an answer, each from 0 to 1."""
    return rouge_1_2_l(prediction, [reference])


def task_score(task: str, predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the score of a whole task, from 0 to 1: the mean, or for ROUGE the geometric mean of three means."""
    pairs = list(zip(predictions, references, strict=True))
    if not pairs:
        return 0.0
    if task in ROUGE_TASKS:
        return geometric_mean([rouge_parts(*pair) for pair in pairs])
    return sum(score(task, *pair) for pair in pairs) / len(pairs)


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

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("prompt_style", ("fixed", "official"))

    def read(self, index: int, where: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return a sample for each question of a row; none for a row that only judges score."""
        if text_of(record, where, "evaluation") not in SCORED:
            return []
        document = text_of(record, where, "input")
        questions, answers = (texts_of(record, where, field) for field in ("instructions", "outputs"))
        if len(questions) != len(answers):
            counts = f"{len(questions)} instructions and {len(answers)} outputs"
            raise BadRow(where, "wrong count", f"has {counts} where it needs as many of both")
        items = []
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            items += self._asked(f"{index}/{number}", where, document, question, answer)
        return items

    def _asked(self, name: str, where: str, document: str, question: str, answer: str) -> list[Sample]:
        head, tail, lead = self._frame(question, answer)
        targets = (answer,)
        second = []
        if self.task == "sci_fi":
            if _FACT not in answer:
                raise BadRow(where, "wrong answer", f"holds {answer!r} in field 'outputs' without its [fact: ...] part")
            story, truth = _halves(answer)
            targets = (story,)
            asked = question.replace(_IN_THE_STORY, _IN_THE_WORLD)
            content = asked + "Please directly answer without any additional output or explanation. \nAnswer:"
            second = [Sample(id=f"{name}/fact", content=content, targets=(truth,), reply=truth, plain=True)]
        first = Sample(
            id=name,
            content=head + document + tail,
            targets=targets,
            reply=targets[0],
            system=_SYSTEMS.get(self.task, _PROMPTS["exam" if self.exam else "generation"]),
            span=(len(head), len(head) + len(document)),
            lead=lead,
        )
        return [first, *second]

    def _frame(self, question: str, answer: str) -> tuple[str, str, str]:
        """What stands before and after the document, and what opens the answer."""
        if self.task in _BARE:
            return "", f"\n\n{question}", ""
        if self.exam:
            asked = f" \nQuestion: {question}.  Please directly give the answer without any additional output or "
            return "Document is as follows. ", asked + "explanation ", "\nAnswer:"
        words = len(answer.split())
        return "Document is as follows. ", f" Instruction: {question} \nAnswer this question with {words} words.", ""

    def framed(self, sample: Sample, content: str, tokenizer: Any) -> str | None:
        """Return the official runs' turns for prompt_style=official.

        Raises:
            ValueError: For a tokenizer whose turns no official run wrote.
        """
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

    def score(self, prediction: str, sample: Sample) -> float:
        """Return the task's own metric; for ROUGE tasks it is one sample's geometric mean, see `summarise`."""
        return score(self.task, prediction, sample.targets[0])

    def summarise(self, scores: Sequence[float], answers: Sequence[tuple[str, tuple[str, ...]]]) -> float:
        """Return the task's score: for ROUGE the geometric mean of three means over the samples, else the mean."""
        predictions, references = [text for text, _ in answers], [targets[0] for _, targets in answers]
        return task_score(self.task, predictions, references)


_FACT = "[fact:"


def _halves(text: str) -> tuple[str, str]:
    """Return what sci_fi's `True [fact: False]` says of the story, and what of the world."""
    story, _, world = text.partition(_FACT)
    return story.strip(), world.strip().removesuffix("]").strip()


def _task(name: str, size: int | None, metric: str, *, exam: bool = False, version: int = 1) -> LEvalTask:
    return LEvalTask(
        name=f"leval/{name}",
        version=version,
        source="L-Eval, arXiv 2307.11088; protocol of arXiv 2410.01805",
        metric=metric,
        max_new_tokens=MAX_NEW_TOKENS,
        chat=True,
        limit=LIMIT,
        truncation="words",
        cut_start=name == "codeU",
        file=f"LEval-data/{'Closed' if exam else 'Open'}-ended-tasks/{name}.jsonl",
        hub_file=f"LEval/{'Exam' if exam else 'Generation'}/{name}.jsonl",
        repo="L4NLP/LEval",
        # The newest change of its rows: "update codeU", October 2023.
        revision="4c8b0cebe802c1b5eb49ba83e98264bf0d14078a",
        size=size,
        task=name,
        exam=exam,
    )


_F1, _ROUGE, _EXACT = "token F1", "geometric mean of ROUGE-1, -2 and -L", "exact match"
TASKS: tuple[LEvalTask, ...] = (
    # The six of the Locret paper, in its order.
    _task("codeU", 90, _EXACT, exam=True),
    _task("natural_question", 104, _F1),
    _task("legal_contract_qa", 130, _F1),
    _task("narrative_qa", 182, _F1),
    _task("meeting_summ", 156, _ROUGE),
    _task("review_summ", 120, _ROUGE),
    _task("coursera", 172, _EXACT, exam=True),
    _task("gsm100", 100, _EXACT, exam=True),
    _task("quality", 202, _EXACT, exam=True),
    _task("sci_fi", None, _EXACT + ", in the story and in the world", exam=True),
    _task("topic_retrieval_longchat", 150, _EXACT, exam=True, version=2),
    _task("tpo", 269, _EXACT, exam=True),
    *(_task(name, None, _F1) for name in ("financial_qa", "multidoc_qa", "scientific_qa")),
    *(
        _task(name, None, _ROUGE)
        for name in ("gov_report_summ", "news_summ", "paper_assistant", "patent_summ", "tv_show_summ")
    ),
)
