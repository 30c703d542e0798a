"""How many cache units stay, where, and when: the numbers of Algorithm 1, checked once when they are read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

POSITIONS = ("compact", "original")
MOMENTS = ("chunk", "prompt_end")


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """The memory a prompt may use. Defaults are those of the original package (Phi-3-mini-128K, Locret section 4.1).

    Raises:
        ValueError: If a number is out of range or two of them contradict each other.
    """

    budget: int = 6000
    """Cache units kept per layer and KV head once a chunk has been read (the paper's b)."""
    chunk_size: int = 3072
    """Prompt tokens per forward pass (the paper's B)."""
    stabilizers: int = 2500
    """Newest units of the cache kept unconditionally after every chunk but the last (n_s); 0 protects nothing."""
    local_len: int = 100
    """Last prompt tokens, read after the last eviction and never evicted while reading (n_loc)."""
    positions: str = "compact"
    """Rotary position of a kept unit: its rank in the cache ("compact"), or its place in the text ("original")."""
    decode_budget: int | None = None
    """Units per KV head that a cache may hold while it generates; none: it grows by one for each token."""
    decode_interval: int = 64
    """Units evicted at once when generation reaches decode_budget."""
    when: str = "chunk"
    """Evict after every "chunk", in bounded memory; or once at "prompt_end", with memory that grows with the prompt."""

    def __post_init__(self) -> None:
        for name in ("budget", "chunk_size", "local_len", "decode_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is too small; it must be 1 or more")
        if self.stabilizers < 0:
            raise ValueError(f"stabilizers={self.stabilizers} is negative; use 0 to protect nothing")
        if self.stabilizers > self.budget - 1:
            raise ValueError(
                f"stabilizers={self.stabilizers} leaves no room for scored units in budget={self.budget}; "
                f"raise budget or lower stabilizers to at most {self.budget - 1}"
            )
        if self.when not in MOMENTS:
            raise ValueError(f'when="{self.when}" is unknown; choose one of {", ".join(MOMENTS)}')
        if self.positions not in POSITIONS:
            raise ValueError(f'positions="{self.positions}" is unknown; choose one of {", ".join(POSITIONS)}')
        if self.decode_budget is not None and self.decode_budget <= self.local_len + self.decode_interval:
            raise ValueError(
                f"decode_budget={self.decode_budget} cannot hold local_len={self.local_len} protected units and free "
                f"decode_interval={self.decode_interval} at a time; raise decode_budget above their sum"
            )

    @property
    def prefill_units(self) -> int:
        """Most units a KV head ever holds while a prompt is read: budget plus one chunk, or plus the local tokens."""
        return self.budget + max(self.chunk_size, self.local_len)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data, for config.json and reports."""
        return asdict(self)
