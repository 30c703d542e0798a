"""F1 over words, characters or segmented words, after the cleaning of SQuAD.

Source:    SQuAD's evaluation script (arXiv 1606.05250), which InfiniteBench, LongBench and L-Eval repeat.
Formula:   F1 = 2 P R / (P + R), with P and R the shares of the prediction's and the reference's tokens that both have,
           counted with repetitions; the best over all references.
Quirks:    punctuation is dropped, not replaced by a space, so "well-known" is one word; ASCII punctuation only outside
           Chinese texts; an empty prediction scores 0 even where the reference is empty after cleaning.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from locret.data.tasks.metrics.libraries import library

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


def plain_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without ASCII punctuation and articles."""
    return bare_words(text.lower())


def plain_characters(text: str) -> list[str]:
    """Return the characters of a text in lower case, without ASCII and Chinese punctuation and white space."""
    return list("".join(text.lower().translate(_CHINESE).split()))


def segmented_words(text: str) -> list[str]:
    """Return the words that jieba cuts a Chinese text into, cleaned like `plain_characters`; empty ones are dropped.

    Raises:
        ValueError: If jieba is not installed.
    """
    cleaned = ("".join(plain_characters(word)) for word in cut_chinese(text))
    return [word for word in cleaned if word]


def cut_chinese(text: str) -> list[str]:
    """Return the pieces that jieba cuts a text into, in its default mode; joined, they are the text.

    Raises:
        ValueError: If jieba is not installed.
    """
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


def _best(tokens: Callable[[str], list[str]], prediction: str, references: Sequence[str]) -> float:
    predicted = tokens(prediction)
    return max((f1(predicted, tokens(reference)) for reference in references), default=0.0)


def word_f1(prediction: str, references: Sequence[str]) -> float:
    """Return F1 over words: LongBench's and L-Eval's question answering, InfiniteBench's E.QA."""
    return _best(plain_words, prediction, references)


def character_f1(prediction: str, references: Sequence[str]) -> float:
    """Return F1 over characters: InfiniteBench's Z.QA."""
    return _best(plain_characters, prediction, references)


def chinese_word_f1(prediction: str, references: Sequence[str]) -> float:
    """Return F1 over jieba's words: LongBench's multifieldqa_zh.

    Raises:
        ValueError: If jieba is not installed.
    """
    return _best(segmented_words, prediction, references)
