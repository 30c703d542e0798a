"""Overlap with a reference: F1 of words, ROUGE, BLEU, and how similar code is.

Libraries that only some metrics need are imported when first used, with a clear message where one is missing.

F1:        after the cleaning of SQuAD's evaluation script (arXiv 1606.05250), which InfiniteBench, LongBench and L-Eval
           repeat: 2 P R / (P + R), with P and R the shares of the prediction's and the reference's tokens that both
           have, counted with repetitions; the best over all references. Punctuation is dropped, not replaced by a
           space, so "well-known" is one word; ASCII punctuation only outside Chinese texts; an empty prediction scores
           0 even where the reference is empty after cleaning.
ROUGE:     in the variants of two packages, whose figures differ by points, so none replaces another: `rouge-score`
           (Google), which InfiniteBench calls through `evaluate` and L-Eval itself, and `rouge` (pltrdy), which
           LongBench calls. rouge-score reads the letters a-z and digits only, so a Chinese text has no words
           in it; with rouge sentences end at ".", words are sets and not bags, F has 1e-8 in its denominator, case and
           punctuation count. InfiniteBench E.Sum is ROUGE-Lsum, lines as sentences, no stemmer; L-Eval ROUGE-1, -2 and
           -L, no stemmer, their geometric mean over a task; LongBench ROUGE-L.
BLEU:      nltk's, of words that white space separates, up to 4-grams, smoothed by method 4: SCBench,
           scbench/repo_qa_utils.py (RepoQA's).
Code:      LongBench, metrics.py, which calls `fuzz.ratio` of fuzzywuzzy: difflib's ratio, rounded to whole percent.
           With python-Levenshtein installed fuzzywuzzy takes another similarity (insertions and deletions only), which
           gives other figures: 59.82 instead of the published 57.61 on LongAlpaca-7B-16k's lcc answers.
Deviates:  RepoQA cuts the first function out of an answer's code blocks with tree-sitter; here the first block is
           compared whole, which is the same for answers that repeat the function and nothing else.
"""

from __future__ import annotations

import re
import string
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

from locret.base.plugins import install


def library(name: str, metric: str) -> ModuleType:
    """Return an optional library, imported."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.split(".")[0]
        if error.name != package:
            raise
        wanted = package.replace("_", "-")
        raise ValueError(f"{metric} needs the library {wanted}; {install('eval')}") from error


_ASCII = str.maketrans("", "", string.punctuation)
_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠"
    "｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"
)
"""As LongBench and InfiniteBench list it: the opening 《 is not in it, though the closing one is."""
_CHINESE = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def bare_words(text: str) -> list[str]:
    """Return the words of a text without ASCII punctuation and the articles a, an, the in small letters."""
    return re.sub(r"\b(a|an|the)\b", " ", text.translate(_ASCII)).split()


def plain_characters(text: str) -> list[str]:
    """Return the characters of a text in lower case, without ASCII and Chinese punctuation and white space."""
    return list("".join(text.lower().translate(_CHINESE).split()))


def segmented_words(text: str) -> list[str]:
    """Return the words that jieba cuts a Chinese text into, cleaned like `plain_characters`; empty ones are dropped."""
    cleaned = ("".join(plain_characters(word)) for word in cut_chinese(text))
    return [word for word in cleaned if word]


def cut_chinese(text: str) -> list[str]:
    """Return the pieces that jieba cuts a text into, in its default mode; joined, they are the text."""
    return list(_segmenter().cut(text, cut_all=False))


@lru_cache(maxsize=1)
def _segmenter() -> Any:
    jieba = library("jieba", "a metric over Chinese words")
    # It reports the loading of its dictionary on the error stream, which belongs to our own warnings.
    jieba.setLogLevel("WARNING")
    return jieba


def f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    """Return F1 of two bags of tokens, from 0 to 1."""
    shared = sum((Counter(predicted) & Counter(expected)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def _best_f1(tokens: Callable[[str], list[str]], prediction: str, references: Sequence[str]) -> float:
    predicted = tokens(prediction)
    return max((f1(predicted, tokens(reference)) for reference in references), default=0.0)


def word_f1(prediction: str, references: Sequence[str]) -> float:
    """Return F1 over words: LongBench's and L-Eval's question answering, InfiniteBench's E.QA."""
    return _best_f1(lambda text: bare_words(text.lower()), prediction, references)


