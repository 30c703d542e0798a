"""The bounded cache: keeps the best units of every KV head after each chunk, and forgets the rest for good."""

# B batch, K KV heads, L new tokens, S slots, D head dim

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from locret.backbone.adapters import describe, find_decoder, unwrap
from locret.backbone.instrument import Chunk, Projections
from locret.backbone.rotary import Rotary, RotationCheck
from locret.cache.cache_contents import CacheContents
from locret.cache.layer import RetentionLayer
from locret.cache.limits import check_pair
from locret.cache.sliding import SlidingLayer
from locret.cache.unscored import Unscored
from locret.heads.heads import RetainingHeads
from locret.policy.policy import RetentionPolicy
from locret.scorers import RetainingHeadScorer, Scorer, TokenPass, TokenScorer, get

if TYPE_CHECKING:
    from typing_extensions import Self


class RetentionCache(CacheContents):
    """A transformers cache that never holds more than `budget` units per KV head between chunks.

    Args:
        model: The backbone the cache is for.
        scorer: Retaining heads, a scorer object, or the name of a training-free scorer.
        policy: How many units stay; if None, what the heads recommend, else the defaults.

    Raises:
        ValueError: If the model has no keys and values to evict, or scorer and model do not match.

    Examples:
        >>> cache = RetentionCache(model, scorer="snapkv", policy=policy)
        >>> logits = prefill(model, ids, cache)
        >>> cache.kept_positions(0).shape  # of layer 0: (batch, KV heads, units)
        torch.Size([1, 4, 80])
        >>> cache.memory().units
        80
    """

    def __init__(
        self, model: nn.Module, scorer: RetainingHeads | Scorer | str, policy: RetentionPolicy | None = None
    ) -> None:
        backbone = describe(model)
        if isinstance(scorer, str):
            scorer = get(scorer)
        if isinstance(scorer, RetainingHeads):
            if policy is None and scorer.config.policy:
                policy = RetentionPolicy(**scorer.config.policy)
            scorer = RetainingHeadScorer(heads=scorer)
        scorer.prepare(model)
        if not backbone.layers:
            warnings.warn("no layer of this backbone has full attention: budget and scorer are ignored", stacklevel=2)
        policy = policy or RetentionPolicy()
        check_pair(scorer, policy)
        super().__init__(model, backbone, scorer, policy, Rotary(find_decoder(model)))
        self._place = {layer_idx: place for place, layer_idx in enumerate(backbone.layers)}
        self._ids: Tensor | None = None
        self._phase = "decode"
        self._last = False
        self._answer_tokens = 0
        self._projections: dict[int, Projections] = {}
        self._unit_positions: Tensor | None = None
        self._chunk_start = 0
        self._rotation_check = RotationCheck(backbone.model_type)
        self.unscored = Unscored(self.governed)
        """Generated units without scores."""

    # -- phases: prefill and generate move the cache through them ---------------------------------------------------

    def begin_reading(self, prompt_tokens: int | None, new_tokens: int = 0) -> None:
        """Get ready for a prompt of `prompt_tokens` (None: unknown), to be followed by `new_tokens` generated ones."""
        if self.pad is not None:
            raise ValueError("rows of different length are read one at a time; use locret.prefill")
        if self._phase != "decode":
            raise ValueError("an earlier read of this cache was interrupted; start again with cache.fresh()")
        self.rate_waiting()
        schedule = self.limits.plan(prompt_tokens, [layer.fill for layer in self.governed])
        self.limits.begin(schedule)
        for place, layer in enumerate(self.governed):
            layer.unsettle(self._next_position)
            if self.policy.when == "chunk":
                layer.evict(*self.limits.before_reading(place))
        self._reserve(self.limits.capacity(schedule, new_tokens))
        self._answer_tokens = new_tokens
        self._phase = "read"

    def begin_chunk(self, final: bool) -> None:
        """Announce the next chunk of the prompt; after the final one no stabilizers are protected."""
        ratios = None
        if self.limits.wants_ratios:
            ratios = [float(layer.share_from_before(self._chunk_start)) for layer in self.governed]
        self.limits.next_chunk(final, ratios)
        self._chunk_start = self.seen
        self._align()

    def _align(self) -> None:
        """Choose the rotary position of the coming token, and make room where a prompt's length is unknown."""
        if self.limits.unbounded:
            for layer in self.governed:
                if layer.fill + self.policy.chunk_size > layer.capacity:
                    layer.reserve(2 * layer.fill + self.policy.chunk_size)
        if self.policy.positions == "compact" and self.backbone.uniform:
            # Rotary attention sees only distances, so units are aligned to the right, to the chunk, and the fullest
            # head starts at 0. Where some layers slide, positions stay true and the aligned units end at the chunk.
            self._next_position = max(layer.longest for layer in self.governed)
        else:
            self._next_position = self.seen

    def begin_local(self) -> None:
        """Announce the local tokens: kept keys are final now, so they are rotated once."""
        self._align()
        for layer in self.governed:
            layer.settle(self._next_position)
        self._phase = "local"

    def end_reading(self) -> None:
        """From here on tokens are generated."""
        self._phase, self._last = "decode", False
        self._rotary.forget()
        if self.policy.when == "prompt_end":
            for place, layer in enumerate(self.governed):
                layer.shrink(self.limits.answer_capacity(place, layer.fill + self._answer_tokens))
            self._workspace.clear()

    def begin_last(self) -> None:
        """Announce the forward pass that ends with the prompt's last token."""
        self._last = True

    def reserve(self, prompt_tokens: int | None, new_tokens: int = 0) -> None:
        """Make buffers large enough for what is to come, in one allocation. Sets the planned bytes."""
        held = [layer.fill for layer in self.governed]
        if prompt_tokens == 0:
            self._reserve([self.limits.answer_capacity(p, units + new_tokens) for p, units in enumerate(held)])
        else:
            self._reserve(self.limits.capacity(self.limits.plan(prompt_tokens, held), new_tokens))

    def _reserve(self, slots: Sequence[int]) -> None:
        for layer, capacity in zip(self.governed, slots, strict=True):
            layer.reserve(max(capacity, layer.fill))
        self._note_largest()

    # -- what `instrumented` asks and tells --------------------------------------------------------------------------

    def connect(self, projections: dict[int, Projections]) -> None:
        """Remember where the hooks put each layer's projections."""
        self._projections = projections

    def positions(self, tokens: Tensor) -> Tensor:
        """Return the (B, L) rotary positions of the coming tokens."""
        batch, length = tokens.shape[:2]
        self._ids = tokens if tokens.ndim == 2 else None
        steps = torch.arange(length, device=tokens.device)
        self._unit_positions = (steps + self.seen).to(torch.int32).expand(1, 1, length)
        rotary = (steps + self._next_position).expand(batch, length)
        if self.pad is not None and self._shift is not None:
            self._unit_positions = self._unit_positions - self.pad[:, None, None].to(torch.int32)
            rotary = rotary - self._shift[:, None]
        return rotary

    def row_start(self, layer_idx: int) -> Tensor | None:
        """Return (B,) the first filled slot of each row, where rows differ."""
        start: Tensor | None = self.layers[layer_idx].row_start
        return start

    def segments(self, layer_idx: int) -> list[list[slice]] | None:
        """Return each head's slots where heads hold different numbers of units."""
        spans: list[list[slice]] | None = self.layers[layer_idx].segments
        return spans

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add the units of L new tokens to a layer; called by the backbone's attention. See `transformers.Cache`."""
        layer: RetentionLayer | SlidingLayer = self.layers[layer_idx]
        if isinstance(layer, SlidingLayer):
            return layer.update(key_states, value_states)
        if layer_idx not in self._projections or self._unit_positions is None:
            raise ValueError(
                "a RetentionCache is filled by locret.prefill and locret.generate, not by calling the model"
            )
        raw_keys = None
        if self._phase == "read" and layer.compact:
            raw_keys = self._projections[layer_idx].key()
            self._rotation_check.compare(layer_idx, self._rotary, self._next_position, raw_keys, key_states)
        elif self._phase == "decode":
            new, place = key_states.shape[-2], self._place[layer_idx]
            most = self.limits.most_answering(place)
            if most is not None and layer.fill + new > most:
                self.rate_waiting()
                layer.evict(*self.limits.answering(place, new))
        return layer.append(key_states, value_states, raw_keys, self._unit_positions, self._next_position)

    def attended(self, chunk: Chunk) -> None:
        """Score a layer's units and, when it is time, evict down to the budget at once."""
        place = self._place[chunk.layer_idx]
        if self._phase == "decode" and chunk.new_tokens == 1 and self.scorer.by_features:
            due = self.unscored.add(place, chunk.projections.feature_parts())
            if due is not None:
                self._rate(place, due)
            return
        layer = self.layers[chunk.layer_idx]
        assert self._unit_positions is not None
        chunk.positions = self._unit_positions.to(chunk.key.device)
        chunk.next_position = self._next_position + chunk.new_tokens
        chunk.row_start, chunk.last, chunk.generating = layer.row_start, self._last, self._phase == "decode"
        chunk.budget, chunk.protected = self._limits_now(place)
        evicts_now = chunk.budget is not None
        most = None if self._phase == "read" else self.limits.most_answering(place)
        if most is not None and not evicts_now and layer.fill >= most:
            # The next token will find no room: these are the scores that decide what makes way for it.
            chunk.budget, chunk.protected = self.limits.answering(place, 1)
        for part, where in layer.parts(chunk, self.scorer.causal):
            scores = self.scorer.score(part)
            if self._again:  # a token fed twice counts once: units before it have been rated with it already
                scores = scores[:, :, -chunk.new_tokens :]
            layer.set_scores(scores, where)
        if evicts_now and not self.scorer.needs_hidden:
            assert chunk.budget is not None
            layer.evict(chunk.budget, chunk.protected)

    @torch.no_grad()
    def rate_waiting(self) -> None:
        """Give the newest units the scores they have been waiting for."""
        for place, features_BWF in self.unscored.take():
            self._rate(place, features_BWF)

    def _rate(self, place: int, features_BWF: Tensor) -> None:
        scores = self.scorer.score_features(self.backbone.layers[place], features_BWF)
        self.governed[place].set_scores(scores)

    def _limits_now(self, place: int) -> tuple[int | None, int]:
        """Return the units that stay after this forward pass, and how many of the newest are protected."""
        if self._phase == "read" and self.policy.when == "chunk":
            return self.limits.after_chunk(place)
        if self._last and self.policy.when == "prompt_end":
            return self.limits.at_prompt_end(place)
        return None, 0

    def _rate_tokens(self, hidden: Tensor) -> None:
        """Rate the tokens of a forward pass that is over, in all layers alike, and evict where it is time."""
        assert isinstance(self.scorer, TokenScorer)
        assert self._unit_positions is not None
        if self._ids is None:
            raise ValueError(f"scorer {self.scorer.name} rates token ids, but the backbone was given embeddings")
        before = None if self._context is None else self._context[:, -1:]
        tokens = TokenPass(
            ids_BL=self._ids, hidden_BLE=hidden, before_B1E=before, positions_BL=self._unit_positions[:, 0]
        )
        scores = self.scorer.score_tokens(unwrap(self.model), tokens)
        states = hidden if self._context is None else torch.cat([self._context, hidden], dim=1)
        self._context = states[:, -2:].clone()
        for place, layer in enumerate(self.governed):
            layer.set_scores(scores[:, None].to(layer.scores.device).expand(-1, self.backbone.num_kv_heads, -1))
            budget, protected = self._limits_now(place)
            if budget is not None:
                layer.evict(budget, protected)

    def finished(self, hidden: Tensor) -> None:
        """Count the tokens of a forward pass."""
        length = hidden.shape[1]
        self._rotation_check.report()
        if self.scorer.needs_hidden:
            self._rate_tokens(hidden)
        self.seen += length
        self.held_back = self._again = False
        self._next_position += length
        if self._phase == "decode":
            self.last_tokens = None
        self._peak = max(self._peak, self._bytes())

    def kept_scores(self, layer: int) -> Tensor:
        """Return the (batch, kv_heads, units) float32 scores of the units held in one layer."""
        self.rate_waiting()
        return super().kept_scores(layer)

    def take_back(self) -> None:
        """Forget the newest token, so that it can be fed again for its logits; a second call changes nothing."""
        self.rate_waiting()
        super().take_back()

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch; `rows` is (new batch,) int64."""
        self.rate_waiting()
        super().select_rows(rows)

    def copy(self) -> Self:
        """Return an independent copy: a document read once answers many questions, each on its own copy."""
        self.rate_waiting()
        twin = super().copy()
        twin._projections, twin.unscored = {}, Unscored(twin.governed)
        return twin

    def fresh(self) -> RetentionCache:
        """Return an empty cache for the same model, scorer and policy."""
        return RetentionCache(self.model, self.scorer, self.policy)
