"""The one-pass step gives the gradients of the obvious two-pass computation, in the memory of one layer."""

from __future__ import annotations

from typing import Any

import oracle as reference
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_cases import CASES, backbone, golden, loss_of, token_ids

from locret import RetainingHeads
from locret.labels.labels import answer_labels, prompt_scores
from locret.train.loss import retention_loss, top_overlap
from locret.train.step import train_step


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside the block that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in inputs:
                storage = leaf.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: (ref, size) for key, (ref, size) in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def naive_step(
    model: nn.Module,
    heads: RetainingHeads,
    prompt_ids: Tensor,
    answer_ids: Tensor,
    cut: int = 10**6,
    loss: dict[str, Any] | None = None,
    **label: Any,
) -> list[float]:
    """Labels in one pass, features of all layers in another, then one loss over everything."""
    from locret.labels.labels import observe

    labels = answer_labels(model, prompt_ids, answer_ids, **label)[..., :cut]
    features: dict[int, Tensor] = {}
    observe(model, prompt_ids, lambda chunk: features.update({chunk.layer_idx: chunk.features()[0]}))
    scores = torch.stack([heads[layer](features[layer][:cut]).T for layer in heads])
    losses = retention_loss(scores, labels, **loss or {})
    losses[0].backward()
    return [value.item() for value in losses]


def gradients(heads: RetainingHeads) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in heads.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("case", "labels"), CASES)
def test_losses_and_gradients_are_those_of_the_original(case: str, labels: str) -> None:
    g = golden(case, labels)
    result = train_step(g.model, g.heads, g.prompt_ids, g.answer_ids)
    assert result.fit.item() == pytest.approx(g.loss["regression"], abs=1e-4)
    assert result.smoothness.item() == pytest.approx(g.loss["smoothness_sum_over_layers"], abs=1e-3)
    assert result.total.item() == pytest.approx(g.loss["total"], abs=1e-4)
    assert result.overlap.mean().item() == pytest.approx(g.loss["top10_overlap"], abs=1e-6)
    prefix = f"grad.{labels}.model.layers."
    expected = {name: grad for name, grad in g.outputs.items() if name.startswith(prefix)}
    assert len(expected) == 4
    for name, grad in expected.items():
        layer, _, linear, _ = name.removeprefix(prefix).split(".")
        actual = getattr(g.heads[int(layer)], linear).weight.grad
        torch.testing.assert_close(actual, grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "label", [{}, {"kind": "log_attention"}, {"kind": "log_attention", "include_last_prompt_token": True}]
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_gradients_are_those_of_the_naive_two_passes(family: str, label: dict[str, Any]) -> None:
    model, prompt_ids, answer_ids = backbone(family), token_ids(37), token_ids(8, seed=1)
    heads, naive = (RetainingHeads.for_model(model, hidden_dim=12, seed=3) for _ in range(2))
    for cut in (10**6, 20):  # the second adds to the gradient of the first
        result = train_step(model, heads, prompt_ids, answer_ids, loss_of(**label), max_prompt_tokens=cut)
        losses = naive_step(model, naive, prompt_ids, answer_ids, cut, **label)
        assert [value.item() for value in (result.total, result.fit, result.smoothness)] == pytest.approx(losses)
    for name, grad in gradients(naive).items():
        torch.testing.assert_close(gradients(heads)[name], grad, atol=1e-6, rtol=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "loss",
    [{}, {"objective": "ranking", "alpha": 0.1}, {"objective": "ranking", "temperature": 2.0}],
    ids=["regression", "ranking", "ranking, warmer"],
)
def test_every_objective_has_the_gradients_of_the_naive_two_passes(loss: dict[str, Any]) -> None:
    model, prompt_ids, answer_ids = backbone(), token_ids(37), token_ids(8, seed=1)
    heads, naive = (RetainingHeads.for_model(model, hidden_dim=12, seed=3) for _ in range(2))
    learned = loss_of("log_attention", **loss)
    result = train_step(model, heads, prompt_ids, answer_ids, learned, max_prompt_tokens=20)
    losses = naive_step(model, naive, prompt_ids, answer_ids, 20, loss, kind="log_attention")
    assert [value.item() for value in (result.total, result.fit, result.smoothness)] == pytest.approx(losses)
    for name, grad in gradients(naive).items():
        torch.testing.assert_close(gradients(heads)[name], grad, atol=1e-6, rtol=1e-5)
    labels = answer_labels(model, prompt_ids, answer_ids, "log_attention")[..., :20]
    scores = prompt_scores(model, heads, prompt_ids)[..., :20]
    assert torch.equal(result.overlap, top_overlap(scores, labels))


def test_losses_are_those_of_the_oracle() -> None:
    model, prompt_ids, answer_ids = backbone(), token_ids(17), token_ids(5, seed=1)
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=3)
    scores, labels = prompt_scores(model, heads, prompt_ids), answer_labels(model, prompt_ids, answer_ids)
    result = train_step(model, heads, prompt_ids, answer_ids)
    expected = reference.loss(scores.detach(), labels, 2.5e-3)
    assert [v.item() for v in (result.total, result.fit, result.smoothness)] == pytest.approx(expected, abs=1e-5)
    assert torch.equal(result.overlap, top_overlap(scores, labels))
    assert result.tokens == 22


