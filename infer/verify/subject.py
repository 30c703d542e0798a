"""What is verified: a backbone, what decides which units stay, a policy, a text; reads of it, and their noise.

A network may damp rounding errors or amplify them a thousandfold, so no constant says what a tolerance should be.
What says it is the backbone: it is run once more with one more rounding after every layer, and in pieces and token by
token with its own cache. The largest of these differences is the noise; what our engine changes is a rounding or two
per layer more, so a few times the noise is the tolerance, in any dtype.

Differences are medians over short runs of tokens: in a mixture of experts one rounding can send a token to another
expert, which says nothing of the rest.
"""

# B rows, N tokens, T tokens of an answer, E hidden size, V vocabulary, K KV heads, S units, D head dim

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill
from locret.backbone.adapters import compute_dtype, describe, find_decoder, input_device, unwrap
from locret.backbone.passes import run_decoder
from locret.backbone.rotary import long_factors
from locret.infer.verify.replay import Kept, recorded
from locret.scorers import Scorer
from locret.scorers.retaining_heads import as_scorer

FACTOR = 8.0
"""Noises that a difference may amount to. Measured on all families of the tests in float32 and bfloat16: 0.6 to 2.8."""
NEW_TOKENS = 12
"""Tokens of an answer."""
_RUN = 16


class Apart(NamedTuple):
    """How far two runs are apart, and runs that differ by rounding alone: relative lengths, medians over tokens."""

    relative: float
    noise: float

    @property
    def noises(self) -> float:
        """How many noises that is."""
        return math.inf if math.isnan(self.relative) else self.relative / self.noise


def relative(states: Tensor, expected: Tensor) -> Tensor:
    """Return (N,) lengths of the differences of (N, E) states, relative to those expected."""
    return (states - expected).norm(dim=-1) / expected.norm(dim=-1)


