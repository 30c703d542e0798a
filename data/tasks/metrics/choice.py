"""Choices and classes: which of the given answers a generated text names.

Source:    InfiniteBench, src/compute_scores.py; LongBench, metrics.py; L-Eval, Evaluation/auto_eval.py and em.py;
           LongBench v2, pred.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LETTERS = "ABCD"


def _blanked(text: str, marks: Sequence[str]) -> str:
    """Replace marks by spaces, and several spaces by one."""
    for mark in marks:
        text = text.replace(mark, " ")
    return re.sub(" +", " ", text)


def _after_phrase(text: str, phrases: Sequence[str]) -> str | None:
    """What comes one character after the first of the phrases that occurs; None if none does.

    The phrases are tried in order, whatever their places in the text. The official code skips one character after the
    phrase without looking at it, so "answer is:B" loses its letter.
    """
    for phrase in phrases:
        start = text.find(phrase)
        if start >= 0:
            return text[start + len(phrase) + 1 :]
    return None


def book_choice(prediction: str, text: str, letter: str) -> float:
    """Return 1 if the answer is the right option: InfiniteBench's E.MC.

    A text that begins with one of A to D is judged by that letter alone, so "A house" and "Because" are taken as
    answers A and B. Else the whole text, then what follows a phrase such as "answer is", then the first word that is
    part of "ABCD" must be the option's text or letter.
    """
    labels = (text, letter)
    prediction = prediction.strip()
    if not prediction:
        return 0.0
    if prediction[0] in LETTERS:
        return float(prediction[0] in labels)
    if prediction in labels:
        return 1.0
    cleaned = _blanked(prediction, ("\n", '"', "'", ".", ",", "?", "!", "{", "}"))
    rest = _after_phrase(cleaned, ("answer is:", "answer:", "answer is", "option is"))
    if rest is not None:
        return float(rest.startswith(labels))
    return float(next((word for word in cleaned.split() if word in LETTERS), None) in labels)


def code_choice(prediction: str, function: str, letter: str) -> float:
    """Return 1 if the answer is the right option: InfiniteBench's C.Debug.

    It must begin with the letter and a full stop or colon, or name letter or function after "is:" or "answer:". A bare
    letter scores 0, and so does the function's name alone.
    """
    prediction = prediction.strip()
    if prediction.startswith((f"{letter}.", f"{letter}:")):
        return 1.0
    cleaned = _blanked(prediction, ("\n", "`", "'", '"', "-", "*", "Option", "option"))
    # The official list goes on with "correct option is:", which is never reached: "is:" is found before it.
    rest = _after_phrase(cleaned, ("answer is:", "is:", "answer:"))
    return float(rest is not None and rest.startswith((letter, function)))


def one_class(prediction: str, expected: str, classes: Sequence[str]) -> float:
    """Return 1 over the number of classes that the answer names if the right one is among them, else 0.

    LongBench's trec and lsht. A named class that is a part of the right one's name does not count; but the official
    loop removes from the list that it walks along, so that the class after a removed one escapes, which is kept here.
    """
    named = [name for name in classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in expected and named[place] != expected:
            del named[place]
        place += 1
    return 1 / len(named) if expected in named else 0.0


def chosen_letters(prediction: str, several: bool) -> str:
    """Return the letters that an answer to one of L-Eval's exams chooses, "A" where it names none.

    An empty one gives "None", which is never right. Where one option alone can be right (not `several`, as in
    coursera), the first of the capitals A to D counts wherever it stands, so "Because" is answer B.
    """
    if not prediction.strip():
        return "None"
    if prediction in LETTERS:
        return prediction
    if not several:
        first = re.search("[A-D]", prediction)
        return first[0] if first else "A"
    start = re.match("[A-D]*", prediction)
    leading = start[0] if start else ""
    if len(leading) > 1:
        return "".join(sorted(set(leading)))
    rest = prediction[len(leading) :].split("Question")[0]
    marked = re.findall(r"[A-D](?=[\s.)])", rest)
    run = re.search("[A-D]+", rest)
    return "".join(sorted({*leading, *marked})) or (run[0] if run else "A")


def stated_letter(prediction: str) -> str | None:
    """Return the letter after "The correct answer is", in brackets or without: LongBench v2; None if none is stated.

    Asterisks are dropped. An answer in brackets counts before one without, wherever they stand.
    """
    text = prediction.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return found[1] if found else None
