"""How far runs of one backbone may differ that are equal in mathematics: measured on the backbone itself.

A network may damp rounding errors or amplify them a thousandfold, so no constant says what a tolerance should be.
What says it is the backbone: it is run once more with one more rounding after every layer, and in pieces and token by
token with its own cache. The largest of these differences is the noise; what our engine changes is a rounding or two
per layer more, so a few times the noise is the tolerance, in any dtype.

Differences are medians over short runs of tokens: in a mixture of experts one rounding can send a token to another
expert, which says nothing of the rest.
"""

# N tokens, E hidden size

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from locret.backbone.adapters import compute_dtype, describe, find_decoder, unwrap
from locret.backbone.passes import gathering_root

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


def run_backbone(model: nn.Module, **arguments: Any) -> None:
    """Run the decoder layers, from the root where weights come together from there on."""
    if gathering_root(model) is not None:
        unwrap(model)(logits_to_keep=1, **arguments)
    else:
        find_decoder(model)(**arguments)


@contextmanager
def recorded(decoder: nn.Module) -> Iterator[list[Tensor]]:
    """Record the last hidden states of all passes until the block ends, (B, L, E) each, float32 on the CPU."""
    states: list[Tensor] = []

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        states.append(output[0].detach().float().cpu())

    handle = decoder.register_forward_hook(hook)
    try:
        yield states
    finally:
        handle.remove()


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
