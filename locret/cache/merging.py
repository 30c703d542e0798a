"""Evicted units folded into kept ones, in the store's own memory, before the store drops them."""

# B batch, K KV heads, S units held, C kept ones, D head dim

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from locret.backbone.attention import View
from locret.cache.store import POSITIONS, SCORES, Part, Store
from locret.mergers.loco import LoCoMerger, Units, take
from locret.policy.selectors import Kept, KeptOverHeads, KeptPerHead, Stay, staying


@dataclass(frozen=True)
class Folding:
    """What one layer does with the units that go."""

    merger: LoCoMerger
    prepared: Any
    """What the merger needs of this backbone."""
    layer_idx: int

    def fold(self, store: Store, kept: Kept, stay: Stay, *, by_text: bool) -> None:
        """Write merged keys, values and columns over the units that stay; `Store.keep` comes next."""
        for part, chosen in kept_parts(store, store.view(0), kept):
            positions, keys = part.columns[POSITIONS], part.keys.float()
            if by_text:
                keys = store.rotary.turn_back(keys, *store.rotary.at(positions, keys))
            own = stay if part.where is None else stay.of_row(part.where[0])
            units = Units(
                layer_idx=self.layer_idx,
                keys=keys,
                values=part.values.float(),
                scores=part.columns[SCORES],
                positions=positions,
                pinned=staying(part.columns[SCORES], positions, own).expand(positions.shape),
                kept=chosen.units,
                gone=chosen.gone(),
                free=max(0, chosen.units.shape[-1] - stay.recent - stay.sinks - stay.guaranteed),
            )
            merged = self.merger.fold(units, self.prepared)
            keys = merged.keys
            if by_text:
                keys = store.rotary.turn(keys, *store.rotary.at(merged.positions, keys))
            made = {SCORES: merged.scores, POSITIONS: merged.positions}
            for name, column in part.columns.items():
                new = made[name] if name in made else take(column, merged.source)
                column.scatter_(2, chosen.units, new.to(column.dtype))
            for states, new in ((part.keys, keys), (part.values, merged.values)):
                states.scatter_(2, chosen.units[..., None].expand_as(new), new.to(states.dtype))


def kept_parts(store: Store, view: View, kept: Kept) -> Iterator[tuple[Part, KeptPerHead]]:
    """Yield the parts of a store that lose units but not all, with those that stay of each."""
    before = 0
    for part in store.parts(view, 0, newest_only=False):
        assert store.values is not None
        if part.values.untyped_storage().data_ptr() != store.values.untyped_storage().data_ptr():
            raise ValueError(
                f"store {store.name} shows copies of its units, so what is merged there would be lost; use another "
                "store, or leave merge out"
            )
        held, chosen = part.keys.shape[2], kept
        if part.where is not None:
            assert isinstance(kept, KeptOverHeads)
            row, head = part.where
            before = 0 if head == 0 else before
            own = kept.units[row].split(kept.counts[row].tolist())[head] - before
            chosen, before = KeptPerHead(own[None, None], held), before + held
        assert isinstance(chosen, KeptPerHead)
        if 0 < chosen.units.shape[-1] < held:
            yield part, chosen
