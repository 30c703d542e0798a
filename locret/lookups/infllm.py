"""InfLLM: recall of blocks of consecutive tokens by a few of their keys, while a text is read and while it is answered.

Paper:     InfLLM, arXiv 2402.04617, sections 3.1 to 3.3; numbers and positions of its released code.
Formula:   block vector = mean of the `repr_topk` un-rotated keys with the most attention, per query head;
           fit = sum over query heads of (mean query of the execution block) . (block vector); the best `topk` are seen.
Positions: the window's true distances; whatever is older looks as if it were `local` - 1 tokens away.
Deviates:  rotary embeddings are the backbone's own, with their scaling; the released code knows the base alone. The
           least recently used copy of a block leaves the device; "lru-s", by attention, would move other bytes alone.
Cost:      a product with one vector per block, query head and execution block; `topk` blocks moved at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from locret.base.fields import Range
from locret.base.registry import Chosen

EXECUTION_BLOCK = 512
"""Tokens that look up blocks together, in all published settings."""
_NUMBERS = ("local", "block", "init", "topk", "cached", "repr_topk")
_ORDERED = (
    ("topk", "cached", "more blocks would be seen than may lie on the device"),
    ("repr_topk", "block", "a block has no more tokens"),
)


def attention_column(member: int) -> str:
    """Return the name of the column with the attention that units got from one query head of their group."""
    return f"attention_{member}"


@dataclass(frozen=True, kw_only=True)
class InfLLM(Chosen):
    """Blocks of old tokens, of which the best few are seen beside the first tokens and a window."""

    kind: ClassVar[str] = "lookup"
    name: ClassVar[str] = "infllm"
    ranges = {**dict.fromkeys(_NUMBERS, Range(1)), "init": Range(0)}

    local: int | None = None
    """Newest tokens that every query sees at their true distance (n_local, 4096); follows from the budget."""
    block: int | None = None
    """Tokens of a block (128; at most 1/32 of local, but 8 or more)."""
    init: int | None = None
    """First tokens of the text, which are always seen (n_init, 128; at most 1/32 of local, but 4 or more)."""
    topk: int | None = None
    """Blocks that a query sees (16; at most half of those that may lie on the device)."""
    cached: int | None = None
    """Blocks that may lie on the device (32, twice topk; at most as many as make up the window)."""
    repr_topk: int | None = None
    """Tokens whose mean key stands for a block (4)."""

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        for small, large, why in _ORDERED:
            least, most = getattr(self, small), getattr(self, large)
            if least is not None and most is not None and least > most:
                self.refuse(f"{small}={least} is above {large}={most}, but {why}; raise {large}, or lower {small}")

    def completed(self, budget: int) -> InfLLM:
        """Return the same with all numbers: those not given follow from `local`, and that from the budget."""
        made = self._around(self.local or 1)
        if self.local is None:
            fitting = (self._around(local) for local in range(min(budget, 4096), 0, -1))
            made = next((one for one in fitting if one.units <= budget), made)
        if made.units > budget:
            raise ValueError(
                f"recall_by={self.name} with local={made.local} holds {made.units} units on the device (init="
                f"{made.init}, block={made.block}, cached={made.cached} blocks), but budget={budget}; raise budget to "
                f"{made.units}, or lower local"
            )
        return made

    @property
    def least_budget(self) -> int:
        """The smallest budget that `completed` takes."""
        return self._around(self.local or 1).units

    def _around(self, local: int) -> InfLLM:
        block = self.block or min(128, max(8, local // 32))
        cached = self.cached or (2 * self.topk if self.topk else max(1, min(32, local // block)))
        return replace(
            self,
            local=local,
            block=block,
            init=min(128, max(4, local // 32)) if self.init is None else self.init,
            cached=cached,
            topk=self.topk or max(1, min(16, cached // 2)),
            repr_topk=self.repr_topk or min(4, block),
        )

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """Local, block, init, topk, cached and repr_topk, of one that is completed."""
        found: Any = tuple(getattr(self, name) for name in _NUMBERS)
        return found  # type: ignore[no-any-return]

    @property
    def units(self) -> int:
        """Units per KV head on the device between execution blocks, copies of blocks included; once completed."""
        local, block, init, _, cached, _ = self.numbers
        return init + local + block + cached * block

    @property
    def execution_block(self) -> int:
        """Tokens that look up blocks together, at most; once completed."""
        return min(EXECUTION_BLOCK, self.numbers[0])

    @property
    def near(self) -> int:
        """Units per KV head on the device before the next execution block comes, but for the copies; once completed."""
        local, block, init, *_ = self.numbers
        return init + local + block - 1

    def copies_bytes(self, kv_heads: int, head_dim: int, element_size: int) -> int:
        """Return the bytes, per row and layer, of the blocks that may lie on the device; once completed."""
        _, block, _, _, cached, _ = self.numbers
        return 2 * cached * block * head_dim * element_size * kv_heads

    def host_bytes(self, units: int, kv_heads: int, heads: int, head_dim: int, element_size: int) -> int:
        """Return the bytes, per row and layer, of blocks of so many units per KV head, and their vectors."""
        return (2 * units * kv_heads + units // self.numbers[1] * heads) * head_dim * element_size

    def formed(self, tokens: int) -> int:
        """Return how many blocks a text of so many tokens has formed when the next token comes; once completed."""
        local, block, init, *_ = self.numbers
        return max(tokens - init - local, 0) // block
