"""Rows longer than one card: each process holds a slice of a row's tokens, and attends with some heads to all of them.

Paper:    DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1: all-to-all around the attention function turns slices of
          tokens with all heads into all tokens with a share of the heads, and back.
Deviates: Backward passes need none: the backbone is frozen. Labels are computed between the two exchanges, where a
          process sees the queries and keys of all tokens in its heads, by the code that labels whole rows.
"""
# P processes, H heads (of queries, keys or values), K KV heads, L own tokens, S tokens of the row, T trained tokens,
# D head dim, F features

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed, nn

from locret.backbone.adapters import Backbone, describe, find_decoder, input_device
from locret.backbone.chunk import Attended
from locret.backbone.forward import run_decoder
from locret.backbone.instrument import instrumented
from locret.backbone.passes import keeping_step
from locret.backbone.rotary import fixed_reach
from locret.labels.labels import LayerObserver

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RowRanks:
    """The processes that share every row, and which of them this one is."""

    rank: int
    size: int
    group: ProcessGroup | None = None
    """None: all processes there are."""

    @classmethod
    def split(cls, size: int) -> RowRanks:
        """Divide all processes, in order, into groups of `size`; every process calls this once, at the same time.

        Raises:
            ValueError: If their number is no multiple of it.
        """
        processes = distributed.get_world_size() if distributed.is_initialized() else 1
        if processes == 1 < size:
            raise ValueError(
                f"--sp-size {size} shares rows among processes, but this is the only one; start them with torchrun "
                f"--standalone --nproc-per-node {size} -m locret.train.command, or drop it"
            )
        if size < 1 or processes % size:
            raise ValueError(
                f"--sp-size {size} does not divide the {processes} processes that were started; start a multiple of "
                "it, or choose another"
            )
        if size == 1:
            return cls(0, 1)
        group, _ = distributed.new_subgroups(group_size=size)
        return cls(distributed.get_rank(group), size, group)

    def check(self, backbone: Backbone) -> None:
        """Refuse a backbone whose rows cannot be shared.

        Raises:
            ValueError: If a layer's KV heads cannot be divided among the processes, or a layer carries a state along.
        """
        check_shared(backbone, self.size)

    def share(self, tokens: int) -> RowShare:
        """Return this process's share of a row."""
        return RowShare(self, tokens)


def check_shared(backbone: Backbone, size: int) -> None:
    """Refuse a backbone whose rows `size` processes cannot share.

    Raises:
        ValueError: If a layer's KV heads cannot be divided among them, or a layer carries a state along.
    """
    if size > 1 and backbone.recurrent:
        raise ValueError(
            f"--sp-size {size}: layers of {backbone.model_type} carry a state from token to token, so its rows cannot "
            "be shared by their tokens; drop it"
        )
    counts = {backbone.shape(layer).num_kv_heads for layer in backbone.layers}
    if any(count % size for count in counts):
        fits = [str(ranks) for ranks in range(2, min(counts) + 1) if not any(count % ranks for count in counts)]
        found = " and ".join(map(str, sorted(counts)))
        raise ValueError(
            f"--sp-size {size} does not divide the {found} KV heads of {backbone.model_type}; "
            + (f"choose {' or '.join(fits)}" if fits else "drop it")
        )


