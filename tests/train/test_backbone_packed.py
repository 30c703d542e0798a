"""Rows packed with many texts learn what the texts would learn apart."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints.build import attention, training
from checkpoints.build.batches import Batch, Stage, batches_of
from checkpoints.build.command import command
from checkpoints.build.model import build_model
from checkpoints.build.options import BackboneTraining
from checkpoints.build.packed import BLOCK, Packed, Row, Rows, pack, reader
from checkpoints.build.training import masked_loss
from locret.data.text.embedded_tokenizer import build_tokenizer
from locret.data.text.filler import generator

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = build_tokenizer()
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
WINDOWS = {"window": 32, "skim_window": 200}
STAGE = Stage(
    steps=3, tokens=600, shortest=256, tasks=["passkey", "multikey", "world/qa1"], forks=5, span=4096,
    gaps_between=True, local_share=0.5, skim_share=0.5, dense_share=0.2, drill_share=0.2,
)  # fmt: skip


@pytest.fixture(scope="module")
def texts() -> list[Batch]:
    rng = generator(0, "train", "packed")
    made = [batches_of(rng, TOKENIZER, 0, replace(STAGE, batch_tokens=1), f"0/{text}") for text in range(12)]
    batches = [batch for batches in made for batch in batches]
    assert {(batch.local, batch.skim) for batch in batches if batch.forks} == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert any(not batch.forks for batch in batches)
    return batches


def test_a_packed_row_has_the_loss_and_the_gradients_of_its_texts(texts):
    model = build_model(BackboneTraining(stages=[STAGE], **SMALL), TOKENIZER)
    total = sum(int(batch.mask_BT[:, 1:].sum()) for batch in texts)
    whole, right = 0.0, []
    for batch in texts:
        near, skim = attention.local_layers(2 if batch.local else 0, 32), attention.skimmed(200 if batch.skim else 0)
        with near, skim:
            loss, tokens_R, right_R = masked_loss(model, batch)
        loss = loss * tokens_R.sum() / total
        loss.backward()
        whole += loss.item()
        right += right_R.tolist()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    row = pack(texts, 6144, **WINDOWS)
    loss, tokens_R, right_R = Packed(model, 6144, local_layers=2).loss(row)
    loss.backward()
    assert (int(tokens_R.sum()), right_R.tolist()) == (total, right)
    assert row.kinds == tuple(kind for batch in texts for kind in batch.kinds)
    assert loss.item() == pytest.approx(whole, rel=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], rtol=1e-3, atol=1e-6)


def test_every_block_in_which_something_is_seen_is_read_and_no_hidden_token_in_a_whole_one(texts):
    tokens = 6144
    row = pack(texts, tokens, **WINDOWS)
    packed = Packed(build_model(BackboneTraining(stages=[STAGE], **SMALL), TOKENIZER), tokens, local_layers=2)
    packed._fields_FT.copy_(row.fields_FT)
    place_T = torch.arange(tokens)
    for first, seen in ((0, packed._near), (2, packed._far)):
        seen_TT = seen(place_T, place_T, place_T[:, None], place_T)
        blocks = seen_TT.view(tokens // BLOCK, BLOCK, tokens // BLOCK, BLOCK).transpose(1, 2).flatten(2)
        part_SS, whole_SS = row.blocks_4SS[first], row.blocks_4SS[first + 1]
        assert not (part_SS & whole_SS).any()
        assert not (blocks.any(-1) & ~(part_SS | whole_SS)).any()
        assert not (whole_SS & ~blocks.all(-1)).any()
        assert part_SS.sum() < 2 * blocks.any(-1).sum()
    assert row.blocks_4SS[3].any()


def test_texts_that_find_no_room_are_left_out_and_one_alone_is_refused(texts):
    size = texts[0].ids_BT.shape[1]
    room = -(-size // BLOCK) * BLOCK
    assert pack(texts, room, **WINDOWS).kinds == texts[0].kinds
    with pytest.raises(ValueError, match="row_tokens=128 has no room for a text of its stages; give more"):
        pack(texts[:1], 128, **WINDOWS)


def test_rows_depend_on_seed_and_step_whoever_makes_them():
    def same(one: Row, other: Row) -> bool:
        return one.kinds == other.kinds and torch.equal(one.fields_FT, other.fields_FT)

    stages = [replace(STAGE, steps=2), replace(STAGE, steps=1, tokens=300)]
    rows = Rows(TOKENIZER, stages, 5, 2048, **WINDOWS)
    with reader(rows, 0, 0) as made:
        assert [row.stage for row in made] == [0, 0, 1]
    with reader(rows, 1, 2) as made:
        assert all(same(one, rows[step]) for step, one in enumerate(made, start=1))
    assert not same(rows[0], rows[1])
    assert not same(rows[0], Rows(TOKENIZER, stages, 6, 2048, **WINDOWS)[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_cannot_be_made_is_told_in_one_sentence_and_no_process_stays(workers):
    rows = Rows(TOKENIZER, [replace(STAGE, dense_share=0.0, drill_share=0.0)], 5, 128, **WINDOWS)
    said = "^row_tokens=128 has no room for a text of its stages; give more$"
    with pytest.raises(ValueError, match=said), reader(rows, 0, workers) as made:
        next(made)
    assert not multiprocessing.active_children()


def living(group: int) -> list[str]:
    """Return the processes of a group that have not ended."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.split()[0] == str(group) and line.split()[1][0] != "Z"]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_says_so_once_and_leaves_no_process(tmp_path, stop):
    recipe = tmp_path / "recipe.yaml"
    shape = "".join(f"{name}: {value}\n" for name, value in SMALL.items())
    more = "row_tokens: 512\nworkers: 2\nautocast: false\neval_samples: 0\n"
    recipe.write_text(f"{shape}{more}stages: [{{steps: 100000, tokens: 64}}]\n")
    line = [sys.executable, "-m", "checkpoints.build", "--config", str(recipe), "--output", str(tmp_path / "out")]
    # What a shell runs in the background inherits a SIGINT that is ignored.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    run = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=heard)
    told = b""
    while not re.search(rb" [1-9]\d*/100000", told):
        more = run.stderr.read(1)
        assert more, told
        told += more
    # A terminal tells all processes of a run, `kill` one.
    (os.killpg if stop == signal.SIGINT else os.kill)(run.pid, stop)
    told += run.communicate(timeout=60)[1]
    assert run.returncode == 128 + stop
    assert told.count(b"interrupted") == 1
    assert b"Traceback" not in told
    ends = time.monotonic() + 30  # workers look every five seconds whether their parent is there
    while left := living(run.pid):
        assert time.monotonic() < ends, left
        time.sleep(0.2)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_resumed_run_of_rows_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, monkeypatch):
    shape = "".join(f"{name}: {value}\n" for name, value in SMALL.items())
    stages = "stages: [{steps: 2, tokens: 64}, {steps: 2, tokens: 256, tasks: [passkey], forks: 3}]\n"
    more = "row_tokens: 512\nautocast: false\neval_samples: 0\nsave_every: 2\noptimizer: muon\n"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(shape + stages + more)
    command(["--config", str(recipe), "--output", str(tmp_path / "whole")])
    learn = training._learn_row

    def interrupted(packed, row, tally):
        if row.stage == 1:
            raise KeyboardInterrupt
        return learn(packed, row, tally)

    kept = ["--config", str(recipe), "--checkpoints", str(tmp_path / "kept"), "--output", str(tmp_path / "parts")]
    monkeypatch.setattr(training, "_learn_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command(kept)
    monkeypatch.undo()
    command([*kept, "--resume", "auto", "--workers", "1"])
    whole, parts = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    record = json.loads((tmp_path / "parts" / "training.json").read_text())
    assert (record["log"][-1]["step"], record["machine"]) == (4, "1 CPU thread(s)")
    assert "passkey_rows" in record["log"][-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_tokens": 100}, "row_tokens=100 is no multiple of 128; give one, or 0 for batches"),
        ({"workers": 2}, "workers=2 changes nothing without row_tokens; give it, or drop workers"),
        ({"workers": -1, "row_tokens": 1280}, "workers=-1 is no number of processes; give 0 or more"),
        ({"row_tokens": 1280}, "autocast changes nothing with row_tokens=1280; give autocast: false"),
        (
            {"row_tokens": 1152},
            "row_tokens=1152 is less than two texts of tokens=600 of stage 0, the longest of which would seldom find "
            "room; give 1200 or more",
        ),
        ({"device": "cuda0"}, "device=cuda0 is none that torch knows; give cpu or cuda"),
        (
            {"row_tokens": 1280, "autocast": False, "stages": [replace(STAGE, batch_tokens=9)]},
            "stages: batch_tokens=9 of stage 0 changes nothing with row_tokens=1280; drop one of the two",
        ),
    ],
)
def test_options_of_rows_that_change_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BackboneTraining(**{"stages": [STAGE]} | options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_gpu_that_is_not_here_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ValueError, match="device=cuda is not here: torch finds no GPU; add --device cpu"):
        command(["--stages", "[{steps: 1, tokens: 32}]", "--device", "cuda", "--output", str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())
