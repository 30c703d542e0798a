"""Quirks of the official metrics that move a published figure, in cases small enough to check by hand."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from locret.data.tasks import Sample, get, names
from locret.data.tasks.metrics import overlap, retrieval
from locret.data.tasks.metrics.overlap import edit_similarity, first_code_line, library
from locret.data.tasks.published import infinitebench, leval, longbench


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("The well-known CAT.", ["wellknown cat"], 1.0),  # punctuation leaves no space behind, articles go
        ("cat cat dog", ["cat dog dog"], 2 / 3),  # bags: one cat and one dog are shared
        ("cat", ["dog", "cat and dog"], 0.5),  # the best reference: precision 1, recall 1/3
        ("", [""], 0.0),
        ("the", ["a"], 0.0),
        ("cat。", ["cat"], 0.0),  # Chinese punctuation is part of a word
    ],
)
def test_word_f1_compares_bags_of_cleaned_words(prediction: str, references: list[str], expected: float) -> None:
    assert overlap.word_f1(prediction, references) == pytest.approx(expected)


def test_character_f1_drops_chinese_punctuation_but_the_opening_title_mark() -> None:
    assert overlap.character_f1("“田 立帆”。", ["田立帆"]) == 1.0
    assert overlap.character_f1("《田》", ["田"]) == pytest.approx(2 / 3)


@pytest.mark.slow
def test_chinese_word_f1_compares_segmented_words() -> None:
    assert overlap.segmented_words("田立帆在商家堡。") == ["田立帆", "在", "商家堡"]
    assert overlap.chinese_word_f1("商家堡", ["田立帆在商家堡。"]) == pytest.approx(0.5)  # precision 1, recall 1/3


@pytest.mark.parametrize(
    ("task", "prediction", "targets", "expected"),
    [
        ("passkey", " 71432.", ["71432"], 1),
        ("passkey", "is 7 71432", ["71432"], 0),  # the first integer alone
        ("number_string", "no digits", ["1"], 0),
        ("kv_retrieval", '{"a": "b-1"}', ["b-1"], 1),
        ("kv_retrieval", "b-12", ["b-1"], 0),
        ("longdialogue_qa_eng", "to be Ace's.", ["ACE", "ROTHSTEIN"], 1),
        ("longdialogue_qa_eng", "Rothstein", ["ACE", "ROTHSTEIN"], 0),  # the first name alone counts
        ("longdialogue_qa_eng", "Ace", ["Ace"], 0),  # the answer is put into capitals, the name is not
        ("code_run", "The value is `-4`", ["-4"], 1),
        ("code_run", "4.", ["4"], 1),
        ("code_run", "4 is the value", ["4"], 0),
        ("code_run", "\n", ["4"], 0),
        ("math_find", "-94.", ["94"], 1),
        ("math_find", "94.9", ["94"], 1),
        ("math_find", "94.5", ["94.5"], 1),
        ("math_find", "", ["94"], 0),
        ("math_find", "9007199254740993", ["9007199254740992"], 0),
        ("math_calc", "[1, 4, 9]", ["1", "4", "8", "8"], 0.5),
        ("math_calc", "9, 1, 4", ["1", "4"], 0),
        ("math_calc", "[-3]", ["-3"], 0),  # signs are lost
    ],
)
def test_infinitebench_scores_short_answers(task: str, prediction: str, targets: list[str], expected: float) -> None:
    assert infinitebench.score(task, prediction, targets) == expected


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (" C. Snowfield", 1),
        ("Because it snows", 0),  # begins with a B
        ("Snowfield", 1),
        ("I think Snowfield", 0),
        ("The answer is: C", 1),
        ("The answer is:C", 0),  # one character after the phrase is skipped unseen
        ("The answer is Snowfield", 1),
        ("The answer is", 0),
        ("In my view C, not D", 1),
        ("In my view D, not C", 0),
        ("  ", 0),
    ],
)
def test_book_choice_reads_the_letter_as_the_official_code_does(prediction: str, expected: float) -> None:
    assert infinitebench.score("longbook_choice_eng", prediction, ["Snowfield", "C"]) == expected


@pytest.mark.parametrize(
    ("prediction", "official", "locret"),
    [
        (" B. pack", 1, 1),
        ("B: pack", 1, 1),
        ("B\nC. unpack", 0, 1),
        ("B", 0, 0),  # a bare letter
        ("pack", 0, 0),
        ("The correct option is: B", 1, 1),
        ("The correct option is: pack", 1, 1),
        ("C. B. pack", 0, 0),
    ],
)
def test_code_choice_wants_a_letter_with_a_full_stop(prediction: str, official: float, locret: float) -> None:
    assert infinitebench.score("code_debug", prediction, ["pack", "B"]) == official
    assert infinitebench.score("code_debug", prediction, ["pack", "B"], "locret") == locret


def test_the_locret_copy_ends_a_value_at_the_end_of_text_mark() -> None:
    assert infinitebench.score("kv_retrieval", "b-1</s>", ["b-1"]) == 0
    assert infinitebench.score("kv_retrieval", "b-1</s>", ["b-1"], "locret") == 1


@pytest.mark.parametrize(
    ("prediction", "classes", "expected"),
    [
        ("Other location\nType: City", ["City", "Other location"], 1),  # the first line alone
        ("\n\nOther location", ["City", "Other location"], 1),  # after empty ones
        ("City or Other location", ["City", "Other location"], 1 / 2),
        ("Other location", ["location", "Other location"], 1),  # a part of the right name does not count ...
        ("Other location", ["Other", "location", "Other location"], 1 / 2),  # ... unless it follows a removed one
        ("City", ["City", "Other location"], 0),
        ("", ["City", "Other location"], 0),
    ],
)
def test_classification_shares_the_point_among_named_classes(
    prediction: str, classes: list[str], expected: float
) -> None:
    assert longbench.score("trec", prediction, ["Other location"], classes) == expected


@pytest.mark.parametrize(
    ("task", "prediction", "target", "expected"),
    [
        ("passage_retrieval_en", "Paragraph 15", "Paragraph 15", 1),
        ("passage_retrieval_en", "15 or 16", "Paragraph 15", 1 / 2),
        ("passage_retrieval_en", "none", "Paragraph 15", 0),
        ("passage_retrieval_zh", "段落3", "段落3", 1),
        ("passage_count", "There are 08 paragraphs", "8", 0),
        ("passage_count", "8 unique. Paragraph 1, 2, 3", "8", 1 / 4),
        ("triviaqa", "\nParis\nQuestion: Rome", "Paris", 1),
        ("hotpotqa", "Paris\nRome", "Paris", 2 / 3),  # all lines count but in the four few-shot tasks
    ],
)
def test_longbench_scores_short_answers(task: str, prediction: str, target: str, expected: float) -> None:
    assert longbench.score(task, prediction, [target]) == pytest.approx(expected)


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


def test_longbench_rouge_l_is_that_of_the_rouge_package() -> None:
    assert overlap.rouge_l("a b", ["a b"]) == pytest.approx(1 - 5e-9, abs=1e-12)  # 1e-8 in the denominator
    assert overlap.rouge_l("A b.", ["a b."]) == pytest.approx(0.5, abs=1e-6)  # case counts
    assert overlap.rouge_l("a a a b", ["a b"]) == pytest.approx(1, abs=1e-6)  # words are a set
    assert overlap.rouge_l("b. a", ["a b"]) == pytest.approx(1, abs=1e-6)  # sentences end at full stops
    assert overlap.rouge_l("", ["a"]) == overlap.rouge_l("...", ["a"]) == 0.0


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


def test_chinese_rouge_l_cuts_words() -> None:
    assert overlap.chinese_rouge_l("商家堡", ["田立帆 在 商家堡", "没有"]) > 0.4
    assert overlap.rouge_l("商家堡", ["田立帆在商家堡"]) == 0.0


@pytest.mark.slow
def test_rouge_lsum_takes_lines_as_sentences_and_knows_no_stems() -> None:
    assert overlap.rouge_lsum("the cat\nsat down", ["sat down\nthe cat"]) == 1.0
    assert overlap.rouge_lsum("the cat sat down", ["sat down the cat"]) == 0.5
    assert overlap.rouge_lsum("cats", ["cat"]) == 0.0
    assert overlap.rouge_lsum("cat", ["dog", "Cat!"]) == 1.0


def test_leval_rouge_averages_before_the_geometric_mean() -> None:
    parts = [(1.0, 0.0, 0.5), (0.0, 0.5, 0.5)]
    assert overlap.geometric_mean(parts) == pytest.approx((0.5 * 0.25 * 0.5) ** (1 / 3))
    assert overlap.geometric_mean([]) == 0.0
    texts = ["a quick cat sat", "it rains"]
    assert leval.task_score("meeting_summ", texts, texts) == pytest.approx(1.0)
    one_two_l = leval.rouge_parts("the cat\nsat", "sat\nthe cat")
    assert one_two_l == pytest.approx((1.0, 0.5, 2 / 3))


@pytest.mark.parametrize(
    ("task", "prediction", "reference", "expected"),
    [
        ("coursera", "AC", "ABC", 0.25),  # a part of the right options
        ("coursera", "CA", "AC", 1),
        ("coursera", "AD", "ABC", 0),
        ("coursera", "A. first\nC. third", "AC", 1),
        ("coursera", "B) it is. Question: A.", "B", 1),  # what follows "Question" is cut off
        ("coursera", "no idea", "A", 1),  # the official guess
        ("coursera", "", "A", 0),
        ("quality", "The answer is C", "(C) the third", 1),
        ("quality", "Because of C", "(C) the third", 0),  # the first capital of A to D
        ("tpo", "D", "D", 1),
        ("gsm100", "so 3 + 4 = 7. The answer is $1,018.00", "1018", 1),
        ("gsm100", "7 apples and -18 pears\n\n5", "18", 1),
        ("gsm100", "none", "18", 0),
        ("topic_retrieval_longchat", "the role of ART in society", "The role of art in society", 1),
        ("topic_retrieval_longchat", "-\nArt\nSociety", "Society", 1),  # any line
        ("topic_retrieval_longchat", "Society\nHistory", "Art", 0),
        ("sci_fi", "This is not False/true.", "True", 1),
        ("sci_fi", "False, not true", "True", 0),
        ("sci_fi", "unknown", "False", 0),
        ("narrative_qa", "Mary was in love.", "Mary was in love with Ann.", 0.8),
    ],
)
def test_leval_scores_short_answers(task: str, prediction: str, reference: str, expected: float) -> None:
    assert leval.score(task, prediction, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("So, the final output of the code is:\n\n```\narray([6, 15])\n```", "[6 15]", 1),
        ("It prints 6, then 15.", "[6 15]", 0),
        ("the value of the code is 3.0", "3", 1),
        ("the final output is 4 because of one two three five 3", "3", 0),  # one word and 3 more after the phrase
        ("[[1, 2], [3, 4]]", "[[1 2]\n [3 4]]", 1),
    ],
)
def test_codeu_compares_the_final_output_with_its_punctuation_dropped(
    prediction: str, reference: str, expected: float
) -> None:
    assert leval.score("codeU", prediction, reference) == expected


def test_exact_match_compares_numbers_before_texts() -> None:
    assert leval.exact_match("18", "18.0") == 1
    assert leval.exact_match("118", "18") == 0
    assert leval.exact_match("it is 118", "18") == 1


def test_ruler_gives_a_share_or_any() -> None:
    assert retrieval.all_contained("it is 12 and Blue", ["12", "blue", "34", "red"]) == 0.5
    assert retrieval.any_contained("it is 12 and Blue", ["34", "BLUE"]) == 1
    assert retrieval.any_contained("nothing", ["34"]) == 0


TEXT = ("eight green apples fell",)
NUMBER = ("8",)
TARGETS = {
    "infinitebench/longbook_sum_eng": TEXT,
    "infinitebench/longbook_qa_eng": TEXT,
    "infinitebench/longbook_choice_eng": ("Snowfield", "B"),
    "infinitebench/code_debug": ("pack", "B"),
    "leval/coursera": ("BD",),
    "leval/quality": ("B",),
    "leval/tpo": ("B",),
    "leval/sci_fi": ("True",),
    "leval/gsm100": NUMBER,
    "longbench/passage_count": NUMBER,
    "longbench/passage_retrieval_en": ("Paragraph 8",),
    "longbench/passage_retrieval_zh": ("段落8",),
}


@pytest.mark.parametrize("name", [name for name in names(None) if "/" in name])
def test_every_published_task_tells_its_reference_from_another_answer(name: str) -> None:
    if name.split("/")[0] not in ("infinitebench", "leval", "longbench"):
        pytest.skip("its own tests show this")
    targets = TARGETS.get(name, NUMBER if name.startswith("infinitebench/") else TEXT)
    reply = "B. pack" if name == "infinitebench/code_debug" else targets[-1]
    item = Sample(id="0", content="?", targets=targets, reply=reply, choices=("other", targets[0]))
    assert get(name).score(reply, item) == pytest.approx(1.0, abs=1e-6)
    assert get(name).score("zz 77", item) < 0.5


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

    monkeypatch.setattr(import_module(library.__module__), "import_module", missing)
    message = r"ROUGE needs the library rouge-score; install it with `pip install 'locret\[eval\]'`"
    with pytest.raises(ValueError, match=message):
        library("rouge_score.rouge_scorer", "ROUGE")
