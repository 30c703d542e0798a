"""Official figures of published prediction files, met to their printed precision.

The files lie beside the repository; without them these tests are skipped. What cannot be checked is stated by
tests too: four figures are printed only as "< 5%", and no figure belongs to the files of L-Eval's two ROUGE tasks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from locret.data.tasks.metrics import overlap as rouge
from locret.data.tasks.published import infinitebench, leval, longbench

INFINITEBENCH = {
    "yi-6b-200k": (
        "passkey",
        "number_string",
        "kv_retrieval",
        "math_find",
        "code_run",
        "code_debug",
        "longbook_choice_eng",
        "longbook_qa_eng",
        "longbook_qa_chn",
        "longdialogue_qa_eng",
    ),
    "gpt4": ("longbook_sum_eng",),
}
LONGBENCH = (
    "2wikimqa",
    "hotpotqa",
    "lcc",
    "multifieldqa_en",
    "passage_count",
    "passage_retrieval_en",
    "samsum",
    "trec",
)
LEVAL = {
    "exam_eval/gpt4-32k": ("codeU", "coursera", "gsm100", "topic_retrieval_longchat"),
    "ngram_eval/turbo-16k-0613": (
        "legal_contract_qa",
        "meeting_summ",
        "narrative_qa",
        "natural_question",
        "review_summ",
    ),
}
CASES = [
    *(("infinitebench", model, task) for model, tasks in INFINITEBENCH.items() for task in tasks),
    *(("longbench", "LongAlpaca-7B-16k", task) for task in LONGBENCH),
    *(("leval", model, task) for model, tasks in LEVAL.items() for task in tasks),
]
NO_REFERENCE = {"meeting_summ", "review_summ"}
PRINTED_AS_BOUND = {"kv_retrieval", "math_find", "code_run", "longdialogue_qa_eng"}


@pytest.fixture
def scoring(shared: Path) -> Path:
    folder = shared / "data" / "scoring"
    if not folder.is_dir():
        pytest.skip("shared/data/scoring with published predictions is not beside the repository")
    return folder


def file_of(scoring: Path, benchmark: str, model: str, task: str) -> Path:
    layouts = {
        "infinitebench": f"infinitebench/{model}/preds_{task}.jsonl",
        "longbench": f"longbench/Pred_LongBench/{task}.jsonl",
        "leval": f"leval/Predictions/{model}/{task}.pred.jsonl",
    }
    return scoring / layouts[benchmark]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def expectations(scoring: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((scoring / "expected_scores.json").read_text(encoding="utf-8"))
    return found


def targets_of(label: Any) -> list[str]:
    """The references as our loaders give them to a metric: as texts."""
    return [str(entry) for entry in (label if isinstance(label, list) else [label])]


def percent(benchmark: str, task: str, rows: list[dict[str, Any]]) -> float:
    """Our score of a prediction file, in percent."""
    if benchmark == "leval":
        field = next(name for name in rows[0] if name.endswith("_pred"))
        return 100 * leval.task_score(task, [row[field] for row in rows], [row["gt"] for row in rows])
    if benchmark == "longbench":
        scores = [longbench.score(task, row["pred"], row["answers"], row["all_classes"] or ()) for row in rows]
    else:
        scores = [infinitebench.score(task, row["prediction"], targets_of(row["ground_truth"])) for row in rows]
    return 100 * sum(scores) / len(scores)


@pytest.mark.parametrize(("benchmark", "model", "task"), CASES)
@pytest.mark.slow
def test_a_prediction_file_gets_its_official_figure_to_the_printed_precision(
    scoring: Path, benchmark: str, model: str, task: str
) -> None:
    expected = expectations(scoring)[benchmark][model][task]
    ours = percent(benchmark, task, rows_of(file_of(scoring, benchmark, model, task)))
    if expected["score"] is not None:
        assert f"{ours:.2f}" == f"{expected['score']:.2f}"
    published = expected["published"]
    if task in PRINTED_AS_BOUND:
        assert published == "< 5%"
        assert ours < 5
    elif task == "codeU":
        assert published == 25.55, "23 of 90 are 25.5556: the repository's table cuts the figure off"
        assert int(100 * ours) / 100 == published
    elif published is not None:
        assert f"{ours:.2f}" == f"{float(str(published).rstrip('%')):.2f}"
    if expected["score"] is None and published is None:
        assert task in NO_REFERENCE


def test_every_prediction_file_is_checked(scoring: Path) -> None:
    files = set(scoring.rglob("*.jsonl"))
    assert files == {file_of(scoring, *case) for case in CASES}


# Leaderboard/ngram_LEval_leaderboard.csv of OpenLMLab/LEval, ROUGE-1, -2 and -L of turbo-16k-0613 on the whole tasks
# (156 and 120 answers); the files hold 135 and 102 of them, so that nearness is all that can be asked. A stemmer, or
# LongBench's package, is more than a point off.
@pytest.mark.parametrize(
    ("task", "count", "whole"),
    [("meeting_summ", 135, (30.20, 7.22, 19.31)), ("review_summ", 102, (30.18, 7.14, 18.67))],
)
def test_leval_rouge_of_part_of_a_task_is_near_the_leaderboard_of_the_whole(
    scoring: Path, task: str, count: int, whole: tuple[float, float, float]
) -> None:
    rows = rows_of(file_of(scoring, "leval", "ngram_eval/turbo-16k-0613", task))
    assert len(rows) == count
    parts = [leval.rouge_parts(row["turbo-16k-0613_pred"], row["gt"]) for row in rows]
    ours = [100 * sum(column) / count for column in zip(*parts, strict=True)]
    assert ours == pytest.approx(whole, abs=0.25)
    # Averages first, then their geometric mean: 0.5 points above the mean of the answers' geometric means.
    assert 100 * rouge.geometric_mean(parts) == pytest.approx((ours[0] * ours[1] * ours[2]) ** (1 / 3), abs=1e-9)
    assert 100 * sum(rouge.geometric_mean([one]) for one in parts) / count < 100 * rouge.geometric_mean(parts) - 0.4


def test_the_locret_copy_gives_code_debug_three_more_answers_than_the_official_code(scoring: Path) -> None:
    rows = rows_of(file_of(scoring, "infinitebench", "yi-6b-200k", "code_debug"))
    right = {
        variant: sum(infinitebench.score("code_debug", row["prediction"], row["ground_truth"], variant) for row in rows)
        for variant in ("official", "locret")
    }
    assert right == {"official": 36, "locret": 39}
