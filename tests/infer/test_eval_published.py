"""Published tasks in `locret-eval`: official prompts, the rows that are asked, and all that a result depends on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_runs import records
from published_cases import infinitebench, leval, longbench
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret.data import tasks as benchmarks
from locret.data.tasks import Sample, Task
from locret.data.tasks.task import MadeSamples, SampleSet
from locret.infer.evaluation import methods, runner

pytest.importorskip("rouge_score", reason="ROUGE needs locret[eval]")
pytest.importorskip("rouge", reason="ROUGE needs locret[eval]")

SMALL = ("--budget", 64, "--chunk-size", 64, "--stabilizers", 16, "--local-len", 8, "--figures", "none")
SMALL = (*SMALL, "--max-new-tokens", 6, "--threads", 1)


@pytest.fixture
def evaluate(evaluate_with: Any) -> Any:
    """Return a function that runs the command and gives exit code, output and errors."""
    return evaluate_with(*SMALL)


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """Return a folder with rows of three benchmarks."""
    return longbench(leval(infinitebench(tmp_path / "data", rows=3)))


def test_two_benchmarks_and_a_generated_task_run_in_one_evaluation(evaluate: Any, ours: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tasks = "passkey,infinitebench/passkey,leval/natural_question,longbench/samsum"
    line = ("--tasks", tasks, "--lengths", 300, "--methods", "full,random", "--data-dir", ours, "--output", out)
    code, table, err = evaluate(*line, "--samples", 2)
    assert code == 0, err
    found = records(out)
    assert [record["task"] for record in found[::4]] == tasks.split(",")
    assert len(found) == 4 * 2 * 2
    assert [record["item"] for record in found if record["task"] == "infinitebench/passkey"] == ["0", "0", "1", "1"]
    assert [record["item"] for record in found if record["task"] == "leval/natural_question"] == ["0/0"] * 2 + [
        "0/1"
    ] * 2
    assert all("item" not in record and record["depth"] in (0.25, 0.75) for record in found[:4])
    assert "| infinitebench/passkey (2 of 590) | leval/natural_question (2 of 104) | longbench/samsum (2 of 200) |" in (
        table.replace("passkey @ 300 | ", "")
    )
    for record in found[4:]:
        task = benchmarks.get(record["task"])
        item = Sample(id="", content="", targets=tuple(record["targets"]), reply="")
        assert record["score"] == task.score(record["prediction"], item)
    cells = {cell["set"]: cell for cell in results(out)["cells"] if "set" in cell}
    assert cells["infinitebench/passkey"]["task"] == "infinitebench/passkey (2 of 590)"
    assert (cells["infinitebench/passkey"]["n"], cells["infinitebench/passkey"]["of"]) == (2, 590)


def test_what_a_result_depends_on_is_on_record(evaluate: Any, ours: Path, tmp_path: Path, backbone: Path) -> None:
    out, file = tmp_path / "out", ours / "infinitebench" / "data" / "passkey.jsonl"
    line = ("--tasks", "infinitebench/passkey", "--methods", "full", "--data-dir", ours, "--output", out)
    assert evaluate(*line)[0] == 0
    config = results(out)["config"]
    fact = config["tasks"]["infinitebench/passkey"]
    (data,) = fact["data"]
    assert data["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (data["file"], data["revision"], data["items"]) == ("passkey.jsonl", None, 3)
    assert fact["prompt"]["form"] == "completion"
    assert fact["generation"] == {
        "decoding": "greedy",
        "max_new_tokens": 6,
        "shortened": False,
        "min_new_tokens": 0,
        "stop": [],
    }
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    template = hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()
    assert config["tokenizer"]["template_sha256"] == template
    assert len(config["tokenizer"]["vocabulary_sha256"]) == 64
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    prompts = [
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
        f"about the important information.\n\n{row['context']}\n\n{row['input']}\n\nThe pass key is"
        for row in rows
    ]
    digests = [hashlib.sha256(f"\0{prompt}\0".encode()).digest() for prompt in prompts]
    assert data["prompts_sha256"] == hashlib.sha256(b"".join(digests)).hexdigest()
    # Completion style: the prompt's tokens with the tokenizer's bos, and no turn around them.
    ids = torch.tensor([tokenizer(prompts[0])["input_ids"]])
    assert records(out)[0]["prompt_sha256"] == hashlib.sha256(ids.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("name", ["infinitebench/passkey", "longbench/qasper", "leval/natural_question"])
def test_a_long_prompt_is_cut_as_the_protocol_cuts_and_both_lengths_are_on_record(
    name: str, evaluate: Any, ours: Path, tmp_path: Path, backbone: Path
) -> None:
    line = ("--tasks", name, "--methods", "full", "--data-dir", ours, "--samples", 1)
    assert evaluate(*line, "--output", tmp_path / "whole")[0] == 0
    assert evaluate(*line, "--output", tmp_path / "cut", "--max-prompt", 200)[0] == 0
    (whole,), (cut,) = records(tmp_path / "whole"), records(tmp_path / "cut")
    assert whole["tokens_before"] == whole["tokens_after"] == cut["tokens_before"] > 300
    assert 0 < cut["tokens_after"] <= 200
    assert cut["tokens"] == 200
    assert cut["prompt_tokens"] < whole["prompt_tokens"]
    fact = results(tmp_path / "cut")["config"]["tasks"][name]
    assert (fact["prompt"]["limit"], fact["prompt"]["limit_from"]) == (200, "--max-prompt")
    # 4,096 positions are fewer than the protocols allow; LongBench leaves it to the model.
    fact = results(tmp_path / "whole")["config"]["tasks"][name]["prompt"]
    room = {"infinitebench/passkey": 0, "longbench/qasper": 128, "leval/natural_question": 1024}[name]
    assert fact["limit"] == 4096 - 6 - room
    assert fact["limit_from"].startswith("backbone")


def test_the_protocols_limit_holds_where_the_backbone_has_room(ours: Path) -> None:
    task = benchmarks.get("infinitebench/passkey")
    assert task.fitted(200_000, None, None) == (task, "protocol")
    assert task.fitted(None, None, None) == (task, "protocol")
    shorter, source = task.fitted(8192, None, None)
    assert (shorter.limit, source) == (8192 - 6, "backbone")
    assert benchmarks.get("infinitebench/math_calc").fitted(131072, None, 50)[0].max_new_tokens == 50
    with pytest.raises(ValueError, match="30,000 new tokens leave no room for a prompt within the 8,192 positions"):
        benchmarks.get("infinitebench/math_calc").fitted(8192, None, None)


def test_some_rows_are_taken_evenly_from_the_file(evaluate: Any, tmp_path: Path) -> None:
    data, out = infinitebench(tmp_path / "data", rows=10), tmp_path / "out"
    line = ("--tasks", "infinitebench/passkey", "--methods", "full", "--data-dir", data, "--output", out)
    assert evaluate(*line, "--samples", 4)[0] == 0
    assert [record["item"] for record in records(out)] == ["0", "2", "5", "7"]
    assert [record["index"] for record in records(out)] == [0, 1, 2, 3]


def test_bad_rows_are_named_and_left_out_only_when_asked(evaluate: Any, ours: Path, tmp_path: Path) -> None:
    file, out = ours / "infinitebench" / "data" / "passkey.jsonl", tmp_path / "out"
    good = file.read_text().splitlines()
    row = {**json.loads(good[0]), "answer": []}
    file.write_text("\n".join([good[0], json.dumps(row), "{half", good[2]]) + "\n")
    line = ("--tasks", "infinitebench/passkey", "--methods", "full", "--data-dir", ours, "--output", out)
    code, _, err = evaluate(*line)
    assert code == 2
    assert "passkey.jsonl: row 1 (counted from 0) has an empty field 'answer'" in err
    assert "--skip-bad-rows" in err
    assert not out.exists()
    code, _, err = evaluate(*line, "--skip-bad-rows")
    assert code == 0
    assert "infinitebench/passkey: 2 bad rows are left out (no answer: 1, not JSON: 1)" in err
    assert [record["item"] for record in records(out)] == ["0", "3"]
    (data,) = results(out)["config"]["tasks"]["infinitebench/passkey"]["data"]
    assert data["skipped_rows"] == {"no answer": 1, "not JSON": 1}


def test_answers_to_other_rows_are_never_mixed(evaluate: Any, ours: Path, tmp_path: Path) -> None:
    line = ("--tasks", "infinitebench/passkey", "--methods", "full", "--data-dir", ours, "--output", tmp_path / "out")
    assert evaluate(*line)[0] == 0
    file = ours / "infinitebench" / "data" / "passkey.jsonl"
    file.write_text(file.read_text().replace("48213", "48214"))
    code, _, err = evaluate(*line, "--resume")
    assert code == 2
    assert "holds an evaluation of another configuration (other tasks)" in err


def test_a_suite_shows_missing_tasks_a_partial_average_and_published_rows(
    evaluate: Any, ours: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    line = ("--suite", "leval-locret", "--published", "--methods", "random,full", "--data-dir", ours, "--output", out)
    code, table, err = evaluate(*line)
    assert code == 0, err
    titles = "| method | budget | codeU | natural_question (2 of 104) | legal_contract_qa | narrative_qa | meeting_summ"
    assert table.splitlines()[2].startswith(titles)
    row = next(line for line in table.splitlines() if line.startswith("| full | all | missing |"))
    assert row.endswith("(partial: 2 of 6 tasks) |")
    assert row.count("missing") == 4
    assert "| published: full, Phi-3-mini-128K [1] |  | 8.89 | 59.14 | 30.34 | 17.59 | 16.05 | 14.51 | 24.42 |" in table
    assert "[1] As printed in Locret, arXiv 2410.01805, Table 3, not measured here. Differs: model Phi-3-mini" in table
    assert "precision not stated, their software and hardware; ours is" in table
    assert "backbone in float32" in table
    assert "Missing: leval/codeU, leval/legal_contract_qa, leval/narrative_qa, leval/review_summ (no rows" in table
    assert "Answers are shorter than the protocol allows (--max-new-tokens)." in table
    found = results(out)["suite"]
    assert set(found["missing"]) == set(found["tasks"]) - {"leval/natural_question", "leval/meeting_summ"}
    for one in found["rows"]:
        known = [score for score in one["scores"].values() if score is not None]
        assert one["partial"]
        assert one["average"] == pytest.approx(sum(known) / 2)
    assert all(one["published"] for one in found["published"])
    assert (out / "results.md").read_text() == table


def test_the_hub_is_read_where_there_is_no_local_copy(evaluate: Any, tmp_path: Path) -> None:
    # Tests are offline, so what is asked of the Hub shows in the refusal.
    code, _, err = evaluate("--tasks", "longbench/qasper", "--methods", "full", "--output", tmp_path / "out")
    assert code == 1
    assert "longbench/qasper: zai-org/LongBench/data.zip at 5e628be450b7" in err
    assert "give --data-dir with a local copy" in err


def test_a_stop_ends_the_answer_and_is_cut_off(backbone: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    setup = methods.Setup(model, tokenizer, None, 0)
    ids = torch.tensor([tokenizer("The red house stands near the river. " * 20)["input_ids"]])
    prompt = methods.Prompt(ids, Sample(id="0", content="", targets=("a",), reply="a"), setup)
    policy = runner.RetentionPolicy(budget=64, chunk_size=32, stabilizers=8, local_len=8)
    for one in (runner.Run(methods.get("full"), None), runner.Run(methods.get("random"), policy)):
        free = runner.answer(prompt, one, 20)
        words = free["prediction"].split()
        stop = next(word for word in words[2:] if free["prediction"].index(word) > 2 and len(word) > 2)
        stopped = runner.answer(prompt, one, 20, (stop,))
        assert stopped["generated_tokens"] < free["generated_tokens"]
        assert stopped["prediction"].endswith(stop)
        cut = runner._answered(
            prompt, one, replace(benchmarks.get("longbench/samsum"), stop=(stop,), max_new_tokens=20)
        )
        assert cut["prediction"] == free["prediction"][: free["prediction"].index(stop)]
        # An answer that must have a token does not begin with its end.
        first = tokenizer.decode(tokenizer(free["prediction"], add_special_tokens=False)["input_ids"][:1])
        assert runner.answer(prompt, one, 20, (first,))["generated_tokens"] == 1
        again = runner.answer(prompt, one, 20, (first,), 1)
        assert not again["prediction"].startswith(first)


def stub(task: Task, of: int | None) -> SampleSet:
    """Return samples of which only the number matters."""
    samples = MadeSamples(task, 0, 4, 0, made=False)
    samples.of = of
    return samples


def test_rouge_of_a_task_is_the_geometric_mean_of_three_means() -> None:
    from locret.infer.evaluation import summary

    task = benchmarks.get("leval/meeting_summ")
    answers = [("the sky is blue", "the sky is red"), ("a house", "a door")]
    found = [
        {
            **{"task": task.name, "tokens": 100, "method": "full", "budget": None, "chunk_size": None},
            **{"stabilizers": None, "prompt_tokens": 9, "prefill_seconds": 1, "generated_tokens": 1},
            **{"decode_seconds": 1, "kept_units": 1, "peak_units": 1, "cache_bytes": 1, "peak_bytes": 1},
            **{"prediction": said, "targets": [right], "item": "0", "tokens_before": 9, "tokens_after": 9},
            "score": task.score(said, Sample(id="", content="", targets=(right,), reply=right)),
        }
        for said, right in answers
    ]
    (cell,) = summary.cells(found, {(task.name, 100): stub(task, 156)})
    # ROUGE-1: 3/4 and 1/2; ROUGE-2: 2/3 and 0; ROUGE-L: 3/4 and 1/2.
    assert cell["score"] == pytest.approx(100 * ((5 / 8) * (1 / 3) * (5 / 8)) ** (1 / 3), abs=1e-3)
    assert cell["task"] == "leval/meeting_summ (2 of 156)"


def test_a_name_says_what_part_was_asked() -> None:
    task = benchmarks.get("infinitebench/passkey")
    assert stub(task, 590).label(590) == "infinitebench/passkey"
    assert stub(task, 590).label(20) == "infinitebench/passkey (20 of 590)"
    assert stub(task, None).label(4) == "infinitebench/passkey (4 rows)"
    assert MadeSamples(task, 0, 4, 0).label(4) == "infinitebench/passkey"
