"""Answers score as the official code scores them: quirks by hand, golden scores, whole published prediction files."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml
from bench_cases import HERE, SHARED, entries, golden

from locret.data import tasks
from locret.data.tasks import Sample
from locret.data.tasks.metrics import overlap, retrieval
from locret.data.tasks.published.leval import exact_match, rouge_parts

ANSWERS = yaml.safe_load((HERE / "answers.yaml").read_text(encoding="utf-8"))


def score(task: str, said: str, targets: Any, classes: tuple[str, ...] = ()) -> float:
    targets = [str(one) for one in (targets if isinstance(targets, list) else [targets])]
    sample = Sample(content="", targets=tuple(targets), reply="", choices=classes)
    return tasks.get(task).score(said, sample)


def test_short_answers_get_their_official_scores() -> None:
    for task, said, right, wanted, *classes in ANSWERS["tasks"]:
        assert score(task, said, right, *classes) == pytest.approx(wanted), (task, said)
    assert all(pytest.raises(ValueError, score, f"infinitebench/{one}", "no", "x") for one in ("code_run", "math_find"))


@pytest.mark.slow
def test_overlaps_by_hand() -> None:
    metrics = {**vars(overlap), **vars(retrieval), "exact_match": lambda said, right: exact_match(said, right[0])}
    for metric, said, right, wanted in ANSWERS["metrics"]:
        assert metrics[metric](said, right) == pytest.approx(wanted, abs=1e-6), (said, right)
    assert overlap.segmented_words("田立帆在商家堡。") == ["田立帆", "在", "商家堡"]
    assert overlap.rouge_l("a b", ["a b"]) == pytest.approx(1 - 5e-9, abs=1e-12)  # 1e-8 in the denominator
    assert overlap.chinese_rouge_l("商家堡", ["田立帆 在 商家堡", "没有"]) > 0.4


def test_leval_rouge_averages_before_the_geometric_mean() -> None:
    parts = [(1.0, 0.0, 0.5), (0.0, 0.5, 0.5)]
    assert overlap.geometric_mean(parts) == pytest.approx((0.5 * 0.25 * 0.5) ** (1 / 3))
    answers = [(text, (text,)) for text in ("a quick cat sat", "it rains")]
    assert tasks.get("leval/meeting_summ").summarise([], answers) == pytest.approx(1.0)
    assert rouge_parts("the cat\nsat", "sat\nthe cat") == pytest.approx((1.0, 0.5, 2 / 3))


def test_answers_score_as_the_official_code_scored_them() -> None:
    pytest.importorskip("rouge_score", reason="ROUGE needs locret[eval]")
    for name, case in golden("scbench").items():
        task = tasks.get(f"scbench/{name}_requests")
        one = next(iter(task.items(entries(case["records"]))))
        asked = [one.asking(question) for question in one.asked]
        for number, said, wanted in case["scores"]:
            sample = asked[number] if asked else one
            if name in ("qa_chn", "many_shot") and len(sample.targets) == 1:
                sample = replace(sample, targets=tuple(sample.targets[0]))  # as the official code takes them by a slip
            assert task.score(said, sample) == pytest.approx(wanted), (task.name, said)


def test_letters_are_read_as_the_official_code_reads_them() -> None:
    for said, letter in golden("longbench_v2")["scores"]:
        assert [score("longbench_v2/all", said, one) for one in "ABCD"] == [float(one == letter) for one in "ABCD"]


def test_a_conversation_scores_the_mean_of_its_turns_and_a_mixed_task_the_mean_of_its_kinds() -> None:
    pytest.importorskip("rouge_score", reason="ROUGE needs locret[eval]")
    found = {name: tasks.get(f"scbench/{name}") for name in ("kv", "summary_with_needles", "repoqa_requests")}
    rows = {name: golden("scbench")[name.removesuffix("_requests")]["records"] for name in found}
    for name, turn in zip(("add", "divide"), rows["repoqa_requests"][0]["multi_turns"], strict=True):
        turn["answer"] = f"def {name}(a, b):\n" + "    check(a, b, kind='number')\n" * 9  # much alike
    first = {name: next(iter(task.items(entries(rows[name])))) for name, task in found.items()}
    kv, mixed = first["kv"], first["summary_with_needles"]
    assert [found["kv"].score(said, kv) for said in (json.dumps(["it is b3f1", "x"]), kv.reply)] == [0.5, 1]
    for wrong in ("b3f1", "[1, 2]", '["b3f1"]', "[" * 10_000):
        with pytest.raises(ValueError, match="is not a JSON list of 2 answers, one for each turn"):
            found["kv"].score(wrong, kv)
    answers = [(json.dumps(["A cat purred.", said]), mixed.targets) for said in ("48213", "none", "none")]
    assert found["summary_with_needles"].summarise([], answers) == pytest.approx((1 + 1 / 3) / 2)
    # An answer that repeats a function is compared with all functions of its repository that are asked for.
    asked = [first["repoqa_requests"].asking(question) for question in first["repoqa_requests"].asked]
    block = f"Here it is:\n```python\n{asked[0].reply}```\nIt adds."
    assert [found["repoqa_requests"].score(block, one) for one in asked] == [1, 0]
    answers = [(asked[1].reply, asked[0].targets), (asked[1].reply, asked[1].targets)]
    assert found["repoqa_requests"].summarise([], answers) == 0.5


# --- published prediction files ---

FILES = {
    "infinitebench/{}/preds_{}.jsonl": {
        "yi-6b-200k": "passkey number_string kv_retrieval math_find code_run code_debug longbook_choice_eng "
        "longbook_qa_eng longbook_qa_chn longdialogue_qa_eng",
        "gpt4": "longbook_sum_eng",
    },
    "longbench/{}/{}.jsonl": {
        "Pred_LongBench": "2wikimqa hotpotqa lcc multifieldqa_en passage_count passage_retrieval_en samsum trec"
    },
    "leval/Predictions/{}/{}.pred.jsonl": {
        "exam_eval/gpt4-32k": "codeU coursera gsm100 topic_retrieval_longchat",
        "ngram_eval/turbo-16k-0613": "legal_contract_qa meeting_summ narrative_qa natural_question review_summ",
    },
}
PREDICTED = [(f, model, task) for f, models in FILES.items() for model, own in models.items() for task in own.split()]


def rows_of(file: str, model: str, task: str) -> list[dict[str, Any]]:
    path = SHARED / "scoring" / file.format(model, task)
    if not path.is_file():
        pytest.skip("needs the published predictions in ../shared/data")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


@pytest.mark.long
@pytest.mark.parametrize(("file", "model", "task"), PREDICTED)
def test_a_prediction_file_gets_its_official_figure_to_the_printed_precision(file, model, task) -> None:
    """Four figures are printed only as "< 5%"; no figure belongs to the files of L-Eval's two ROUGE tasks."""
    rows, family = rows_of(file, model, task), file.split("/")[0]
    known = json.loads((SHARED / "scoring" / "expected_scores.json").read_text())[family]
    expected = known["LongAlpaca-7B-16k" if family == "longbench" else model][task]
    said = next(name for name in rows[0] if name in ("pred", "prediction") or name.endswith("_pred"))
    right = next(name for name in ("answers", "ground_truth", "gt") if name in rows[0])
    scores = [score(f"{family}/{task}", row[said], row[right], tuple(row.get("all_classes") or ())) for row in rows]
    answers = [(row[said], (row[right],)) for row in rows]
    ours = 100 * (
        tasks.get(f"leval/{task}").summarise(scores, answers) if family == "leval" else sum(scores) / len(scores)
    )
    published = str(expected["published"]).rstrip("%")
    if expected["score"] is not None:
        assert f"{ours:.2f}" == f"{expected['score']:.2f}"
    if published.startswith("<"):
        assert ours < 5
    elif published != "None":
        printed = int(100 * ours) / 100 if task == "codeU" else ours  # the repository's table cuts 25.5556 off
        assert f"{printed:.2f}" == f"{float(published):.2f}"
