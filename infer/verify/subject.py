"""What is verified: a backbone, what decides which units stay, a policy, a text; and how reads of it are recorded."""

# N tokens, E hidden size, K KV heads, S units, D head dim

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill
from locret.backbone.adapters import Backbone, describe, find_decoder, input_device, unwrap
from locret.backbone.rotary import long_factors
from locret.infer.verify.noise import Noise, apart, measured_noise, one_more_rounding, recorded, run_backbone
from locret.infer.verify.position_modes import measured_layouts
from locret.infer.verify.rotation import Layout, Turn
from locret.scorers import Scorer
from locret.scorers.retaining_heads import as_scorer

NEW_TOKENS = 12
"""Tokens of an answer."""
_LAST = 16


@dataclass(frozen=True)
class Step:
    """What a cache held once a chunk had been read."""

    seen: int
    """Tokens read so far."""
    kept: list[list[Tensor]]
    """Per governed layer and KV head, (S,) original positions, ascending, on the CPU."""


@dataclass(frozen=True)
class Read:
    """A text that was read into a cache."""

    cache: RetentionCache
    logits: Tensor
    """(vocabulary,) float32 on the CPU, of the last token."""
    states: Tensor
    """(N, E) last hidden states, float32 on the CPU."""
    steps: list[Step]


