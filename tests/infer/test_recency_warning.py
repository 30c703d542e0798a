"""A budget that a method's own newest units fill is said in one line, since what is measured then is recency."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from locret.cli.command import run
from locret.infer.evaluation import methods
from locret.infer.evaluation.command import command
from locret.infer.reading import warn_of_recency
from locret.policy.policy import RetentionPolicy

SAID = "{} keeps the {} newest units whatever their scores, so that with --budget {} it keeps nothing else; raise"


def policy(budget: int, **changes: Any) -> RetentionPolicy:
    return RetentionPolicy(**{"budget": budget, "chunk_size": 64, "stabilizers": 0, "local_len": 8, **changes})


@pytest.mark.parametrize(
    ("name", "policies", "said"),
    [
        ("snapkv", [policy(33), policy(32), policy(16)], (32, "32,16")),
        ("snapkv", [policy(24, when="prompt_end")], (32, "24")),  # 8 local units are held besides
        ("snapkv", [policy(25, when="prompt_end")], None),
        ("h2o", [policy(2)], None),  # a share of the budget never fills it
    ],
)
@pytest.mark.filterwarnings("error")
def test_only_budgets_without_room_for_scores_are_named(
    name: str, policies: list[RetentionPolicy], said: tuple[int, str] | None
) -> None:
    recent = methods.get(name).recent
    if said is None:
        warn_of_recency(name, recent, policies)
        return
    with pytest.warns(UserWarning, match=SAID.format(name, *said) + f" --budget above {said[0]}"):
        warn_of_recency(name, recent, policies)


def test_both_commands_say_it_once_for_each_method(
    infer: Callable[..., Any], backbone: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = ("--chunk-size", "64", "--local-len", "8", "--dry-run")
    line = ["--model", str(backbone), "--methods", "random,snapkv,snapkv+adaptive_heads", "--tasks", "passkey"]
    with pytest.raises(SystemExit) as leaving:
        run(command, [*line, "--lengths", "300", "--budget", "32,64", *numbers])
    out, err = capsys.readouterr()
    assert not leaving.value.code
    assert err.count("newest units") == 2
    for name in ("snapkv", "snapkv+adaptive_heads"):
        assert "locret-eval: warning: " + SAID.format(name, 32, 32) in err
    assert json.loads(out)["runs"] == 3 * 2 * 100
    usual = ("--model", backbone, "--prompt-file", text, "--scorer", "snapkv", "--stabilizers", 8, *numbers)
    assert "locret-infer: warning: " + SAID.format("snapkv", 32, 32) in infer(*usual, "--budget", 32).err
    assert "newest units" not in infer(*usual, "--budget", 64).err
