"""`locret-eval`: methods are treated alike, everything is on record, runs go on where they stopped, suites are tables,
and mistakes are refused before anything is written: one sentence, exit code 2, and the way out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
import pytest
import yaml
from eval_runs import RECORD, TIMES, cells, published, records, results
from hypothesis import given
from hypothesis import strategies as st

from locret import RetentionPolicy, environment
from locret.base import method_spec
from locret.base.files import locked
from locret.data import tasks
from locret.data.tasks.published import suites
from locret.infer.evaluation import answering, report
from locret.infer.evaluation.records import PART, SAMPLES, SampleLog, key
from locret.infer.methods import find

SMALL = ("--chunk-size", 32, "--stabilizers", 16, "--local-len", 8, "--max-new-tokens", 6)
ONE = ("--methods", "random", "--tasks", "passkey", "--lengths", 500, "--budget", 64, "--samples", 1, *SMALL)
TWO = ("--tasks", "passkey,twostage/2stage", "--lengths", 600, "--budget", 64, "--samples", 2, *SMALL)


@pytest.fixture
def evaluate(evaluate_with: Any, heads: Path) -> Callable[..., Any]:
    """Return a function that runs the command on a random backbone and gives exit code, output and errors."""
    return lambda *arguments, own=("--heads", heads): evaluate_with(*own)(*arguments)


def test_every_method_holds_the_same_budget_and_everything_is_on_record(evaluate: Any, tmp_path: Path) -> None:
    out, methods = tmp_path / "out", "full,locret,random,streaming+original,oracle,streaming+recall"
    code, table, err = evaluate("--methods", methods, *TWO, "--output", out)
    assert code == 0, err
    found = records(out)
    assert len(found) == 6 * 2 * 2
    for record in found:
        if record["method"] == "full":
            assert record["budget"] is None
            assert record["kept_units"] == record["prompt_tokens"] <= 600 - 6
        else:
            assert record["kept_units"] == 64 + 8
            assert record["peak_units"] <= 64 + 32 + 8 + record["generated_tokens"]
            # 2 layers of 2 KV heads hold keys and values of 8 bfloat16 numbers, here as float32.
            assert record["cache_bytes"] >= 72 * 2 * 2 * 2 * 8 * 4
        assert ("host_bytes" in record) == record["method"].endswith("recall")
    assert len({(r["task"], r["index"], r["prompt_sha256"]) for r in found}) == 4
    whole = results(out)
    assert whole["complete"]
    assert [cell["n"] for cell in whole["cells"]] == [2] * 12
    assert {"locret", "torch", "transformers"} <= set(whole["versions"])
    assert (out / "results.md").read_text() == table
    assert "| niah/passkey (filler) @ 600 | twostage/2stage @ 600 |" in table


def test_an_interrupted_run_goes_on_with_more_methods_and_equals_an_uninterrupted_one(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "halves", tmp_path / "whole"
    assert evaluate(*TWO, "--methods", "full,random,locret", "--output", whole)[0] == 0
    answer, left = answering.answer, [3]

    def interrupted(*given: Any) -> dict[str, Any]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return answer(*given)

    with monkeypatch.context() as patch:
        patch.setattr(answering, "answer", interrupted)
        code, _, err = evaluate(*TWO, "--methods", "full,random", "--output", out)
    assert (code, len(records(out)), results(out)["complete"]) == (130, 3, False)
    assert "--resume goes on" in err
    with (out / "samples.jsonl").open("a") as file:
        file.write('{"task": "passkey", "vers')  # what a crash in the middle of a line leaves
    line = (*TWO, "--methods", "full,random,locret", "--output", out)
    assert evaluate(*line)[0] == 2  # neither --resume nor --overwrite
    now = environment.versions()
    monkeypatch.setattr("locret.infer.evaluation.records.versions", lambda: {**now, "torch": "9.9"})
    code, _, err = evaluate(*line, "--resume")
    assert code == 0, err
    assert f"--resume mixes answers of different versions (torch {now['torch']} is now 9.9)" in err
    assert records(out) == records(whole)
    assert cells(out) == cells(whole)
    code, _, err = evaluate(*TWO, "--methods", "full", "--output", out, "--resume")
    assert (code, "of another configuration (other methods)" in err) == (2, True)


def test_of_what_heads_recommend_other_methods_take_the_sizes_alone() -> None:
    sizes, shares = {"budget": 64, "chunk_size": 16}, {"head_budgets": "shares", "head_shares": (0.5, 1.5)}
    theirs = RetentionPolicy(**sizes, **shares, spacing=16, diversity=0.2)
    for method, chosen, own in (
        ("locret", (), {**shares, "spacing": 16, "diversity": 0.2}),
        ("random", (), {}),
        ("snapkv", (), {"positions": "original"}),
        ("snapkv+diverse", (), {"diversity": 0.15}),
        ("locret+4bit", (), {"key_bits": 4, "value_bits": 4}),
        ("locret+pyramid", (), {"layer_budgets": "pyramid", "diversity": 0.2}),
        ("random+head_shares", (), shares),
        ("random", ("diversity",), {"diversity": 0.2}),
        ("random", ("head_budgets", "spacing"), {**shares, "spacing": 16}),
    ):
        made = find(method_spec.parse(method), "--methods", []).policy(theirs, chosen)
        assert made == RetentionPolicy(**sizes, **own)  # type: ignore[arg-type]


def test_a_folder_of_another_configuration_is_refused_unless_overwritten(evaluate: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert evaluate(*ONE, "--output", out)[0] == 0
    before = (out / "samples.jsonl").read_text()
    for flags in ((), ("--resume",)):
        code, _, err = evaluate(*ONE, "--seed", 5, "--output", out, *flags)
        assert code == 2
        assert "(other tasks, seed); choose another folder, or --overwrite" in err
    assert (out / "samples.jsonl").read_text() == before
    assert evaluate(*ONE, "--seed", 5, "--output", out, "--overwrite")[0] == 0
    assert records(out)[0]["seed"] == 5
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    code, _, err = evaluate(*ONE, "--output", tmp_path / "mine", "--overwrite")
    assert (code, "holds something else than an evaluation" in err) == (2, True)
    with locked(out, "--output"):
        code, _, err = evaluate(*ONE, "--output", out, "--overwrite")
    assert code != 0
    assert "is being written by" in err


def test_damaged_or_foreign_answers_are_refused(evaluate: Any, tmp_path: Path) -> None:
    assert evaluate(*ONE, "--output", tmp_path)[0] == 0
    log = tmp_path / "samples.jsonl"
    line = log.read_text()
    for written, message in (
        (2 * line, "line 2 answers what an earlier line has answered (niah/passkey, sample 0, method"),
        (line.replace('"method": "random"', '"method": "h2o"'), "has an answer to what is not asked here (niah/pass"),
    ):
        log.write_text(written)
        code, _, err = evaluate(*ONE, "--output", tmp_path, "--resume")
        assert (code, message in err) == (2, True), err


@given(data=st.data())
def test_damaged_records_are_refused_or_read(tmp_path_factory: Any, data: st.DataObject) -> None:
    lines = [json.dumps({**RECORD, "index": number}).encode() for number in range(3)]
    at = data.draw(st.integers(0, 2))
    if data.draw(st.booleans()):
        lines[at] = json.dumps(mutations.values_of(data.draw, RECORD)).encode()
    else:
        lines[at] = mutations.bytes_of(data.draw, lines[at])
    path = mutations.put(tmp_path_factory.getbasetemp() / "records", SAMPLES, b"\n".join(lines) + b"\n")
    mutations.loaded_or_refused(SampleLog(path.parent).load)


def test_shipped_heads_are_evaluated_where_locret_is_named(evaluate_with: Any) -> None:
    line = ("--tasks", "passkey", "--lengths", 400, "--samples", 1, "--dry-run")
    for methods, taken in (("full,locret+pyramid", True), ("snapkv", False)):
        code, out, err = evaluate_with()(*line, "--methods", methods, model="checkpoints/tiny")
        assert (code, "checkpoints/tiny-heads are shipped" in err) == (0, taken), err
        assert str(json.loads(out)["config"]["heads"]).endswith("tiny-heads") == taken


def test_a_plan_says_what_would_be_done_and_writes_nothing(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = {"tasks": ["multikey"], "task_options": {"multikey": {"chat": False}}, "chunk_size": 32, "samples": 5}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "budget": [8, 32], "lengths": "300,600"}))
    line = ("--config", tmp_path / "recipe.yaml", "--methods", "full,random", "--dry-run")
    plan = json.loads(evaluate(*line)[1])
    assert [(p["budget"], p["chunk_size"], p["stabilizers"]) for p in plan["policies"]] == [(8, 32, 2), (32, 32, 8)]
    assert all(policy["planned_cache_bytes"] > 0 for policy in plan["policies"])
    assert plan["runs"] == 2 * 5 * (1 + 2)
    assert plan["config"]["tasks"]["ruler/niah_multikey_1"]["chat"] is False
    plan = json.loads(evaluate("--tasks", "passkey", "--lengths", 400, "--dry-run", own=())[1])
    assert plan["config"]["methods"] == ["full", "random", "streaming"]
    assert plan["notes"][0] == "--methods without locret, as trained heads are needed for that; give --heads"
    # An eighth of 400 tokens: the default would hold the prompt whole.
    assert {(p["budget"], p["stabilizers"]) for p in plan["policies"]} == {(50, 12)}
    roomy = ("--tasks", "twostage/2stage", "--lengths", 400, "--budget", 400, "--methods", "random", "--dry-run")
    assert json.loads(evaluate(*roomy)[1])["notes"][0].startswith("no prompt is longer than the budget and --local-len")
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_shares_of_the_prompt_are_on_record_by_share_with_what_they_came_to(evaluate: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = ("--methods", "full,random", "--tasks", "twostage/2stage", "--lengths", "400,600", "--samples", 1, "--json")
    line = (*line, "--local-len", 8, "--max-new-tokens", 4, "--output", out)
    code, shown, err = evaluate(*line, "--budget-share", "0.1,0.25", own=())
    assert code == 0, err
    found = [one for one in records(out) if one["method"] == "random"]
    assert len(found) == 4
    for one in found:
        assert one["resolved"]["budget"] == int(one["budget_share"] * one["prompt_tokens"])
        assert (one["budget"], one["kept_units"]) == (None, one["resolved"]["budget"] + 8)
    rows = (out / "results.md").read_text().splitlines()[2:5]
    assert [row.split("|")[2].strip() for row in rows] == ["all", "10%", "25%"]
    assert [cell.get("budget_share") for cell in json.loads(shown)["cells"]] == [None, 0.1, 0.25] * 2


def test_the_minimal_command_names_its_folder_and_the_list_names_everything(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = evaluate("--tasks", "passkey", "--lengths", 400, "--samples", 1, *SMALL[-4:], own=())
    assert code == 0, err
    (output,) = (tmp_path / "runs").iterdir()
    assert output.name.startswith("backbone-niah-passkey-")
    assert f"locret-eval: 3 answers, 1,200 prompt tokens; results go to runs/{output.name}" in err
    shown = evaluate("--list")[1]
    assert all(f"  {name} " in shown for name in (*tasks.names(), *suites.names(), "oracle", "snapkv", "quest"))
    assert "  +pyramid " in shown


def test_merging_keeps_one_of_each_and_the_order_of_one_process(tmp_path: Path) -> None:
    order = {key({**RECORD, "index": index}): index for index in range(5)}
    for rank, indices in ((0, (3, 0)), (1, (4, 1)), (2, (1, 2, 0))):
        log = SampleLog(tmp_path, rank)
        for index in indices:
            log.append({**RECORD, "index": index})
    with (tmp_path / PART.format(2)).open("a") as file:
        file.write('{"task": "pass')  # cut off when its process was killed
    main = SampleLog(tmp_path)
    main.load()
    main.merge(order)
    assert [one["index"] for one in records(tmp_path)] == [0, 1, 2, 3, 4]
    assert [{k: v for k, v in one.items() if k not in TIMES} for one in main.records] == records(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["samples.jsonl"]
    (tmp_path / SAMPLES).write_text(
        json.dumps({name: one for name, one in RECORD.items() if name != "protocol"}) + "\n"
    )
    (first := SampleLog(tmp_path)).load()
    assert first.records == [RECORD], "a record of the first toolkits names no protocol"


def test_rows_of_a_file_are_asked_as_the_protocol_says_and_never_mixed(evaluate: Any, tmp_path: Path) -> None:
    pytest.importorskip("rouge", reason="ROUGE needs locret[eval]")
    data, out = published(tmp_path / "data"), tmp_path / "out"
    named = "infinitebench/passkey,leval/natural_question,longbench/samsum"
    line = ("--tasks", named, "--methods", "full", "--data-dir", data, "--budget", 64, *SMALL, "--output", out)
    code, table, err = evaluate(*line, "--samples", 2, "--max-prompt", 200)
    assert code == 0, err
    found = records(out)
    assert [record["item"] for record in found] == ["0", "2", "0/0", "0/1", "0", "1"]
    assert all(record["tokens_before"] > 300 >= 200 >= record["tokens_after"] > 0 for record in found)
    read = ("infinitebench/passkey (2 of 590)", "leval/natural_question (2 of 104)", "longbench/samsum (2 of 200)")
    assert f"| {' | '.join(read)} |" in table
    facts = results(out)["config"]["tasks"]
    assert {(one["limit"], one["limit_from"]) for one in facts.values()} == {(200, "--max-prompt")}
    file = data / "infinitebench" / "data" / "passkey.jsonl"
    file.write_text(file.read_text().replace("48213", "48214"))
    code, _, err = evaluate(*line, "--samples", 2, "--max-prompt", 200, "--resume")
    assert (code, "holds an evaluation of another configuration (other tasks)" in err) == (2, True)


# --- suites ---


def test_a_suite_shows_missing_tasks_a_partial_average_and_published_rows(evaluate: Any, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score", reason="ROUGE needs locret[eval]")
    data, out = published(tmp_path / "data"), tmp_path / "out"
    line = ("--suite", "leval-locret", "--published", "--methods", "random,full", "--data-dir", data, "--output", out)
    code, table, err = evaluate(*line, "--budget", 64, *SMALL, own=())
    assert code == 0, err
    row = next(line for line in table.splitlines() if line.startswith("| full | all | missing |"))
    assert row.endswith("(partial) |")
    assert row.count("missing") == 4
    assert "| published: full, Phi-3-mini-128K [1] |  | 8.89 | 59.14 | 30.34 | 17.59 | 16.05 | 14.51 | 24.42 |" in table
    assert "[1] As printed in Locret, arXiv 2410.01805, Table 3, not measured here. Differs: model Phi-3-mini" in table
    assert "Missing: leval/codeU (no rows found)." in table
    assert "Answers are shorter than the protocol allows (--max-new-tokens)." in table
    found = results(out)["suite"]
    assert set(found["missing"]) == set(found["tasks"]) - {"leval/natural_question", "leval/meeting_summ"}
    for one in found["rows"]:
        known = [score for score in one["scores"].values() if score is not None]
        assert one["average"] == pytest.approx(sum(known) / 2)
        assert one["standard_errors"]["leval/meeting_summ"] is None  # ROUGE of a task is no mean over its texts
    assert (out / "results.md").read_text() == table


def test_generated_benchmarks_have_a_row_per_length_and_leave_out_what_cannot_be_made(
    evaluate: Any, tmp_path: Path
) -> None:
    line = ("--suite", "niah", "--methods", "full,streaming", "--samples", 2, "--budget", 64, *SMALL)
    code, table, err = evaluate(*line, "--lengths", "400,500", "--output", tmp_path / "out")
    assert code == 0, err
    rows = [(row["method"], row["tokens"]) for row in results(tmp_path / "out")["suite"]["rows"]]
    assert rows == [("full", 400), ("streaming", 400), ("full", 500), ("streaming", 500)]
    assert "Rows are generated here, by our own writing of the benchmark's generator, from texts of filler." in table
    assert {record["depth"] for record in records(tmp_path / "out")} == {0.1, 0.9}
    code, table, err = evaluate(*line, "--lengths", 150, "--output", tmp_path / "short")
    assert code == 0, err
    whole = results(tmp_path / "short")
    assert (whole["complete"], set(whole["suite"]["missing"])) == (True, {"niah/needle"})
    assert "Left out: niah/needle cannot be made at 150 tokens" in table


def test_errors_are_over_texts_not_over_questions() -> None:
    marks = {0: [1, 1, 0, 0], 1: [1], 2: [0, 0]}
    found = [(text, question, score) for text, scores in marks.items() for question, score in enumerate(scores)]
    named = [dict(zip(("index", "question", "score"), one, strict=True)) for one in found]
    own = report.task_score(tasks.get("longbench/qasper"), report.by_text(named))
    assert own == {"score": 50.0, "standard_error": pytest.approx(50 / 3**0.5, abs=1e-4)}


# --- what is refused, or said ---

REFUSED = yaml.safe_load(Path(__file__).with_name("refused_evaluations.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("refusals"))


@pytest.mark.parametrize(("line", "message"), REFUSED, ids=[line for line, _ in REFUSED])
def test_a_mistake_is_one_sentence_with_exit_code_2_and_leaves_no_folder(
    line: str, message: str, evaluate_with: Any, data: Path, tmp_path: Path
) -> None:
    given, output = shlex.split(line.replace("DATA", str(data))), tmp_path / "out"
    usual = {"--methods": "random", "--samples": "1", "--tasks": "passkey", "--lengths": "400"}
    other = {"--tasks": ("--suite",), "--lengths": ("--tasks", "--suite")}
    for flag, value in usual.items():
        if flag not in given and not any(one in given for one in other.get(flag, ())):
            given += [flag, value]
    code, _, err = evaluate_with()(*given, "--output", output)
    assert code == 2, err
    assert message in err.splitlines()[-1], err
    assert not output.exists()


SAID = "{} keeps the {} newest units whatever their scores, so that with --budget {} it keeps nothing else; raise"


def test_both_commands_say_which_budgets_leave_no_room_for_scores_once_for_each_method(
    infer: Callable[..., Any], evaluate: Any, backbone: Path, text: Path
) -> None:
    numbers = ("--chunk-size", "64", "--local-len", "8", "--dry-run")
    line = ("--methods", "random,snapkv,h2o", "--tasks", "passkey", "--lengths", "300", "--budget", "32,64")
    err = evaluate(*line, *numbers, own=())[2]
    assert err.count("newest units") == err.count("locret-eval: warning: " + SAID.format("snapkv", 32, 32)) == 1
    usual = ("--model", backbone, "--prompt-file", text, "--scorer", "snapkv", "--stabilizers", 8, *numbers)
    assert "locret-infer: warning: " + SAID.format("snapkv", 32, 32) in infer(*usual, "--budget", 32).err
    assert "newest units" not in infer(*usual, "--budget", 64).err
    at_end = (*usual, "--when", "prompt_end", "--stabilizers", 0, "--budget")
    assert ["newest units" in infer(*at_end, budget).err for budget in (24, 25)] == [True, False]  # and 8 local units
