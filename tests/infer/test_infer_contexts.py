"""`locret-infer` with several questions, and with contexts that were saved: one reading, many answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from locret import LongContextModel, RetentionPolicy

ASKED = ["What is the number of Oslo?", "Who, then: you?"]
Infer = Callable[..., Any]


@pytest.fixture
def pair(backbone: Path, heads: Path) -> list[object]:
    return ["--model", backbone, "--heads", heads, "--max-new-tokens", 6]


@pytest.fixture
def saved(infer: Infer, pair: list[object], text: Path, tmp_path: Path) -> Path:
    done = infer(*pair, "--prompt-file", text, "--save-context", tmp_path / "a.ctx")
    assert (done.code, done.out) == (0, "")
    assert "tokens read, " in done.err
    return tmp_path / "a.ctx"


def questions(*asked: str) -> list[str]:
    return [word for question in asked for word in ("--question", question)]


def answers(done: Any) -> list[str]:
    assert done.code == 0, done.err
    return [record["answer"] for record in json.loads(done.out)["answers"]]


def test_each_question_is_answered_as_if_it_were_the_only_one(
    infer: Infer, pair: list[object], text: Path, saved: Path
) -> None:
    done = infer(*pair, "--prompt-file", text, *questions(*ASKED), "--json")
    record = json.loads(done.out)
    assert [one["question"] for one in record["answers"]] == ASKED
    assert record["reading"]["prompt_tokens"] + 5 < record["answers"][0]["prompt_tokens"]
    assert record["policy"]["budget"] == 64
    alone = [answers(infer(*pair, "--context", saved, *questions(one), "--json"))[0] for one in ASKED]
    assert [one["answer"] for one in record["answers"]] == alone
    printed = infer(*pair, "--context", saved, *questions(*ASKED))
    assert printed.out == f"> {ASKED[0]}\n{alone[0]}\n\n> {ASKED[1]}\n{alone[1]}\n"
    assert infer(*pair, "--context", saved, *questions(ASKED[1])).out == f"{alone[1]}\n"


def test_a_saved_context_is_the_one_of_the_object(
    infer: Infer, pair: list[object], backbone: Path, heads: Path, saved: Path, text: Path
) -> None:
    lm = LongContextModel.from_pretrained(backbone, heads=heads, dtype="float32", device="cpu")
    asked = infer(*pair, "--context", saved, *questions(*ASKED), "--json")
    assert lm.read(text).ask(ASKED, max_new_tokens=6, repetition_penalty=1.0) == [one.strip() for one in answers(asked)]
    assert lm.load(saved).name == "text.txt"


def test_questions_come_from_a_file(infer: Infer, pair: list[object], saved: Path, tmp_path: Path) -> None:
    expected = answers(infer(*pair, "--context", saved, *questions(*ASKED), "--json"))
    lines, rows = tmp_path / "asked.txt", tmp_path / "asked.jsonl"
    lines.write_text("\n".join(["", *ASKED, " "]))
    rows.write_text("\n".join([json.dumps({"question": ASKED[0], "id": 3}), json.dumps(ASKED[1])]))
    for path in (lines, rows):
        assert answers(infer(*pair, "--context", saved, "--questions", path, "--json")) == expected


@pytest.mark.parametrize(
    "policy",
    [
        ("--budget-share", 0.05),
        ("--when", "prompt_end", "--budget", 40),
        ("--memory", "sqrt", "--scorer", "snapkv"),
        ("--num-beams", 2),
        ("--kv-memory", "200KiB"),
    ],
)
def test_every_way_to_give_a_budget_reads_for_many_questions(
    infer: Infer, pair: list[object], text: Path, policy: tuple[object, ...]
) -> None:
    pair = [*pair[:2], *pair[4:]] if "--scorer" in policy else pair
    done = infer(*pair, "--prompt-file", text, *questions(*ASKED), "--json", *policy)
    assert len(answers(done)) == 2
    for record in json.loads(done.out)["answers"]:
        assert 0 < record["peak_cache_bytes"] <= record["planned_cache_bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt-file", "x"], "so --prompt-file x would not be; drop one of them"),
        (["--budget", 32], "so --budget would do nothing; leave that out"),
        (["--template", "none", "--system", "a"], "so --system, --template would do nothing"),
        (["--save-context", "y"], "so --save-context would do nothing"),
        (["--dry-run"], "so --dry-run would do nothing"),
        (["--protocol", "aware"], "so --protocol would do nothing"),
        (["--compare-full"], "so --compare-full would do nothing"),
        (["--questions", "q"], "exclude each other"),
    ],
)
def test_what_has_no_effect_on_a_saved_context_is_refused(
    infer: Infer, pair: list[object], saved: Path, arguments: list[object], said: str
) -> None:
    done = infer(*pair, "--context", saved, *questions("Who?"), *arguments)
    assert (done.code, said in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--context", "no.ctx", "--question", "Who?"], "no.ctx does not exist"),
        (["--context", "no.ctx"], "--context no.ctx waits for a question"),
        (["--question", "Who?", "--question", " "], "--question is empty"),
        (["--questions", "no.txt"], "--questions no.txt: no such file"),
        (["--save-context", "no/a.ctx"], "--save-context no/a.ctx: there is no folder"),
        (["--save-context", "bad.jsonl"], "bad.jsonl is there already and is not a saved cache"),
        (["--save-context", "."], "--save-context . is a folder; give a file"),
        (["--questions", "empty.txt"], "--questions empty.txt holds no questions"),
        (["--questions", "bad.jsonl"], "--questions bad.jsonl, line 2: not JSON"),
        (["--questions", "none.jsonl"], "--questions none.jsonl, line 1 holds no question"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    infer: Infer, pair: list[object], arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n \n")
    Path("bad.jsonl").write_text('"Who?"\nWho?\n')
    Path("none.jsonl").write_text('{"answer": 3}\n')
    done = infer(*pair, *arguments)
    assert (done.code, said in done.err) == (2, True), done.err


def test_a_context_of_other_heads_is_refused(infer: Infer, pair: list[object], saved: Path) -> None:
    done = infer(*pair[:2], "--scorer", "snapkv", "--context", saved, *questions("Who?"))
    assert done.code == 2
    assert "snapkv" in done.err
    assert "or --allow-other-scorer to rate" in done.err
    done = infer(*pair, "--context", saved, *questions("Who?"), "--json")
    scorer = ("--scorer", "streaming", "--allow-other-scorer", "--max-new-tokens", 6)
    other = infer("--model", pair[1], *scorer, "--context", saved, *questions("Who?"), "--json")
    assert len(answers(other)) == len(answers(done)) == 1
    lost = infer(*pair, "--context", "nowhere.ctx", *questions("Who?"))
    assert "nowhere.ctx does not exist; give a file written by context.save, chat.save or --save-context" in lost.err


def test_the_bar_knows_the_size_of_the_file(
    infer: Infer, pair: list[object], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for asked in (ASKED, ASKED[:1]):
        shown = infer(*pair, "--prompt-file", text, *questions(*asked)).err
        assert "reading: 100%" in shown
        assert "20.0k/20.0k" in shown
    assert infer(*pair, "--prompt-file", text, *questions("Who?"), "--quiet").err == ""


def test_a_recipe_may_hold_questions(infer: Infer, pair: list[object], saved: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "ask.yaml"
    recipe.write_text(f"question: [{json.dumps(ASKED[0])}, {json.dumps(ASKED[1])}]\ncontext: {saved}\n")
    assert len(answers(infer("--config", recipe, *pair, "--json"))) == 2


def test_how_a_turn_is_read_can_be_chosen_only_where_there_is_one(
    infer: Infer, pair: list[object], text: Path, tmp_path: Path
) -> None:
    refused = infer(*pair, "--prompt-file", text, *questions(ASKED[0]), "--turns", "text", "--protocol", "aware")
    assert refused.code == 2
    assert "--turns text changes nothing here, where a question is read with its text" in refused.err
    units = {}
    for turns in ("local", "text"):
        said = infer(*pair, "--prompt-file", text, *questions(*ASKED), "--turns", turns, "--budget", 40, "--json")
        units[turns] = json.loads(said.out)["answers"][0]["final_units"]
    assert units["text"] < units["local"]


def test_a_policy_of_its_own_is_kept_with_the_context(
    infer: Infer, pair: list[object], text: Path, tmp_path: Path
) -> None:
    own = RetentionPolicy(budget=40, chunk_size=24, stabilizers=4, local_len=8)
    flags = [word for name in ("budget", "chunk_size", "stabilizers", "local_len")
             for word in (f"--{name.replace('_', '-')}", getattr(own, name))]  # fmt: skip
    infer(*pair, "--prompt-file", text, *flags, "--save-context", tmp_path / "b.ctx")
    record = json.loads(infer(*pair, "--context", tmp_path / "b.ctx", *questions("Who?"), "--json").out)
    assert record["policy"]["budget"] == 40
    assert record["answers"][0]["final_units"] <= 40 + 8 + 24 + 6  # a question of up to chunk_size stays


def test_a_store_of_a_file_holds_the_units(
    infer: Infer, pair: list[object], text: Path, saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "from locret.cache.store import DenseStore\n\n\nclass Loud(DenseStore):\n    name = 'loud'\n\n"
        "    def keep(self, kept, turned):\n        print('keep')\n        super().keep(kept, turned)\n"
    )
    own = ("--store", f"{tmp_path / 'own.py'}:Loud")
    for asked in (questions(ASKED[0]), questions(*ASKED)):
        plain, kept = (infer(*pair, "--prompt-file", text, *asked, *store) for store in ((), own))
        assert kept.out.startswith("keep\n")
        assert kept.out.replace("keep\n", "") == plain.out
    refused = infer(*pair, "--prompt-file", text, "--store", f"{tmp_path / 'own.py'}:DenseStor")
    assert refused.code == 2
    assert "DenseStor" in refused.err
    assert infer(*pair, "--context", saved, *questions(ASKED[0]), *own).code == 2
