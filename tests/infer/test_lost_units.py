"""What heads lose against the agnostic oracle: kinds of tokens, scores that are replaced, record, picture, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from locret import LongContextModel, RetentionCache, RetentionPolicy, pictures, prefill, scorers
from locret.data import tasks
from locret.data.text.embedded_tokenizer import build_tokenizer
from locret.infer.evaluation.lost_units import KINDS, LostUnitsOptions, Replaced, command, kinds_of, made
from locret.infer.evaluation.methods import Setup

TOKENIZER = build_tokenizer()
PAIR = {"model": "checkpoints/tiny", "heads": "checkpoints/tiny-heads"}


def test_tokens_are_of_the_kind_that_questions_make_of_them() -> None:
    names = [("What is the number for Oslo?", ("314",)), ("What is the number for Rome?", ("271",))]
    text = "The number for Oslo is: 314. The tower has 99 steps."
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    found = dict.fromkeys(KINDS, "")
    for kind, one in zip(kinds_of(TOKENIZER, ids, names), ids, strict=True):
        found[kind] += TOKENIZER.decode([one]).strip().removeprefix("##")
    assert found["answer"] == "314"
    assert "Oslo" in found["key"]
    assert "number" in found["question word"]
    assert found["other number"] == "99"
    assert "tower" in found["other word"]
    assert set(found["punctuation"]) <= set(":. ")


def test_with_all_scores_replaced_the_oracles_units_stay() -> None:
    policy = RetentionPolicy(budget=24, chunk_size=128, local_len=16)
    loaded: Any = LongContextModel.from_pretrained(PAIR["model"], heads=PAIR["heads"], policy=policy)
    setup = Setup(loaded.model, loaded.tokenizer, loaded.scorer.prepare(loaded.model), 0)
    options = LostUnitsOptions(tasks="multikey", tokens=400, samples=1)
    task: Any = tasks.get("multikey")
    (asked,) = made(setup, task, options)
    assert asked.labels.shape[-1] == len(asked.kinds) == asked.document_1D.shape[1]
    assert len(asked.pairs) == 8
    layers = tuple(setup.heads.layers) if setup.heads is not None else ()
    everything = frozenset((nth, head) for nth in range(len(layers)) for head in range(asked.labels.shape[1]))
    for taken, scorer in ((everything, scorers.get("oracle", labels=asked.labels)), (frozenset(), loaded.scorer)):
        own = Replaced(heads=setup.heads, labels=asked.labels, taken=taken, layers=layers)
        kept = []
        for one in (own, scorer):
            cache = RetentionCache(loaded.model, one, policy)
            prefill(loaded.model, asked.document_1D, cache)
            kept.append(torch.stack([cache.kept_positions(layer)[0] for layer in layers]))
        assert kept[0].equal(kept[1])


def test_without_matplotlib_the_record_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = pictures.importlib.util.find_spec
    monkeypatch.setattr(
        pictures.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else there(name)
    )
    small = ["--tasks=multikey", "--tokens=200", "--samples=1", "--questions=1", "--budget=24", "--local-len=16"]
    assert command([*small, f"--output={tmp_path / 'lost'}"]) == 0
    assert "the picture needs matplotlib; install it with" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "lost").iterdir()] == ["lost_units.json"]


def test_the_command_writes_record_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    small = ["--tokens=300", "--samples=1", "--questions=2", "--budget=24", "--local-len=16", "--chunk-size=128"]
    assert command(["--tasks=multikey,multikey", *small, f"--output={tmp_path / 'lost'}"]) == 0
    shown = capsys.readouterr().out
    record = json.loads((tmp_path / "lost" / "lost_units.json").read_text())
    assert (tmp_path / "lost" / "lost_units.png").stat().st_size > 10_000
    assert record["options"]["questions"] == 2
    found = record["tasks"]["multikey"]
    assert found["questions"] == 2
    assert len(found["right"]) == 2 + 2 * len(found["in_common"])
    assert all(0 <= share <= 1 for share in found["right"].values())
    for layer, shares in found["in_common"].items():
        assert all(0 <= share <= 1 for share in shares)
        missed, spare = (sum(found[name][layer].values()) for name in ("missed", "spare"))
        assert missed == pytest.approx(spare)  # both sides keep as many
        assert f"layer {layer}, missed" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "longbench/qasper"}, "--tasks longbench/qasper does not say which questions there are of its texts"),
        ({"tasks": ""}, "--tasks names nothing; give at least one, such as multikey"),
        (
            {"budget": 480, "tokens": 512},
            "--budget 480 and --local-len 32 hold all of --tokens 512, so nothing is lost",
        ),
        ({"samples": 0}, "--samples 0 leaves nothing to ask; give 1 or more"),
        ({"output": __file__}, "is a file; name a folder"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LostUnitsOptions(**options)


def test_a_text_that_cannot_be_made_is_refused_before_the_first_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locret.infer.evaluation.lost_units.Comparison.add", lambda *_: pytest.fail("a text was read"))
    with pytest.raises(ValueError, match="text 1 of 1 of lookalikes/keys does not fit --tokens 120"):
        command(["--tasks=passkey,lookalikes/keys", "--tokens=120", "--samples=1", "--budget=24", "--local-len=16"])
