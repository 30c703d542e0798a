"""The bounded cache: what has been read, as far as it was kept."""

# B batch, K KV heads, L new tokens, S slots, E hidden size

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from locret import mergers, prefill_attention
from locret.backbone.adapters import compute_dtype, describe, describe_whole, find_decoder, latents, ranks_of
from locret.backbone.chunk import PROJECTIONS, feature_widths
from locret.backbone.passes import unrotated_layers
from locret.backbone.rotary import Rotary, RotationCheck, fixed_reach
from locret.backbone.shape import BOTH, RECURRENT
from locret.cache.checks import check_over_ranks, check_reach, check_scores
from locret.cache.digest import shortened
from locret.cache.export import to_dynamic_cache
from locret.cache.layer import RetentionLayer
from locret.cache.layers import find_store, make_layer
from locret.cache.limits import CacheMemory, Limits, check_pair, check_slots, with_shares
from locret.cache.protected import check_held, check_room, check_rows
from locret.cache.row_algebra import index_rows, join_rows, take_rows, trimmed
from locret.cache.states import STATES, States
from locret.cache.store import POSITIONS, SCORES, Store
from locret.cache.transformers_cache import TransformersCache
from locret.cache.units import Units, Workspace
from locret.heads.heads import RetainingHeads
from locret.policy.policy import NO_MERGER, RetentionPolicy, policy_of, usual_budget
from locret.policy.protection import Rows, Span, checked_rows
from locret.prefill_attention.blocked import SparseAttention
from locret.scorers import FALLBACK, FeatureScorer, RetainingHeadScorer, Scorer, get

if TYPE_CHECKING:
    from typing_extensions import Self

    from locret.cache.reader import Reader


