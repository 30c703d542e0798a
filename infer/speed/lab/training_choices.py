"""What the choices inside a training step are worth: each beside what was tried in its place, in the same rounds.

    python -m locret.infer.speed.lab.training_choices --output infer/speed/records/training_choices_cpu

labels      one layer's labels with blocks of 2^k logits, over the size that is used
optimizer   AdamW as PyTorch chooses it by default, or one tensor after the other, over one fused kernel
features    a head's step on q, k and v one by one, each with its own columns of W1, over q, k and v copied together

Random tensors of the given shape stand in for a layer's; nothing else runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from locret.backbone.chunk import Attended, Projections
from locret.cli import parse_options, run
from locret.heads.head import RetainingHead
from locret.infer.speed.lab.choices import LayerOptions, choices_page, measure_choices
from locret.infer.speed.side_by_side import write
from locret.labels.labels import LABEL_KINDS, layer_labels

_BLOCKS = (18, 20, 22, 24)


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(LayerOptions):
    """The layer, the row, and how often."""

    layers: int = 8
    """Layers whose heads the optimizer steps."""
    tokens: int = 2048
    """Prompt tokens of the row."""
    answer_tokens: int = 64
    """Answer tokens of the row."""


def measure(options: ChoiceOptions) -> dict[str, Any]:
    """Return the ratios of what was tried to what is used, seconds, and where they were taken."""
    torch.manual_seed(0)
    return measure_choices({**_labels(options), **_optimizers(options), **_features(options)}, _USED, options)


_USED = {
    "labels logit": "as used",
    "labels log_attention": "as used",
    "optimizer": "fused",
    "features": "copied together",
}


def _labels(options: ChoiceOptions) -> dict[str, Callable[[], object]]:
    tokens = options.tokens + options.answer_tokens
    query = torch.randn(1, options.heads, tokens, options.head_dim)
    key = torch.randn(1, options.kv_heads, tokens, options.head_dim)
    nothing = Projections(None)  # type: ignore[arg-type]  # labels need none
    chunk = Attended(
        layer_idx=0,
        query=query,
        key=key,
        value=key,
        scaling=options.head_dim**-0.5,
        softcap=None,
        projections=nothing,
    )
    sides: dict[str, Callable[[], object]] = {}
    for kind in LABEL_KINDS:
        sides[f"labels {kind}"] = partial(layer_labels, chunk, options.tokens, kind, False)
        for block in _BLOCKS:
            sides[f"labels {kind}, 2^{block}"] = partial(
                layer_labels, chunk, options.tokens, kind, False, block_elements=2**block
            )
    return sides


def _optimizers(options: ChoiceOptions) -> dict[str, Callable[[], object]]:
    fresh = torch.nn.ModuleList([options.fresh_head() for _ in range(options.layers)])
    sides: dict[str, Callable[[], object]] = {}
    ways: dict[str, dict[str, bool | None]] = {
        "optimizer": {"fused": True},
        "optimizer, default": {},
        "optimizer, one by one": {"foreach": False, "fused": False},
    }
    for name, way in ways.items():
        weights = list(copy.deepcopy(fresh).parameters())
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        sides[name] = torch.optim.AdamW(weights, lr=0.0, betas=(0.9, 0.95), **way).step  # type: ignore[arg-type]
    return sides


def _features(options: ChoiceOptions) -> dict[str, Callable[[], object]]:
    widths = [count * options.head_dim for count in (options.heads, options.kv_heads, options.kv_heads)]
    parts = [torch.randn(options.tokens, width) for width in widths]
    head = options.fresh_head()

    def together() -> list[Tensor]:
        head(torch.cat(parts, dim=-1)).square().mean().backward()
        return _taken(head)

    def one_by_one() -> list[Tensor]:
        columns = head.fc1.weight.split(widths, dim=1)
        hidden: Tensor = torch.stack([part @ column.mT for part, column in zip(parts, columns, strict=True)]).sum(0)
        head.fc2(head.activation(hidden)).square().mean().backward()
        return _taken(head)

    return {"features": together, "features, one by one": one_by_one}


def _taken(head: RetainingHead) -> list[Tensor]:
    """Return a head's gradients, and leave it without."""
    gradients = [weight.grad for weight in head.parameters() if weight.grad is not None]
    head.zero_grad()
    return gradients


def command(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the record if asked to."""
    description = "Measure what the choices inside a training step are worth."
    (options,), _ = parse_options("training_choices", description, [ChoiceOptions], argv)
    record = measure(options)
    page = choices_page(
        record, "What choices inside a training step are worth", "locret.infer.speed.lab.training_choices"
    )
    write(record, page, options.output)
    return 0


if __name__ == "__main__":
    run(command)
