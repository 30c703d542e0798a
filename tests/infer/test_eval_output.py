"""What `locret-eval` leaves behind: records, cells, tables, and a folder that is never mixed or half-written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from locret import pictures
from locret.infer.evaluation import output_folder, records, runner, summary, tables

LINE = ("--tasks", "passkey", "--lengths", "300", "--samples", "2", "--budget", "64", "--chunk-size", "32")
LINE = (*LINE, "--stabilizers", "16", "--local-len", "8", "--threads", "1")
RECORD = {
    "task": "passkey",
    "version": 1,
    "tokens": 300,
    "index": 0,
    "method": "random",
    "budget": 64,
    "chunk_size": 32,
    "stabilizers": 16,
    "prompt_tokens": 300,
    "prediction": "48213",
    "targets": ["48213"],
    "score": 1.0,
    "kept_units": 72,
    "peak_units": 96,
    "cache_bytes": 1000,
    "peak_bytes": 2048,
    "prefill_seconds": 2.0,
    "generated_tokens": 7,
    "decode_seconds": 0.5,
}


def record(**changes: Any) -> dict[str, Any]:
    return {**RECORD, **changes}


def untimed(one: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if not name.endswith("_seconds")}


@pytest.fixture
def evaluate(evaluate_with: Any) -> Any:
    """Return a function that runs the command and gives exit code, output and errors."""
    return evaluate_with(*LINE)


def test_cells_by_hand() -> None:
    scores = (1.0, 0.0, 0.5, 0.5)
    found = [record(index=i, score=s, kept_units=70 + i, prefill_seconds=i + 1.0) for i, s in enumerate(scores)]
    full = record(method="full", budget=None, chunk_size=None, stabilizers=None, score=1.0)
    first, second = summary.cells([*found, full])
    assert first["n"] == 4
    assert first["score"] == 50
    # Deviations 50, -50, 0, 0: the variance is 5000 / 3, the standard error its root by 2.
    assert first["standard_error"] == pytest.approx(20.4124)
    assert first["kept_units"] == 73
    assert first["prefill_tokens_per_second"] == 120  # 1,200 tokens in 10 seconds
    assert first["decode_tokens_per_second"] == 14  # 28 in 2
    assert (second["n"], second["standard_error"], second["budget"]) == (1, None, None)


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_table_by_hand() -> None:
    full = record(method="full", budget=None, chunk_size=None, stabilizers=None, score=0.8, kept_units=300)
    longer = record(tokens=3000, score=0.25)
    heads, _, first, second = cells_of(tables.table(summary.cells([full, record(score=0.6), longer])))
    assert heads[:4] == ["method", "budget", "passkey @ 300", "passkey @ 3,000"]
    assert first[:5] == ["full", "all", "80.0", "", "300"]
    assert second[:5] == ["random", "64", "60.0 (75%)", "25.0", "72"]


def test_table_shows_what_varies_and_nothing_is_a_share_of_nothing() -> None:
    full = record(method="full", budget=None, chunk_size=None, stabilizers=None, score=0.0)
    heads, _, *rows = cells_of(tables.table(summary.cells([full, record(), record(stabilizers=0)])))
    assert heads[2] == "stabilizers"
    assert [row[2:4] for row in rows] == [["", "0.0"], ["16", "100.0"], ["0", "100.0"]]


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_line_that_was_cut_off_is_dropped_and_the_next_one_stands_alone(cut: int, tmp_path: Path) -> None:
    log = records.SampleLog(tmp_path)
    for index in range(3):
        log.append(record(index=index))
    whole = log.path.read_bytes()
    log.path.write_bytes(whole[:-cut])
    again = records.SampleLog(tmp_path)
    again.load()
    assert [one["index"] for one in again.records] == [0, 1]
    again.append(record(index=2))
    assert log.path.read_bytes() == whole


@pytest.mark.slow
def test_a_full_disk_stops_with_one_sentence_and_the_run_goes_on_later(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, append = tmp_path / "out", records.SampleLog.append

    def full(self: records.SampleLog, found: dict[str, Any]) -> None:
        if len(self.records) == 1:
            self.path = Path("/dev/full")
        append(self, found)

    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with monkeypatch.context() as patch:
        patch.setattr(records.SampleLog, "append", full)
        code, _, err = evaluate("--methods", "random", "--figures", "none", "--output", out)
    assert code == 1
    assert "cannot be written (No space left on device); free some space, then --resume" in err
    assert evaluate("--methods", "random", "--figures", "none", "--output", out, "--resume")[0] == 0
    assert len((out / "samples.jsonl").read_text().splitlines()) == 2


def test_an_interrupted_run_leaves_results_that_say_so(evaluate: Any, tmp_path: Path, stopped_after: Any) -> None:
    with stopped_after(3):
        code, _, err = evaluate("--methods", "full,random", "--output", tmp_path / "out")
    assert code == 130
    assert "3 answers are in" in err
    assert "--resume goes on" in err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["complete"] is False
    assert [cell["n"] for cell in results["cells"]] == [2, 1]


@pytest.mark.slow
def test_a_run_that_goes_on_may_ask_more_methods_and_nothing_else(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("--figures", "none", "--output")
    assert evaluate("--methods", "random,full", *line, tmp_path / "out")[0] == 0
    answered = runner.answer
    asked = []
    monkeypatch.setattr(runner, "answer", lambda *given: asked.append(given) or answered(*given))
    assert evaluate("--methods", "full,h2o,random", *line, tmp_path / "out", "--resume")[0] == 0
    assert len(asked) == 2  # of the new method alone
    assert evaluate("--methods", "full,h2o,random", *line, tmp_path / "whole")[0] == 0
    grown, whole = (records.read(tmp_path / name / records.SAMPLES)[0] for name in ("out", "whole"))
    assert [untimed(one) for one in grown] == [untimed(one) for one in whole]
    stored = json.loads((tmp_path / "out" / output_folder.CONFIGURATION).read_text())
    assert stored["methods"] == ["full", "h2o", "random"]
    for changed, named in (
        (("--methods", "full,random"), "methods"),
        (("--methods", "full,h2o,random", "--protocol", "agnostic"), "protocols"),
        (("--methods", "full,h2o,random", "--batch-size", 2), "batch_size"),
    ):
        code, _, err = evaluate(*changed, *line, tmp_path / "out", "--resume")
        assert code == 2
        assert f"holds an evaluation of another configuration (other {named})" in err


@pytest.mark.slow
def test_answers_of_other_weights_are_never_mixed(evaluate: Any, backbone: Path, tmp_path: Path) -> None:
    model, line = tmp_path / "model", ("--methods", "random", "--figures", "none", "--output", tmp_path / "out")
    shutil.copytree(backbone, model)
    assert evaluate(*line, model=model)[0] == 0
    assert evaluate(*line, "--resume", model=model)[0] == 0
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = -weights["lm_head.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    code, _, err = evaluate(*line, "--resume", model=model)
    assert code == 2
    assert "holds an evaluation of another configuration (other weights)" in err


def test_without_matplotlib_all_but_the_pictures_is_written(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures.importlib.util, "find_spec", lambda name: None)
    code, out, err = evaluate("--methods", "random", "--output", tmp_path / "out")
    assert code == 0
    assert err.count("needs matplotlib") == 1
    assert "--figures all needs matplotlib; install it with `pip install 'locret[eval]'`; everything but" in err
    assert "| random | 64 |" in out
    assert json.loads((tmp_path / "out" / "results.json").read_text())["figures"] == []


@pytest.mark.slow
def test_overwriting_removes_what_the_earlier_run_wrote_and_nothing_else(evaluate: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the pictures need locret[eval]")
    out = tmp_path / "out"
    assert evaluate("--methods", "random", "--output", out)[0] == 0
    assert list(out.glob("*.png"))
    (out / "mine.png").write_text("a holiday")
    line = ("--methods", "random", "--seed", 1, "--figures", "none", "--overwrite", "--output", out)
    assert evaluate(*line)[0] == 0
    assert [path.name for path in out.glob("*.png")] == ["mine.png"]


def test_a_setting_that_an_older_folder_does_not_know_makes_no_difference(tmp_path: Path) -> None:
    (tmp_path / output_folder.CONFIGURATION).write_text('{"seed": 0}')
    output_folder.check_output(str(tmp_path), {"seed": 0, "new": (1, 2)}, resume=True, overwrite=False)
    former = {"seed": 0, "questions": None, "batch_size": 1, "protocols": ["aware"]}
    output_folder.check_output(str(tmp_path), former, resume=True, overwrite=False)
    for name, other in (("questions", 4), ("batch_size", 8), ("protocols", ["agnostic"])):
        with pytest.raises(ValueError, match=f"other {name}"):
            output_folder.check_output(str(tmp_path), {**former, name: other}, resume=True, overwrite=False)


def test_retired_fields_of_a_policy_make_a_difference_only_where_they_were_used(tmp_path: Path) -> None:
    here, state = {"policies": [{"budget": 8}]}, tmp_path / output_folder.CONFIGURATION
    state.write_text(json.dumps({"policies": [{"budget": 8, "refit": False, "ledger": 0}]}))
    output_folder.check_output(str(tmp_path), here, resume=True, overwrite=False)
    state.write_text(json.dumps({"policies": [{"budget": 8, "refit": True, "ledger": 0}]}))
    with pytest.raises(ValueError, match=r"another configuration \(other policies\)"):
        output_folder.check_output(str(tmp_path), here, resume=True, overwrite=False)


def test_damage_to_a_configuration_is_one_sentence(tmp_path: Path) -> None:
    for content in ("", "[1]", "{half"):
        (tmp_path / output_folder.CONFIGURATION).write_text(content)
        with pytest.raises(ValueError, match=r"configuration.json is broken; --overwrite starts again"):
            output_folder.check_output(str(tmp_path), {"seed": 0}, resume=True, overwrite=False)
    for versions in ('"5"', "[1]", "[[]]", "{}"):
        (tmp_path / output_folder.CONFIGURATION).write_text(f'{{"versions": {versions}}}')
        with pytest.raises(ValueError, match="configuration.json is broken; --overwrite starts again, or choose"):
            output_folder.versions_of(tmp_path)


def test_a_folder_that_cannot_be_one_is_refused(evaluate: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a file")
    line = ("--methods", "random", "--figures", "none", "--output")
    for output, code, message in (
        (file, 2, "is a file; name a folder"),
        (file / "out", 1, "cannot be written (Not a directory); choose another folder"),
    ):
        found = evaluate(*line, output)
        assert (found.code, message in found.err) == (code, True), found.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_one_sentence(evaluate: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    code, _, err = evaluate("--methods", "random", "--output", tmp_path / "out")
    tmp_path.chmod(0o700)
    assert code == 1
    assert "cannot be written (Permission denied); choose another folder" in err


def test_a_tokenizer_that_cannot_express_a_task_writes_nothing(evaluate: Any, backbone: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = tmp_path / "model"
    shutil.copytree(backbone, model)
    core = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(model)
    code, _, err = evaluate("--methods", "random", "--output", tmp_path / "out", model=model)
    assert code == 2
    assert "task passkey cannot be expressed by this tokenizer" in err
    assert not (tmp_path / "out").exists()


def test_running_out_of_memory_says_what_helps(evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any) -> dict[str, Any]:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(runner, "answer", exhausted)
    code, _, err = evaluate("--methods", "random", "--figures", "none", "--output", tmp_path / "out")
    assert code == 1
    assert "cpu is out of memory; use --resume with" in err


def test_list_as_json_holds_versions_and_options(evaluate: Any) -> None:
    code, out, _ = evaluate("--list", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["tasks"]["multikey"]["options"] == {"keys": 8, "digits": 7}
    assert found["tasks"]["passkey"]["version"] >= 1
    assert "oracle" in found["methods"]


@pytest.mark.slow
def test_quiet_says_nothing_on_standard_error(evaluate: Any, tmp_path: Path) -> None:
    line = ("--methods", "full", "--lengths", "5000", "--samples", 1, "--figures", "none")
    _, _, err = evaluate(*line, "--output", tmp_path / "one")
    assert "locret-eval: warning: prompts of 5,000 tokens go beyond the 4,096 positions" in err
    assert evaluate(*line, "--output", tmp_path / "two", "--quiet")[2] == ""


def test_blank_lines_between_records_cost_no_answer(tmp_path: Path) -> None:
    lines = [json.dumps(record(index=i)) for i in range(3)]
    path = tmp_path / "samples.jsonl"
    path.write_text("\n".join([lines[0], "", "", lines[1], lines[2]]) + "\n")
    found, good = records.read(path)
    assert [one["index"] for one in found] == [0, 1, 2]
    assert good == path.stat().st_size


DAMAGE = [
    ({"task": []}, r"it has \[\] in field 'task', which must be a text"),
    ({"version": "one"}, r"it has \"one\" in field 'version', which must be a whole number"),
    ({"tokens": 1e400}, r"it has Infinity in field 'tokens'"),
    ({"score": "x"}, r"it has \"x\" in field 'score', which must be a number from 0 to 1"),
    ({"score": None}, r"it has null in field 'score'"),
    ({"score": True}, r"it has true in field 'score'"),
    ({"score": float("nan")}, r"it has NaN in field 'score'"),
    ({"targets": "48213"}, r"it has \"48213\" in field 'targets', which must be a list of texts"),
    ({"prefill_seconds": -1}, r"it has -1 in field 'prefill_seconds', which must be a number, 0 or more"),
    ({"depth": {}}, r"it has {} in field 'depth'"),
]


def test_a_line_that_cannot_be_a_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    damaged = [(json.dumps(record() | changes), message) for changes, message in DAMAGE]
    damaged += [(line, "it is no") for line in ("[]", "5", "null", "[" * 100_000)]
    for name in RECORD:
        rest = {key: value for key, value in record().items() if key != name}
        damaged.append((json.dumps(rest), f"it has no field '{name}'"))
    for line, message in damaged:
        path.write_text(f"{line}\n{json.dumps(record(index=1))}\n")
        with pytest.raises(ValueError, match=f"line 1 is not a record of an evaluation: {message}.*; mend the file"):
            records.read(path)


def test_an_answer_that_is_there_twice_counts_once_and_two_answers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    lines = [json.dumps(record(index=index)) + "\n" for index in (0, 1, 0)]
    path.write_text("".join(lines))
    assert [one["index"] for one in records.read(path)[0]] == [0, 1]
    path.write_text("".join([*lines, json.dumps(record(index=1, prediction="else")) + "\n"]))
    with pytest.raises(ValueError, match="lines 2 and 4 answer one question in different ways; mend the file, or"):
        records.read(path)


@pytest.mark.parametrize("text", ["", "[]", "\udcff", "[" * 100_000, '{"figures": 5, "versions": 3}'])
def test_results_that_are_damaged_keep_no_run_from_going_on(tmp_path: Path, text: str) -> None:
    settings = {"seed": 0}
    output_folder.open_output(str(tmp_path), settings, overwrite=False).append(record())
    (tmp_path / records.RESULTS).write_bytes(text.encode(errors="surrogateescape"))
    output_folder.check_output(str(tmp_path), settings, resume=True, overwrite=False)
    assert len(output_folder.open_output(str(tmp_path), settings, overwrite=False).records) == 1
    output_folder.open_output(str(tmp_path), settings, overwrite=True)
    assert not (tmp_path / records.RESULTS).exists()


def test_the_jackknife_of_a_mean_is_its_standard_error_and_works_for_other_scores() -> None:
    from dataclasses import dataclass

    from locret.data import tasks
    from locret.data.tasks.generated.passkey import PassKey

    @dataclass(frozen=True, kw_only=True)
    class Rooted(PassKey):
        """The root of the mean: its error is that of the mean over twice the root, nearly."""

        def summarise(self, scores: Any, answers: Any) -> float:
            return (sum(scores) / len(scores)) ** 0.5

    @dataclass(frozen=True, kw_only=True)
    class Mean(PassKey):
        """The mean, as if it were another rule."""

        def summarise(self, scores: Any, answers: Any) -> float:
            return sum(scores) / len(scores)

    passkey = tasks.get("passkey")
    facts = {name: getattr(passkey, name) for name in ("name", "source", "metric", "max_new_tokens")}
    found = [record(index=i, score=score) for i, score in enumerate((0.2, 0.4, 0.9, 0.5) * 25)]
    plain, mean, rooted = (summary.task_score(task, found) for task in (passkey, Mean(**facts), Rooted(**facts)))
    assert mean == plain
    assert rooted["score"] == pytest.approx(100 * 0.5**0.5, abs=1e-3)
    assert rooted["standard_error"] == pytest.approx(plain["standard_error"] / (2 * 0.5**0.5), rel=0.01)
    assert summary.task_score(Rooted(**facts), found[:1])["standard_error"] is None
    of_one = [record(index=0, question=number, score=score) for number, score in enumerate((0.2, 0.4, 0.9, 0.5))]
    assert summary.task_score(Rooted(**facts), of_one) == {"score": rooted["score"], "standard_error": None}
    assert summary.task_score(passkey, of_one) == {"score": 50.0, "standard_error": None}


def test_gates_grow_with_the_methods_whatever_tells_them_apart(tmp_path: Path) -> None:
    gates = {"dms:path=a": {"neuron": {"places": {0: (1, 2)}}, "window": None}}
    settings = {"methods": ["dms:path=a"], "gates": gates}
    output_folder.open_output(str(tmp_path / "out"), settings, overwrite=False)
    more = {"methods": ["dms:path=a", "kvzap:path=b"], "gates": {**gates, "kvzap:path=b": {"weights": "1"}}}
    output_folder.check_output(str(tmp_path / "out"), more, resume=True, overwrite=False)
    output_folder.open_output(str(tmp_path / "out"), more, overwrite=False)
    other = {**more, "gates": {**gates, "kvzap:path=b": {"weights": "2"}}}
    with pytest.raises(ValueError, match=r"another configuration \(other gates\)"):
        output_folder.check_output(str(tmp_path / "out"), other, resume=True, overwrite=False)
