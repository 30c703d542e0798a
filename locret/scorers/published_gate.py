"""What scorers of gates have in common that others published: where their files are, and what stays whatever its score.

A gate rates a unit once, by the hidden states of its token. Its authors evict what it rates below a threshold, and keep
a window of the newest tokens; here the best `budget` units stay, and of the window as much as the budget has room for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from locret.backbone.chunk import Chunk
from locret.heads import gate_files
from locret.heads.fingerprint import weight_fingerprint
from locret.heads.heads import RetainingHeads
from locret.scorers.base import Scorer
from locret.scorers.option_checks import check_at_least

_SHARE = 4
"""Of the budget, the part that a window takes at most which was not asked for."""
_READ: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], RetainingHeads]] = WeakKeyDictionary()
"""Gates of a backbone that have been read: a cache is made for every text, and a gate may have gigabytes."""


@dataclass(frozen=True, kw_only=True)
class PublishedGateScorer(Scorer):
    """Rank units with a gate; a subclass per method says how its files are read."""

    positions: ClassVar[str] = "original"
    by_features: ClassVar[bool] = True
    read: ClassVar[Callable[..., gate_files.Read]]
    their_window: ClassVar[int]
    """Newest tokens that stay in the authors' own code."""

    path: str
    """Folder, file or Hub id of the gate."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    window: int | None = None
    """Newest units that always stay; if none is given, as many as in the authors' code, but a quarter of the budget at
    most."""
    sinks: int = 0
    """First tokens of the text that always stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self.name, 0, window=self.window or 0, sinks=self.sinks)

    def recent(self, budget: int) -> int:
        """Return the window."""
        return min(self._authors_window(), budget // _SHARE) if self.window is None else self.window

    def _authors_window(self) -> int:
        return self.their_window

    def check_budget(self, budget: int) -> None:
        """Refuse a window and sinks that leave nothing of a budget.

        Raises:
            ValueError: Naming them.
        """
        if self.recent(budget) + self.sinks >= budget:
            raise ValueError(
                f"scorer {self.name}: window={self.recent(budget)} and sinks={self.sinks} leave nothing of budget="
                f"{budget} for its scores; lower them, or raise budget"
            )

    def sink_tokens(self, budget: int, recent: int) -> int:
        """Return the sinks."""
        return self.sinks

    def check_backbone(self, config: Any) -> None:
        """Read the gate for a backbone whose weights are not there yet.

        Raises:
            ValueError: If it does not fit.
        """
        self._read(config)

    def prepare(self, model: nn.Module) -> RetainingHeads:
        """Return the gate, each layer's on its device.

        Raises:
            ValueError: If it does not fit the backbone.
        """
        read = _READ.setdefault(model, {})
        key = (self.name, self.path, self.revision, *_stamps(Path(self.path)))
        if key not in read:
            for stale in [one for one in read if one[:3] == key[:3]]:  # of files that have been replaced
                del read[stale]
            read[key] = RetainingHeads._with_weights(*self._read(model))
        return read[key].follow(model)  # which may have moved since

    def _read(self, model_or_config: Any) -> gate_files.Read:
        try:
            return type(self).read(self.path, model_or_config, self.revision)
        except ValueError as error:
            raise ValueError(f"scorer {self.name}: {error}") from error

    def identity(self, prepared: RetainingHeads) -> dict[str, Any]:
        """Return a fingerprint of the gate's weights, and what stays besides."""
        return {"weights": weight_fingerprint(prepared), "window": self.window, "sinks": self.sinks}

    def feature_source(self, prepared: RetainingHeads) -> str:
        """Return which hidden states the gate reads."""
        return prepared.config.reads

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, L)."""
        features_BLF = chunk.features(self.feature_source(chunk.prepared))
        return self.score_features(chunk.prepared, chunk.layer_idx, features_BLF)

    def score_features(self, prepared: RetainingHeads, layer_idx: int, features_BLF: Tensor) -> Tensor:
        """Return scores (B, K, L)."""
        scores_BLK: Tensor = prepared[layer_idx](features_BLF)
        return scores_BLK.transpose(1, 2)


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Return what tells files from others of the same names that take their place."""
    # Gates of several backbones have a folder each.
    files = [path] if path.is_file() else sorted([*path.glob("*"), *path.glob("*/*")]) if path.is_dir() else []
    found = [(str(file), os.stat(file)) for file in files if file.is_file()]
    return [(name, one.st_size, one.st_mtime_ns) for name, one in found]
