"""The embedded backbone: how it is trained and saved, and what the committed one can do."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints.build import attention as backbone_attention
from checkpoints.build import command as backbone
from checkpoints.build import training
from checkpoints.build.batches import Batch, Stage, dense_batch, fact_tokens, gapped_positions, steps
from checkpoints.build.command import command
from checkpoints.build.forks import Forks
from checkpoints.build.measure import answer
from checkpoints.build.model import build_model
from checkpoints.build.muon import Muon, orthogonalised
from checkpoints.build.options import BackboneTraining
from checkpoints.build.training import masked_loss, train
from locret.cli.command import run
from locret.data import tasks
from locret.data.text.embedded_tokenizer import build_tokenizer
from locret.train import checkpointing

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "checkpoints" / "tiny"
WORLD = ROOT / "checkpoints" / "world"
RECIPES = sorted((ROOT / "recipes" / "backbone").glob("*.yaml"))
COPY, FACTS = (
    Stage(steps=1, tokens=32, batch_tokens=64),
    Stage(steps=2, tokens=256, batch_tokens=256, tasks=["passkey", "multikey"], span=512, local_share=0.5),
)
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
INHERITED = {"hidden_size": 192, "intermediate_size": 384, "num_layers": 7, "num_heads": 8, "num_kv_heads": 4}
"""The shape of the shipped backbone with two more layers."""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    shape = "".join(f"{name}: {value}\n" for name, value in SMALL.items())
    stages = (
        "stages: [{steps: 1, tokens: 32, batch_tokens: 64}, "
        "{steps: 2, tokens: 256, batch_tokens: 256, tasks: [passkey]}]\n"
    )
    path.write_text(shape + stages + "eval_samples: 1\neval_tokens: [128]\neval_tasks: [passkey, number]\n")
    return str(path)


@pytest.fixture(scope="module")
def tiny():
    return AutoModelForCausalLM.from_pretrained(TINY).eval(), AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def world():
    return AutoModelForCausalLM.from_pretrained(WORLD).eval(), AutoTokenizer.from_pretrained(WORLD)


def exact(pair, name):
    """Return how many of ten fresh samples of 1,024 tokens are answered exactly."""
    model, tokenizer = pair
    task = tasks.get(name)
    right = 0
    for index in range(10):
        sample = task.sample(tokenizer, 1024, depth=(index + 0.5) / 10, seed=9000 + index)
        said = answer(model, tokenizer, sample.content, task.max_new_tokens, sample.system)
        right += task.score(said, sample) == 1
    return right


def test_a_three_step_run_writes_a_folder_that_the_auto_classes_load(recipe, tmp_path, capsys):
    output = tmp_path / "out"
    assert command(["--config", recipe, "--output", str(output)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {task: list(row) for task, row in report["exact"].items()} == {"passkey": ["128"], "number": ["128"]}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert model.config.vocab_size == len(tokenizer)
    assert model.dtype == torch.float32
    record = json.loads((output / "training.json").read_text())
    assert [stage["steps"] for stage in record["options"]["stages"]] == [1, 2]
    assert record["log"][-1]["step"] == 3
    assert "| task | 128 tokens |" in (output / "README.md").read_text()
    assert "`<bos><user>TEXT\\nWhat is the pass key?<eos><assistant>`" in (output / "README.md").read_text()
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

    monkeypatch.setattr(training if place == "masked_loss" else backbone, place, interrupt)
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
        ({"stages": [COPY], "resume": "auto"}, "resume=auto needs checkpoints, the folder where they are"),
        ({"stages": [COPY], "num_layers": 0}, "num_layers=0 is too small; give 1 or more"),
        ({"stages": [COPY], "copying_layer": 1}, "copying_layer=1 needs start=distances, and a layer after the first"),
        ({"stages": [COPY], "start": "distances", "copying_layer": 2}, "needs start=distances, and a layer after"),
        (
            {"stages": [COPY], "start": "distances", "copying_layer": 1, "num_heads": 8},
            "num_heads=8 of head_dim=32 are more than hidden_size=128; lower them",
        ),
        ({"stages": [COPY], "silent_layers": [0, 2]}, "silent_layers=[2] are not among num_layers=2; count from 0"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BackboneTraining(**options)


def test_a_stage_too_short_for_facts_is_refused():
    with pytest.raises(ValueError, match="tokens=64 is too short to hide facts in; give 256 or more"):
        Stage(steps=1, tokens=64, tasks=["passkey"])


@pytest.mark.parametrize("name", ["skim_share", "bare_share"])
def test_shares_of_forking_texts_are_refused_without_forks(name):
    with pytest.raises(ValueError, match=f"{name}=0.5 changes nothing without forks; give forks, or drop it"):
        Stage(steps=1, tokens=256, tasks=["passkey"], **{name: 0.5})


def test_a_share_of_single_rows_is_refused_with_forks():
    with pytest.raises(ValueError, match="focus_share=0.5 changes nothing with forks; drop one of the two"):
        Stage(steps=1, tokens=256, tasks=["passkey"], focus_share=0.5, forks=4)


def test_an_unknown_key_in_a_stage_is_an_error(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("stages: [{steps: 1, tokens: 32, speed: 9}]\n")
    with pytest.raises(ValueError, match="stages in .*recipe.yaml: speed is unknown"):
        command(["--config", str(path), "--dry-run"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_shipped_recipes_build_models_of_at_most_six_million_parameters(path, capsys, tmp_path):
    assert command(["--config", str(path), "--dry-run", "--output", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] <= 6_000_000


def test_dense_rows_are_a_sequence_and_a_rotation_of_it():
    ids_BT, mask_BT = dense_batch(random.Random(0), torch.arange(7, 700), rows=6, tokens=40)
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


def test_the_tokens_to_copy_are_whole_words_of_the_vocabulary():
    tokenizer = build_tokenizer()
    ids = fact_tokens(tokenizer).tolist()
    assert tokenizer.unk_token_id not in ids
    assert {"Oslo", "ALPHA", "teal", "Henry", "office", "Norway", "48", "##07"} <= set(
        tokenizer.convert_ids_to_tokens(ids)
    )


def test_the_loss_of_fact_batches_is_on_the_answer_alone():
    tokenizer = build_tokenizer()
    stage = Stage(steps=4, tokens=256, batch_tokens=512, tasks=["passkey", "multikey"], dense_share=0.0)
    for (batch,) in steps(tokenizer, [stage], seed=0):
        assert set(batch.kinds) <= {"passkey", "multikey", "facts"}
        for ids_T, mask_T in zip(batch.ids_BT, batch.mask_BT, strict=True):
            prompt, reply = tokenizer.decode(ids_T[~mask_T]), tokenizer.decode(ids_T[mask_T])
            assert "<assistant>" in prompt
            assert re.fullmatch(r"(The (pass key is|special magic number for \w+ is:) \d+\. ?)+<eos>", reply)


def test_windowed_attention_sees_the_window_and_nothing_else():
    query, key, value = torch.randn(2, 4, 77, 8), torch.randn(2, 2, 77, 8), torch.randn(2, 2, 77, 8)
    distance_TT = torch.arange(77)[:, None] - torch.arange(77)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=(distance_TT >= 0) & (distance_TT < 16), scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(backbone_attention.windowed_attention(query, key, value, 16, 0.3), expected)


def test_windowed_attention_works_where_its_queries_are(monkeypatch):
    masks = []
    monkeypatch.setattr(
        backbone_attention,
        "scaled_dot_product_attention",
        lambda query, key, value, attn_mask, scale: masks.append(attn_mask) or query,
    )
    query, key = torch.empty(1, 4, 40, 8, device="meta"), torch.empty(1, 2, 40, 8, device="meta")
    backbone_attention.windowed_attention(query, key, key, 16, 0.3)
    assert [mask.device.type for mask in masks] == ["meta"]


def test_a_window_holds_for_the_first_layers_and_ends_with_its_block():
    model = build_model(BackboneTraining(stages=[COPY], **SMALL), build_tokenizer()).eval()
    ids_BT = torch.randint(8, 800, (1, 64))
    changed_BT = ids_BT.clone()
    changed_BT[0, 5] += 1

    def reach() -> bool:
        """Whether token 5 changes what layer 1 hands on at token 60."""
        with torch.no_grad():
            first, second = (model.model(ids).last_hidden_state[0, 60] for ids in (ids_BT, changed_BT))
        return not torch.equal(first, second)

    with backbone_attention.local_layers(2, 8):
        assert not reach()
    assert reach()


def test_a_backbone_that_starts_with_distances_looks_at_the_tokens_just_before():
    options = BackboneTraining(stages=[COPY], num_heads=4, num_kv_heads=2, start="distances", silent_layers=[1])
    model = build_model(options, build_tokenizer())
    model.set_attn_implementation("eager")
    attention_NTT = model(torch.randint(8, 800, (1, 300)), output_attentions=True).attentions[0][0]
    for head, attention_TT in enumerate(attention_NTT):
        assert torch.equal(attention_TT[20:].argmax(-1), torch.arange(20, 300) - head - 1)
    assert not model.model.layers[1].mlp.down_proj.weight.any()


def test_what_a_start_or_a_stage_cannot_use_is_refused():
    for wrong in ({"start": "random"}, {"start": "distances", "hidden_size": 16}):
        with pytest.raises(ValueError, match="ordered_numbers needs start=distances and a hidden_size of 32 or more"):
            BackboneTraining(stages=[COPY], ordered_numbers=True, **wrong)
    with pytest.raises(ValueError, match="stages: gaps=0 is not a number of gaps; give 1 or more, or span=0 for none"):
        Stage(steps=1, tokens=64, gaps=0)
    with pytest.raises(ValueError, match="stages: drills changes nothing without drill_share"):
        Stage(steps=1, tokens=64, drills=["sums"])


def test_numbers_can_start_out_in_their_order_and_still_differ():
    tokenizer = build_tokenizer()
    options = BackboneTraining(stages=[COPY], start="distances", ordered_numbers=True, hidden_size=256)
    embedding_VE = build_model(options, tokenizer).get_input_embeddings().weight.detach()
    assert (embedding_VE[:, 0] == embedding_VE[0, 0]).all()
    for form in ("{:02d}", "##{:02d}"):
        ids = tokenizer.convert_tokens_to_ids([form.format(value) for value in range(100)])
        unit_NE = torch.nn.functional.normalize(embedding_VE[ids, 1:], dim=1)
        near_NN = unit_NE @ unit_NE.T
        by_distance = torch.stack([near_NN.diagonal(distance).mean() for distance in (1, 10, 30, 60)])
        assert (by_distance.diff() < 0).all()
        assert 0.25 < by_distance[0] < 0.6
        assert near_NN.fill_diagonal_(0).max() < 0.75


def test_a_layer_that_starts_out_copying_says_what_followed_the_same_token():
    shape = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "num_layers": 3, "rope_theta": 1e9}
    options = BackboneTraining(stages=[COPY], start="distances", copying_layer=2, silent_layers=[1], **shape)
    ids_BT, mask_BT = dense_batch(random.Random(0), torch.arange(7, 700), rows=8, tokens=64)

    def right(options) -> float:
        """The share of copied tokens that an untrained model predicts."""
        with torch.no_grad():
            said_BT = build_model(options, build_tokenizer())(ids_BT).logits[:, :-1].argmax(-1)
        return float((said_BT == ids_BT[:, 1:])[mask_BT[:, 1:]].float().mean())

    assert right(options) > 20 * right(replace(options, copying_layer=None)) + 0.05


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(recipe, tmp_path, monkeypatch):
    stages = "[{steps: 2, tokens: 32, batch_tokens: 64}, {steps: 3, tokens: 256, batch_tokens: 256, tasks: [passkey]}]"
    common = ["--config", recipe, "--stages", stages, "--eval-samples", "0", "--save-every", "2"]
    command([*common, "--output", str(tmp_path / "whole")])

    learn, steps = training._learn, []

    def interrupted(*arguments):
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return learn(*arguments)

    kept = ["--checkpoints", str(tmp_path / "kept"), "--output", str(tmp_path / "parts")]
    monkeypatch.setattr(training, "_learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command([*common, *kept])
    monkeypatch.undo()
    with pytest.raises(ValueError, match="holds those of an earlier run; go on with --resume auto"):
        command([*common, *kept])
    with pytest.raises(ValueError, match=r"--window was 32 and is now 16"):
        command([*common, *kept, "--resume", "auto", "--window", "16"])
    command([*common, *kept, "--resume", "auto"])
    whole, parts = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert [path.name for path in checkpointing.complete(tmp_path / "kept")] == ["checkpoint-4", "checkpoint-5"]
    assert AutoTokenizer.from_pretrained(tmp_path / "kept" / "checkpoint-4").chat_template
    state = checkpointing.read(tmp_path / "kept" / "checkpoint-4")
    state["log"].append({"seconds": 7200.0})
    monkeypatch.setattr(checkpointing, "read", lambda path: state)
    shutil.rmtree(tmp_path / "kept" / "checkpoint-5")
    command([*common, *kept, "--resume", "auto", "--overwrite"])
    assert "Made from scratch in 120 minutes" in (tmp_path / "parts" / "README.md").read_text()


def test_the_log_counts_each_kind_of_row_for_itself():
    tally = training.Tally()
    tally.add(("dense", "passkey", "passkey"), torch.tensor([10, 4, 4]), torch.tensor([5.0, 4.0, 2.0]))
    tally.add(("passkey",), torch.tensor([2]), torch.tensor([2.0]))
    tally.add_loss(2.0)
    tally.add_loss(1.0)
    assert tally.means() == {
        "loss": 1.5, "dense_tokens": 0.5, "dense_rows": 0.0, "passkey_tokens": 0.8, "passkey_rows": 0.6667,
    }  # fmt: skip


def test_later_stages_may_change_when_a_run_goes_on_and_earlier_ones_may_not(recipe, tmp_path):
    copying, facts = "{steps: 2, tokens: 32, batch_tokens: 64}", "{steps: 2, tokens: 256, batch_tokens: 256, %s}"
    kept = ["--config", recipe, "--eval-samples", "0", "--save-every", "3", "--checkpoints", str(tmp_path / "kept")]
    first, second = facts % "tasks: [passkey]", facts % "tasks: [number], optimizer_free: 0"
    command([*kept, "--stages", f"[{copying}, {first}]", "--output", str(tmp_path / "first")])
    more = [*kept, "--resume", "auto", "--output", str(tmp_path / "more")]
    with pytest.raises(ValueError, match="--stages was"):
        command([*more, "--stages", f"[{copying.replace('64', '32')}, {first}]"])
    with pytest.raises(ValueError, match="optimizer_free is unknown"):
        command([*more, "--stages", f"[{copying}, {second}]"])
    longer = first.replace("steps: 2", "steps: 3")
    command([*more, "--stages", f"[{copying}, {longer}]"])
    record = json.loads((tmp_path / "more" / "training.json").read_text())
    assert record["log"][-1]["step"] == 5


def test_the_learning_rate_is_its_stages_and_falls_where_that_says_so():
    stages = [Stage(steps=10, tokens=32, lr=1.0), Stage(steps=10, tokens=32, lr=2.0, decay=True)]
    rates = [training.learning_rate(step, stages, warmup=5) for step in range(1, 21)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[9] == 1.0
    assert rates[10] == pytest.approx(2 * 0.91)
    assert rates[-1] == pytest.approx(0.2)


def test_a_stage_that_sharpens_scales_what_attention_compares_when_it_begins():
    first = dataclasses.replace(COPY, lr=0.0)
    plain, sharp = (
        train(BackboneTraining(stages=[first, dataclasses.replace(first, steps=2, sharpen=factor)], **SMALL))[0]
        for factor in (1.0, 1.5)
    )
    for (name, before), after in zip(plain.state_dict().items(), sharp.state_dict().values(), strict=True):
        assert torch.equal(after, before * 1.5 if "q_proj" in name else before)
    with pytest.raises(ValueError, match="stages: sharpen=0 is no factor on attention's logits; give more than 0"):
        Stage(steps=1, tokens=64, sharpen=0)


def test_a_stage_that_is_louder_scales_embeddings_and_what_comes_last_takes_it_back():
    first = dataclasses.replace(COPY, lr=0.0)
    options = [
        BackboneTraining(stages=[first, dataclasses.replace(first, louder=factor)], silent_layers=[0, 1], **SMALL)
        for factor in (1.0, 8.0)
    ]
    plain, loud = (train(one)[0] for one in options)
    assert torch.equal(loud.get_input_embeddings().weight, 8 * plain.get_input_embeddings().weight)
    ids_BT = torch.arange(8, 40)[None]
    with torch.no_grad():  # silent layers add nothing, so only what the norm adds to small squares can differ
        torch.testing.assert_close(loud(ids_BT).logits, plain(ids_BT).logits, atol=2e-3, rtol=2e-3)
    with pytest.raises(ValueError, match="stages: louder=0 is no factor on the embeddings; give more than 0, to 64"):
        Stage(steps=1, tokens=64, louder=0)


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest():
    options = BackboneTraining(stages=[COPY, FACTS], optimizer="muon", **SMALL)
    muon, adamw = training.make_optimizers(options, build_model(options, build_tokenizer()))
    assert all(weight.ndim == 2 for group in muon.param_groups for weight in group["params"])
    assert any(weight.shape[0] == len(build_tokenizer()) for group in adamw.param_groups for weight in group["params"])
    _, _, log = train(options)
    assert log[-1]["step"] == 3


def test_muon_moves_singular_values_close_to_one_and_keeps_directions():
    torch.manual_seed(0)
    for shape in ((3, 12, 20), (3, 20, 12), (1, 16, 16)):
        matrices_NRC = torch.randn(shape)
        found_NRC = orthogonalised(matrices_NRC)
        left_NRS, values_NS, right_NSC = torch.linalg.svd(matrices_NRC, full_matrices=False)
        kept_NSS = left_NRS.mT @ found_NRC @ right_NSC.mT
        assert kept_NSS.diagonal(dim1=1, dim2=2)[values_NS > 0.05 * values_NS.max()].sub(1).abs().max() < 0.5
        assert (kept_NSS - torch.diag_embed(kept_NSS.diagonal(dim1=1, dim2=2))).abs().max() < 1e-4


def test_muon_steps_as_the_one_of_pytorch_does():
    torch.manual_seed(0)
    starts = [torch.randn(8, 12), torch.randn(12, 8), torch.randn(8, 12)]
    ours, theirs = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    steppers = (
        Muon(ours, lr=0.01),
        torch.optim.Muon(theirs, lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        for mine, its in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            its.grad = mine.grad.clone()
        for stepper in steppers:
            stepper.step()
    for mine, its, start in zip(ours, theirs, starts, strict=True):
        # Theirs multiplies in bfloat16, with 8 bits of precision.
        assert (mine - its).norm() < 0.03 * (its - start).norm()
    with pytest.raises(ValueError, match="closure is given, but Muon asks for the loss once only"):
        steppers[0].step(lambda: 0.0)


def test_a_backbone_that_begins_with_a_smaller_one_says_at_first_what_that_says():
    options = BackboneTraining(stages=[COPY], init=str(TINY), silent_layers=[2, 5], **INHERITED)
    model = build_model(options, build_tokenizer()).eval()
    smaller = AutoModelForCausalLM.from_pretrained(TINY).eval()
    ids_BT = torch.randint(8, 800, (1, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, expected = model(ids_BT).logits, smaller(ids_BT).logits
    torch.testing.assert_close(logits[..., : expected.shape[-1]], expected, atol=1e-3, rtol=1e-4)
    new_VE = model.get_input_embeddings().weight[expected.shape[-1] :]
    assert len(new_VE) == len(build_tokenizer()) - expected.shape[-1]
    assert new_VE.norm(dim=1).min() > 0.3 * smaller.get_input_embeddings().weight.norm(dim=1).mean()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"silent_layers": [2]}, "has 5 layers, but num_layers=7 and silent_layers=.2. leave room for 6"),
        ({"rope_theta": 1e4}, "change rope_theta"),
        ({"intermediate_size": 64}, "has layers of another shape; give its own widths"),
        ({"start": "distances"}, "brings its own weights, but start=distances; drop one of the two"),
    ],
)
def test_a_smaller_backbone_that_does_not_fit_is_refused(wrong, message):
    options = {"silent_layers": [2, 5], "init": str(TINY)} | INHERITED | wrong
    with pytest.raises(ValueError, match=message):
        build_model(BackboneTraining(stages=[COPY], **options), build_tokenizer())


def test_a_skimmed_text_is_seen_whole_by_the_questions_alone():
    model = build_model(BackboneTraining(stages=[COPY], **SMALL), build_tokenizer()).eval()
    forks = Forks(64, torch.zeros(6, dtype=torch.long), torch.arange(6))
    ids_BT = torch.randint(8, 800, (1, 70))
    changed_BT = ids_BT.clone()
    changed_BT[0, 5] += 1
    with torch.no_grad(), backbone_attention.forked([forks]), backbone_attention.skimmed(8):
        first, second = (model.model(ids).last_hidden_state[0] for ids in (ids_BT, changed_BT))
    assert torch.equal(first[40:64], second[40:64])
    assert not torch.equal(first[64:], second[64:])


def test_gaps_reach_the_span_and_keep_the_order():
    positions = [gapped_positions(random.Random(seed), 50, 4096)[0] for seed in range(30)]
    for positions_T in positions:
        assert (positions_T.diff() >= 1).all()
        assert positions_T[0] == 0
        assert positions_T[-1] < 4096
    assert max(int(p[-1]) for p in positions) > 2000
    assert torch.equal(gapped_positions(random.Random(0), 50, 0)[0], torch.arange(50))
    few = [gapped_positions(random.Random(seed), 50, 4096, 2)[0].diff() for seed in range(30)]
    assert max(int((diff > 1).sum()) for diff in few) == 2


def test_gaps_in_the_positions_do_not_cut_the_attention():
    # transformers takes gaps in position ids for the seams of packed texts; the trainer's own attention must not.
    model = build_model(BackboneTraining(stages=[COPY], **SMALL), build_tokenizer())
    ids_BT, mask_BT = dense_batch(random.Random(0), torch.arange(7, 700), rows=1, tokens=16)
    positions_1T = torch.cat([torch.arange(8), torch.arange(8) + 100])[None]

    def loss() -> float:
        return masked_loss(model, Batch(0, ("dense",), False, ids_BT, mask_BT, positions_1T))[0].item()

    before = loss()
    ids_BT[0, 0] = 699 if ids_BT[0, 0] != 699 else 698
    assert loss() != before


@pytest.mark.slow
@pytest.mark.parametrize("name", tasks.names())
def test_the_committed_backbone_answers_fresh_samples(tiny, name):
    # Tells weights that belong to these tasks from others; the card has the shares over more samples.
    assert exact(tiny, name) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["passkey", "world/near_keys", "world/two_hop", "world/qa5", "world/rules"])
def test_the_committed_backbone_of_worlds_answers_fresh_samples(world, name):
    assert exact(world, name) >= 8


@pytest.mark.parametrize("folder", [TINY, WORLD], ids=lambda folder: folder.name)
def test_the_committed_folders_are_small_and_complete(folder):
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "training.json"} <= names
    assert sum(path.stat().st_size for path in folder.iterdir()) < 16_000_000