def apart(states: Tensor, expected: Tensor, noise: Tensor) -> Apart:
    """Compare (N, E) states where they are furthest apart for the (N,) noise."""
    if len(states) != len(expected):
        return Apart(math.inf, float(noise.median()))
    runs = max(1, len(states) // _RUN)
    parts = (numbers.tensor_split(runs) for numbers in (relative(states, expected), noise[: len(states)]))
    found = (Apart(float(one.median()), float(base.median())) for one, base in zip(*parts, strict=True))
    return max(found, key=lambda one: one.noises)


class Read(NamedTuple):
    """A text that was read: (N, E) last hidden states, and after every chunk the tokens read and the units held."""

    cache: RetentionCache
    states: Tensor
    steps: list[tuple[int, Kept]]


class Answer(NamedTuple):
    """A greedy answer: (B, T) ids, (B, T, V) logits, and (B, T, E) last hidden states of what was fed for it."""

    ids: Tensor
    logits: Tensor
    states: Tensor


class Subject:
    """What the checks look at: (1, N) token ids, read with a backbone; the seed is that of rounding noise."""

    def __init__(
        self, model: nn.Module, scorer: RetainingHeads | Scorer, policy: RetentionPolicy, ids: Tensor, seed: int = 0
    ) -> None:
        self.model, self.scorer, self.policy, self.ids, self.seed = model, as_scorer(scorer), policy, ids.cpu(), seed
        self.decoder: Any = find_decoder(model)
        self.backbone, self.tokens = describe(model), ids.shape[1]

    @property
    def plain_policy(self) -> RetentionPolicy:
        """The policy without what changes units by design, or how a text is read."""
        plain = RetentionPolicy()
        names = ("key_bits", "value_bits", "merge", "prefill_attention", "host_budget", "recall", "recall_by")
        return self.policy.changed(**{name: getattr(plain, name) for name in names})

    def roomy(self, **changes: Any) -> RetentionPolicy:
        """Return the plain policy with room for the whole text, so that nothing is evicted."""
        numbers = {name: getattr(self.policy, name) for name in ("chunk_size", "local_len", "positions")}
        protected = min(self.policy.stabilizers, self.tokens - 1)
        return RetentionPolicy(**{"budget": self.tokens, "stabilizers": protected, **numbers, **changes})

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the backbone compute by itself, with the rotary frequencies that it has here."""
        with torch.no_grad(), long_factors(self.decoder):
            yield

    def own_states(self, ends: Sequence[int] = (), ids: Tensor | None = None) -> Tensor:
        """Return (N, E) last hidden states of the text: in one pass, or with its own cache in pieces with such ends."""
        ids = self.on_device(self.ids if ids is None else ids)
        cache = DynamicCache(config=unwrap(self.model).config) if ends else None
        with self.alone(), recorded(self.decoder) as states:
            for start, end in pairwise([0, *ends] if ends else [0, self.tokens]):
                where = torch.arange(start, end, device=ids.device)[None]  # which some do not know by themselves
                run_decoder(self.model, ids[:, start:end], cache, **({} if cache is None else {"position_ids": where}))
        return torch.cat([part[0] for part in states])

    @cached_property
    def expected(self) -> Tensor:
        """(N, E) last hidden states of the text, of the backbone itself."""
        return self.own_states()

    @cached_property
    def unsound(self) -> str:
        """Which of the backbone's own numbers are NaN or infinite, and in which dtype; empty if none are."""
        with self.alone():
            last = unwrap(self.model)(input_ids=self.on_device(self.ids), use_cache=False, logits_to_keep=_RUN)
        for name, numbers in (("hidden states", self.expected), ("logits", last.logits)):
            if not numbers.isfinite().all():
                return f"NaN or infinite {name} in {str(compute_dtype(self.model)).removeprefix('torch.')}"
        return ""

    @cached_property
    def noise(self) -> Tensor:
        """(N,) what rounding alone changes in these states, and no less than the dtype's own."""
        found = torch.full((self.tokens,), torch.finfo(compute_dtype(self.model)).eps)
        with self.one_more_rounding():
            runs = [self.own_states()]
        runs.append(self.own_states(range(self.tokens - _RUN, self.tokens + 1)))
        runs.append(self.own_states(ids=torch.cat([self.ids, self.ids.flip(1)])))  # LLM.int8 rounds a batch together
        for run in runs:
            found = torch.maximum(found, relative(run, self.expected))
        pieces = relative(self.own_states((self.tokens // 3, self.tokens // 2, self.tokens)), self.expected)
        # Some backbones forget what came before a piece (states of Mamba): their runs in pieces are not equal. Others
        # only round by what is computed together (LLM.int8 by the outliers of a whole product), which is noise.
        equal = not self.backbone.recurrent or float(pieces.median()) <= FACTOR * float(found.median())
        return torch.maximum(found, pieces) if equal else found

    def noise_of(self, tokens: int, first: int = 0) -> Tensor:
        """Return the noise of so many tokens, from a first one on; beyond the text it is that of the text's end."""
        end = self.noise[-_RUN:].median().expand(max(0, first + tokens - self.tokens))
        return torch.cat([self.noise, end])[first : first + tokens]

    def noise_beside(self, states: Tensor, expected: Tensor) -> Tensor:
        """Return the larger of the noise, and of what these (N, E) states are apart."""
        return torch.maximum(self.noise_of(len(states)), relative(states, expected))

    @contextmanager
    def one_more_rounding(self) -> Iterator[None]:
        """Change what every layer returns by up to one unit in the last place."""
        generators: dict[torch.device, torch.Generator] = {}

        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            states = output[0] if isinstance(output, tuple) else output
            if states.device not in generators:
                generators[states.device] = torch.Generator(states.device).manual_seed(self.seed)
            drawn = torch.rand(states.shape, generator=generators[states.device], device=states.device) - 0.5
            changed = (states.float() * (1 + 2 * torch.finfo(states.dtype).eps * drawn)).to(states.dtype)
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        with ExitStack() as hooks:
            for layer in self.decoder.layers:
                hooks.callback(layer.register_forward_hook(hook).remove)
            yield

    @property
    def typical(self) -> float:
        """The noise as one number."""
        return float(self.noise.median())

    def on_device(self, ids: Tensor) -> Tensor:
        """Return token ids where the backbone wants them."""
        return ids.to(input_device(self.model))

    def read(self, policy: RetentionPolicy | None = None, *, ids: Tensor | None = None, new_tokens: int = 0) -> Read:
        """Read a text (None: the subject's) into a new cache."""
        cache, steps = RetentionCache(self.model, self.scorer, policy or self.policy), list[tuple[int, Kept]]()

        def note(found: RetentionCache) -> None:
            steps.append((found.seen, kept_by_head(found)))

        with recorded(self.decoder) as states:
            prefill(self.model, self.ids if ids is None else ids, cache, on_chunk=note, new_tokens=new_tokens)
        return Read(cache, torch.cat([part[0] for part in states]), steps)

    def answer(self, cache: RetentionCache | None) -> Answer:
        """Go on from what a cache holds; without one by the backbone's own `generate` from the text."""
        config = unwrap(self.model).generation_config
        neutral = {"repetition_penalty": None, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
        options: dict[str, Any] = {k: v for k, v in neutral.items() if getattr(config, k, None) is not None}
        options |= {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        options |= {"return_dict_in_generate": True, "output_logits": True}
        with recorded(self.decoder) as states:
            if cache is not None:
                out: Any = generate(self.model, cache=cache, **options)
            else:
                ids, model = self.on_device(self.ids), unwrap(self.model)
                with self.alone():
                    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        logits = torch.stack([step.float().cpu() for step in out.logits], dim=1)
        return Answer(out.sequences[:, -NEW_TOKENS:].cpu(), logits, torch.cat(states, dim=1)[:, -NEW_TOKENS:])


def kept_by_head(cache: RetentionCache, row: int = 0) -> Kept:
    """Return the original positions that a row holds, per governed layer and KV head."""
    held = (cache.kept_positions(index)[row].cpu() for index in cache.backbone.layers)
    return [[head[head >= 0] for head in positions] for positions in held]


def scores_by_head(cache: RetentionCache) -> list[list[Tensor]]:
    """Return the scores that go with `kept_by_head`."""
    layers = cache.backbone.layers
    held = ((cache.kept_positions(index)[0].cpu(), cache.kept_scores(index)[0].cpu()) for index in layers)
    return [[s[p >= 0] for p, s in zip(positions, scores, strict=True)] for positions, scores in held]


def fitted(policy: RetentionPolicy, tokens: int, given: Mapping[str, Any] | None = None) -> RetentionPolicy:
    """Return a policy whose numbers, but for those given, fit a short text as they would a long one: 1 in 4 stays."""
    given = given or {}
    budget = int(given.get("budget") or min(policy.budget, tokens // 4))
    least = {"stabilizers": 0, "local_len": 2, "chunk_size": 8, "min_chunk": 2, "exact_recent": 0, "recall": 1}
    numbers = {name: getattr(policy, name) for name in least}
    changes = {k: min(numbers[k], max(floor, numbers[k] * budget // policy.budget)) for k, floor in least.items()}
    changes |= {"budget": budget, "chunk_size": min(changes["chunk_size"], max(8, tokens // 8))}
    if isinstance(policy.host_budget, int):
        changes["host_budget"] = max(changes["recall"], policy.host_budget * budget // policy.budget)
    if policy.decode_budget is not None:
        bound = max(policy.decode_budget * budget // policy.budget, budget + changes["local_len"] + 8)
        changes |= {"decode_budget": bound, "decode_interval": 4}
    return policy.changed(**{**changes, **given})