def peak_bytes(layers: int, step: Any) -> int:
    model, prompt_ids, answer_ids = backbone(num_hidden_layers=layers), token_ids(96), token_ids(16, seed=1)
    heads = RetainingHeads.for_model(model, hidden_dim=64, seed=3)
    step(model, heads, prompt_ids, answer_ids)  # the heads' gradients are allocated now and not counted below
    with LiveBytes() as counted:
        step(model, heads, prompt_ids, answer_ids)
    return counted.peak


def test_peak_memory_does_not_grow_with_the_number_of_layers() -> None:
    few, many = peak_bytes(2, train_step), peak_bytes(9, train_step)
    assert many - few < 1024  # losses and overlaps: a few scalars per layer
    assert peak_bytes(9, naive_step) > 2 * peak_bytes(2, naive_step)  # so the count does see what grows


class Waits(TorchDispatchMode):
    """Notes the operations after which the host must wait for a GPU: those whose result it has to know."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(func.__name__.split(".")[0].lstrip("_").startswith(name.lstrip("_")) for name in self.NAMES):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("objective", ["regression", "ranking"])
@pytest.mark.parametrize("kind", ["logit", "log_attention"])
def test_a_step_waits_for_the_device_no_more_often_than_a_plain_forward(kind: str, objective: str) -> None:
    model, prompt_ids, answer_ids = backbone(), token_ids(37), token_ids(8, seed=1)
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=3)
    with Waits() as plain, torch.no_grad():
        model.get_decoder()(input_ids=torch.cat([prompt_ids, answer_ids], dim=1), use_cache=False)
    with Waits() as waits:
        result = train_step(
            model, heads, prompt_ids, answer_ids, loss_of(kind, objective=objective), earlier_answers=[(5, 9)]
        )
    assert waits.found == plain.found  # transformers looks for several texts in a row, once
    with Waits() as told:
        float(result.total)
    assert len(told.found) == 1


def test_shares_given_to_backward_add_up_to_the_total() -> None:
    model, shares = backbone(), []
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=3)
    result = train_step(model, heads, token_ids(9), token_ids(3), backward=lambda loss: shares.append(loss.item()))
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(result.total.item(), rel=1e-5)
    assert not gradients(heads)


def test_a_prompt_of_one_token_trains() -> None:
    model = backbone()
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=3)
    result = train_step(model, heads, token_ids(1), token_ids(1))
    assert result.smoothness.item() == 0.0
    assert all(grad.isfinite().all() for grad in gradients(heads).values())


def test_bfloat16_autocast_keeps_float32_gradients_near_those_of_float32() -> None:
    model, prompt_ids, answer_ids = backbone(), token_ids(37), token_ids(8, seed=1)
    heads, exact = (RetainingHeads.for_model(model, hidden_dim=12, seed=3) for _ in range(2))
    train_step(model, exact, prompt_ids, answer_ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train_step(model, heads, prompt_ids, answer_ids)
    for name, grad in gradients(heads).items():
        assert grad.dtype == torch.float32
        assert not torch.equal(grad, gradients(exact)[name])
        assert (grad - gradients(exact)[name]).norm() < 0.1 * gradients(exact)[name].norm()
