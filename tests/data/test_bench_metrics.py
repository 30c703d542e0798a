"""Quirks of the official metrics that move a published figure, in cases small enough to check by hand."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest

from locret.data.tasks.metrics import overlap, retrieval
from locret.data.tasks.metrics.overlap import edit_similarity, first_code_line, library
from locret.data.tasks.published import infinitebench, leval, longbench

CITY = ("City", "Other location")
# Task, answer, references, score; of classifications also the classes.
ANSWERS: list[tuple[Any, ...]] = [
    ("infinitebench/passkey", " 71432.", ["71432"], 1),
    ("infinitebench/passkey", "is 7 71432", ["71432"], 0),  # the first integer alone
    ("infinitebench/passkey", "071432", ["71432"], 0),
    ("infinitebench/passkey", "714321", ["71432"], 0),  # a longer number is another number
    ("infinitebench/passkey", "7143", ["71432"], 0),
    ("infinitebench/passkey", "7 1 4 3 2", ["71432"], 0),
    ("infinitebench/passkey", "71432 is the pass key, and 99999 is not", ["71432"], 1),
    ("infinitebench/passkey", "x71432x", ["71432"], 1),  # letters end an integer as InfiniteBench splits it
    ("infinitebench/passkey", "-71432", ["71432"], 1),
    ("infinitebench/passkey", "٧١٤٣٢ 71432", ["71432"], 1),  # other scripts' digits are no integer of the benchmark
    ("infinitebench/number_string", "no digits", ["1"], 0),
    ("infinitebench/kv_retrieval", '{"a": "b-1"}', ["b-1"], 1),
    ("infinitebench/kv_retrieval", "b-12", ["b-1"], 0),
    ("infinitebench/kv_retrieval", "b-1</s>", ["b-1"], 0),
    ("locret/kv_retrieval", "b-1</s>", ["b-1"], 1),  # the Locret release's copy ends a value there
    ("infinitebench/longdialogue_qa_eng", "to be Ace's.", ["ACE", "ROTHSTEIN"], 1),
    ("infinitebench/longdialogue_qa_eng", "Rothstein", ["ACE", "ROTHSTEIN"], 0),  # the first name alone counts
    ("infinitebench/longdialogue_qa_eng", "Ace", ["Ace"], 0),  # the answer is put into capitals, the name is not
    ("infinitebench/code_run", "The value is `-4`", ["-4"], 1),
    ("infinitebench/code_run", "4.", ["4"], 1),
    ("infinitebench/code_run", "4 is the value", ["4"], 0),
    ("infinitebench/code_run", "\n", ["4"], 0),
    ("infinitebench/math_find", "-94.", ["94"], 1),
    ("infinitebench/math_find", "94.9", ["94"], 1),
    ("infinitebench/math_find", "94.5", ["94.5"], 1),
    ("infinitebench/math_find", "", ["94"], 0),
    ("infinitebench/math_find", "9007199254740993", ["9007199254740992"], 0),
    ("infinitebench/math_calc", "[1, 4, 9]", ["1", "4", "8", "8"], 0.5),
    ("infinitebench/math_calc", "9, 1, 4", ["1", "4"], 0),
    ("infinitebench/math_calc", "[-3]", ["-3"], 0),  # signs are lost
    ("infinitebench/longbook_choice_eng", " C. Snowfield", ["Snowfield", "C"], 1),
    ("infinitebench/longbook_choice_eng", "Because it snows", ["Snowfield", "C"], 0),  # begins with a B
    ("infinitebench/longbook_choice_eng", "Snowfield", ["Snowfield", "C"], 1),
    ("infinitebench/longbook_choice_eng", "I think Snowfield", ["Snowfield", "C"], 0),
    ("infinitebench/longbook_choice_eng", "The answer is: C", ["Snowfield", "C"], 1),
    ("infinitebench/longbook_choice_eng", "The answer is:C", ["Snowfield", "C"], 0),  # a character is skipped unseen
    ("infinitebench/longbook_choice_eng", "The answer is Snowfield", ["Snowfield", "C"], 1),
    ("infinitebench/longbook_choice_eng", "The answer is", ["Snowfield", "C"], 0),
    ("infinitebench/longbook_choice_eng", "In my view C, not D", ["Snowfield", "C"], 1),
    ("infinitebench/longbook_choice_eng", "In my view D, not C", ["Snowfield", "C"], 0),
    ("infinitebench/longbook_choice_eng", "  ", ["Snowfield", "C"], 0),
    *((f"{who}/code_debug", " B. pack", ["pack", "B"], 1) for who in ("infinitebench", "locret")),
    *((f"{who}/code_debug", "B: pack", ["pack", "B"], 1) for who in ("infinitebench", "locret")),
    *((f"{who}/code_debug", "B", ["pack", "B"], 0) for who in ("infinitebench", "locret")),  # a bare letter
    ("infinitebench/code_debug", "B\nC. unpack", ["pack", "B"], 0),
    ("locret/code_debug", "B\nC. unpack", ["pack", "B"], 1),
    ("infinitebench/code_debug", "pack", ["pack", "B"], 0),
    ("infinitebench/code_debug", "The correct option is: B", ["pack", "B"], 1),
    ("infinitebench/code_debug", "The correct option is: pack", ["pack", "B"], 1),
    ("infinitebench/code_debug", "C. B. pack", ["pack", "B"], 0),
    ("longbench/trec", "Other location\nType: City", ["Other location"], 1, CITY),  # the first line alone
    ("longbench/trec", "\n\nOther location", ["Other location"], 1, CITY),  # after empty ones
    ("longbench/trec", "City or Other location", ["Other location"], 1 / 2, CITY),
    # A part of the right name does not count, unless it follows a removed one.
    ("longbench/trec", "Other location", ["Other location"], 1, ("location", "Other location")),
    ("longbench/trec", "Other location", ["Other location"], 1 / 2, ("Other", "location", "Other location")),
    ("longbench/trec", "City", ["Other location"], 0, CITY),
    ("longbench/trec", "", ["Other location"], 0, CITY),
    ("longbench/passage_retrieval_en", "Paragraph 15", ["Paragraph 15"], 1),
    ("longbench/passage_retrieval_en", "15 or 16", ["Paragraph 15"], 1 / 2),
    ("longbench/passage_retrieval_en", "none", ["Paragraph 15"], 0),
    ("longbench/passage_retrieval_zh", "段落3", ["段落3"], 1),
    ("longbench/passage_count", "There are 08 paragraphs", ["8"], 0),
    ("longbench/passage_count", "8 unique. Paragraph 1, 2, 3", ["8"], 1 / 4),
    ("longbench/triviaqa", "\nParis\nQuestion: Rome", ["Paris"], 1),
    ("longbench/hotpotqa", "Paris\nRome", ["Paris"], 2 / 3),  # all lines count but in the four few-shot tasks
    ("leval/coursera", "AC", ["ABC"], 0.25),  # a part of the right options
    ("leval/coursera", "CA", ["AC"], 1),
    ("leval/coursera", "AD", ["ABC"], 0),
    ("leval/coursera", "A. first\nC. third", ["AC"], 1),
    ("leval/coursera", "B) it is. Question: A.", ["B"], 1),  # what follows "Question" is cut off
    ("leval/coursera", "no idea", ["A"], 1),  # the official guess
    ("leval/coursera", "", ["A"], 0),
    ("leval/quality", "The answer is C", ["(C) the third"], 1),
    ("leval/quality", "Because of C", ["(C) the third"], 0),  # the first capital of A to D
    ("leval/tpo", "D", ["D"], 1),
    ("leval/gsm100", "so 3 + 4 = 7. The answer is $1,018.00", ["1018"], 1),
    ("leval/gsm100", "7 apples and -18 pears\n\n5", ["18"], 1),
    ("leval/gsm100", "none", ["18"], 0),
    ("leval/topic_retrieval_longchat", "the role of ART in society", ["The role of art in society"], 1),
    ("leval/topic_retrieval_longchat", "-\nArt\nSociety", ["Society"], 1),  # any line
    ("leval/topic_retrieval_longchat", "Society\nHistory", ["Art"], 0),
    ("leval/sci_fi", "This is not False/true.", ["True"], 1),
    ("leval/sci_fi", "False, not true", ["True"], 0),
    ("leval/sci_fi", "unknown", ["False"], 0),
    ("leval/narrative_qa", "Mary was in love.", ["Mary was in love with Ann."], 0.8),
    # codeU compares the final output with its punctuation dropped.
    ("leval/codeU", "So, the final output of the code is:\n\n```\narray([6, 15])\n```", ["[6 15]"], 1),
    ("leval/codeU", "It prints 6, then 15.", ["[6 15]"], 0),
    ("leval/codeU", "the value of the code is 3.0", ["3"], 1),
    ("leval/codeU", "the final output is 4 because of one two three five 3", ["3"], 0),  # too far behind the phrase
    ("leval/codeU", "[[1, 2], [3, 4]]", ["[[1 2]\n [3 4]]"], 1),
]


def score(task: str, prediction: str, targets: list[str], classes: tuple[str, ...] = ()) -> float:
    family, _, name = task.partition("/")
    if family == "leval":
        return leval.score(name, prediction, targets[0])
    if family == "longbench":
        return longbench.score(name, prediction, targets, classes)
    return infinitebench.score(name, prediction, targets, "locret" if family == "locret" else "official")


def test_short_answers_get_their_official_scores() -> None:
    for task, said, right, wanted, *classes in ANSWERS:
        assert score(task, said, right, *classes) == pytest.approx(wanted), (task, said)


WORDS: list[tuple[Any, str, list[str], float]] = [
    (overlap.word_f1, "The well-known CAT.", ["wellknown cat"], 1.0),  # no space behind punctuation, articles go
    (overlap.word_f1, "cat cat dog", ["cat dog dog"], 2 / 3),  # bags: one cat and one dog are shared
    (overlap.word_f1, "cat", ["dog", "cat and dog"], 0.5),  # the best reference: precision 1, recall 1/3
    (overlap.word_f1, "", [""], 0.0),
    (overlap.word_f1, "the", ["a"], 0.0),
    (overlap.word_f1, "cat。", ["cat"], 0.0),  # Chinese punctuation is part of a word
    (overlap.character_f1, "“田 立帆”。", ["田立帆"], 1.0),
    (overlap.character_f1, "《田》", ["田"], 2 / 3),  # the opening mark stays
    (overlap.chinese_word_f1, "商家堡", ["田立帆在商家堡。"], 0.5),  # precision 1, recall 1/3
    # LongBench's ROUGE-L: case counts, words are a set, sentences end at full stops.
    (overlap.rouge_l, "A b.", ["a b."], 0.5),
    (overlap.rouge_l, "a a a b", ["a b"], 1.0),
    (overlap.rouge_l, "b. a", ["a b"], 1.0),
    (overlap.rouge_l, "", ["a"], 0.0),
    (overlap.rouge_l, "...", ["a"], 0.0),
    (overlap.rouge_l, "商家堡", ["田立帆在商家堡"], 0.0),
    # InfiniteBench's ROUGE-Lsum: lines are sentences, no stems, the best reference.
    (overlap.rouge_lsum, "the cat\nsat down", ["sat down\nthe cat"], 1.0),
    (overlap.rouge_lsum, "the cat sat down", ["sat down the cat"], 0.5),
    (overlap.rouge_lsum, "cats", ["cat"], 0.0),
    (overlap.rouge_lsum, "cat", ["dog", "Cat!"], 1.0),
    (retrieval.all_contained, "it is 12 and Blue", ["12", "blue", "34", "red"], 0.5),
    (retrieval.all_contained, "12345678", ["1234567"], 1),  # RULER looks for the string, wherever it is
    (retrieval.all_contained, "123456", ["1234567"], 0),
    (retrieval.all_contained, "", ["a", "b"], 0),
    (retrieval.all_contained, "a", ["a", "b", "c"], 1 / 3),
    (retrieval.any_contained, "it is 12 and Blue", ["34", "BLUE"], 1),
    (retrieval.any_contained, "nothing", ["34"], 0),
    (lambda said, right: leval.exact_match(said, right[0]), "18", ["18.0"], 1),  # numbers before texts
    (lambda said, right: leval.exact_match(said, right[0]), "118", ["18"], 0),
    (lambda said, right: leval.exact_match(said, right[0]), "it is 118", ["18"], 1),
]


def test_overlaps_by_hand() -> None:
    for metric, said, right, wanted in WORDS:
        assert metric(said, right) == pytest.approx(wanted, abs=1e-6), (said, right)
    assert overlap.segmented_words("田立帆在商家堡。") == ["田立帆", "在", "商家堡"]
    assert overlap.rouge_l("a b", ["a b"]) == pytest.approx(1 - 5e-9, abs=1e-12)  # 1e-8 in the denominator
    assert overlap.chinese_rouge_l("商家堡", ["田立帆 在 商家堡", "没有"]) > 0.4


def test_a_reference_without_a_paragraph_number_is_named() -> None:
    with pytest.raises(ValueError, match=r"reference 'number 8' names no paragraph; it must be such as 'Paragraph 12'"):
        longbench.score("passage_retrieval_en", "8", ["number 8"])


def test_code_similarity_takes_the_first_line_of_code_in_whole_percent() -> None:
    assert first_code_line("\n\n# note\n```\nx = 1\ny = 2") == "x = 1"
    assert first_code_line("x = 1 // 2") == ""
    assert edit_similarity("x = 1", "x = 1") == 1.0
    # difflib matches "ab" of "abcd" and "ab": 2 * 2 / 6; three figures would be 0.667.
    assert edit_similarity("abcd", "ab") == 0.67
    # difflib starts from the longest block, "xyz"; insertions and deletions alone would match "abcd": 0.47.
    assert edit_similarity("xyzabcd", "a1b2c3dxyz") == 0.35
    assert edit_similarity("", "x") == 0.0


def test_longbench_rouge_l_of_a_very_long_sentence_is_0_as_in_the_official_runs() -> None:
    def sentence(letter: str, words: int) -> str:
        return "both " + " ".join(f"{letter}{index}" for index in range(words))

    before = sys.getrecursionlimit()
    try:
        for limit in (before, 10_000):  # other packages raise it, and no score may depend on them
            sys.setrecursionlimit(limit)
            assert overlap.rouge_l(sentence("a", 300), [sentence("b", 300)]) > 0
            assert overlap.rouge_l(sentence("a", 600), [sentence("b", 600)]) == 0.0
            assert sys.getrecursionlimit() == limit
    finally:
        sys.setrecursionlimit(before)


def test_leval_rouge_averages_before_the_geometric_mean() -> None:
    parts = [(1.0, 0.0, 0.5), (0.0, 0.5, 0.5)]
    assert overlap.geometric_mean(parts) == pytest.approx((0.5 * 0.25 * 0.5) ** (1 / 3))
    assert overlap.geometric_mean([]) == 0.0
    texts = ["a quick cat sat", "it rains"]
    assert leval.task_score("meeting_summ", texts, texts) == pytest.approx(1.0)
    assert leval.rouge_parts("the cat\nsat", "sat\nthe cat") == pytest.approx((1.0, 0.5, 2 / 3))


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

    monkeypatch.setattr(import_module(library.__module__), "import_module", missing)
    message = r"ROUGE needs the library rouge-score; install it with `pip install 'locret\[eval\]'`"
    with pytest.raises(ValueError, match=message):
        library("rouge_score.rouge_scorer", "ROUGE")
