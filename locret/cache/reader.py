"""One read, or one answer, in progress: the phases of Algorithm 1, and all that dies with them.

A reader is the observer of its cache's forward passes. The cache holds what has been read; where a reader leaves it in
the middle of something, the cache says so wherever it is used next.
"""

# B batch, K KV heads, L new tokens, E hidden size

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from locret.backbone.adapters import unwrap
from locret.backbone.attention import MaskMemo, View
from locret.backbone.chunk import Attended, Chunk, Projections, counting
from locret.backbone.instrument import Observer, instrumented
from locret.cache.checks import check_reach, check_scores
from locret.cache.digest import extended
from locret.cache.layer import RetentionLayer
from locret.cache.store import POSITIONS, SCORES, DenseStore, Part
from locret.cache.unscored import Unscored
from locret.policy.selectors import Stay
from locret.prefill_attention.blocked import SparseAttention
from locret.scorers import FeatureScorer, Rated, TokenPass, TokenScorer

if TYPE_CHECKING:
    from locret.cache.cache import RetentionCache


class Reader(Observer):
    """Fills a cache: observes its forward passes, and scores and evicts as its policy says."""

    def __init__(self, cache: RetentionCache, *, answering: bool) -> None:
        self.cache, self.policy, self.scorer = cache, cache.policy, cache.scorer
        self.layers: list[RetentionLayer] = cache.governed
        shape = cache.backbone.shape
        self.projections: Mapping[int, Projections] = {
            i: Projections(shape(i), latent=cache.latents.get(i)) for i in cache.backbone.layers
        }
        self.masks = MaskMemo()
        self.waiting = Unscored([layer.store for layer in self.layers], cache.widths, idle=not cache.latents)
        """Generated units without scores."""
        self.limits = copy.copy(cache.limits)
        self.limits.protect(cache.protected)
        self.limits.read = cache.seen
        self.answering = answering
        self.torn = False
        """Whether the cache would be left in the middle of something."""
        self._nth = {layer_idx: nth for nth, layer_idx in enumerate(cache.backbone.layers)}
        self._evicting = not answering
        self.last = False
        """Whether the coming forward pass ends with the prompt's last token."""
        self._new_tokens = 0
        self._chunk_start = 0
        self._ids: Tensor | None = None
        self._digest: Tensor | None = None
        self._extremes: list[Tensor] = []
        self._first = True
        self._positions: Tensor | None = None
        self._view: View | None = None
        self._patterns: Sequence[SparseAttention] = ()
        self._shared: dict[str, Any] = {}
        self._lent: dict[int, tuple[Tensor, Tensor, bool]] = {}
        self._due: list[tuple[int, Stay, int]] = []
        """Evictions of layers that others have still to attend to."""

    # -- the phases of a read -----------------------------------------------------------------------------------------

    def begin(self, prompt_tokens: int | None, new_tokens: int = 0) -> None:
        """Get ready for a prompt of `prompt_tokens` (None: unknown), to be followed by `new_tokens` generated ones."""
        cache = self.cache
        self._patterns = cache.patterns
        held = [layer.fill for layer in self.layers]
        schedule = self.limits.plan(prompt_tokens, held)
        capacity = self.limits.capacity(schedule, new_tokens)
        host = self.limits.host_capacity(schedule, [layer.held for layer in self.layers], new_tokens)
        check_reach(cache, max(capacity) + max(host), None if prompt_tokens is None else prompt_tokens + new_tokens)
        self.limits.begin(schedule)
        self.torn = True
        cache.reserve_slots(capacity, host)  # first: the second tier takes what an earlier answer leaves
        for nth, layer in enumerate(self.layers):
            layer.unsettle(cache.next_position, cache.seen)
            if self.policy.when == "chunk":
                layer.evict(self.limits.before_reading(nth), cache.next_position)
            if self.scorer.fade != 1 and layer.fill:
                layer.store.columns["scores"].mul_(self.scorer.fade)
        self._new_tokens = new_tokens

    def begin_chunk(self, final: bool) -> None:
        """Announce the next chunk of the prompt; after the final one no stabilizers are protected."""
        ratios = None
        if self.limits.wants_ratios:
            shares = torch.stack([layer.store.share_before(self._chunk_start).cpu() for layer in self.layers])
            ratios = (shares if self.cache.ranks is None else self.cache.ranks.mean(shares)).tolist()
        self.limits.next_chunk(final, ratios)
        self._chunk_start = self.cache.seen
        self._align()

    def _align(self, *, final: bool = False) -> None:
        """Choose the rotary position of the coming token, and make room where a prompt's length is unknown."""
        if self.limits.unbounded:
            for layer in self.layers:
                if layer.fill + self.policy.chunk_size > layer.capacity:
                    layer.store.reserve(2 * layer.fill + self.policy.chunk_size)
        if self.policy.positions == "compact" and not self.cache.backbone.slides:
            # Rotary attention sees only distances, so units are aligned to the right, to the chunk, and the fullest
            # head starts at 0. Where some layers slide, positions stay true and the aligned units end at the chunk.
            self.cache.next_position = max(layer.reach if final else layer.store.longest for layer in self.layers)
        else:
            self.cache.next_position = self.cache.seen

    def begin_local(self) -> None:
        """Announce the local tokens: kept keys are final now, so they are rotated once."""
        self._align(final=True)
        for layer in self.layers:
            layer.settle(self.cache.next_position, self.cache.seen)
        self._evicting = False

    def end(self) -> None:
        """From here on tokens are generated."""
        self.answering, self.last, self.torn = True, False, False
        self.cache.text_end = self.cache.seen
        self.cache.end_reading(self._new_tokens)

    # -- what a forward pass asks and tells ---------------------------------------------------------------------------

    def positions(self, tokens: Tensor) -> Tensor:
        """Return the (B, L) rotary positions of the coming tokens."""
        self.torn, self._shared = True, {}
        for states in self.cache.carriers.values():
            states.marking = self.answering or self.last
        batch, length = tokens.shape[:2]
        self.limits.read = self.cache.seen + length
        ids = tokens if tokens.ndim == 2 else None
        known = self.cache.digest is not None or not self.cache.seen
        self._digest = extended(self.cache.digest, ids) if known and ids is not None else None
        self._ids = ids if isinstance(self.scorer, TokenScorer) else None
        steps = torch.arange(length, device=tokens.device)
        self._positions, rotary = self.cache.number(steps, batch)
        return rotary

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> None:
        """Add the units of L new tokens to a full-attention layer."""
        assert self._positions is not None
        nth, cache, raw_keys = self._nth[layer_idx], self.cache, None
        layer = self.layers[nth]
        if layer_idx in cache.latents:  # transformers holds the latent first
            keys, values = cache.latents[layer_idx].halves(values), keys
        if layer.raw or (self._evicting and (layer.compact or layer.folding is not None)):
            own = self.projections[layer_idx].key()
            if self._evicting:
                cache.rotation.compare(layer_idx, layer.store.rotary, cache.next_position, own, keys)
            raw_keys = own if layer.compact else None
        elif self.answering:
            most = self.limits.most_answering(nth)
            if most is not None and layer.fill + keys.shape[-2] > most:
                self.rate_waiting()
                layer.evict(self.limits.answering(nth, keys.shape[-2]), cache.next_position)
        layer.append(keys, values, raw_keys, self._positions)
        if layer_idx in cache.backbone.lenders:
            self._lent[layer_idx] = keys, values, raw_keys is not None

    def view(self, layer_idx: int, query: Tensor, scaling: float) -> View:
        """Return what queries attend to; `update` has been called for their layer."""
        backbone = self.cache.backbone
        if backbone.borrows(layer_idx):
            return self._borrowed(backbone.sources[layer_idx], layer_idx)
        if layer_idx not in self._nth:
            return self.cache.layers[layer_idx].view(again=layer_idx in backbone.lenders)  # type: ignore[no-any-return]
        nth = self._nth[layer_idx]
        layer = self.layers[nth]
        self._view = layer.view(self.cache.next_position, self.projections[layer_idx])
        recalled = None
        if layer.host is not None and not (self._evicting and (layer.compact or not layer.host.lookup.reading)):
            recalled = layer.host.recalled(
                query,
                scaling=scaling,
                nth=nth,
                layers=len(self.layers),
                near=self._view,
                generating=self.answering,
                fed=self.answering and self.cache.held_back,
                shared=self._shared,
                ranks=self.cache.ranks,
            )
        if recalled is None:
            return self._by_pattern(layer_idx, layer, self._view)
        if query.shape[2] == 1 and isinstance(layer.store, DenseStore):
            lent = layer.store.lend_room(recalled)
            if lent is not None:
                return lent
        # A pattern of slots says nothing of recalled units, so with those all queries attend to all that is held.
        return replace(self._view, recalled=recalled)

    def _by_pattern(self, layer_idx: int, layer: RetentionLayer, view: View) -> View:
        """Return a view of what a layer holds as a chunk's queries attend to it."""
        if not self._evicting or not self._patterns or self._patterns[layer_idx].covers(layer.store.longest):
            return view
        return replace(view, sparse=self._patterns[layer_idx])

    def _borrowed(self, source: int, layer_idx: int) -> View:
        """Return what the queries of a layer without units attend to: those of its source, as that has seen them."""
        if source not in self._nth:
            return self.cache.layers[source].view(again=True)  # type: ignore[no-any-return]
        layer = self.layers[self._nth[source]]
        keys, values, waiting = self._lent[source]
        layer.store.look_again(keys, values, waiting=waiting)
        return self._by_pattern(layer_idx, layer, layer.view(self.cache.next_position, self.projections[source]))

    def attended(self, layer: Attended) -> None:
        """Score a layer's units and, when it is time, evict down to the budget at once."""
        nth, (view, self._view) = self._nth[layer.layer_idx], (self._view, None)
        held, one = self.layers[nth], self.answering and layer.new_tokens == 1
        if self.cache.watch is not None and one:
            self.cache.watch.see(nth, layer, cast(View, view), held)
        if one and isinstance(self.scorer, FeatureScorer):
            if (due := self.waiting.add(nth, layer.projections.feature_parts(self.cache.features))) is not None:
                self._rate(nth, due)
            return
        if self.answering and not (self.scorer.rates_answers or self.scorer.columns):
            # No scores choose anything before a text is read again.
            kv_heads = layer.projections.shape.num_kv_heads
            held.rate(layer.query.new_zeros(len(layer.query), kv_heads, layer.new_tokens, dtype=torch.float32))
            return
        stay, base = self._stay_now(nth), self.cache.next_position + layer.new_tokens
        for part in held.parts(cast(View, view), layer.new_tokens, self.scorer.causal):
            held.rate(*self._rated(self._chunk(nth, layer, part, stay)), part.where)
        if stay is None or isinstance(self.scorer, TokenScorer):
            return
        if layer.layer_idx in self.cache.backbone.lenders:
            self._due.append((nth, stay, base))
        else:
            held.evict(stay, base)

    def _chunk(self, nth: int, layer: Attended, part: Part, stay: Stay | None) -> Chunk:
        """Return what the scorer is given of a layer, or of one head of one row."""
        query, projections, learned_sinks = layer.query, layer.projections, layer.learned_sinks
        positions, start = cast(Tensor, self._positions).to(layer.key.device), self.layers[nth].store.row_start
        if part.where is not None:
            row, head = part.where
            group = query.shape[1] // projections.shape.num_kv_heads
            own = slice(head * group, (head + 1) * group)
            query, projections = query[row : row + 1, own], projections.of_head(row, head)
            learned_sinks = None if learned_sinks is None else learned_sinks[own]
            positions = positions if len(positions) == 1 else positions[row : row + 1]
        most = None if self._evicting else self.limits.most_answering(nth)
        if most is not None and stay is None and self.layers[nth].fill >= most:
            # The next token will find no room: these are the scores that decide what makes way for it.
            stay = self.limits.answering(nth, 1)
        staying = stay or Stay(part.keys.shape[2], 0, 0)
        return Chunk(
            layer_idx=layer.layer_idx,
            query=query,
            key=part.keys,
            value=part.values,
            scaling=layer.scaling,
            softcap=layer.softcap,
            learned_sinks=learned_sinks,
            projections=projections,
            positions=positions,
            unit_positions=part.columns[POSITIONS],
            stored_scores=part.columns[SCORES][..., : part.keys.shape[2] - layer.new_tokens],
            columns={n: column for n, column in part.columns.items() if n not in (SCORES, POSITIONS)},
            next_position=self.cache.next_position + layer.new_tokens,
            row_start=counting(1, query.device).expand(len(query)) if start is None else start,
            padded=start is not None,
            selects=stay is not None,
            budget=staying.budget,
            recent=staying.recent,
            sinks=staying.sinks,
            last=self.last,
            generating=self.answering,
            prepared=self.cache.prepared,
        )

    def _rated(self, chunk: Chunk) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what the scorer says of a chunk: scores, and the columns it declares."""
        rated = self.scorer.score(chunk)
        scores, columns = rated if isinstance(rated, Rated) else (rated, {})
        batch, kv_heads, units = chunk.unit_positions.shape
        new, every = (batch, kv_heads, chunk.new_tokens), (batch, kv_heads, units)
        for name, values in {"scores": scores, **columns}.items():
            self._check(name, values, chunk.key.device, {new: "for the new units", every: "for all"})
        if self.scorer.causal or (chunk.selects and units > chunk.budget):  # else they are replaced before they matter
            self._note_unsound(scores)
        if self.cache.fed_again:  # a token fed twice counts once: units before it have been rated with it already
            own = slice(-chunk.new_tokens, None)
            return scores[:, :, own], {name: values[:, :, own] for name, values in columns.items()}
        return scores, dict(columns)

    def _check(self, name: str, values: object, device: torch.device, shapes: Mapping[tuple[int, ...], str]) -> None:
        """Refuse anything but real numbers on the device, in one of some shapes."""
        returned = f"scorer {self.scorer.name} returned {name}"
        if not isinstance(values, Tensor):
            raise ValueError(f"{returned} of type {type(values).__name__}, not a tensor")
        if values.is_complex() or values.device != device:
            raise ValueError(
                f"{returned} as {values.dtype} on {values.device}; return real numbers on {device}, where the units are"
            )
        if tuple(values.shape) not in shapes:
            wanted = ", or ".join(f"{shape} {meaning}" for shape, meaning in shapes.items())
            raise ValueError(f"{returned} of shape {tuple(values.shape)}; return {wanted}")

    def _note_unsound(self, scores: Tensor) -> None:
        """Remember whether scores are finite, without waiting for them."""
        if not self.answering:  # empty slots, whose scores do not matter, exist only then
            self._extremes += torch.aminmax(scores if scores.is_floating_point() else scores.float())

    def _report_unsound(self) -> None:
        """Look at the first chunk's scores at once, and leave those of later ones to the next use of the cache."""
        first, self._first = self._first, False
        if not self._extremes:
            return
        cache, device = self.cache, self._extremes[0].device
        unsound = ~torch.isfinite(torch.stack([extreme.to(device) for extreme in self._extremes])).all()
        if cache.ranks is not None:  # what one of them finds stops all
            unsound = cache.ranks.largest(unsound.int()) > 0
        self._extremes = []
        if first:  # later ones do not wait for the device
            check_scores(cache.scorer, unsound)
        else:
            cache.suspect = unsound if cache.suspect is None else cache.suspect.to(device) | unsound

    def finished(self, hidden: Tensor) -> None:
        """Rate tokens, where that takes a whole pass, and count them."""
        self.cache.rotation.report()
        for nth, stay, base in self._due:
            self.layers[nth].evict(stay, base)
        self._due, self._lent = [], {}
        for index in self.cache.backbone.lenders - self._nth.keys():
            self.cache.layers[index].view()
        if isinstance(self.scorer, TokenScorer):
            self._rate_tokens(self.scorer, hidden)
        self._report_unsound()
        self.cache.digest = self._digest
        self.cache.finished(hidden)
        if self.answering:
            self.cache.last_tokens = None
        self.torn = not self.answering

    def _stay_now(self, nth: int) -> Stay | None:
        """Return what stays after this forward pass; None: everything."""
        if self._evicting and self.policy.when == "chunk":
            return self.limits.after_chunk(nth)
        return self.limits.at_prompt_end(nth) if self.last and self.policy.when == "prompt_end" else None

    # -- scores that come later ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def rate_waiting(self) -> None:
        """Give the newest units the scores they have been waiting for."""
        for nth, features_BWF in self.waiting.take():
            self._rate(nth, features_BWF)

    def _rate(self, nth: int, features_BWF: Tensor) -> None:
        scorer, layer_idx = cast(FeatureScorer, self.scorer), self.cache.backbone.layers[nth]
        self.layers[nth].rate(scorer.score_features(self.cache.prepared, layer_idx, features_BWF))

    def _rate_tokens(self, scorer: TokenScorer, hidden: Tensor) -> None:
        """Rate the tokens of a forward pass that is over, in all layers alike, and evict where it is time."""
        assert self._positions is not None
        if self._ids is None:
            raise ValueError(f"scorer {scorer.name} rates token ids, but the backbone was given embeddings")
        cache = self.cache
        before = None if cache.newest_hidden is None else cache.newest_hidden[:, -1:]
        tokens = TokenPass(ids_BL=self._ids, hidden_BLE=hidden, before_B1E=before)
        scores = scorer.score_tokens(unwrap(cache.model), tokens)
        self._check("scores", scores, hidden.device, {tuple(self._ids.shape): "one for each token"})
        self._note_unsound(scores)
        states = hidden if cache.newest_hidden is None else torch.cat([cache.newest_hidden, hidden], dim=1)
        cache.newest_hidden = states[:, -2:].clone()
        for nth, (layer, shape) in enumerate(zip(self.layers, cache.backbone.full_shapes, strict=True)):
            device = layer.store.held("scores").device
            layer.rate(scores[:, None].to(device).expand(-1, shape.num_kv_heads, -1))
            if (stay := self._stay_now(nth)) is not None:
                layer.evict(stay, cache.next_position + hidden.shape[1])


@contextmanager
def reading(model: nn.Module, cache: RetentionCache, prompt_tokens: int | None, new_tokens: int) -> Iterator[Reader]:
    """Read a prompt of so many tokens (None: unknown) into a cache, to be followed by so many generated ones."""
    if cache.pad is not None:
        raise ValueError("rows of different length are read through locret.prefill")
    with instrumented(model), cache.read_by(Reader(cache, answering=False)) as reader:
        reader.begin(prompt_tokens, new_tokens)
        yield reader


@contextmanager
def answering(model: nn.Module, cache: RetentionCache) -> Iterator[Reader]:
    """Let forward passes go on from what a cache holds; what they add is scored when the block ends."""
    with instrumented(model), cache.read_by(Reader(cache, answering=True)) as reader:
        yield reader
