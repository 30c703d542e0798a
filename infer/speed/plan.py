"""What a benchmark is about to measure, to the last number; what cannot be is refused before weights are made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from locret import RetainingHeads, RetentionPolicy, loading, shipped
from locret.backbone.adapters import describe, find_decoder
from locret.backbone.shape import Backbone
from locret.cache.limits import check_named
from locret.infer.evaluation.eval_options import numbers
from locret.infer.infer_options import ModelOptions
from locret.infer.methods import check_heard
from locret.infer.speed import ways
from locret.infer.speed.bench_options import MOST_PASSES, BenchOptions
from locret.infer.speed.ways import Way
from locret.loading.options import BackboneSource, ScorerOptions, WeightOptions
from locret.loading.weights import plan_weights, sketch_of
from locret.policy.resolve import check_no_turns, check_used, resolve
from locret.scorers.chosen import check_matches, chosen_heads, load_scorer


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """Every setting of a benchmark."""

    options: BenchOptions
    source: BackboneSource | None
    """How weights from a folder or the Hub are loaded; None for random ones."""
    shape: Shape = field(repr=False)
    """With the lengths that are measured, and the width of the heads."""
    methods: tuple[Way, ...]
    policy: RetentionPolicy
    trained: RetainingHeads | None = field(repr=False)
    dtype: torch.dtype
    device: torch.device | None
    """None: a GPU is asked for that is not here, so nothing is measured."""

    @cached_property
    def _sketch(self) -> Any:
        return sketch_of(self.shape.config, self.dtype)

    @cached_property
    def backbone(self) -> Backbone:
        return describe(self._sketch)

    @cached_property
    def weight_bytes(self) -> int:
        """The bytes of the backbone's weights on the device."""
        if self.source is None or not self.source.given():
            return sum(t.nbytes for t in [*self._sketch.parameters(), *self._sketch.buffers()])
        device = self.device or torch.device("cuda")
        return plan_weights(self.source, self.shape.config, device, self.dtype).on(device)

    @cached_property
    def head_bytes(self) -> int:
        """The bytes of retaining heads."""
        with torch.device("meta"):
            heads = self.trained or RetainingHeads.for_model(self.shape.config, self.shape.hidden_dim)
        return sum(weight.nbytes for weight in heads.parameters())

    def planned_bytes(self, method: Way, length: int) -> dict[str, int]:
        """Return what a method will hold: weights, and the cache and its second tier at their largest."""
        held = method.planned(self.backbone, self.policy, self.dtype.itemsize, length, self.options.new_tokens)
        weights = self.weight_bytes + (self.head_bytes if method.needs_heads else 0)
        return {"weights": weights, "cache": held.cache, "host": held.host}

    def work(self, method: Way, length: int) -> dict[str, int]:
        """Return the least work: operations of reading a prompt, bytes of writing.

        Operations: two per weight of every matrix and token, two per query head, dimension and pair of a token and a
        unit that it sees, for logits and for their sum over values. Bytes: every weight and every unit once per token.
        """
        backbone, size = self.backbone, self.dtype.itemsize
        linear = sum(m.weight.numel() for m in find_decoder(self._sketch).modules() if isinstance(m, nn.Linear))
        last = int(self._sketch.get_output_embeddings().weight.numel())
        *passes, after = method.passes(backbone, self.policy, length)
        flops = 2 * (last + linear * length)
        for tokens, held in passes:
            for shape, units in zip(backbone.full_shapes, held, strict=True):
                pairs = tokens * units + tokens * (tokens + 1) // 2
                flops += 2 * shape.num_heads * (shape.query_dim + shape.value_dim) * pairs
        shapes = zip(backbone.full_shapes, after.held, strict=True)
        moved = linear + last + sum(shape.num_kv_heads * shape.unit_dim * units for shape, units in shapes)
        return {"prefill": flops, "decode": self.options.new_tokens * size * moved}

    def resolved(self) -> dict[str, Any]:
        """Return every setting as plain data."""
        same = ("heads", "new_tokens", "repeats", "seed")
        return {
            "shape": self.options.shape if self.source is None else None,
            "model": self.options.model,
            **(self.source.given() if self.source else {}),
            **{name: getattr(self.options, name) for name in same},
            "threads": torch.get_num_threads(),
            "hidden_dim": self.shape.hidden_dim,
            "methods": [method.name for method in self.methods],
            "lengths": list(self.shape.lengths),
            "policy": self.policy.to_dict(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": None if self.device is None else str(self.device),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return what is known of every method and length beforehand."""
        return [
            {"method": method.name, "length": length, "planned_bytes": self.planned_bytes(method, length)}
            for length in self.shape.lengths
            for method in self.methods
        ]


def make_plan(options: BenchOptions, chosen: set[str]) -> BenchPlan:
    source = None
    if options.model is not None:
        weights = {one.name: getattr(options, one.name) for one in fields(WeightOptions)}
        source = ModelOptions(model=options.model, dtype=options.dtype, **weights)
    heads = chosen_heads(options.heads, source)
    shape = shape_of(options.shape if source is None else "cpu-512")
    if source is not None:
        shape = replace(shape, config=loading.load_config(source))
    device = _device(options, shape, source)
    given = {one.name: getattr(options, one.name) for one in fields(RetentionPolicy)}
    own = {name: value for name, value in given.items() if name in chosen or value != getattr(BenchOptions, name)}
    file = None if source is None or source.gguf_path is None else str(source.gguf_path)
    methods = tuple(ways.get(name, own, file) for name in options.method_names())
    trained: Any = None  # fresh ones will do
    if heads is not None:
        named = ScorerOptions(heads=heads)
        trained, _ = load_scorer(named)
        check_matches(named, trained, shape.config)
        if not any(method.needs_heads for method in methods):
            raise ValueError(f"--heads {options.heads}: no method of --methods uses them; add locret, or drop them")
        shape = replace(shape, hidden_dim=trained.config.hidden_dim)
    if options.lengths is not None:
        shape = replace(shape, lengths=tuple(sorted(numbers(options.lengths, "--lengths"))))
    plan = BenchPlan(
        options=options,
        source=source,
        shape=shape,
        methods=methods,
        policy=resolve(own, (trained and trained.config.policy) or shape.policy),
        trained=trained,
        dtype=loading.resolve_dtype(options.dtype, shape.config, device or torch.device("cuda")),
        device=device,
    )
    _check(plan, own)
    return plan


def _device(options: BenchOptions, shape: Shape, source: BackboneSource | None) -> torch.device | None:
    """Return where to measure; None where a GPU is asked for, or needed, and none is here."""
    if source is not None and source.device_map is not None:
        return loading.device_of_source(source)
    if options.device.startswith("mps"):
        raise ValueError(f"--device {options.device}: its memory cannot be measured; use cpu or cuda")
    has_gpu = torch.cuda.is_available()
    if options.device == "auto":
        return torch.device("cuda") if has_gpu else None if shape.gpu else torch.device("cpu")
    if options.device.startswith("cuda") and not has_gpu:
        return None
    return loading.resolve_device(options.device)


def _check(plan: BenchPlan, own: Mapping[str, Any]) -> None:
    """Refuse a plan that a method, the policy or the machine contradicts."""
    bounded = [one for one in plan.methods if not one.plain]
    policies = [one.policy(plan.policy) for one in bounded] or [plan.policy]
    check_used(own, policies)
    check_no_turns(own)
    for policy in policies:
        check_named(policy)
    for method, policy in zip(bounded, policies, strict=False):
        shared = policy.head_budgets == "shares" and not (policy.head_shares or method.rating(plan.trained).head_shares)
        if shared and plan.source is None:
            raise ValueError(f"--methods {method.name}: KV heads of random weights have no shares; give --model")
    check_heard(own, plan.methods)
    has, size = psutil.virtual_memory().total, plan.policy.chunk_size
    for length in plan.shape.lengths:
        if length > size * MOST_PASSES:
            raise ValueError(
                f"--lengths {length} is read in {-(-length // size):,} chunks of {size}, but at most {MOST_PASSES:,} "
                f"are measured; give at most {size * MOST_PASSES}, or raise --chunk-size"
            )
        for method in plan.methods:
            method.passes(plan.backbone, plan.policy, length)
            planned = plan.planned_bytes(method, length)
            # A GPU says that it is out of memory; a system that is kills the process.
            on_host = planned["weights"] + planned["cache"] if plan.device and plan.device.type == "cpu" else 0
            if (needed := on_host + 8 * length) > has:
                raise ValueError(
                    f"--methods {method.name} at {length:,} tokens needs {needed / 2**30:,.1f} GiB of weights, cache "
                    f"and ids, but this machine has {has / 2**30:,.1f}; leave it out, or lower --lengths, --budget, "
                    "--chunk-size, --local-len or --new-tokens"
                )


# Budgets, chunks, stabilizers, local tokens and d_R of the large ones are those of Locret, section 4.1.
_SHAPES: dict[str, Any] = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A backbone's config, and how it is measured unless told otherwise."""

    config: PretrainedConfig
    policy: dict[str, int]
    hidden_dim: int
    lengths: tuple[int, ...]
    gpu: bool = False
    """Whether it is too large for a CPU to say anything about."""


def shape_of(name: str) -> Shape:
    values = dict(_SHAPES[name])
    own = values.pop("config")
    config = AutoConfig.from_pretrained(shipped.find(own)) if isinstance(own, str) else AutoConfig.for_model(**own)
    return Shape(**{**values, "config": config, "lengths": tuple(values["lengths"])})


def random_model(
    config: PretrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Return a model in evaluation mode whose weights come from the seed; they are made on the device."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
