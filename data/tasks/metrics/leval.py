"""L-Eval: which metric each task has, and the cleaning of exam answers.

Paper:     arXiv 2307.11088.
Source:    OpenLMLab/LEval, Evaluation/auto_eval.py at cd34b05 and em.py; rouge.py and f1.py are those of SCROLLS.
Deviates:  an answer to topic_retrieval_longchat counts the same at each of its three places; newer official code
           averages each place apart, whose mean is the same for the published set (50 conversations, 3 topics each).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from locret.data.tasks.metrics.choice import LETTERS, chosen_letters, expected_letters, letters_match
from locret.data.tasks.metrics.f1 import bare_words, word_f1
from locret.data.tasks.metrics.rouge import Parts, geometric_mean, rouge_1_2_l

F1_TASKS = (
    "natural_question",
    "legal_contract_qa",
    "narrative_qa",
    "financial_qa",
    "multidoc_qa",
    "scientific_qa",
)
ROUGE_TASKS = (
    "meeting_summ",
    "review_summ",
    "gov_report_summ",
    "news_summ",
    "paper_assistant",
    "patent_summ",
    "tv_show_summ",
)

_FILLERS = ("will be", "of the code", "is", "would be", "the value of", "the result of", "printed")


def exact_match(prediction: str, reference: str) -> float:
    """Return what L-Eval calls exact match, from 0 to 1.

    A reference of the capitals A to D alone: 1 for the same letters, 0.25 for a part of them. Any other: 1 for the same
    number; where either is none, 1 for an answer that has the reference in it, spaces and case aside, in its first line
    of two characters or more.
    """
    letters = " ".join(bare_words(reference))
    if set(letters) <= set(LETTERS):
        return letters_match(" ".join(bare_words(prediction)), letters)
    try:
        return float(float(prediction) == float(reference))
    except ValueError:
        line = next((line for line in prediction.split("\n") if len(line) > 1), prediction)
        return float(reference.lower().replace(" ", "") in line.lower().replace(" ", ""))


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

    Raises:
        ValueError: If the metric's library is not installed.
    """
    if task in ROUGE_TASKS:
        return geometric_mean([rouge_parts(prediction, reference)])
    return _METRICS[task](prediction, reference)


def rouge_parts(prediction: str, reference: str) -> Parts:
    """Return ROUGE-1, -2 and -L of an answer, each from 0 to 1.

    Raises:
        ValueError: If rouge-score is not installed.
    """
    return rouge_1_2_l(prediction, [reference])


def task_score(task: str, predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the score of a whole task, from 0 to 1: the mean, or for ROUGE the geometric mean of three means.

    Raises:
        ValueError: If the metric's library is not installed.
    """
    pairs = list(zip(predictions, references, strict=True))
    if not pairs:
        return 0.0
    if task in ROUGE_TASKS:
        return geometric_mean([rouge_parts(*pair) for pair in pairs])
    return sum(score(task, *pair) for pair in pairs) / len(pairs)
