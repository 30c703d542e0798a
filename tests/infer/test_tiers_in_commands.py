"""A second tier is planned, counted and shown alike in every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locret import shipped
from locret.infer.command import command as infer
from locret.infer.context_command import command as context
from locret.infer.evaluation import methods
from locret.infer.evaluation.command import command as evaluate
from locret.infer.speed.command import command as bench

MODEL = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads"]
NUMBERS = {"budget": 32, "chunk_size": 64, "stabilizers": 8, "local_len": 8}
FLAGS = [part for name, value in NUMBERS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
KEY = 4 * 32 * 4 * 5  # one key of every layer of the embedded backbone: heads, dimensions, bytes, layers
UNIT = 2 * KEY + 4 * 5 * (4 + 4)  # with its value, its score and its position


@pytest.mark.slow
def test_an_answer_is_measured_with_both_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    text = shipped.find("recipes/infer/pass_key.txt")
    line = [*MODEL, "--prompt-file", text, "--question", "What is the pass key?", "--budget", "32"]
    line += ["--host-budget", "128", "--recall", "4"]
    assert infer([*line, "--dry-run", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["planned_host_bytes"] == 128 * UNIT
    assert infer([*line, "--json", "--quiet"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["planned_host_bytes"] == record["host_bytes"] == 128 * UNIT
    assert record["moved_bytes"] > 0
    assert "43600" in record["answer"]
    assert infer(line) == 0
    assert "MiB in host memory" in capsys.readouterr().err
    everything = [*line, "--host-budget", "all", "--dry-run", "--quiet"]
    assert infer(everything) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["planned_host_bytes"] == (plan["prompt_tokens"] - 32 - plan["policy"]["local_len"]) * UNIT


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--recall", "4"], "recall=4 needs a second tier to recall from; give host_budget"),
        (["--host-budget", "64"], "host_budget=64 keeps units that nothing recalls; give recall"),
        (["--recall-by", "exact:page=16"], "--recall-by exact:page=16 changes nothing without --recall"),
        (
            ["--host-by", "recency", "--host-budget", "all", "--recall", "4"],
            "--host-by recency changes nothing without --host-budget as a number of units; add that, or drop --host-by",
        ),
        (["--host-budget", "64", "--recall", "4", "--recall-by", "exakt"], 'lookup "exakt" is unknown'),
        (["--host-budget", "1K", "--recall", "4"], 'host_budget=1K is neither a number of units nor "all"'),
        (["--host-budget", "1000000000000", "--recall", "4"], "bytes of host memory, but this machine has"),
        (["--key-bits", "4", "--exact-layers", "3"], "exact_layers=3 leaves none of 5 layers for key_bits=4 and"),
        (["--merge", "loco:kernels=/nope"], "there is no folder '/nope'; give a folder of merging kernels"),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_refused_before_weights_are_loaded(
    flags: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locret.loading.load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match="recall|host|exact|merge") as caught:
        infer([*MODEL, "--prompt-file", shipped.find("recipes/infer/pass_key.txt"), "--budget", "32", *flags])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("quest+original", 'method "quest+original": quest sets positions itself; drop +original'),
        ("infllm:blokc=4", 'lookup infllm: it has no option "blokc"; did you mean block'),
        ("quest+recall", "quest sets host_budget itself; drop +recall"),
        ("exact", "exact only says how units are recalled; write it as locret+recall:recall_by=exact"),
        ("full+recall", "full evicts nothing, so +recall means nothing; drop it"),
        ("locret+d2o", 'modifier "+d2o" was retired; release 0.1.0'),
    ],
)
def test_a_method_of_another_paper_that_contradicts_itself_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match="quest|exact|full|infllm|retired") as caught:
        methods.get(name)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("names", "flags", "sentence"),
    [
        ("omnikv,full", ["--host-budget", "64", "--recall", "4"], "--host-budget 64 is set by omnikv itself"),
        ("locret+recall", ["--host-budget", "64", "--recall", "8"], "--host-budget 64 is set by locret+recall itself"),
        ("infllm", ["--key-bits", "4"], "--key-bits 4 is set by infllm itself"),
        (
            "full",
            ["--key-bits", "4"],
            "--key-bits 4 means nothing to full, so it would change nothing; drop --key-bits",
        ),
        ("full,locret+loco:kernels=/nope", [], "there is no folder '/nope'; give a folder of merging kernels"),
        ("full,locret+minference:patterns=/nope", [], "there is no file /nope; give one that MInference publishes"),
        ("minference", [], '"minference" is a modifier; write it behind a method, such as locret+minference'),
    ],
)
def test_what_no_method_takes_is_refused_by_an_evaluation_and_a_benchmark(
    names: str, flags: list[str], sentence: str
) -> None:
    for compare, line in (
        (evaluate, [*MODEL, "--tasks", "passkey", "--lengths", "300"]),
        (bench, ["--shape", "tiny", "--lengths", "300"]),
    ):
        with pytest.raises(ValueError, match="full|omnikv|locret|infllm|merge|prefill|exact|quest") as caught:
            compare([*line, "--budget", "64", "--methods", names, *flags, "--dry-run"])
        assert sentence in str(caught.value)


def test_blocks_are_planned_asked_several_times_and_not_saved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(shipped.find("recipes/infer/pass_key.txt")).read_text(encoding="utf-8")[:2000])
    line = ["--model", "checkpoints/tiny", "--scorer", "streaming", "--recall-by", "infllm", "--prompt-file", str(text)]
    line += ["--max-new-tokens", "4", "--quiet"]
    for budget in (["--budget", "96"], ["--kv-memory", "1MiB"]):
        assert infer([*line, *budget, "--question", "What?", "--protocol", "aware", "--dry-run"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert infer([*line, *budget, "--question", "What?", "--protocol", "aware", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["policy"] == plan["policy"]
        assert plan["planned_host_bytes"] == record["planned_host_bytes"] == record["host_bytes"] > 0
        assert plan["planned_cache_bytes"] == record["planned_cache_bytes"] == record["peak_cache_bytes"] <= 2**20
    assert infer([*line, "--budget", "96", "--question", "What?", "--question", "Which pass key?", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["answers"]
    assert infer([*line, "--budget", "96", "--question", "Which pass key?", "--question", "Who?", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["answer"] == second["answer"]
    assert first["host_bytes"] == first["planned_host_bytes"] > 0
    monkeypatch.setattr("locret.loading.load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match="a file has no place for the blocks"):
        context(["read", *[*line[:-3], "--quiet"], "--budget", "96", "--output", str(tmp_path / "context")])
    with pytest.raises(ValueError, match="even a budget of 21 takes"):
        infer([*line, "--kv-memory", "100KiB", "--question", "What?"])