class RowShare:
    """A process's slice of one row: the tokens from `start` to `end` - 1.

    Args:
        ranks: The processes that share the row.
        tokens: S.
    """

    def __init__(self, ranks: RowRanks, tokens: int) -> None:
        self.ranks, self.all_tokens = ranks, tokens
        # The first ones have one more where they cannot be equal.
        starts = [rank * (tokens // ranks.size) + min(rank, tokens % ranks.size) for rank in range(ranks.size + 1)]
        self._spans = list(zip(starts, starts[1:], strict=False))
        self.start, self.end = self._spans[ranks.rank]

    def counts(self, tokens: int) -> list[int]:
        """Return how many of the row's first `tokens` each process holds."""
        return [max(0, min(tokens, end) - start) for start, end in self._spans]

    def own(self, tokens: int) -> int:
        """Return how many of the row's first `tokens` this process holds."""
        return self.counts(tokens)[self.ranks.rank]

    def heads(self, states: Tensor, tokens: int | None = None) -> Tensor:
        """Given (1, H, L, D), return (1, H / P, S, D).

        Args:
            states: What belongs to this process's tokens.
            tokens: S; where it is less than the row's, the first tokens of the row.
        """
        size = self.ranks.size
        numbers = self.counts(self.all_tokens if tokens is None else tokens)
        parts_PLHD = states[0].unflatten(0, (size, -1)).transpose(1, 2)
        width = parts_PLHD.shape[2:].numel()
        sizes = [parts_PLHD.shape[1] * width] * size
        received = self._exchange(parts_PLHD.reshape(-1), sizes, [count * width for count in numbers])
        return received.view(sum(numbers), *parts_PLHD.shape[2:]).transpose(0, 1)[None]

    def tokens(self, states: Tensor) -> Tensor:
        """Given (1, H / P, S, D), return (1, H, L, D); of a row's first tokens, if S is less."""
        heads, dim = states.shape[1], states.shape[3]
        numbers = self.counts(states.shape[2])
        own = numbers[self.ranks.rank]
        sent = torch.cat([part.reshape(-1) for part in states[0].split(numbers, dim=1)])
        sizes = [count * heads * dim for count in numbers]
        received = self._exchange(sent, sizes, [own * heads * dim] * self.ranks.size)
        return received.view(self.ranks.size * heads, own, dim)[None]

    def own_heads(self, numbers: Tensor) -> Tensor:
        """Given (H,), return the (H / P,) of this process's heads."""
        return numbers.chunk(self.ranks.size)[self.ranks.rank]

    def _exchange(self, sent: Tensor, sizes: list[int], received: list[int]) -> Tensor:
        out = sent.new_empty(sum(received))
        distributed.all_to_all_single(out, sent, received, sizes, group=self.ranks.group)
        return out

    def next_token(self, own_LF: Tensor) -> Tensor:
        """Return (1, F), what the process behind this one gave for its first token; nothing, (0, F), for the last."""
        first_1F = own_LF[:1] if len(own_LF) else own_LF.new_zeros(1, own_LF.shape[1])
        given = [torch.empty_like(first_1F) for _ in range(self.ranks.size)]
        distributed.all_gather(given, first_1F.contiguous(), group=self.ranks.group)
        return given[self.ranks.rank + 1] if self.ranks.rank + 1 < self.ranks.size else own_LF[:0]

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the processes."""
        total = values.clone()
        distributed.all_reduce(total, group=self.ranks.group)
        return total

    def log_sum_exp(self, values_KL: Tensor) -> Tensor:
        """Return (K, 1), the log-sum-exp over the tokens of all processes, without gradient."""
        values_KL = values_KL.detach()
        lowest = torch.finfo(values_KL.dtype).min  # not -inf, which a process without tokens would subtract from itself
        most_K1 = torch.cat([values_KL, values_KL.new_full((len(values_KL), 1), lowest)], dim=1).amax(1, keepdim=True)
        distributed.all_reduce(most_K1, distributed.ReduceOp.MAX, group=self.ranks.group)
        return most_K1 + self.total((values_KL - most_K1).exp().sum(1, keepdim=True)).log()


class _SharedRow(LayerObserver):
    """An observer whose passes are over a process's slice of the row."""

    def __init__(self, share: RowShare, backbone: Backbone, on_layer: Callable[[Attended], None]) -> None:
        super().__init__(backbone, on_layer)
        self.exchange = self._share = share

    def positions(self, tokens: Tensor) -> Tensor:
        """Number the tokens from the beginning of the row."""
        return torch.arange(self._share.start, self._share.end, device=tokens.device)[None]


@torch.no_grad()
@keeping_step
def observe_share(model: nn.Module, share: RowShare, input_ids: Tensor, on_layer: Callable[[Attended], None]) -> None:
    """Run the decoder over this process's slice of (1, S) token ids, together with the others; see `labels.observe`.

    Args:
        model: The backbone.
        share: Which slice of the row is this process's.
        input_ids: Those of the whole row.
        on_layer: Told of every full-attention layer: queries, keys and values of all tokens in this process's heads,
            and the projections of its own tokens in all heads.

    Raises:
        ValueError: For a row beyond which the backbone's rotary frequencies follow its length (dynamic NTK).
    """
    reach = fixed_reach(find_decoder(model))
    if reach is not None and share.all_tokens > reach:
        raise ValueError(
            f"the rotary frequencies of this backbone change with rows of more than {reach} tokens, so one of "
            f"{share.all_tokens} cannot be shared; give --max-tokens {reach}, or drop --sp-size"
        )
    own_ids = input_ids[:, share.start : share.end].to(input_device(model))
    with instrumented(model, _SharedRow(share, describe(model), on_layer)):
        run_decoder(model, own_ids)
