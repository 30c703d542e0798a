"""The loop: oracle losses, bit-exact resume, processes, signals, checkpoints, logs, and the memory of a step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import oracle as reference
import pytest
import torch
from allocations import peak_bytes
from training_cases import records, train, train_arguments, weights, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, get_linear_schedule_with_warmup

from locret import RetainingHeads
from locret.backbone.chunk import Attended, Projections
from locret.data.training.stream import TrainingStream, load_rows
from locret.infer.speed.plan import random_model
from locret.labels.labels import answer_labels, layer_labels
from locret.train import checkpointing
from locret.train.loss import retention_loss
from locret.train.step import train_step
from locret.train.trainer import Trainer
from locret.train.training_options import Loss


def losses(output: Path) -> list[tuple[float, ...]]:
    return [(r["step"], r["total"], r["ranking"], r["smoothness"], *r["overlap_per_layer"]) for r in records(output)]


PAPERS = ("--label-kind=logit", "--objective=regression")


def test_training_on_two_rows_has_the_losses_of_the_oracle(paths: tuple[Path, Path], tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "two.json", rows=2)
    output = tmp_path / "run"
    assert train((paths[0], rows), output, *PAPERS, "--steps=5", "--warmup-steps=2", "--alpha=0.1") == 0
    model = AutoModelForCausalLM.from_pretrained(paths[0], dtype=torch.float32).eval().requires_grad_(False)
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0).requires_grad_(True)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 5)
    stream = TrainingStream(
        load_rows(str(rows)), AutoTokenizer.from_pretrained(paths[0]), seed=0, max_length=2048, source="two"
    )
    for record in records(output):
        example = next(stream)
        labels = answer_labels(model, example.prompt_ids, example.answer_ids)
        scores = prompt_scores_with_gradient(model, heads, example.prompt_ids)
        total, regression, smoothness = reference.loss(scores.detach(), labels, 0.1)
        assert record["total"] == pytest.approx(total, abs=1e-4)
        assert record["regression"] == pytest.approx(regression, abs=1e-4)
        assert record["smoothness"] == pytest.approx(smoothness, rel=1e-5)
        assert record["learning_rate"] == pytest.approx(schedule.get_last_lr()[0])
        optimizer.zero_grad()
        retention_loss(scores, labels, 0.1)[0].backward()
        torch.nn.utils.clip_grad_value_(heads.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    trained = RetainingHeads.from_pretrained(output)
    for name, weight in heads.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], weight, atol=1e-6, rtol=0)


def prompt_scores_with_gradient(model: Any, heads: RetainingHeads, prompt_ids: torch.Tensor) -> torch.Tensor:
    from locret.labels.labels import observe

    features: dict[int, torch.Tensor] = {}
    observe(model, prompt_ids, lambda chunk: features.update({chunk.layer_idx: chunk.projections.features()[0]}))
    return torch.stack([heads[layer](features[layer]).T for layer in heads])


def test_the_gradient_of_a_step_is_the_mean_over_its_rows(paths: tuple[Path, Path], tmp_path: Path) -> None:
    rows, norms = write_rows(tmp_path / "one.json", rows=1), []
    for count in (1, 3):  # of the same row
        output = tmp_path / str(count)
        assert train((paths[0], rows), output, "--steps=1", f"--gradient-accumulation={count}", "--log-every=1") == 0
        norms.append(records(output)[-1]["gradient_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.long
def test_two_processes_do_what_one_does_with_accumulation(paths: tuple[Path, Path], tmp_path: Path) -> None:
    options = ("--steps=4", "--warmup-steps=1", "--clip-limit=0.01")
    assert train(paths, tmp_path / "one", *options, "--gradient-accumulation=2") == 0
    # accelerate reads torchrun's variables; its own launcher starts several CPU processes through MPI only.
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    arguments = ["-m", "locret.train.command", *train_arguments(paths, tmp_path / "two", *options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    assert all(torch.allclose(weight, two[name], atol=1e-6, rtol=0) for name, weight in one.items())
    for one, two in zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True):
        assert one == pytest.approx(two, abs=1e-5)
    assert [r["tokens"] for r in records(tmp_path / "one")] == [r["tokens"] for r in records(tmp_path / "two")]


def test_a_signal_saves_a_checkpoint_to_go_on_from(
    paths: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, output = Trainer._optimizer_step, tmp_path / "run"

    def interrupted(trainer: Trainer) -> None:
        step(trainer)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_optimizer_step", interrupted)
    assert train(paths, output) == 128 + signal.SIGTERM
    (saved,) = checkpointing.complete(output)
    assert (saved.name, checkpointing.read(saved)["step"]) == ("checkpoint-1", 1)
    assert records(output)[-1]["step"] == 1
    assert "stopped at step 1; go on with --resume" in capsys.readouterr().err
    assert not (output / "model.safetensors").exists()
    assert len(RetainingHeads.from_pretrained(saved)) == 2


def test_a_full_disk_leaves_no_half_written_checkpoint(
    paths: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="cannot write .*checkpoint-6.*make room"):
        train(paths, tmp_path / "run")
    assert not list((tmp_path / "run").glob("*checkpoint*"))


def test_a_loss_that_is_no_number_ends_the_run_without_saving(paths: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) at step 3; lower --lr"):
        train(paths, tmp_path / "run", "--lr=1.0e+30", "--warmup-steps=1", "--log-every=3")
    assert not checkpointing.complete(tmp_path / "run")


@pytest.mark.parametrize("clip", ["value", "norm"])
def test_gradients_are_clipped_as_asked(
    paths: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: str
) -> None:
    seen: list[torch.Tensor] = []
    step = torch.optim.AdamW.step

    def look(self: torch.optim.AdamW, *args: Any) -> Any:
        seen.append(torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]]))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", look)
    assert train(paths, tmp_path / "run", "--steps=1", "--warmup-steps=0", f"--clip={clip}", "--clip-limit=1e-6") == 0
    largest, norm = seen[0].abs().max().item(), seen[0].norm().item()
    assert (largest if clip == "value" else norm) == pytest.approx(1e-6, rel=1e-3)
    assert (norm > 2e-6) == (clip == "value")


def test_logs_and_curves_hold_losses_overlaps_speed_and_memory(paths: tuple[Path, Path], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(paths, tmp_path / "run") == 0
    record = records(tmp_path / "run")[-1]
    assert [(one["step"], one["rows"]) for one in records(tmp_path / "run")] == [(step, step) for step in range(1, 7)]
    assert record["tokens_per_second"] > 0
    assert record["memory_bytes"] > 10**8
    assert record["overlap"] == pytest.approx(sum(record["overlap_per_layer"]) / 2)
    assert record["gradient_norm"] > 0 == record["epoch"] - 1
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "locret")).Reload()
    shown = [(event.step, event.value) for event in board.Scalars("total")]
    assert shown == [(r["step"], pytest.approx(r["total"])) for r in records(tmp_path / "run")]
    assert train(paths, tmp_path / "none", "--report-to=none", "--steps=1") == 0
    assert not (tmp_path / "none" / "tensorboard").exists()


TOKENS = 512


def peaks(layers: int) -> tuple[int, int]:
    """Return the bytes that are allocated at once while a row is only read, and while it is trained on again."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_hidden_layers=layers,
    )
    model = random_model(config, dtype=torch.float32)
    heads = RetainingHeads.for_model(model, 64, seed=0)
    ids = torch.randint(3, 256, (1, TOKENS + 200), generator=torch.Generator().manual_seed(0))

    def read() -> None:
        with torch.no_grad():
            model.get_decoder()(input_ids=ids, use_cache=False)

    def train() -> None:
        train_step(model, heads, ids[:, :TOKENS], ids[:, TOKENS:], Loss(label_kind="log_attention"))

    train()  # the gradients are there
    return peak_bytes(read), peak_bytes(train)


def test_a_row_takes_what_reading_it_takes_and_layers_add_nothing_but_gradients() -> None:
    (reading, training), (_, many) = peaks(2), peaks(6)
    assert training <= 1.01 * reading
    assert many - training < 4096


@pytest.mark.parametrize("kind", ["logit", "log_attention"])
def test_no_matrix_of_answer_by_prompt_exists(kind: str) -> None:
    prompt, answer, heads, dim = 3000, 1500, 4, 8
    query, key = torch.randn(1, heads, prompt + answer, dim), torch.randn(1, 2, prompt + answer, dim)
    nothing = Projections(None)  # type: ignore[arg-type]
    chunk = Attended(layer_idx=0, query=query, key=key, value=key, scaling=1.0, softcap=None, projections=nothing)
    with torch.no_grad():
        peak = peak_bytes(lambda: layer_labels(chunk, prompt, kind, False))
    logits = 3 * 4 * heads * dim * (prompt + answer)  # a block has no more of them than the layer has queries
    assert peak <= logits + key.nbytes < 4 * prompt * answer / 2
