"""What `--protect` keeps of each prompt of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from locret import shipped
from locret.conversation.protect import rules_of
from locret.data import tasks
from locret.data.tasks.prompts import build_prompt
from locret.infer.evaluation.command import command
from locret.infer.evaluation.methods import Prompt, Setup
from locret.infer.evaluation.shared_text import SharedText

BACKBONE = shipped.find("checkpoints/tiny")
HEADS = shipped.find("checkpoints/tiny-heads")


@pytest.mark.parametrize("name", ["niah/needle", "niah/passkey"])
def test_the_system_message_of_a_prompt_is_found(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BACKBONE)
    task = tasks.get(name)
    sample = task.sample(tokenizer, 1024, seed=0)
    ids = build_prompt(task, sample, tokenizer).ids
    setup: Any = Setup(None, tokenizer, None, 0, protect=rules_of(["system", "tokens:800-99999=0.25"]))  # type: ignore[arg-type]
    prompt = Prompt(torch.tensor([ids]), sample, setup)
    ranges, system = prompt.protected()
    assert (ranges.start, ranges.end, ranges.share) == (800, len(ids), 0.25)
    assert (system.start, system.share) == (0, None)
    held = tokenizer.decode(ids[: system.end]).replace(" ", "")
    assert held.endswith(sample.system.replace(" ", "") + tokenizer.eos_token)


def test_the_question_is_protected_where_it_is_known() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BACKBONE)
    task = tasks.get("multikey")
    sample = task.sample(tokenizer, 1024, seed=0)
    ids = build_prompt(task, sample, tokenizer).ids
    setup: Any = Setup(None, tokenizer, None, 0, protect=rules_of("question"))  # type: ignore[arg-type]
    prompt = Prompt(torch.tensor([ids]), sample, setup, SharedText(setup, task, sample))
    (span,) = prompt.protected()
    asked = tokenizer.decode(ids[span.start : span.end])
    assert sample.question.replace(" ", "") in asked.replace(" ", "")
    assert len(asked) < len(sample.question) + 80  # and what a template writes behind it
    assert not prompt.document.protected()


def test_protected_questions_stay_in_methods_that_evict(tmp_path: Path) -> None:
    arguments = ["--model", BACKBONE, "--tasks", "multikey", "--lengths", "768", "--samples", "1", "--quiet"]
    arguments += [
        "--max-new-tokens",
        "2",
        "--figures",
        "none",
        "--heads",
        HEADS,
        "--budget",
        "96",
        "--protocol",
        "aware,agnostic",
    ]
    arguments += ["--methods", "locret,untrained+pyramid,oracle,random,snapkv:window=8,h2o"]
    assert command([*arguments, "--output", str(tmp_path), "--protect", "question"]) == 0
    found = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(found) == 12
    assert all(bool(one.get("protected")) == (one.get("protocol", "aware") == "aware") for one in found)


def test_an_evaluation_says_how_much_it_protects(tmp_path: Path) -> None:
    arguments = ["--model", BACKBONE, "--tasks", "niah/needle,passkey", "--lengths", "768", "--samples", "1"]
    arguments += ["--methods", "full,random", "--budget", "192", "--output", str(tmp_path), "--quiet"]
    assert command([*arguments, "--protect", "system"]) == 0
    found = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    protected = {(one["task"], one["method"]): one.get("protected", 0) for one in found}
    assert protected["niah/needle", "random"] > 0
    assert not any(count for (task, method), count in protected.items() if task == "passkey" or method == "full")
    with pytest.raises(ValueError, match="protect"):  # another evaluation than the one that is there
        command([*arguments, "--resume"])
