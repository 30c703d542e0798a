"""A task's own answer is right: what the oracle takes for the true answer gets the full score, nonsense does not."""

from __future__ import annotations

import pytest
from bench_cases import entries, golden

from locret.data import tasks as benchmarks
from locret.data.tasks.published.loading import open_task

# References of the kind that a task has; the rest are sentences.
REFERENCES = {
    **dict.fromkeys(("passkey", "number_string", "gsm100", "passage_count"), "91717"),
    "kv_retrieval": "0aab207e-619c-45e7-af9b-3a655f9c3996",
    "longdialogue_qa_eng": "TIFFANY",
    "code_run": -4,
    "math_find": 1.5,
    "math_calc": [90, 2, 7],
    "codeU": "[7, 8.0]",
    "coursera": "BC",
    "quality": "(C) He was reduced to particles",
    "tpo": "C",
    "sci_fi": "True [fact: False]",
    "passage_retrieval_en": "Paragraph 12",
    "passage_retrieval_zh": "段落12",
    **dict.fromkeys(("lcc", "repobench-p"), "        return self.width * 2"),
    **dict.fromkeys(("multifieldqa_zh", "dureader", "vcsum", "longbook_qa_chn"), "很久以前，有一只猫。"),
    **dict.fromkeys(("trec", "lsht"), "Other entity"),
}
SENTENCE = "The cat sat on a mat"
CASES = [(family, form) for family in ("infinitebench", "leval", "longbench") for form in golden(family)]


def full_score(name, items):
    """Return the lowest score of the items' replies; skip where an optional library is missing."""
    task = benchmarks.get(name)
    try:
        return min(task.score(item.reply, item) for item in items)
    except ValueError as error:
        if "needs the library" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize(("family", "form"), CASES, ids=map("/".join, CASES))
def test_the_reply_of_every_task_scores_full_and_another_answer_less(family, form):
    name, reference = f"{family}/{form}", REFERENCES.get(form, SENTENCE)
    row = golden(family)[form]["records"][0]
    row |= {"outputs": [reference], "answers": [reference], "all_classes": ["Other entity", "entity", "b"]}
    row |= {"answer": reference, "options": [SENTENCE, "f", "g", "h"]}
    items = list(benchmarks.get(name).items(entries([row])))
    assert full_score(name, items) == pytest.approx(1)
    assert all(benchmarks.get(name).score("zzz", item) < 0.3 for item in items)


@pytest.mark.slow
def test_replies_to_real_rows_score_full(shared):
    data = shared / "data"
    roots = [data, data / "infinitebench_generated", data / "derived/infinitebench", data / "derived/leval"]
    scores = {}
    for name in [f"{family}/{form}" for family, form in CASES]:
        try:
            rows = open_task(benchmarks.get(name), data_dir=roots)
        except ValueError:
            continue
        scores[name] = full_score(name, list(rows.items()))
    assert len(scores) == 40
    assert {name: score for name, score in scores.items() if score < 0.999} == {}


def test_code_debug_wants_the_letter_with_a_full_stop_and_the_locret_release_takes_it_alone_on_its_line():
    row = {"context": "c", "input": "q", "options": ["f", "g", "h", "i"], "answer": ["g"]}
    official, locret = (benchmarks.get("infinitebench/code_debug", scorer=scorer) for scorer in ("official", "locret"))
    (item,) = official.items(entries([row]))
    assert item.reply == "B. g"
    assert [official.score(answer, item) for answer in ("B. g", "B", "B\nC")] == [1, 0, 0]
    assert [locret.score(answer, item) for answer in ("B. g", "B", "B\nC")] == [1, 0, 1]
    with pytest.raises(ValueError, match="scorer='mine' is unknown; use one of official, locret"):
        benchmarks.get("infinitebench/code_debug", scorer="mine")
