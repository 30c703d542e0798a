"""Gates that others published are trained here, and written in the files of their authors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_cases import backbone, loss_of, token_ids, train_arguments
from transformers import AutoModelForCausalLM

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill, scorers
from locret.labels.labels import layer_labels, observe
from locret.train.loss import fit_and_smoothness
from locret.train.step import train_step

SCORERS = {"kvzap-linear": "kvzap", "kvzap-mlp": "kvzap", "fast-kvzip": "fast_kvzip", "dms": "dms"}
LABELS = ["--label-kind=kvzip_plus", "--label-source=reconstruction"]
FEW = ["--steps=3", "--warmup-steps=1", *LABELS]


def train(paths: tuple[Path, Path], output: Path, *more: str) -> int:
    """Run `locret-train` in this process without a width of the heads."""
    from accelerate.state import AcceleratorState

    from locret.train.command import command

    AcceleratorState._reset_state(reset_partial_state=True)
    return command([one for one in train_arguments(paths, output, *more) if one != "--hidden-dim=8"])


every_gate = pytest.mark.parametrize("gate", SCORERS)


@every_gate
def test_a_trained_gate_scores_the_same_from_its_authors_files(
    gate: str, paths: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert train(paths, folder, f"--gate={gate}", *FEW) == 0
    heads = RetainingHeads.from_pretrained(folder)
    assert heads.config.gate is not None
    assert heads.config.gate["name"] == gate
    assert json.loads((folder / "run.json").read_text())["config"]["gate"] == gate
    model = AutoModelForCausalLM.from_pretrained(paths[0])
    policy = RetentionPolicy(budget=20, chunk_size=16, local_len=4, positions="original")
    ids = token_ids(90)
    scorer = scorers.get(SCORERS[gate], path=str(folder / "published"), window=0, sinks=0)
    caches = [RetentionCache(model, one, policy) for one in (heads, scorer)]
    for cache in caches:
        prefill(model, ids, cache)
    for layer in range(2):
        assert torch.equal(caches[0].kept_scores(layer), caches[1].kept_scores(layer))
        assert torch.equal(caches[0].kept_positions(layer), caches[1].kept_positions(layer))
    fresh = heads.fresh(0).state_dict()
    assert all(not torch.equal(weight, fresh[name]) for name, weight in heads.state_dict().items())


@every_gate
def test_a_step_has_the_gradient_of_the_loss_of_its_layers(gate: str) -> None:
    model, prompt, answer = backbone("qwen3"), token_ids(21), token_ids(9, seed=1)
    loss = loss_of("kvzip_plus")
    heads = RetainingHeads.for_model(model, seed=3, gate=gate)
    train_step(model, heads, prompt, answer, loss)
    found = {name: weight.grad for name, weight in heads.named_parameters()}
    parts = []

    def keep(chunk) -> None:
        hidden = chunk.projections.residual if gate == "dms" else chunk.projections.hidden
        labels = layer_labels(chunk, 21, "kvzip_plus", False)
        with torch.enable_grad():
            fit, smoothness = fit_and_smoothness(heads[chunk.layer_idx](hidden[0, :21]).T, labels, loss)
            parts.append(fit / 3 + loss.alpha * smoothness)

    heads.zero_grad()
    observe(model, torch.cat([prompt, answer], 1), keep)
    torch.stack(parts).sum().backward()
    for name, weight in heads.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, atol=1e-6, rtol=1e-4)


def test_a_gate_learns_its_labels() -> None:
    model, prompt, answer = backbone(num_hidden_layers=1), token_ids(40), token_ids(10, seed=1)
    loss = loss_of("kvzip_plus", alpha=0.0)
    heads = RetainingHeads.for_model(model, seed=3, gate="kvzap-mlp", hidden_dim=32)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=5e-3)
    results = []
    for _ in range(40):
        results.append(train_step(model, heads, prompt, answer, loss))
        optimizer.step()
        optimizer.zero_grad()
    assert float(results[-1].fit) < 0.2 * float(results[0].fit)
    assert float(results[-1].overlap) > 0.5 > float(results[0].overlap)


def test_a_second_run_and_a_resumed_run_train_gates_too(paths: tuple[Path, Path], tmp_path: Path) -> None:
    whole, halves, further = tmp_path / "whole", tmp_path / "halves", tmp_path / "further"
    flags = ["--gate=kvzap-mlp", "--warmup-steps=1", "--save-every=2", *LABELS]
    assert train(paths, whole, "--steps=4", *flags) == 0
    assert train(paths, halves, "--steps=4", *flags) == 0
    checkpoint = sorted(halves.glob("checkpoint-*"))[0]
    assert train(paths, tmp_path / "again", "--steps=4", f"--resume={checkpoint}", *flags) == 0
    ends = [RetainingHeads.from_pretrained(folder).state_dict() for folder in (whole, tmp_path / "again")]
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())
    assert train(paths, further, "--steps=2", "--warmup-steps=0", f"--init-from={whole}", *LABELS) == 0
    assert RetainingHeads.from_pretrained(further).config.gate == RetainingHeads.from_pretrained(whole).config.gate
    assert (further / "published" / "config.json").is_file()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--gate=kvzap-linear", "--hidden-dim=64"], "--hidden-dim 64 changes nothing of --gate kvzap-linear, which"),
        (["--gate=dms", "--hidden-dim=64"], "--hidden-dim 64 changes nothing of --gate dms"),
    ],
)
def test_a_width_that_changes_nothing_is_refused(
    flags: list[str], sentence: str, paths: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        train(paths, tmp_path / "run", *FEW, *flags)
    assert not (tmp_path / "run").exists()


def test_a_gate_that_its_authors_files_cannot_hold_is_refused_before_it_is_trained(
    paths: tuple[Path, Path], tmp_path: Path
) -> None:
    backbone("gemma2").config.save_pretrained(tmp_path / "model")  # no weights: the config tells
    with pytest.raises(ValueError, match="--gate kvzap-mlp is published .* 2 with full attention of 3; use"):
        train((tmp_path / "model", paths[1]), tmp_path / "run", "--gate=kvzap-mlp", *FEW)
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_overwritten_leaves_no_gate_of_its_own(paths: tuple[Path, Path], tmp_path: Path) -> None:
    assert train(paths, tmp_path / "run", "--gate=kvzap-linear", *FEW) == 0
    assert (tmp_path / "run" / "published").is_dir()
    assert train(paths, tmp_path / "run", "--overwrite", "--hidden-dim=4", *FEW) == 0
    assert not (tmp_path / "run" / "published").exists()


def test_another_architecture_than_that_of_the_heads_to_go_on_from_is_refused(
    paths: tuple[Path, Path], tmp_path: Path
) -> None:
    assert train(paths, tmp_path / "first", "--gate=kvzap-linear", *FEW) == 0
    more = [f"--init-from={tmp_path / 'first'}", "--gate=fast-kvzip"]
    with pytest.raises(ValueError, match="--gate fast-kvzip differs from kvzap-linear of the heads in --init-from"):
        train(paths, tmp_path / "second", *FEW, *more)


def test_the_plan_counts_a_gate(paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(paths, tmp_path / "run", "--gate=kvzap-mlp", "--dry-run", "--json", *FEW) == 0
    record = json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(paths[0])
    weights = RetainingHeads.for_model(model, gate="kvzap-mlp").config.num_weights
    assert record["config"]["hidden_dim"] == 512
    assert record["memory_bytes"]["heads"] == 4 * weights
