"""The embedded backbone: how it is trained and saved, and what the committed one can do."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret.cli import run
from locret.data.needles import facts_sample, passkey_sample
from locret.train import backbone
from locret.train.backbone import BackboneTraining, answer, build_model, command, masked_loss, train
from locret.train.backbone_batches import Stage, batches, dense_batch, gapped_positions

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "checkpoints" / "tiny"
RECIPE = ROOT / "recipes" / "backbone" / "tiny.yaml"
COPY, FACTS = (
    Stage(steps=1, tokens=32, batch_tokens=64),
    Stage(steps=2, tokens=128, batch_tokens=256, facts=2, span=512),
)
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    shape = "".join(f"{name}: {value}\n" for name, value in SMALL.items())
    stages = (
        "stages: [{steps: 1, tokens: 32, batch_tokens: 64}, {steps: 2, tokens: 128, batch_tokens: 256, facts: 2}]\n"
    )
    path.write_text(shape + stages + "eval_samples: 1\neval_tokens: [64]\n")
    return str(path)


@pytest.fixture(scope="module")
def tiny():
    return AutoModelForCausalLM.from_pretrained(TINY).eval(), AutoTokenizer.from_pretrained(TINY)


def test_a_three_step_run_writes_a_folder_that_the_auto_classes_load(recipe, tmp_path, capsys):
    output = tmp_path / "out"
    assert command(["--config", recipe, "--output", str(output)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["pass_key_found"]) == {"64"}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert model.config.vocab_size == len(tokenizer)
    assert model.dtype == torch.float32
    record = json.loads((output / "training.json").read_text())
    assert [stage["steps"] for stage in record["options"]["stages"]] == [1, 2]
    assert record["log"][-1]["step"] == 3
    assert "| 64 | " in (output / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "recipe.yaml"]


def test_the_same_seed_trains_the_same_weights_and_another_seed_others():
    def weights(seed):
        model, _, _ = train(BackboneTraining(stages=[COPY, FACTS], seed=seed, **SMALL))
        return model.state_dict()

    first, second, other = weights(3), weights(3), weights(4)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_dry_run_prints_the_options_and_writes_nothing(recipe, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert command(["--config", recipe, "--output", str(tmp_path / "out"), "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["options"]["hidden_size"] == 32
    assert plan["bytes"] == 4 * plan["parameters"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_not_empty_is_refused_before_training_unless_overwritten(recipe, tmp_path, capsys):
    output = tmp_path / "out"
    arguments = ["--config", recipe, "--output", str(output)]
    command(arguments)
    (output / "stale").write_text("")
    with pytest.raises(ValueError, match=r"output=.*out is not empty; choose another folder, or add --overwrite"):
        command(arguments)
    assert (output / "stale").exists()
    command([*arguments, "--overwrite"])
    assert not (output / "stale").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "recipe.yaml"]


def test_overwriting_never_deletes_a_folder_that_holds_something_else(recipe, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="holds something else than a trained backbone; choose another folder"):
        command(["--config", recipe, "--output", str(tmp_path / "mine"), "--overwrite"])
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("place", ["masked_loss", "measure", "model_card"])
def test_an_interrupt_leaves_nothing_and_exits_130(recipe, tmp_path, monkeypatch, place):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(backbone, place, interrupt)
    with pytest.raises(SystemExit) as stop:
        run(command, ["--config", recipe, "--output", str(tmp_path / "out")])
    assert stop.value.code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_failure_while_saving_leaves_the_old_folder_as_it_was(recipe, tmp_path, monkeypatch):
    output = tmp_path / "out"
    command(["--config", recipe, "--output", str(output)])
    before = (output / "model.safetensors").read_bytes()

    def full_disk(*arguments, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        command(["--config", recipe, "--output", str(output), "--overwrite", "--seed", "5"])
    assert (output / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "recipe.yaml"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "stages is empty, so there is nothing to train; use --config recipes/backbone/tiny.yaml"),
        ({"stages": [COPY], "num_heads": 3}, "num_kv_heads=2 does not divide num_heads=3"),
        ({"stages": [COPY], "num_layers": 0}, "num_layers=0 is too small; give 1 or more"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BackboneTraining(**options)


def test_a_stage_too_short_for_facts_is_refused():
    with pytest.raises(ValueError, match="tokens=64 is too short to hide facts in; give 128 or more"):
        Stage(steps=1, tokens=64, facts=4)


def test_an_unknown_key_in_a_stage_is_an_error(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("stages: [{steps: 1, tokens: 32, speed: 9}]\n")
    with pytest.raises(SystemExit) as stop:
        command(["--config", str(path), "--dry-run"])
    assert stop.value.code == 2


def test_the_shipped_recipe_builds_a_model_below_three_megabytes(capsys, tmp_path):
    assert command(["--config", str(RECIPE), "--dry-run", "--output", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] < 3_000_000


def test_dense_rows_are_a_sequence_and_a_rotation_of_it():
    ids_BT, mask_BT = dense_batch(random.Random(0), 700, 7, rows=6, tokens=40)
    shifts = set()
    for ids_T in ids_BT:
        source, copy = ids_T[:20], ids_T[20:]
        matching = [shift for shift in range(20) if torch.equal(source.roll(-shift), copy)]
        assert matching
        shifts.add(matching[0])
    assert len(shifts) > 1  # a fixed shift would teach an offset
    assert ids_BT.min() >= 7
    assert not mask_BT[:, :24].any()
    assert mask_BT[:, 24:].all()


def test_the_loss_of_fact_batches_is_on_the_answer_alone():
    from locret.data.embedded_tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    stage = Stage(steps=4, tokens=256, batch_tokens=512, facts=4, dense_share=0.0)
    for _, dense, ids_BT, mask_BT, _ in batches(tokenizer, [stage], seed=0):
        assert not dense
        for ids_T, mask_T in zip(ids_BT, mask_BT, strict=True):
            prompt, reply = tokenizer.decode(ids_T[~mask_T]), tokenizer.decode(ids_T[mask_T])
            assert "<assistant>" in prompt
            assert re.fullmatch(r"The (pass key|number of \w+) is \d+\..* <eos>", reply)


def test_gaps_reach_the_span_and_keep_the_order():
    positions = [gapped_positions(random.Random(seed), 50, 4096)[0] for seed in range(30)]
    for positions_T in positions:
        assert (positions_T.diff() >= 1).all()
        assert positions_T[0] == 0
        assert positions_T[-1] < 4096
    assert max(int(p[-1]) for p in positions) > 2000
    assert torch.equal(gapped_positions(random.Random(0), 50, 0)[0], torch.arange(50))


def test_gaps_in_the_positions_do_not_cut_the_attention():
    # transformers takes gaps in position ids for the seams of packed texts unless a mask is given.
    from locret.data.embedded_tokenizer import build_tokenizer

    model = build_model(BackboneTraining(stages=[COPY], **SMALL), build_tokenizer())
    ids_BT, mask_BT = dense_batch(random.Random(0), 700, 7, rows=1, tokens=16)
    positions_1T = torch.cat([torch.arange(8), torch.arange(8) + 100])[None]
    loss, _ = masked_loss(model, ids_BT, mask_BT, positions_1T)
    ids_BT[0, 0] = 699 if ids_BT[0, 0] != 699 else 698
    changed, _ = masked_loss(model, ids_BT, mask_BT, positions_1T)
    assert loss.item() != changed.item()


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1024, 2048])
def test_the_committed_backbone_finds_the_pass_key_in_ten_fresh_samples(tiny, tokens):
    samples = [passkey_sample(tiny[1], tokens, (index + 0.5) / 10, seed=9000 + index) for index in range(10)]
    missed = [s.answer for s in samples if not s.is_answered_by(answer(*tiny, s.content))]
    assert missed == []


@pytest.mark.slow
def test_the_committed_backbone_answers_a_question_for_one_of_several_facts(tiny):
    samples = [facts_sample(tiny[1], 1024, 8, 1, seed=9000 + index) for index in range(10)]
    missed = [s.answer for s in samples if not s.is_answered_by(answer(*tiny, s.content))]
    assert missed == []


@pytest.mark.slow
def test_the_committed_backbone_knows_every_number_of_a_long_answer_once_its_name_is_said(tiny):
    # What heads learn from: the answer is given, as in training, and each digit must be predicted from the text. Which
    # name comes next in a list of names is not claimed here: the committed backbone has not learned that.
    model, tokenizer = tiny
    right = total = 0
    for seed in range(5):
        sample = facts_sample(tokenizer, 1024, 16, 17, seed=9000 + seed)
        messages = [{"role": "user", "content": sample.content}, {"role": "assistant", "content": sample.reply}]
        ids_BT = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            predicted_T = model(ids_BT).logits[0, :-1].argmax(-1)
        start = ids_BT[0].tolist().index(tokenizer.convert_tokens_to_ids("<assistant>"))
        for target, guess in zip(ids_BT[0, 1:][start:].tolist(), predicted_T[start:].tolist(), strict=True):
            if tokenizer.convert_ids_to_tokens(target).removeprefix("##").isdigit():
                total += 1
                right += target == guess
    assert total == 5 * 17 * 3
    assert right / total >= 0.98


def test_the_committed_folder_is_small_and_complete():
    names = {path.name for path in TINY.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "training.json"} <= names
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 3_000_000
