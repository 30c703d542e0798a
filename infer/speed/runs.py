"""One prompt read and answered by one method, in steps that a clock or a byte counter can be put around."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from locret import RetainingHeads, RetentionCache, generate, prefill
from locret.infer.speed.floor import generate_plainly, read_static, write_static
from locret.infer.speed.methods import BenchMethod, Bounded, Floor
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.shapes import random_model


@dataclass(frozen=True)
class BenchSetup:
    """What all runs share."""

    model: PreTrainedModel
    heads: RetainingHeads | None
    plan: BenchPlan
    prompt_1N: Tensor
    """Token ids of the longest prompt; shorter ones are its beginning."""

    def weight_bytes(self, method: BenchMethod) -> int:
        """Return the bytes of the weights that a method uses, counted from the tensors."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if self.heads is not None and isinstance(method, Bounded) and method.has_heads:
            tensors += list(self.heads.parameters())
        return storage_bytes(tensors)


class BenchRun(ABC):
    """A prompt to be read, then answered. Both are greedy and end with ids on the host."""

    def __init__(self, setup: BenchSetup, length: int) -> None:
        self.model, self.plan = setup.model, setup.plan
        self.ids = setup.prompt_1N[:, :length]

    def read(self) -> int:
        """Read the prompt and return the first new token."""
        return int(self._logits().argmax(dim=-1).item())

    @abstractmethod
    def _logits(self) -> Tensor:
        """Read the prompt and return (1, vocabulary) logits of its last token."""

    @abstractmethod
    def write(self, first: int) -> list[int]:
        """Generate `new_tokens` tokens, one forward pass each, and return their ids."""

    @abstractmethod
    def cache_bytes(self) -> int:
        """Return the bytes of the cache at its largest so far, counted from its tensors, without a second tier."""

    def host_bytes(self) -> int:
        """Return the bytes of the second tier, counted from its tensors."""
        return 0

    def moved_bytes(self) -> int:
        """Return the bytes fetched from the second tier so far."""
        return 0


class FullRun(BenchRun):
    """transformers' own cache and attention; the prompt comes chunk by chunk."""

    @torch.no_grad()
    def _logits(self) -> Tensor:
        self.cache = DynamicCache(config=self.model.config)
        decoder, size, length = self.model.get_decoder(), self.plan.policy.chunk_size, self.ids.shape[1]
        last = range(0, length, size)[-1]
        for start in range(0, last, size):
            decoder(input_ids=self.ids[:, start : start + size], past_key_values=self.cache, use_cache=True)
        tokens = self.ids[:, last:]
        output = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1]

    def write(self, first: int) -> list[int]:
        ids = torch.cat([self.ids, self.ids.new_tensor([[first]])], dim=1)
        return generate_plainly(self.model, self.cache, ids, self.plan.new_tokens)[0].tolist()

    def cache_bytes(self) -> int:
        return layer_bytes(self.cache)


class FloorRun(BenchRun):
    """The same chunks as a bounded cache reads, against a static one."""

    def _logits(self) -> Tensor:
        policy = self.plan.policy
        self.cache, logits = read_static(
            self.model, self.ids, policy.budget, policy.chunk_size, policy.local_len, self.plan.new_tokens
        )
        return logits

    def write(self, first: int) -> list[int]:
        token = self.ids.new_tensor([[first]])
        return write_static(self.model, self.cache, token, self.plan.new_tokens)[0].tolist()

    def cache_bytes(self) -> int:
        return layer_bytes(self.cache)


class BoundedRun(BenchRun):
    """A bounded cache, read and answered as any user would."""

    def __init__(self, setup: BenchSetup, length: int, method: Bounded) -> None:
        super().__init__(setup, length)
        self.scorer, self.policy = method.make_scorer(setup.heads), method.policy(setup.plan.policy)

    def _logits(self) -> Tensor:
        self.cache = RetentionCache(self.model, self.scorer, self.policy)
        return prefill(self.model, self.ids, self.cache, new_tokens=self.plan.new_tokens)

    def write(self, first: int) -> list[int]:
        """See `Run`; the prompt's last token is fed once more, so the first id is `first` again."""
        plan = self.plan
        ids = generate(self.model, cache=self.cache, max_new_tokens=plan.new_tokens, do_sample=False)
        return ids[0].tolist()

    def cache_bytes(self) -> int:
        return self.cache.memory().peak

    def host_bytes(self) -> int:
        return self.cache.memory().host

    def moved_bytes(self) -> int:
        return self.cache.memory().moved


def new_run(setup: BenchSetup, method: BenchMethod, length: int) -> BenchRun:
    """Return a run of a method over a prompt's first tokens; nothing is allocated yet."""
    if isinstance(method, Bounded):
        return BoundedRun(setup, length, method)
    return FloorRun(setup, length) if isinstance(method, Floor) else FullRun(setup, length)


def make_setup(plan: BenchPlan) -> BenchSetup:
    """Load or make the backbone, the heads and the prompt of a plan that has a device.

    Raises:
        ValueError: If weights are missing or broken, or heads do not fit.
    """
    from locret import loading

    assert plan.device is not None
    model: Any
    if plan.source is None:
        model = random_model(plan.config, plan.seed, plan.dtype, plan.device)
    else:
        model = loading.load_model(plan.source, plan.config, plan.device, plan.dtype)
    # Nothing ends an answer early, and no published sampling settings apply.
    model.generation_config = GenerationConfig(pad_token_id=0)
    heads = None
    if any(isinstance(method, Bounded) and method.has_heads for method in plan.methods):
        made = RetainingHeads.for_model(model, plan.hidden_dim, seed=plan.seed)
        heads = made if plan.heads is None else RetainingHeads.from_pretrained(plan.heads)
        heads.follow(model)
    generator = torch.Generator().manual_seed(plan.seed)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, max(plan.lengths)), generator=generator)
    return BenchSetup(model, heads, plan, ids.to(plan.device))


def layer_bytes(cache: Any) -> int:
    """Return the bytes of all memory that a transformers cache holds on to."""
    return storage_bytes(value for layer in cache.layers for value in vars(layer).values() if torch.is_tensor(value))


def storage_bytes(tensors: Any) -> int:
    """Return the bytes of the memory behind tensors, which may share some of it."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
