"""What `--protect` keeps of each prompt of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from locret import shipped
from locret.conversation.rules import rules_of
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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--protect", "sytem"], "--protect 'sytem' names nothing"),
        (
            ["--protect", "user"],
            "--protect user is no part that every prompt has; give system, question, or tokens:A-B",
        ),
        (["--protect", "question", "--protocol", "agnostic"], "agnostic asks when all has been evicted; add aware"),
        (
            ["--protect", "question", "--tasks", "passkey", "--lengths", "512", "--methods", "random", "--budget", "4"],
            "--protect, method random, text 0 of task passkey: the protected spans need .* raise budget, or",
        ),
        (
            # As much as a uniform layer holds; the last of a pyramid holds less.
            ["--protect", "tokens:0-50", "--tasks", "passkey", "--lengths", "512", "--budget", "50", "--methods"]
            + ["random+pyramid"],
            "--protect, method random.pyramid, text 0 of task passkey: .* holds [0-9]+ in full-attention layer .*raise",
        ),
        (
            [
                "--protect",
                "system",
                "--tasks",
                "niah/needle",
                "--lengths",
                "512",
                "--budget",
                "64",
                "--memory",
                "linear",
            ]
            + ["--chunk-size", "64", "--stabilizers", "4", "--local-len", "8", "--methods", "streaming"],
            "--protect, method streaming, text 0 of task niah/needle: .* after chunk 1 memory holds 10",
        ),
        (
            ["--protect", "system", "--tasks", "niah/needle", "--lengths", "320,1024", "--budget-share", "0.1"]
            + ["--local-len", "8", "--samples", "1", "--seed", "8", "--methods", "streaming"],
            "--protect, method streaming, text 0 of task niah/needle: .* but budget=19 holds 19",
        ),
        (
            ["--protect", "tokens:500-600", "--tasks", "passkey", "--lengths", "512", "--methods", "random"],
            "--protect tokens:500-600: text 0 of task passkey has 5[0-9]+ tokens to read, protocol aware; name tokens",
        ),
        (
            ["--protect", "system", "--protect", "system=0.5"],
            "--protect system=0.5 adds nothing to --protect system, which keeps all units; drop one of them",
        ),
        (["--protect", "question", "--methods", "quest:page=8"], "changes nothing, for none of quest:page=8"),
        (["--protect", "system", "--methods", "full"], "changes nothing, for none of full evicts as ours do"),
        (
            ["--protect", "system", "--tasks", "passkey", "--lengths", "512", "--methods", "random", "--budget", "64"],
            "--protect system changes nothing, for no text of passkey has a system message; drop it, or add such a",
        ),
    ],
)
def test_what_protects_nothing_is_refused(changed: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        command(["--model", BACKBONE, "--output", str(tmp_path / "out"), *changed])
    assert not (tmp_path / "out").exists()


def test_what_a_method_cannot_keep_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    arguments = ["--model", BACKBONE, "--tasks", "passkey", "--lengths", "512", "--samples", "1", "--budget", "64"]
    arguments += ["--methods", "random", "--key-bits", "4", "--exact-layers", "9"]
    with pytest.raises(ValueError, match="exact_layers=9 leaves none of 5 layers"):
        command([*arguments, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
