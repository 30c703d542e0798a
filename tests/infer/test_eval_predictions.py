"""`--score-predictions`: answers of other programs get the scores of the benchmarks' own programs, without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from locret.cli.command import run
from locret.data import tasks
from locret.infer.evaluation import runner
from locret.infer.evaluation.command import command

LONGBENCH = [
    {"pred": "David Niven", "answers": ["David Niven", "Niven"], "all_classes": None, "length": 9},
    {"pred": "Oklahoma", "answers": ["Norman"], "all_classes": None, "length": 9},
]
INFINITEBENCH = [
    {"id": 0, "prediction": " 71432.", "ground_truth": "71432"},
    {"id": 1, "prediction": "1", "ground_truth": "2"},
]
LEVAL = [{"gt": "[6 15]", "mine_pred": "So the final output is [6, 15]", "evaluation": "exam"}]
TREC = [{"pred": "Other entity", "answers": ["Other entity"], "all_classes": ["Other entity", "Food"]}]
SCI_FI = [
    {"gt": "True [fact: False]", "mine_pred": "True [fact: False]", "evaluation": "exam"},
    {"gt": "True [fact: False]", "mine_pred": "True. [fact: It is true]", "evaluation": "exam"},
]
RULER = [{"index": 5, "pred": "ABCDE and FGHIJ", "outputs": ["ABCDE", "FGHIJ", "KLMNO", "PQRST"]}]


@pytest.fixture
def score(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that scores files and gives exit code, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            run(command, ["--score-predictions", *map(str, arguments)])
        out, err = capsys.readouterr()
        return int(leaving.value.code or 0), out, err

    return call


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("name", "rows", "task", "expected"),
    [
        ("hotpotqa.jsonl", LONGBENCH, None, ("longbench/hotpotqa", 2, 50.0, 50.0)),
        ("preds_passkey.jsonl", INFINITEBENCH, "infinitebench/passkey", ("infinitebench/passkey", 2, 50.0, 50.0)),
        ("codeU.pred.jsonl", LEVAL, None, ("leval/codeU", 1, 100.0, None)),
        ("trec.jsonl", TREC, None, ("longbench/trec", 1, 100.0, None)),
        ("sci_fi.pred.jsonl", SCI_FI, None, ("leval/sci_fi", 4, 75.0, 25.0)),
        ("vt.jsonl", RULER, None, ("ruler/vt", 1, 50.0, None)),
    ],
)
def test_files_of_the_benchmarks_own_programs_are_scored(
    score: Any, tmp_path: Path, name: str, rows: list[dict[str, Any]], task: str | None, expected: tuple[Any, ...]
) -> None:
    file = write(tmp_path / name, rows)
    code, out, err = score(file, "--json", *([] if task is None else ["--tasks", task]))
    assert code == 0, err
    (cell,) = json.loads(out)["cells"]
    assert (cell["task"], cell["n"], cell["score"], cell["standard_error"]) == expected


def test_samples_of_locret_eval_are_scored_by_method_and_budget(score: Any, tmp_path: Path) -> None:
    rows = [
        {"task": "passkey", "method": method, "budget": 64, "tokens": 300, "prediction": said, "targets": ["48213"]}
        for method, said in (("random", "48213"), ("random", "no"), ("streaming", "48213"))
    ]
    code, out, err = score(write(tmp_path / "samples.jsonl", rows))
    assert code == 0, err
    assert "| samples.jsonl | passkey @ 300 | random, 64 | 2 | 50.00 ± 50.00 |" in out
    assert "| samples.jsonl | passkey @ 300 | streaming, 64 | 1 | 100.00 |" in out


@pytest.mark.parametrize(
    ("task", "row", "said", "options"),
    [
        (
            "longbench/trec",
            {"context": "Type: Food", "input": "What is it?", "answers": ["Food"], "all_classes": ["Food", "Other"]},
            "Food",
            {},
        ),
        ("world/qa5", None, None, {"gifts": 2}),
        ("world/secret", None, "", {}),
        (
            "loogle/shortdep_cloze",
            {"context": "Ann Lee.", "question": "<mask-0>", "answer": {"<mask-0>": "Ann Lee"}},
            "{'<mask-0>': 'Ann'}",
            {"scorer": "partial"},
        ),
        (
            "longbench_v2/all",
            {
                "context": "B",
                "question": "Which?",
                "answer": "B",
                "difficulty": "easy",
                "length": "short",
                **{f"choice_{letter}": letter for letter in "ABCD"},
            },
            "?",
            {"compensated": True},
        ),
    ],
)
def test_answers_of_a_run_get_the_scores_that_it_gave_them(
    score: Any,
    backbone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    row: dict[str, Any] | None,
    said: str | None,
    options: dict[str, Any],
) -> None:
    answered = runner.answer
    if row:
        file = tmp_path / "data" / task.partition("/")[0] / tasks.get(task).file  # type: ignore[attr-defined]
        file.parent.mkdir(parents=True)
        write(file, [row])

    def saying(prompt: Any, *given: Any) -> dict[str, Any]:
        return {**answered(prompt, *given), "prediction": prompt.sample.reply if said is None else said}

    monkeypatch.setattr(runner, "answer", saying)
    line = [
        "--model",
        backbone,
        "--tasks",
        task,
        "--methods",
        "full",
        "--max-new-tokens",
        1,
        "--output",
        tmp_path / "out",
    ]
    line += ["--quiet", "--figures", "none"]
    line += ["--data-dir", tmp_path / "data"] if row else ["--lengths", 600, "--samples", 8]
    line += ["--questions", 2] if task == "world/qa5" else []  # of a gift, who gave it and who received it
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"task_options": {task: options}}))
    assert command(["--config", str(recipe), *map(str, line)]) == 0
    (found,) = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    code, out, err = score(tmp_path / "out" / "samples.jsonl", "--json")
    assert code == 0, err
    (cell,) = json.loads(out)["cells"]
    assert (cell["score"], cell["standard_error"]) == (found["score"], found["standard_error"])


def test_two_files_may_be_of_one_task_and_a_third_of_another(score: Any, tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", LONGBENCH) for name in ("one", "two", "three")]
    line = (",".join(map(str, files)), "--json", "--tasks")
    code, out, err = score(*line, "longbench/qasper,longbench/hotpotqa,longbench/qasper")
    assert code == 0, err
    found = [(cell["file"], cell["task"]) for cell in json.loads(out)["cells"]]
    qasper, hotpotqa = "longbench/qasper", "longbench/hotpotqa"
    assert found == [("one.jsonl", qasper), ("two.jsonl", hotpotqa), ("three.jsonl", qasper)]
    code, _, err = score(*line, "longbench/qasper,longbench/qasper")
    assert code == 2
    assert "names 2 tasks for 3 files" in err


@pytest.mark.parametrize(
    ("name", "text", "flags", "message"),
    [
        ("passkey.jsonl", json.dumps(INFINITEBENCH[0]), (), "may be infinitebench/passkey or "),
        ("mine.jsonl", json.dumps(LONGBENCH[0]), (), "is named after no task; give --tasks, such as"),
        ("qasper.jsonl", '{"answers": ["a"]}', (), "has no answer; it must be a text in a field prediction or pred"),
        ("qasper.jsonl", '{"pred": 5, "answers": ["a"]}', (), "has no answer"),
        ("qasper.jsonl", '{"pred": "a"}', (), "has no references; they must be in one of the fields targets,"),
        ("qasper.jsonl", '{"pred": "a", "answers": []}', (), "has no references"),
        ("qasper.jsonl", "nonsense", (), "qasper.jsonl:1 (row 0 from 0) is not a JSON object"),
        ("qasper.jsonl", "", (), "is empty"),
        ("qasper.jsonl", '{"pred": "a", "answers": ["a"]}', ("--tasks", "longbench/qaspr"), "did you mean longbench/"),
        ("qasper.jsonl", '{"pred": "a", "answers": ["a"]}', ("--tasks", "passkey,number"), "names 2 tasks for 1 files"),
        ("code_debug.jsonl", '{"pred": "a", "ground_truth": ["a"]}', (), "does not have what infinitebench/code_debug"),
        (
            "trec.jsonl",
            '{"pred": "a", "answers": ["a"]}',
            (),
            "does not say the list all_classes, which longbench/trec",
        ),
        (
            "sci_fi.jsonl",
            '{"pred": "True", "gt": "True [fact: True]"}',
            (),
            "answers 'True' without its [fact: ...] part",
        ),
        (
            "samples.jsonl",
            '{"task": "world/qa5", "method": "full", "prediction": "Bill", "targets": ["Bill"], "score": 1.0}',
            (),
            "does not say the question, which world/qa5 compares an answer with; add it, or take the scores of results",
        ),
        (
            "samples.jsonl",
            '{"task": "longbench_v2/all", "version": 1, "method": "full", "prediction": "?", "targets": ["A"], '
            '"score": 0.25}',
            (),
            "says score 0.25, and longbench_v2/all gives 0 here; put the configuration.json of its run, which has the",
        ),
        ("missing", None, (), "is not a file; name one with an answer in JSON on each line"),
    ],
)
def test_what_cannot_be_scored_is_one_sentence(
    score: Any, tmp_path: Path, name: str, text: str | None, flags: tuple[str, ...], message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    code, _, err = score(tmp_path / name, *flags)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1