def character_f1(prediction: str, references: Sequence[str]) -> float:
    """Return F1 over characters: InfiniteBench's Z.QA."""
    return _best_f1(plain_characters, prediction, references)


def chinese_word_f1(prediction: str, references: Sequence[str]) -> float:
    """Return F1 over jieba's words: LongBench's multifieldqa_zh."""
    return _best_f1(segmented_words, prediction, references)


Parts = tuple[float, float, float]
"""ROUGE-1, -2 and -L of one answer, each from 0 to 1."""
_CALLS = 1000
"""Calls within each other that Python allows when it starts."""


@lru_cache(maxsize=2)
def _google_scorer(*kinds: str) -> Any:
    module = library("rouge_score.rouge_scorer", "ROUGE of InfiniteBench and L-Eval")
    return module.RougeScorer(list(kinds), use_stemmer=False)


@lru_cache(maxsize=1)
def _set_scorer() -> Any:
    return library("rouge", "ROUGE of LongBench").Rouge(metrics=["rouge-l"], stats=["f"])


def rouge_lsum(prediction: str, references: Sequence[str]) -> float:
    """Return F of ROUGE-Lsum, the best over the references: InfiniteBench's E.Sum."""
    return float(_google_scorer("rougeLsum").score_multi(references, prediction)["rougeLsum"].fmeasure)


def rouge_1_2_l(prediction: str, references: Sequence[str]) -> Parts:
    """Return F of ROUGE-1, -2 and -L, each the best over the references: L-Eval."""
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
    """
    return max((_rouge_of_sets(prediction, reference) for reference in references), default=0.0)


def _rouge_of_sets(prediction: str, reference: str) -> float:
    scorer = _set_scorer()
    try:
        with _usual_depth():
            return float(scorer.get_scores([prediction], [reference], avg=True)["rouge-l"]["f"])
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
    """Return F of ROUGE-L over jieba's words, the best over the references: LongBench's dureader and vcsum."""
    return rouge_l(" ".join(cut_chinese(prediction)), [" ".join(cut_chinese(text)) for text in references])


def bleu(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Return nltk's smoothed sentence BLEU, from 0 to 1."""
    module = library("nltk.translate.bleu_score", "BLEU of SCBench's code retrieval")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no n-gram in common is a score of 0, not a fault
        smoothing = module.SmoothingFunction().method4
        return float(module.sentence_bleu([list(reference)], list(prediction), smoothing_function=smoothing))


def first_code_line(prediction: str) -> str:
    """Return the first line that has no backtick, # or // in it; empty if there is none, or if that line is empty.

    Empty lines at the very start are passed over.
    """
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")


def edit_similarity(prediction: str, reference: str) -> float:
    """Return difflib's similarity of the first code line and the reference, in steps of 0.01."""
    ratio = SequenceMatcher(None, first_code_line(prediction), reference).ratio()
    return round(100 * ratio) / 100


def first_code_block(prediction: str) -> str:
    """Return what stands in the first block between lines of three backticks; the whole answer if there is none."""
    text = prediction.strip()
    found = re.search(r"^```(?:\w+)?\s*\n(.*?)(?=^```)```", text, re.DOTALL | re.MULTILINE)
    return found[1] if found else text


def repeated_function(prediction: str, functions: Sequence[tuple[str, str]]) -> tuple[str, float]:
    """Return the name of the function that an answer is most like, and how much: RepoQA's retrieval.

    Likeness is smoothed BLEU over what white space separates, from 0 to 1. The first of equals counts.
    """
    code = first_code_block(prediction).strip()
    best, most = "", 0.0
    for name, function in functions:
        likeness = bleu(re.split(r"\s+", code), re.split(r"\s+", function.strip()))
        if likeness > most:
            best, most = name, likeness
    return best, most
