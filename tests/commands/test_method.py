"""One way to write a method, NAME:OPTION=VALUE+MODIFIER, in every command; what cannot be is said in one sentence."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from locret import scorers
from locret.__main__ import COMMANDS
from locret.cli.command import parse_options
from locret.infer.evaluation import methods
from locret.infer.evaluation.command import command as evaluate
from locret.infer.speed.command import command as bench
from locret.loading.options import ScorerOptions
from locret.scorers.chosen import load_scorer

METHOD = "locret+4bit+recall:host_budget=64"
TINY, HEADS = "checkpoints/tiny", "checkpoints/tiny-heads"
TEXT = ["--prompt-file", "recipes/infer/pass_key.txt"]
LINES: dict[str, list[str]] = {
    "infer": [*TEXT, "--question", "What?"],
    "context": [*TEXT, "--output", "a.ctx"],
    "serve": ["--kv-memory", "1GiB"],
    "verify": [],
    "eval": ["--tasks", "passkey", "--lengths", "512", "--samples", "1"],
    "bench": ["--lengths", "512"],
}
"""What is asked of each command, without backbone, method, heads and budget."""


def policies(found: Any) -> list[dict[str, Any]]:
    """Return the policies in what a command has printed, wherever they stand."""
    inner = list(found.values()) if isinstance(found, dict) else found if isinstance(found, list) else []
    own = [found] if isinstance(found, dict) and "key_bits" in found else []
    return [*own, *(policy for one in inner for policy in policies(one))]


@pytest.mark.parametrize("name", LINES)
def test_every_command_understands_a_method(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = [*(["read"] if name == "context" else []), "--model", TINY, *LINES[name], "--method", METHOD]
    line += ["--heads", HEADS, "--budget", "48", "--dry-run"]
    command = import_module(COMMANDS[name][0]).command
    if name == "serve":
        with pytest.raises(ValueError, match="--host-budget 64 is a second tier, which no engine has"):
            command(line)
        return
    assert command(line) == 0
    out = capsys.readouterr().out
    record = json.loads(out[out.index("{") :])
    if name == "bench":
        assert record["plan"][0]["planned_bytes"]["host"] > 0
        return
    wanted = {"budget": 48, "key_bits": 4, "value_bits": 4, "host_budget": 64, "recall": 8}
    assert any(wanted.items() <= policy.items() for policy in policies(record))


def load(*arguments: str) -> Any:
    (options,), _ = parse_options("test", "", [ScorerOptions], arguments)
    return load_scorer(options)


def test_a_scorer_is_a_method_with_options_and_modifiers(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("scorer: snapkv:kernel=7,pooling=max\n")
    for line in (["--scorer", "snapkv:kernel=7,pooling=max"], ["--config", str(tmp_path / "recipe.yaml")]):
        assert load(*line) == (scorers.SnapKVScorer(kernel=7, pooling="max"), {})
    recommended = {"positions": "original", "when": "prompt_end"}
    assert load("--scorer", "snapkv:window=8+prompt_end+original") == (scorers.SnapKVScorer(window=8), recommended)
    changes = {"layer_budgets": "pyramid", "pyramid_beta": 10}
    assert load("--method", "snapkv:window=8+pyramid:pyramid_beta=10") == (scorers.SnapKVScorer(window=8), changes)
    assert ScorerOptions(method=METHOD, heads=HEADS).label == METHOD


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--scorer oracle", "scorer oracle needs the labels of the true answer, which only locret-eval knows"),
        ("--scorer retaining_heads", "retaining_heads means trained heads; give --heads FOLDER"),
        ("--scorer snapkv --scorer-options.kernel 9", 'option "scorer_options" was retired: a scorer\'s options stand'),
        ("--scorer locret+recall", "locret means trained heads; give --heads"),
        ("--scorer quest:page=8", "quest is a lookup; give --host-budget all --recall N --recall-by quest:page=8"),
        ("--scorer streamin", 'scorer "streamin" is unknown; did you mean streaming'),
        ("--method locret", "--method locret takes trained heads, and none are shipped here; give --heads"),
        ("--method snapkv --scorer h2o", "--method snapkv and --scorer h2o exclude each other; drop one of"),
        (f"--method snapkv --heads {HEADS}", "--heads checkpoints/tiny-heads and --method snapkv exclude each other"),
    ],
)
def test_what_cannot_rate_units_is_refused(line: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"method|scorer|modifier|locret") as refused:
        load(*line.split())
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("streaming-original", "was retired: streaming+original has the positions of the text"),
        ("retaining_heads:heads=x", "is called locret here; write locret, and give --heads"),
        ("quest+original", 'method "quest+original": quest sets positions itself; drop +original'),
        ("quest+recall", "quest sets host_budget itself; drop +recall"),
        ("exact", "exact only says how units are recalled; write it as locret+recall:recall_by=exact"),
        ("locret+d2o", 'modifier "+d2o" was retired; release 0.1.0'),
    ],
)
def test_a_method_that_contradicts_itself_is_refused(method: str, sentence: str) -> None:
    with pytest.raises(ValueError, match="method|scorer|lookup|modifier") as caught:
        methods.get(method)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("omnikv,full --host-budget 64 --recall 4", "--host-budget 64 is set by omnikv itself"),
        ("locret+recall --host-budget 64 --recall 8", "--host-budget 64 is set by locret+recall itself"),
        ("infllm --local-len 9", "--local-len 9 is set by infllm itself, so it would change nothing; drop --local-len"),
        ("full --key-bits 4", "--key-bits 4 means nothing to full, so it would change nothing; drop --key-bits, or"),
        ("full,locret+loco:kernels=/nope", "there is no folder '/nope'; give a folder of merging kernels"),
        ("full,locret+minference:patterns=/nope", "there is no file /nope; give one that MInference publishes"),
        ("minference", '"minference" is a modifier; write it behind a method, such as locret+minference'),
    ],
)
def test_what_no_method_takes_is_refused_by_an_evaluation_and_a_benchmark(line: str, sentence: str) -> None:
    for compare, usual in (
        (evaluate, ["--model", TINY, "--heads", HEADS, "--tasks", "passkey", "--lengths", "300"]),
        (bench, ["--shape", "tiny", "--lengths", "300"]),
    ):
        with pytest.raises(ValueError, match="full|omnikv|locret|infllm|merge|prefill|exact|quest") as caught:
            compare([*usual, "--budget", "64", "--dry-run", "--methods", *line.split()])
        assert sentence in str(caught.value)


def test_the_harness_takes_options_of_a_scorer_and_no_others() -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    from locret.infer.evaluation.harness_model import LocretLM

    small = {"device": "cpu", "budget": 64, "chunk_size": 64, "stabilizers": 8, "local_len": 8}
    # The second as the harness splits --model_args at commas.
    for settings in ({"scorer": "snapkv:kernel=7,pooling=max"}, {"scorer": "snapkv:kernel=7", "pooling": "max"}):
        model = LocretLM(TINY, **small, **settings)
        assert model.scorer == scorers.SnapKVScorer(kernel=7, pooling="max")
        assert model.policy.positions == "compact"
    for settings, sentence in (
        ({"kernel": 7}, "--model_args: kernel is not a setting of the model locret"),
        ({"scorer": "snapkv:kernel=7", "kernel": 9}, "has the option kernel already; give it once"),
    ):
        with pytest.raises(ValueError, match=sentence):
            LocretLM(TINY, **small, **settings)
