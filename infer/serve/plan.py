"""How `--kv-memory` is divided: what it and the weights hold is all that the server takes, whatever is asked of it."""

from __future__ import annotations

from dataclasses import dataclass

from locret import RetainingHeads, RetentionPolicy
from locret.backbone.adapters import compute_dtype, find_decoder, unwrap
from locret.backbone.rotary import rotary_parameters
from locret.cache.export import check_prefix, mean_units
from locret.cache.limits import Limits, column_bytes, planned_bytes
from locret.conversation.chat import LONGEST_ANSWER
from locret.conversation.model import LongContextModel
from locret.infer import sizing
from locret.policy.planned_bytes import parse_bytes, units_bytes
from locret.policy.sizes import EVERY_UNIT

_COPIES = 2
"""Of a context on its way to disk or back: what the cache gives or takes, and what the file is written from."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of everything beside the weights. `of` makes it."""

    kv_memory: int
    """What was promised."""
    engine: int
    """Keys and values of questions and answers, and contexts that are asked."""
    readers: int
    """Texts that are read side by side, in turns."""
    reader: int
    """One of their caches."""
    moving: int
    """One context that is written to disk or read from it."""
    working: int
    """What one chunk works with."""
    units: int
    """Units per KV head of a context that has been read, on average where they differ."""

    @classmethod
    def of(cls, lm: LongContextModel, kv_memory: int | str, *, readers: int = 2) -> MemoryPlan:
        """Divide an amount of memory; ValueError if it is too small, or what is read would be no prefix."""
        total = parse_bytes(kv_memory) if isinstance(kv_memory, str) else kv_memory
        policy, backbone = lm.policy, lm.backbone
        _check_policy(lm)
        size = compute_dtype(lm.model).itemsize
        kept = Limits.of(backbone, lm.scorer, policy).plan(None).last.kept
        units = mean_units(kept)
        shape = backbone.check_alike("locret-serve")
        token = backbone.num_layers * shape.num_kv_heads * shape.unit_dim * size
        stored = units_bytes(backbone, kept, size, column_bytes(lm.scorer))
        # The least that the engine can work with: a context, a question of one chunk and an answer.
        engine_tokens = units + policy.chunk_size + LONGEST_ANSWER
        reader = reader_bytes(lm, policy)
        moving = _COPIES * stored
        working = working_bytes(lm, policy)
        fixed, least_engine = readers * reader + moving + working, engine_tokens * token
        if total < fixed + least_engine:
            raise ValueError(
                f"--kv-memory {kv_memory} is too small: {_times(readers, 'reader')} of {reader:,} bytes, "
                f"{working + moving:,} to work with and {least_engine:,} for one answer take {fixed + least_engine:,} "
                "bytes; give as much, or lower --readers, --budget or --chunk-size"
            )
        return cls(
            kv_memory=total,
            engine=total - fixed,
            readers=readers,
            reader=reader,
            moving=moving,
            working=working,
            units=units,
        )

    @property
    def reading(self) -> int:
        """The caches of all readers."""
        return self.readers * self.reader

    def table(self) -> str:
        rows = {
            f"{_times(self.readers, 'reader')} of {self.reader:,}": self.reading,
            "contexts, questions and answers": self.engine,
            "a context on its way to or from disk": self.moving,
            "what a chunk works with": self.working,
            "in all (--kv-memory)": self.kv_memory,
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {size:>18,} bytes" for name, size in rows.items())


def reader_bytes(lm: LongContextModel, policy: RetentionPolicy, tokens: int | None = None) -> int:
    """Return the bytes of a cache that reads by a policy: so many tokens, what it holds included, or any number."""
    return planned_bytes(lm.backbone, lm.scorer, policy, compute_dtype(lm.model).itemsize, tokens)


def working_bytes(lm: LongContextModel, policy: RetentionPolicy) -> int:
    """Return what a chunk works with that is read by a policy."""
    prepared = lm.new_cache().prepared
    heads = prepared if isinstance(prepared, RetainingHeads) else lm.scorer
    tokens = max(policy.chunk_size, policy.local_len)
    return sizing.working_bytes(unwrap(lm.model).config, heads, compute_dtype(lm.model), tokens, policy)


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _check_policy(lm: LongContextModel) -> None:
    """Refuse a policy whose cache is not bounded, or is no prefix."""
    policy, rotary = lm.policy, rotary_parameters(find_decoder(lm.model))
    for wrong, flags, why in (
        (policy.budget == EVERY_UNIT, "--scorer full", "keeps every unit of any text; name another scorer, or heads"),
        (policy.when != "chunk", f"--when {policy.when}", "holds all of a text until its end; take --when chunk"),
        (policy.plans_by_length, f"--memory {policy.memory}", "plans by a text's length; take --memory fixed"),
        (policy.has_host, f"--host-budget {policy.host_budget}", "is a second tier, which no engine has; leave it out"),
        (not policy.exact_bits, "--key-bits and --value-bits", "hold codes, which no engine takes; leave them out"),
        (policy.turns != "local", f"--turns {policy.turns}", "is not what engines do with a question; leave it out"),
    ):
        if wrong:
            raise ValueError(f"{flags} {why}")
    check_prefix(policy, lm.backbone, {policy.budget + policy.local_len}, rotary, uneven=True)
