"""What the evaluation of evidence measures, against slow versions, and its command from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from locret import LongContextModel
from locret.data import tasks
from locret.infer.evaluation import evidence
from locret.infer.evaluation.composing import generated


@pytest.fixture(scope="module")
def lm() -> LongContextModel:
    policy = {"budget": 24, "ledger": 32}
    loaded = LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy=policy)
    loaded._knows_little = False
    return loaded


def test_the_area_is_the_chance_that_a_wrong_answer_stands_out() -> None:
    assert evidence.roc_area([3, 2, 1], [True, True, False]) == 1
    assert evidence.roc_area([1, 2, 3, 2], [True, False, False, True]) == 0.125
    assert evidence.roc_area([1, 1], [True, False]) == 0.5
    assert evidence.roc_area([1, 2], [True, True]) is None


def test_full_attention_is_that_of_transformers(lm: LongContextModel) -> None:
    """The share that falls on evicted units, from the weights of transformers' own eager code."""
    sample = tasks.get("multikey").sample(lm.tokenizer, 600, seed=1)
    text = sample.content[: sample.span[1]]
    context, measuring = lm.read(text, progress=False), evidence.Measuring(lm, 0)
    ids = measuring.read_ids(text)
    where = evidence.place(ids, lm.tokenizer, sample.targets)
    assert where is not None
    assert lm.tokenizer.decode(ids[slice(*where)]).strip() in (sample.targets[0], f"{sample.targets[0]}.")
    given, of_evidence = measuring.full_attention(context, ids, sample, sample.reply, where)
    reply = lm.tokenizer(sample.reply, add_special_tokens=False).input_ids
    whole = [*ids, *context.question_ids(sample.question)[0].tolist(), *reply]
    lm.model.set_attn_implementation("eager")
    weights = lm.model(torch.tensor([whole]), output_attentions=True).attentions
    lm.model.set_attn_implementation("sdpa")
    lost = paid = near = queries = 0.0
    for index, layer in enumerate(weights):
        kept = context.cache.kept_positions(index)[0]
        group = layer.shape[1] // len(kept)
        for head in range(layer.shape[1]):
            gone = [token for token in range(len(ids)) if token not in set(kept[head // group].tolist())]
            rows = layer[0, head, len(whole) - len(reply) - 1 : -1]
            lost += float(rows[:, gone].sum())
            queries += len(rows)
            paid += float(rows[:, slice(*where)].sum())
            near += float(rows[:, [token for token in gone if where[0] <= token < where[1]]].sum())
    assert given == pytest.approx(lost / queries, rel=1e-4)
    assert of_evidence == pytest.approx(near / paid, rel=1e-4)


def test_answers_of_several_values_have_no_one_place(lm: LongContextModel) -> None:
    sample = tasks.get("multivalue").sample(lm.tokenizer, 600, seed=1)
    assert evidence.Measuring(lm, 0).ask(generated("multivalue"), sample) is None


@pytest.mark.parametrize(
    ("where", "size", "begins"),
    [((50, 54), 20, 42), ((2, 6), 20, 0), ((97, 100), 20, 80)],
    ids=["inside", "at the start", "at the end"],
)
def test_the_right_passage_stays_in_the_text(where: tuple[int, int], size: int, begins: int) -> None:
    assert evidence.around(where, size, 100) == begins


def test_the_command_measures_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n\n{evidence.BEGIN}old\n{evidence.END}\nAfter.\n")
    small = ["--tasks", "multikey", "--tokens", "300", "--budgets", "16", "--samples", "1", "--ledger", "32"]
    evidence.command([*small, "--output", str(tmp_path / "page"), "--json"])
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "page.json").read_text())
    (row,) = record["rows"]
    assert row["answers"] == 1
    assert 0 < row["lost"] < 1
    assert 0 < row["true"] < 1
    assert row["named"]["right"] == 1
    assert set(row["tells_wrong"]) == set(evidence.SIGNALS)
    assert set(row["again"]) == set(evidence.ARMS)
    assert sum(one["answers"] for one in record["all"]["calibration"]) == 1
    assert page.read_text() == f"Before.\n\n{evidence.BEGIN}\n{evidence.tables(record)}{evidence.END}\nAfter.\n"
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    evidence.command([*small, "--output", str(tmp_path / "page")])  # over its own files, which it names
    assert capsys.readouterr().out.split() == [f"{tmp_path / 'page'}.{ending}" for ending in ("json", "md", "png")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--samples", "0"], "--samples 0"),
        (["--budgets", "4"], "give at least 1, 2 and 8"),
        (["--tasks", "longbench/qasper"], "--tasks longbench/qasper has texts of its own"),
        (["--tasks", "multivalue", "--samples", "1", "--tokens", "500"], "no one value that stands once in the text"),
        (
            ["--tokens", "2048", "96"],
            "--budgets 48 and its 48 local tokens hold all of --tokens 96, so nothing is lost",
        ),
        (["--budgets", "8", "--tokens", "2048", "41"], "sample 1 of 20 of multikey cannot be made of --tokens 41"),
        (
            ["--tasks", "multikey", "--samples", "1", "--tokens", "300", "--budgets", "16", "--ledger", "2"],
            "--ledger 2: a passage of .* tokens is nearly all of a text of .*; raise --ledger or --tokens",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evidence.command(given)


@pytest.mark.parametrize("ending", ["md", "json", "png"])
def test_files_of_something_else_are_not_written_over(ending: str, tmp_path: Path) -> None:
    for holds in ("precious", ""):
        (tmp_path / f"notes.{ending}").write_text(holds)
        if holds or ending != "md":
            with pytest.raises(ValueError, match=f"notes.{ending} holds something else than this command writes"):
                evidence.EvidenceOptions(output=str(tmp_path / "notes"))
    (tmp_path / f"notes.{ending}").write_bytes(b"caf\xe9 " + f"{evidence.BEGIN}{evidence.END}".encode())  # no UTF-8
    with pytest.raises(ValueError, match=f"notes.{ending} holds something else than this command writes"):
        evidence.EvidenceOptions(output=str(tmp_path / "notes"))
    (tmp_path / f"notes.{ending}").unlink()
    (tmp_path / f"notes.{ending}").mkdir()
    with pytest.raises(ValueError, match=f"notes.{ending} holds something else than this command writes"):
        evidence.EvidenceOptions(output=str(tmp_path / "notes"))


def test_what_is_named_twice_is_asked_once() -> None:
    options = evidence.EvidenceOptions(tasks=["multikey", "multikey"], budgets=[16, 24, 16], tokens=[300])
    assert options.cells() == [("multikey", 300, 16), ("multikey", 300, 24)]


def test_the_page_holds_what_was_measured() -> None:
    """The page in docs is drawn from the record beside it."""
    docs = Path(__file__).parents[2] / "docs"
    record = json.loads((docs / "evidence.json").read_text())
    assert evidence.tables(record) in (docs / "evidence.md").read_text()