class RetentionCache(TransformersCache):
    """A transformers cache that never holds more than `budget` units per KV head between chunks.

    It holds what has been read; `locret.prefill` and `locret.generate` fill it, through a reader of their own.

    Args:
        model: The backbone the cache is for.
        scorer: Retaining heads, a scorer object, or the name of a training-free scorer.
        policy: How many units stay; if None, what the heads recommend, else the defaults.
        store: What holds the units, a class derived from `locret.cache.store.Store`, `package.module:Class` or
            `file.py:Class`; if None, ours. Planned bytes are ours too.

    Raises:
        ValueError: If the model has no keys and values to evict, scorer and model do not match, the store cannot hold
            what the policy selects.

    Examples:
        >>> cache = RetentionCache(model, scorer="snapkv", policy=policy)
        >>> logits = prefill(model, ids, cache)
        >>> cache.kept_positions(0).shape  # of layer 0: (batch, KV heads, units)
        torch.Size([1, 4, 80])
        >>> cache.memory().units
        80
    """

    model: Any
    next_position = 0
    """Rotary position of the coming token: how far positions reach."""
    text_end = 0
    """Tokens up to where the last text that was read ends, padding included; what follows it are turns."""
    last_tokens: Tensor | None = None
    """(B, 1) the prompt's last token, while it is the newest unit."""
    held_back = False
    """Whether `last_tokens` is still to be fed."""
    fed_again = False
    """Whether it has been fed before."""
    newest_hidden: Tensor | None = None
    """(B, 1 or 2, E) hidden states of the newest tokens, for a scorer that rates tokens."""
    pad: Tensor | None = None
    """(B,) left padding of each row, where rows differ."""
    shift: Tensor | None = None
    """(B,) by how much rotary positions of each row lag behind `next_position`, where rows differ."""
    digest: Tensor | None = None
    """(B,) fingerprint of the token ids that were read; None where they are unknown."""
    protected: Rows = ()
    """Spans that stay whatever their scores, of each row or of all rows alike; see `protect`."""
    suspect: Tensor | None = None
    """Whether a scorer may have returned NaN or infinity; looked at where the cache is used next."""
    watch: Any = None
    """What looks at the attention of the answer in progress, if anybody wants to know."""
    _interrupted = False
    _peak = 0

    def __init__(
        self,
        model: nn.Module,
        scorer: RetainingHeads | Scorer | str,
        policy: RetentionPolicy | Mapping[str, Any] | None = None,
        *,
        store: type[Store] | str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model is a {type(model).__name__}; load it with AutoModelForCausalLM.from_pretrained")
        backbone = describe(model)
        policy = policy_of(policy)
        scorer = get(scorer) if isinstance(scorer, str) else scorer
        if not isinstance(scorer, RetainingHeads | Scorer):
            what = f"the class {scorer.__name__}" if isinstance(scorer, type) else f"a {type(scorer).__name__}"
            raise ValueError(f"scorer is {what}; give retaining heads, a scorer object, or a name such as {FALLBACK!r}")
        if isinstance(scorer, RetainingHeads):
            if policy is None and scorer.config.policy:
                policy = RetentionPolicy.from_dict(scorer.config.policy, "the heads' policy")
            scorer = RetainingHeadScorer(heads=scorer)
        self.model, self.decoder, self.backbone, self.scorer = model, find_decoder(model), backbone, scorer
        self.whole = describe_whole(model)
        """The backbone with the KV heads of all processes."""
        self.ranks = ranks_of(model)
        """The processes that share the KV heads; what the cache holds are those of this one."""
        policy = policy or RetentionPolicy(budget=usual_budget(backbone.max_positions))
        self.policy = with_shares(policy, scorer, [shape.num_kv_heads for shape in backbone.full_shapes])
        self.store = None if store is None else find_store(store)
        """What holds the units, if it is not ours."""
        self.prepared = scorer.prepare(model)
        """What the scorer needs of this backbone."""
        check_pair(scorer, self.policy)
        self.merger = None if self.policy.merge == NO_MERGER else mergers.get(self.policy.merge)
        """Folds the units that go into those that stay."""
        self.merging = None if self.merger is None else self.merger.prepare(model)
        """What the merger needs of this backbone."""
        if self.merger is not None:
            check_slots(self.policy, self.merger.slots(self.merging))
        if self.ranks is not None:
            check_over_ranks(self)
        self.latents = latents(model)
        """The layers with latent attention."""
        self.rotary = Rotary(self.decoder, unrotated_layers(model, backbone))
        self.rotation, self.fixed_reach = RotationCheck(backbone.model_type), fixed_reach(self.decoder)
        self.workspace, self.limits = Workspace(), Limits(self.policy, scorer, backbone)
        """Memory that the layers share, and how many units of which layer stay."""
        self.copies_memory = CacheMemory()
        """What was counted of the copy that held the beams, or the other answers, of the answer written last."""
        self._slots = self._second_slots = [0] * len(backbone.layers)
        """Most slots that each full-attention layer has had, and its second tier."""
        super().__init__(layers=[make_layer(self, index) for index in range(backbone.num_layers)])
        number = int(getattr(self.decoder.config, "number_of_conv_states", 1))
        self.carriers = {i: States(number) for i, kind in enumerate(backbone.kinds) if kind in (RECURRENT, BOTH)}
        for index, states in self.carriers.items():
            states.show(self.layers[index])
        own = scorer if isinstance(scorer, FeatureScorer) else None
        self.features = PROJECTIONS if own is None else own.feature_source(self.prepared)
        """What the scorer looks at, where it looks at features."""
        self.widths = feature_widths(model, backbone, self.features)
        """Numbers of a token's features, by full-attention layer."""
        self.computation: dict[str, Any] | None = None
        """What the backbone computed besides its weights when it was read; see `locret.heads.fingerprint`."""

    @cached_property
    def patterns(self) -> list[SparseAttention]:
        """How queries attend while a text is read, by layer; empty: densely."""
        strategy = prefill_attention.get(self.policy.prefill_attention)
        own = slice(None) if self.ranks is None else self.ranks.part(self.whole.num_heads)
        return [] if strategy is None else [SparseAttention(heads[own]) for heads in strategy.by_head(self.whole)]

    def holders(self) -> Iterator[tuple[int, str, Units]]:
        """Yield all that holds anything, with its layer and what its tensors' names begin with in a file."""
        for index, layer in enumerate(self.layers):
            for name, holder in layer.holders.items():
                yield index, f"layers.{index}.{name}", holder
            if index in self.carriers:
                yield index, f"layers.{index}.{STATES}", self.carriers[index]

    @property
    def governed(self) -> list[RetentionLayer]:
        """The layers of full attention, whose units compete for the budget."""
        return [layer for layer in self.layers if isinstance(layer, RetentionLayer)]

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before the first token."""
        return max((holder.batch for _, _, holder in self.holders()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on the backbone's devices."""
        return self.workspace.nbytes + sum(holder.nbytes for _, _, holder in self.holders())

    def kept_positions(self, layer: int) -> Tensor:
        """Return the original text positions of the units held in one layer.

        Args:
            layer: Index of a full-attention layer of the backbone.

        Returns:
            (batch, kv_heads, units) int64, ascending; -1 in front where a row or head holds fewer units than others.
            Under tensor parallelism the KV heads are those of this process.

        Raises:
            ValueError: If that layer slides over a window and holds no scored units.
        """
        return _held(self, layer, POSITIONS).long()

    def kept_everywhere(self, layer: int) -> Tensor:
        """Return `kept_positions` with the KV heads of all processes that share them; called in all of them alike."""
        own = self.kept_positions(layer)
        return own if self.ranks is None else self.ranks.gather(own, 1)

    def kept_scores(self, layer: int) -> Tensor:
        """Return the (batch, kv_heads, units) float32 scores of the units held in one layer."""
        if self.reader is not None:
            self.reader.rate_waiting()
        return _held(self, layer, SCORES).clone()

    def memory(self) -> CacheMemory:
        """Return planned and counted bytes of all buffers, the shared workspace included."""
        limits, most = self.limits, self.policy.host_budget
        _note_slots(self)
        slots, second = self._slots, self._second_slots
        if not self.policy.needs_length:
            slots = slots if any(slots) else list(limits.plan(None).peak)
            second = [most] * len(slots) if isinstance(most, int) and not self.seen else second
        of = compute_dtype(self.model).itemsize, self.rows or 1
        planned = limits.fast_bytes(self.backbone, slots, second, *of)
        return replace(self.counted(), planned=planned, host_planned=limits.far_bytes(self.backbone, second, *of))

    def counted(self) -> CacheMemory:
        """Return what `memory` counts, with nothing planned."""
        layers = self.governed
        hosts = [layer.tier for layer in layers if layer.tier is not None]
        fills = [layer.fill for layer in layers] or [0]
        return CacheMemory(
            actual=self.nbytes,
            peak=max(self._peak, self.nbytes),
            units=round(sum(fills) / len(fills)) if self.policy.head_budgets == "shares" else max(fills),
            host=sum(host.away_nbytes for host in hosts),
            host_units=max((host.fill for host in hosts if not host.resident), default=0),
            moved=sum(host.moved for host in hosts),
        )

    def protect(self, *rows: Iterable[Span]) -> None:
        """Say which tokens stay whatever their scores, instead of what was said before.

        What is protected is part of the budget: other units have what it leaves. Spans hold from now on, in every
        layer with scored units and every KV head, while texts are read, turns added and answers written, and in what
        is copied, saved, shrunk and composed.

        Args:
            *rows: Spans of the text that the cache reads, counted as `kept_positions` counts; once for all rows of a
                batch, or for each of them. Without any nothing is protected any more.

        Raises:
            ValueError: If the budget cannot hold them, two shares are of the same tokens, a pinned token has been read
                and evicted already, or a rule of its own decides what stays.

        Examples:
            >>> cache = RetentionCache(model, scorer="snapkv", policy=policy)
            >>> cache.protect([Span(0, 12)])
            >>> logits = prefill(model, ids, cache)
            >>> cache.kept_positions(0)[0, 0, :12].tolist()
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
        """
        if self.reader is None or self.reader.answering:  # between the chunks of a read it may be said too
            self.check_whole()
        found = checked_rows(rows)
        check_rows(found, self.rows)
        check_room(self, found)
        check_held(self, found)
        self.protected = found
        if self.reader is not None:
            self.reader.limits.protect(found)

    def check_whole(self) -> None:
        """Refuse to go on from a read that did not end."""
        if self.suspect is not None:
            check_scores(self.scorer, self.suspect)
            self.suspect = None
        if self._interrupted:
            raise ValueError("an earlier read of this cache was interrupted; start again with cache.fresh()")
        if self.reader is not None and self.reader.torn:
            raise ValueError("this cache is being read; go on when that read has ended, or with cache.fresh()")

    def finish_scores(self) -> None:
        """Refuse to go on from a read that did not end, and give all units their scores."""
        self.check_whole()
        if self.reader is not None:
            self.reader.rate_waiting()

    @property
    def turn_room(self) -> int:
        """Tokens that a turn may have to be read as it is, without eviction; 0: it is read like more text."""
        policy = self.policy
        if not self.seen or policy.turns != "local" or policy.recalls_blocks:
            return 0
        room = policy.chunk_size - max(self.seen - self.text_end, 0)
        for nth, layer in enumerate(self.governed):
            if (most := self.limits.most_answering(nth)) is not None:
                room = min(room, most - layer.fill)
        return max(room, 0)

    @contextmanager
    def read_by(self, reader: Reader) -> Iterator[Reader]:
        """Let a reader fill the cache until the block ends; if it ends in the middle of something, remember that."""
        self.check_whole()
        if self.reader is not None:
            raise ValueError("this cache is answering; go on when that answer has ended, or with cache.copy()")
        self.reader = reader
        try:
            yield reader
        finally:
            self._interrupted, self.reader = True, None
            if not reader.torn:
                self._peak = max(self._peak, self.nbytes)
                reader.rate_waiting()
                self._interrupted = False

    def number(self, steps: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Return (1 or B, 1, L) original and (B, L) rotary positions of the coming tokens; `steps` are 0 .. L - 1."""
        original = (steps + self.seen).to(torch.int32).expand(1, 1, len(steps))
        rotary = (steps + self.next_position).expand(batch, len(steps))
        if self.pad is not None and self.shift is not None:
            original = original - self.pad[:, None, None].to(torch.int32)
            rotary = rotary - self.shift[:, None]
        return original, rotary

    def finished(self, hidden: Tensor) -> None:
        """Count the tokens of a forward pass with (B, L, E) last hidden states."""
        length = hidden.shape[1]
        self.seen += length
        self.held_back = self.fed_again = False
        self.next_position += length
        if self.reader is None or not self.reader.answering:  # while an answer is written, no buffer shrinks
            self._peak = max(self._peak, self.nbytes)

    def end_reading(self, new_tokens: int) -> None:
        """Give back what only reading needed, but for room for `new_tokens` generated ones."""
        self.rotary.forget()
        if self.policy.when == "prompt_end":
            for nth, layer in enumerate(self.governed):
                layer.store.shrink(self.limits.answer_capacity(nth, layer.fill + new_tokens))
            self.workspace.clear()

    def make_room(self, tokens: int) -> None:
        """Get ready for so many tokens that are no prompt, in one allocation. Sets the planned bytes."""
        check_reach(self, self.next_position + tokens, tokens)  # evictions while answering do not turn positions back
        slots = [self.limits.answer_capacity(nth, layer.fill + tokens) for nth, layer in enumerate(self.governed)]
        self.reserve_slots(slots, self.limits.host_answering([layer.held for layer in self.governed], tokens))

    def reserve_slots(self, slots: Sequence[int], host: Sequence[int] = ()) -> None:
        """Make room for so many units in each full-attention layer, and in its second tier."""
        for layer, capacity in zip(self.governed, slots, strict=True):
            layer.store.reserve(max(capacity, layer.fill))
        for layer, capacity in zip(self.governed, host, strict=False):
            if layer.tier is not None:
                layer.tier.reserve(capacity)
        _note_slots(self)

    def fresh(self) -> RetentionCache:
        """Return an empty cache for the same model, scorer and policy."""
        return RetentionCache(self.model, self.scorer, self.policy, store=self.store)

    @torch.inference_mode(False)
    def copy(self) -> Self:
        """Return an independent copy: a document read once answers many questions, each on its own copy.

        Raises:
            ValueError: If a read of this cache was interrupted, or is in progress.
        """
        self.finish_scores()
        return take_rows(self)

    def take_back(self) -> None:
        """Forget the newest token, so that it can be fed again for its logits; a second call changes nothing.

        Raises:
            ValueError: If a read of this cache was interrupted, or is in progress, or it carries states that do not say
                what they were before that token.
        """
        self.check_whole()
        if self.held_back:
            return
        for states in self.carriers.values():
            states.check_take_back()
        with self._changed_whole():
            if self.digest is not None:
                last = self.last_tokens
                self.digest = None if last is None else shortened(self.digest, last.to(self.digest.device))
            if self.newest_hidden is not None:
                self.newest_hidden = self.newest_hidden[:, :-1] if self.newest_hidden.shape[1] > 1 else None
            for _, _, holder in self.holders():
                holder.take_back()
            self.seen -= 1
            self.next_position -= 1
            self.held_back = self.fed_again = True

    @torch.inference_mode(False)
    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch; `rows` is (new batch,) int64.

        Raises:
            ValueError: If a read of this cache was interrupted, or is in progress.
        """
        before = self.rows
        with self._changed_whole():
            for _, _, holder in self.holders():
                holder.select_rows(rows)
            index_rows(self, rows)
            if len(rows) < before:
                self.workspace.clear()  # it is of a size for more

    reorder_cache = batch_select_indices = select_rows  # as transformers calls it

    def take_rows(self, rows: Tensor | None = None) -> Self:
        """Return some rows, or all, as a cache of their own."""
        return take_rows(self, rows)

    @contextmanager
    def _changed_whole(self) -> Iterator[None]:
        """Let all layers be changed; if that ends in the middle, remember it as an interrupted read."""
        self.finish_scores()
        self._interrupted = True
        yield
        self._interrupted = False

    def split(self, batch: int) -> list[RetentionCache]:
        """Return one cache per row, without the empty slots in front of short rows; new ones if nothing was read."""
        if not self.seen:
            rows = [take_rows(self) for _ in range(batch)]
            for index, row in enumerate(rows):
                row.protected = self.protected[index : index + 1] if len(self.protected) > 1 else self.protected
            return rows
        self.finish_scores()
        return [trimmed(self, row) for row in range(batch)]

    def join(self, rows: list[Self], width: int, new_tokens: int = 0) -> None:
        """Take over the units of single rows, aligned to the right, with room for `new_tokens` more."""
        with self._changed_whole():
            join_rows(self, rows, width, new_tokens)
            self._peak = max(self._peak, self.nbytes)
        self.end_reading(new_tokens)

    @torch.no_grad()
    def to_dynamic_cache(self) -> DynamicCache:
        """Return what is held as an ordinary prefix, for any code that takes a cache of transformers.

        To that code it is a prompt of as many tokens as there are units, from position 0 on; the backbone needs nothing
        of this toolkit. The copy is on the backbone's devices and grows like any other cache. Units of a second tier
        stay here.

        Raises:
            ValueError: If it would be no ordinary prefix: original positions, heads, layers or rows with different
                numbers of units, layers that slide; or a read was interrupted.

        Examples:
            >>> cache = RetentionCache(model, scorer=heads, policy=policy)
            >>> logits = prefill(model, ids, cache)
            >>> cache.to_dynamic_cache().get_seq_length()
            80
        """
        self.finish_scores()
        return to_dynamic_cache(self)


def _held(cache: RetentionCache, index: int, name: str) -> Tensor:
    layer = cache.layers[index]
    if not isinstance(layer, RetentionLayer):
        raise ValueError(f"layer {index} has no scored units; layers that have: {cache.backbone.layers}")
    if not layer.is_initialized:
        return torch.empty(1, cache.backbone.shape(index).num_kv_heads, 0)
    return layer.store.held(name)


def _note_slots(cache: RetentionCache) -> None:
    """Remember the most slots that there have been."""
    cache._slots = list(map(max, cache._slots, [layer.capacity for layer in cache.governed]))
    second = [0 if layer.tier is None else layer.tier.capacity for layer in cache.governed]
    cache._second_slots = list(map(max, cache._second_slots, second))
