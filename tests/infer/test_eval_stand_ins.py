"""Texts of our own are named where they stand in for published ones; `--max-prompt` bounds prompts or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from embedded import tiny_tokenizer
from published_cases import leval, longbench

from locret.data import tasks
from locret.data.tasks.prompts import build_prompt
from locret.data.tasks.task import MadeSamples, Wanted


@pytest.fixture
def plan(evaluate_with: Any) -> Callable[..., tuple[int, Any, str]]:
    """Return a function that plans a run and gives exit code, plan and errors."""

    def call(*arguments: object) -> tuple[int, Any, str]:
        code, out, err = evaluate_with("--methods", "streaming", "--budget", 64, "--dry-run")(*arguments)
        return code, json.loads(out) if out else None, err

    return call


@pytest.mark.parametrize(
    ("name", "label", "source"),
    [
        ("ruler/niah_single_1", "", "words of our own, not those of wonderwords"),
        ("ruler/niah_single_2", "filler", "our own filler, not the published essays; words of our own, not those of"),
        ("ruler/niah_multikey_3", "", None),
        ("ruler/vt", "", None),
        ("ruler/cwe", "own words", "words of our own, not those of wonderwords"),
        ("niah/needle", "filler", "our own filler, not the published essays"),
        ("twostage/2stage", "", None),
        ("passkey", "", None),
    ],
)
def test_what_stands_in_for_published_texts_is_in_the_name_and_on_record(
    name: str, label: str, source: str | None
) -> None:
    made = MadeSamples(tasks.get(name), 4096, 2, 0)
    assert made.label(2) == (f"{name} ({label})" if label else name)
    assert str(made.facts()["source"]).startswith(str(source))


def test_with_essays_the_name_is_the_published_one(tmp_path: Path) -> None:
    folder = tmp_path / "essays" / "PaulGrahamEssays"
    folder.mkdir(parents=True)
    (folder / "one.txt").write_text("A house stands near the river. " * 2000)
    task = tasks.get("niah/needle")
    wanted = Wanted(tokenizer=tiny_tokenizer, lengths=[2048], samples=1, folders=[str(tmp_path / "essays")])
    made = task.select(wanted).samples[2048]
    assert made.label(1) == "niah/needle"
    assert made.facts()["source"] == "essays in essays"


def test_a_note_says_once_which_texts_are_ours(plan: Any) -> None:
    code, found, err = plan("--tasks", "ruler/cwe,ruler/niah_single_3,ruler/vt", "--lengths", 2048, "--samples", 1)
    assert code == 0, err
    (note,) = found["notes"]
    assert note.startswith("ruler/niah_single_3 (filler), ruler/cwe (own words): our own texts stand in") or (
        note.startswith("ruler/cwe (own words), ruler/niah_single_3 (filler): our own texts stand in")
    )
    assert "--data-dir" in note


@pytest.mark.parametrize("name", ["ruler/vt", "twostage/2stage", "niah/passkey"])
def test_a_length_and_a_smaller_max_prompt_contradict_each_other(plan: Any, name: str) -> None:
    code, _, err = plan("--tasks", name, "--lengths", 2048, "--samples", 1, "--max-prompt", 1024)
    assert code == 2
    assert f"--max-prompt 1024 cannot cut prompts of {name}, which are made to --lengths 2048; give --lengths" in err
    assert plan("--tasks", name, "--lengths", 2048, "--samples", 1, "--max-prompt", 2048)[0] == 0


PUBLISHED = ["leval/natural_question", "leval/meeting_summ", "longbench/qasper", "longbench/samsum"]


@pytest.mark.parametrize("bound", [40, 120, 400, 700])
@pytest.mark.parametrize("name", PUBLISHED)
def test_max_prompt_bounds_the_whole_prompt(tmp_path: Path, name: str, bound: int) -> None:
    tokenizer = tiny_tokenizer()
    folder = leval(longbench(tmp_path))
    wanted = Wanted(tokenizer=lambda: tokenizer, lengths=[], folders=[str(folder)], max_prompt=bound)
    selection = tasks.get(name).select(wanted)
    ((_, samples),) = selection.samples.items()
    sample = samples.sample(samples.chosen[-1], tokenizer)
    if bound < 300 and name.startswith("leval"):  # its system turn alone has more
        with pytest.raises(
            ValueError, match=f"--max-prompt {bound} has no room for what stands around the text of {name}"
        ):
            build_prompt(selection.task, sample, tokenizer)
        return
    built = build_prompt(selection.task, sample, tokenizer)
    assert bound * 0.3 <= len(built.ids) <= bound
