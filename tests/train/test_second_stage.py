"""The second stage: heads learn from what they see while they evict, and from labels of which nothing is evicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_cases import backbone, loss_of, refused, token_ids, train, train_arguments

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill
from locret.labels.labels import answer_labels
from locret.scorers.retaining_heads import RetainingHeadScorer
from locret.train.loss import retention_loss
from locret.train.step import _Recorder, train_step

TIGHT = RetentionPolicy(budget=8, chunk_size=6, stabilizers=2, local_len=3)
ROOMY = RetentionPolicy(budget=64, chunk_size=6, stabilizers=2, local_len=3)
OBJECTIVES: list[dict[str, Any]] = [{}, {"objective": "ranking", "kind": "log_attention", "floor": -4.0}]


def gradients(heads: RetainingHeads) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in heads.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("options", OBJECTIVES, ids=["regression", "ranking"])
@pytest.mark.parametrize("cut", [10**6, 20])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_where_nothing_has_to_go_the_step_is_that_of_the_first_stage(
    family: str, cut: int, options: dict[str, Any]
) -> None:
    model, row, loss = backbone(family), (token_ids(37), token_ids(8, seed=1)), loss_of(**options)
    first, second = (RetainingHeads.for_model(model, hidden_dim=12, seed=3) for _ in range(2))
    plain = train_step(model, first, *row, loss, max_prompt_tokens=cut)
    evicting = train_step(model, second, *row, loss, policy=ROOMY, max_prompt_tokens=cut)
    assert evicting.total.item() == pytest.approx(plain.total.item(), rel=1e-5)
    assert evicting.tokens == plain.tokens
    for name, grad in gradients(first).items():
        torch.testing.assert_close(gradients(second)[name], grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", OBJECTIVES, ids=["regression", "ranking"])
def test_heads_learn_from_what_they_are_given_while_they_evict(options: dict[str, Any]) -> None:
    model, row = backbone(), (token_ids(37), token_ids(8, seed=1))
    heads, naive, plain = (RetainingHeads.for_model(model, hidden_dim=12, seed=3) for _ in range(3))
    result = train_step(model, heads, *row, loss_of(**options), policy=TIGHT)
    seen: dict[int, list[Tensor]] = {layer: [] for layer in naive}
    hooks = [
        naive[layer].register_forward_pre_hook(lambda _, inputs, layer=layer: seen[layer].append(inputs[0][0]))
        for layer in naive
    ]
    prefill(model, row[0], RetentionCache(model, naive, TIGHT))
    for hook in hooks:
        hook.remove()
    scores = torch.stack([naive[layer](torch.cat(seen[layer])).T for layer in naive])
    labels = answer_labels(model, *row, options.get("kind", "logit"))
    loss = {name: value for name, value in options.items() if name != "kind"}
    total, fit, _ = retention_loss(scores, labels, **loss)
    total.backward()
    assert (result.total.item(), result.fit.item()) == pytest.approx((total.item(), fit.item()), rel=1e-5)
    for name, grad in gradients(naive).items():
        torch.testing.assert_close(gradients(heads)[name], grad, atol=1e-6, rtol=1e-5)
    train_step(model, plain, *row, loss_of(**options))
    assert not torch.allclose(gradients(plain)["heads.2.fc1.weight"], gradients(heads)["heads.2.fc1.weight"], rtol=0.1)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_second_stage_goes_on_from_heads_under_the_policy_they_recommend(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = ["--policy.budget=12", "--policy.chunk_size=8", "--policy.stabilizers=2", "--policy.local_len=3"]
    assert train(paths, tmp_path / "first", *policy) == 0
    second = [f"--init-from={tmp_path / 'first'}", "--evict-while-training", "--save-every=3"]
    assert train(paths, tmp_path / "second", *second) == 0
    config = RetainingHeads.from_pretrained(tmp_path / "second").config
    assert config.policy is not None
    assert config.policy["budget"] == 12
    assert config.training is not None
    assert config.training["states"] == "as the heads' own evictions leave them"
    losses = [
        [json.loads(line)["total"] for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    ]
    assert losses[0] != losses[1]
    resumed = [f"--resume={tmp_path / 'second' / 'checkpoint-3'}", *policy, "--policy.budget=13"]
    code, message = refused(capsys, train_arguments(paths, tmp_path / "third", *second, *resumed))
    assert (code, "--policy was" in message) == (2, True), message


@pytest.mark.parametrize("objective", ["regression", "ranking"])
@pytest.mark.parametrize("kind", ["logit", "log_attention"])
def test_heads_evict_while_they_learn_as_they_will_in_use(kind: str, objective: Any) -> None:
    heads = RetainingHeads.for_model(backbone(), hidden_dim=12, seed=3)
    recorder = _Recorder(heads, loss_of(kind, objective=objective))
    heads.annotate(label={"kind": kind}, training={"objective": objective}, policy={"layer_shares": [1.0, 0.5, 1.5]})
    in_use = RetainingHeadScorer(heads=heads)
    assert recorder.relative(None) == in_use.relative(heads)
    assert recorder.layer_shares == in_use.layer_shares == (1.0, 0.5, 1.5)


def test_an_evicting_stage_shares_layers_out_as_the_heads_recommend(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = ["--policy.budget=16", "--policy.chunk_size=8", "--policy.local_len=2", "--policy.layer_budgets=shares"]
    assert train(paths, tmp_path / "first", *shares, "--policy.layer_shares=[0.5, 1.5]") == 0
    second = [f"--init-from={tmp_path / 'first'}", "--evict-while-training", *shares]
    assert train(paths, tmp_path / "second", *second) == 0
    policy = RetainingHeads.from_pretrained(tmp_path / "second").config.policy
    assert policy is not None
    assert policy["layer_shares"] == [0.5, 1.5]
    code, message = refused(capsys, train_arguments(paths, tmp_path / "third", "--evict-while-training", *shares))
    assert (code, "--policy.layer-budgets shares needs a share of each layer" in message) == (2, True), message
    assert not (tmp_path / "third").exists()


def test_evicting_without_a_policy_is_refused_and_without_trained_heads_warned_about(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", "--evict-while-training"))
    assert (code, "--evict-while-training needs to know how to evict; add --policy.budget 256" in message) == (2, True)
    assert "untrained heads evict by chance at first" in caplog.text
    plain = train(paths, tmp_path / "run", "--dry-run", "--json")
    without = json.loads(capsys.readouterr().out)["memory_bytes"]
    evicting = train(paths, tmp_path / "run", "--dry-run", "--json", "--evict-while-training", "--policy.budget=3000")
    kept = json.loads(capsys.readouterr().out)["memory_bytes"]
    assert (plain, evicting) == (0, 0)
    assert kept["total"] - without["total"] == kept["features"] == 2 * 2048 * 64 * 4  # layers, tokens, width, bytes
