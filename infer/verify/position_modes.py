"""May the engine refuse a position mode on this backbone? Asked of the backbone's own keys."""

from __future__ import annotations

import torch

from locret.backbone.adapters import rotary_module
from locret.backbone.rotary import FULL_ATTENTION
from locret.infer.verify.findings import Finding
from locret.infer.verify.replay import Block, Turn, replay
from locret.infer.verify.subject import Subject
from locret.policy.policy import RetentionPolicy

_SHIFT = 3


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
    """Return whether the backbone rotates keys in halves, by frequencies that are the same at all positions."""
    rope: object = getattr(rotary_module(subject.decoder), "rope_type", "default")
    kinds = rope.values() if isinstance(rope, dict) else [rope]
    if any("dynamic" in str(kind) for kind in kinds) or (isinstance(rope, dict) and FULL_ATTENTION not in rope):
        return False
    ids = subject.on_device(subject.ids[:, :64])
    nothing = [[torch.empty(0)] * subject.backbone.shape(one).num_kv_heads for one in subject.backbone.layers]
    blocks, turn = [Block(0, ids.shape[1], nothing)], Turn(subject.decoder)
    with subject.alone():
        at, further = (replay(subject.model, ids, blocks, compact=False, shift=shift).keys for shift in (0, _SHIFT))
        layer = subject.backbone.layers[0]
        distance = torch.full((ids.shape[1],), _SHIFT)
        apart = (turn(at[layer], distance) - further[layer]).norm(dim=-1) / further[layer].norm(dim=-1)
    return bool(apart.median() < 0.05)
