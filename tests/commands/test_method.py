"""One way to write a method, `--method NAME:OPTION=VALUE+MODIFIER`, in every command that reads."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from locret.__main__ import COMMANDS
from locret.loading.options import ScorerOptions
from locret.scorers.chosen import load_scorer

METHOD = "locret+4bit+recall:host_budget=64"
MODEL = ["--model", "checkpoints/tiny"]
TEXT = ["--prompt-file", "recipes/infer/pass_key.txt"]
LINES: dict[str, list[str]] = {
    "infer": [*MODEL, *TEXT, "--question", "What?"],
    "context": ["read", *MODEL, *TEXT, "--output", "a.ctx"],
    "serve": [*MODEL, "--kv-memory", "1GiB"],
    "verify": [*MODEL],
    "eval": [*MODEL, "--tasks", "passkey", "--lengths", "512", "--samples", "1"],
    "bench": [*MODEL, "--lengths", "512"],
}
"""What is asked of each command, without method, heads and budget."""


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
    line = [*LINES[name], "--method", METHOD, "--heads", "checkpoints/tiny-heads", "--budget", "48", "--dry-run"]
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


def test_a_scorer_is_a_method_with_its_modifiers() -> None:
    scorer, recommended = load_scorer(ScorerOptions(method="snapkv:window=8+pyramid:pyramid_beta=10"))
    assert (scorer.name, scorer.window) == ("snapkv", 8)  # type: ignore[union-attr]
    assert (recommended["layer_budgets"], recommended["pyramid_beta"]) == ("pyramid", 10)
    assert ScorerOptions(method=METHOD, heads="checkpoints/tiny-heads").label == METHOD


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "locret"}, "--method locret takes trained heads; give --heads, or let --heads auto look for some"),
        ({"method": "snapkv", "scorer": "h2o"}, "--method snapkv and --scorer h2o exclude each other; drop one of"),
        ({"method": "snapkv", "heads": "checkpoints/tiny-heads"}, "--heads checkpoints/tiny-heads and --method snapkv"),
        ({"method": "snapkv+4bti"}, "+4bti is unknown; did you mean +4bit"),
        ({"method": "quest"}, '--method "quest": quest is a lookup; give --host-budget all --recall N'),
        ({"scorer": "locret+recall"}, "locret means trained heads; give --heads"),
    ],
)
def test_a_method_that_cannot_be_is_refused_in_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="method|scorer|locret") as refused:
        load_scorer(ScorerOptions(**given))
    assert sentence in str(refused.value)
