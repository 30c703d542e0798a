"""May the engine refuse a position mode on this backbone? Asked of the backbone's own keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from locret.backbone.adapters import rotary_module
from locret.infer.verify.findings import Finding
from locret.infer.verify.replay import Block, replay
from locret.infer.verify.rotation import Layout, layout_of
from locret.policy.policy import RetentionPolicy

if TYPE_CHECKING:
    from locret.infer.verify.subject import Subject

_SHIFT, _TOKENS = 3, 64


def refusal(subject: Subject, policy: RetentionPolicy, error: ValueError) -> Finding:
    """Say whether the engine refuses a position mode with good reason."""
    cannot = policy.positions == "compact" and not turns_by_distance(subject)
    return Finding(
        compared=f"positions {policy.positions}",
        ok=cannot,
        refused=cannot,
        why=f"refused: {error}",
        means=f"positions {policy.positions} are refused although this backbone's rotation allows them; use the other "
        "mode, and report it with this table",
    )


def turns_by_distance(subject: Subject) -> bool:
    """Return whether keys of all layers are turned by what their distance says, the same at all positions."""
    rope: object = getattr(rotary_module(subject.decoder), "rope_type", "default")
    kinds = rope.values() if isinstance(rope, dict) else [rope]
    if any("dynamic" in str(kind) for kind in kinds):
        return False
    limit = max(0.02, subject.noise.typical)
    return all(apart < limit for _, apart in subject.layouts.values())


def measured_layouts(subject: Subject) -> dict[int, tuple[Layout, float]]:
    """Return how every governed layer rotates keys: what makes those at one position the ones further on."""
    ids, layers = subject.on_device(subject.ids[:, :_TOKENS]), subject.backbone.layers
    nothing = [[torch.empty(0)] * subject.backbone.shape(one).num_kv_heads for one in layers]
    blocks = [Block(0, ids.shape[1], nothing)]
    with subject.alone():
        at, further = (replay(subject.model, ids, blocks, shift=shift).keys for shift in (0, _SHIFT))
        return {one: layout_of(subject.decoder, at[one], further[one], _SHIFT) for one in layers}
