"""What is verified: a backbone, what decides which units stay, a policy, a text; reads of it, and their noise.

A network may damp rounding errors or amplify them a thousandfold, so no constant says what a tolerance should be.
What says it is the backbone: it is run once more with one more rounding after every layer, and in pieces and token by
token with its own cache. The largest of these differences is the noise; what our engine changes is a rounding or two
per layer more, so a few times the noise is the tolerance, in any dtype.

Differences are medians over short runs of tokens: in a mixture of experts one rounding can send a token to another
expert, which says nothing of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill
from locret.backbone.adapters import (
    Backbone,
    compute_dtype,
    describe,
    find_decoder,
    input_device,
    rotary_module,
    unwrap,
)
from locret.backbone.rotary import long_factors
from locret.infer.verify.replay import Block, Layout, Turn, layout_of, recorded, replay, run_backbone
from locret.scorers import Scorer
from locret.scorers.retaining_heads import as_scorer

FACTOR = 8.0
"""Noises that a difference may amount to. Measured on all families of the tests in float32 and bfloat16: 0.6 to 2.8."""
_RUN = 16


@dataclass(frozen=True)
class Difference:
    """How far two runs are apart, where they are furthest compared with the noise."""

    relative: float
    """Length of the difference of two hidden states, relative to their length; median of a run of tokens."""
    noise: float
    """The same of runs that differ by rounding alone."""

    @property
    def tolerance(self) -> float:
        """The most it may be."""
        return FACTOR * self.noise

    @property
    def ok(self) -> bool:
        """Whether rounding explains it."""
        return self.relative <= self.tolerance  # False for NaN


@dataclass(frozen=True)
class Noise:
    """What rounding changes in the states of a text."""

    by_token: Tensor
    """(N,) relative differences."""
    epsilon: float
    """The dtype's own: less is not believed."""

    def of(self, states: Tensor, expected: Tensor) -> Difference:
        """Compare (M, E) states of the text's first or of further tokens; beyond the text the noise is that of its end.

        Args:
            states: What was computed.
            expected: What it should be.
        """
        found = relative(states, expected)
        noise = self._over(len(found))
        pieces = max(1, len(found) // _RUN)
        worst: Difference | None = None
        for part, base in zip(found.tensor_split(pieces), noise.tensor_split(pieces), strict=True):
            one = Difference(float(part.median()), max(float(base.median()), self.epsilon))
            if worst is None or not one.relative / one.noise <= worst.relative / worst.noise:
                worst = one
        assert worst is not None
        return worst

    def beside(self, by_token: Tensor) -> Noise:
        """Return the larger of this noise and another one, of a text that goes on."""
        return Noise(torch.maximum(self._over(len(by_token)), by_token), self.epsilon)

    def _over(self, tokens: int) -> Tensor:
        """Return the noise of the first tokens; what comes after the text is as noisy as its end."""
        end = self.by_token[-_RUN:].median().expand(max(0, tokens - len(self.by_token)))
        return torch.cat([self.by_token[:tokens], end])

    @property
    def typical(self) -> float:
        """One number for people."""
        return max(float(self.by_token.median()), self.epsilon)


def relative(states: Tensor, expected: Tensor) -> Tensor:
    """Return (N,) lengths of the differences of (N, E) states, relative to those expected."""
    return (states - expected).norm(dim=-1) / expected.norm(dim=-1)


def apart(logits: Tensor, expected: Tensor) -> Tensor:
    """Return (T,) differences of (T, V) logits, relative to their spread over the vocabulary."""
    spread = expected - expected.mean(dim=-1, keepdim=True)
    return (logits - expected).norm(dim=-1) / spread.norm(dim=-1)


def measured_noise(model: nn.Module, decoder: Any, ids: Tensor, expected: Tensor, seed: int) -> Noise:
    """Run the backbone with more rounding, and in pieces; gradients are off and rotary frequencies settled."""
    with recorded(decoder) as rounded, one_more_rounding(decoder, seed):
        run_backbone(model, input_ids=ids, use_cache=False)
    tokens = ids.shape[1]
    pieces = _in_pieces(model, decoder, ids, [0, tokens // 3, tokens // 2, tokens])
    steps = _in_pieces(model, decoder, ids, [0, *range(tokens - _RUN, tokens + 1)])
    epsilon = torch.finfo(compute_dtype(model)).eps
    found = torch.maximum(relative(rounded[0][0], expected), relative(steps, expected))
    in_pieces = relative(pieces, expected)
    # Some backbones forget what came before a piece (states of Mamba): their runs in pieces are not equal. Others only
    # round by what is computed together (LLM.int8 by the outliers of a whole product), which is noise of any size.
    if not describe(model).recurrent or float(in_pieces.median()) <= FACTOR * max(float(found.median()), epsilon):
        found = torch.maximum(found, in_pieces)
    return Noise(found, epsilon)


def _in_pieces(model: nn.Module, decoder: Any, ids: Tensor, bounds: Sequence[int]) -> Tensor:
    """Return (N, E) states of the backbone with its own cache, read in pieces."""
    cache = DynamicCache(config=unwrap(model).config)
    with recorded(decoder) as states:
        for start, end in pairwise(bounds):
            where = torch.arange(start, end, device=ids.device)[None]  # which some backbones do not know by themselves
            part = ids[:, start:end]
            run_backbone(model, input_ids=part, past_key_values=cache, use_cache=True, position_ids=where)
    return torch.cat([part[0] for part in states])


@contextmanager
def one_more_rounding(decoder: Any, seed: int) -> Iterator[None]:
    """Change what every layer returns by up to one unit in the last place."""
    generator: dict[torch.device, torch.Generator] = {}

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        if states.device not in generator:
            generator[states.device] = torch.Generator(states.device).manual_seed(seed)
        drawn = torch.rand(states.shape, generator=generator[states.device], device=states.device) - 0.5
        changed = (states.float() * (1 + 2 * torch.finfo(states.dtype).eps * drawn)).to(states.dtype)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    handles = [layer.register_forward_hook(hook) for layer in decoder.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_SHIFT, _TOKENS = 3, 64


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
        names = ("key_bits", "value_bits", "merge", "refit", "prefill_attention", "host_budget", "recall", "recall_by")
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


def turns_by_distance(subject: Subject) -> bool:
    """Return whether keys of all layers are turned by what their distance says, the same at all positions."""
    rope: object = getattr(rotary_module(subject.decoder), "rope_type", "default")
    kinds = rope.values() if isinstance(rope, dict) else [rope]
    if any("dynamic" in str(kind) for kind in kinds):
        return False
    limit = max(0.02, subject.noise.typical)
    return all(apart < limit for _, apart in subject.layouts.values())


def measured_layouts(subject: Subject) -> dict[int, tuple[Layout, float]]:
    """Return how every governed layer rotates keys: what makes those at one position the ones further on."""
    ids, layers = subject.on_device(subject.ids[:, :_TOKENS]), subject.backbone.layers
    nothing = [[torch.empty(0)] * subject.backbone.shape(one).num_kv_heads for one in layers]
    blocks = [Block(0, ids.shape[1], nothing)]
    with subject.alone():
        at, further = (replay(subject.model, ids, blocks, shift=shift).keys for shift in (0, _SHIFT))
        return {one: layout_of(subject.decoder, at[one], further[one], _SHIFT) for one in layers}