@dataclass(frozen=True)
class Subject:
    """What the checks look at."""

    model: nn.Module
    scorer: RetainingHeads | Scorer
    policy: RetentionPolicy
    ids: Tensor
    """(1, N) token ids, on the CPU."""
    seed: int = 0

    @cached_property
    def backbone(self) -> Backbone:
        """The backbone's shape."""
        return describe(self.model)

    @property
    def tokens(self) -> int:
        """N."""
        return self.ids.shape[1]

    @property
    def decoder(self) -> Any:
        """The stack of decoder layers."""
        return find_decoder(self.model)

    @property
    def rates(self) -> Scorer:
        """What decides which units stay, as the engine has it."""
        return as_scorer(self.scorer)

    @property
    def plain_policy(self) -> RetentionPolicy:
        """The policy without what changes units, or how a text is read, by design."""
        plain = RetentionPolicy()
        names = ("key_bits", "value_bits", "merge", "prefill_attention", "host_budget", "recall", "recall_by")
        return replace(self.policy, **{name: getattr(plain, name) for name in names})

    def roomy(self, **changes: Any) -> RetentionPolicy:
        """Return the plain policy with room for the whole text, so that nothing is evicted."""
        plain = RetentionPolicy(
            budget=self.tokens,
            chunk_size=self.policy.chunk_size,
            stabilizers=min(self.policy.stabilizers, self.tokens - 1),
            local_len=self.policy.local_len,
            positions=self.policy.positions,
        )
        return replace(plain, **changes)

    # -- the backbone by itself ---------------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the backbone compute by itself, with the rotary frequencies that it has here."""
        with torch.no_grad(), long_factors(self.decoder):
            yield

    def own_states(self, ids: Tensor) -> Tensor:
        """Return (N, E) last hidden states of the first row, computed by the backbone itself in one pass."""
        with self.alone(), recorded(self.decoder) as states:
            run_backbone(self.model, input_ids=self.on_device(ids), use_cache=False)
        return states[0][0]

    @cached_property
    def expected(self) -> Tensor:
        """(N, E) last hidden states of the text, of the backbone itself."""
        return self.own_states(self.ids)

    @cached_property
    def noise(self) -> Noise:
        """What rounding alone changes in these states."""
        with self.alone():
            return measured_noise(self.model, self.decoder, self.on_device(self.ids), self.expected, self.seed)

    @cached_property
    def logit_noise(self) -> float:
        """What rounding alone changes in the logits of the text's last tokens, relative to their spread."""
        model: Any = unwrap(self.model)
        with self.alone():
            runs = []
            beside = torch.cat([self.ids, self.ids.flip(1)])  # LLM.int8 rounds by what is in a batch
            more = one_more_rounding(self.decoder, self.seed)
            for ids, how in ((self.ids, nullcontext()), (self.ids, more), (beside, nullcontext())):
                with how:
                    found = model(input_ids=self.on_device(ids), use_cache=False, logits_to_keep=_LAST).logits
                runs.append(found[0].float().cpu())
        return max(*(float(apart(run, runs[0]).median()) for run in runs[1:]), self.noise.epsilon)

    @cached_property
    def layouts(self) -> dict[int, tuple[Layout, float]]:
        """Per governed layer, how it rotates keys, and how well that explains them."""
        return measured_layouts(self)

    def turns(self, detour: int = 0) -> dict[int, Turn]:
        """Return what turns the keys of each governed layer; for `detour` see `Turn`."""
        return {index: Turn(self.decoder, layout, detour) for index, (layout, _) in self.layouts.items()}

    def on_device(self, ids: Tensor) -> Tensor:
        """Return token ids where the backbone wants them."""
        return ids.to(input_device(self.model))

    def answer_options(self, tokens: int = NEW_TOKENS) -> dict[str, Any]:
        """Return the options of a greedy answer of exactly so many tokens."""
        config = unwrap(self.model).generation_config
        neutral = {"repetition_penalty": None, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
        own = {name: value for name, value in neutral.items() if getattr(config, name, None) is not None}
        return {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, **own}

    # -- reads --------------------------------------------------------------------------------------------------------

    def read(
        self,
        policy: RetentionPolicy | None = None,
        ids: Tensor | None = None,
        *,
        cache: RetentionCache | None = None,
        on_chunk: Callable[[RetentionCache], None] | None = None,
        new_tokens: int = 0,
    ) -> Read:
        """Read a text (None: the subject's) into a new cache, or into the one that is given."""
        cache = cache or RetentionCache(self.model, self.scorer, policy or self.policy)
        steps: list[Step] = []

        def note(found: RetentionCache) -> None:
            steps.append(Step(found.seen, kept_by_head(found)))
            if on_chunk is not None:
                on_chunk(found)

        with recorded(self.decoder) as states:
            logits = prefill(self.model, self.ids if ids is None else ids, cache, on_chunk=note, new_tokens=new_tokens)
        return Read(cache, logits[0].float().cpu(), torch.cat([part[0] for part in states]), steps)

    def answers(self, cache: RetentionCache, tokens: int = NEW_TOKENS) -> tuple[Tensor, Tensor]:
        """Go on from what a cache holds; return (B, tokens) ids and (B, tokens, vocabulary) logits, on the CPU."""
        found: Any = generate(
            self.model,
            cache=cache,
            return_dict_in_generate=True,
            output_logits=True,
            **self.answer_options(tokens),
        )
        return found.sequences.cpu(), torch.stack([step.float().cpu() for step in found.logits], dim=1)

    def answer(self, cache: RetentionCache) -> tuple[Tensor, Tensor]:
        """Return the (tokens,) ids and (tokens, vocabulary) logits of the only row's answer."""
        ids, logits = self.answers(cache)
        return ids[0], logits[0]


def positions_held(cache: RetentionCache, index: int) -> Tensor:
    """Return (B, K, S) original positions that this process holds in a governed layer, on the CPU; -1: no unit."""
    layer: Any = cache.layers[index]
    positions: Tensor = layer.store.held("positions").long().cpu()
    return positions


def kept_by_head(cache: RetentionCache) -> list[list[Tensor]]:
    """Return the original positions that the first row holds, per governed layer and KV head."""
    held = (positions_held(cache, index)[0] for index in cache.backbone.layers)
    return [[head[head >= 0] for head in positions] for positions in held]


def scores_by_head(cache: RetentionCache) -> list[list[Tensor]]:
    """Return the scores that go with `kept_by_head`."""
    found = []
    for index in cache.backbone.layers:
        layer: Any = cache.layers[index]
        scores = layer.store.held("scores")[0].cpu()
        positions = positions_held(cache, index)[0]
        found.append([score[head >= 0] for head, score in zip(positions, scores, strict=True)])
    return found


def fitted(policy: RetentionPolicy, tokens: int, given: Mapping[str, Any] | None = None) -> RetentionPolicy:
    """Return a policy whose numbers fit a short text as they would a long one: a quarter of it stays.

    Args:
        policy: As for real texts.
        tokens: Tokens of the text.
        given: Numbers that the user gave, which stay as they are.

    Raises:
        ValueError: If the numbers that were given contradict the others.
    """
    given = given or {}
    budget = int(given.get("budget") or min(policy.budget, tokens // 4))
    share = budget / policy.budget
    least = {"stabilizers": 0, "local_len": 2, "chunk_size": 8, "min_chunk": 2, "exact_recent": 0, "recall": 1}
    changes: dict[str, Any] = {"budget": budget}
    for name, floor in least.items():
        number = getattr(policy, name)
        changes[name] = min(number, max(floor, int(number * share)))
    changes["chunk_size"] = min(changes["chunk_size"], max(8, tokens // 8))
    if isinstance(policy.host_budget, int):
        changes["host_budget"] = max(changes["recall"], int(policy.host_budget * share))
    if policy.decode_budget is not None:
        changes["decode_budget"] = max(int(policy.decode_budget * share), budget + changes["local_len"] + 8)
        changes["decode_interval"] = 4
    return replace(policy, **{**changes, **given})
