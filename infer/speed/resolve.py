"""From options to a plan; everything that can be refused is refused here, before a weight is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import psutil
import torch

from locret import RetainingHeads, RetentionPolicy, loading
from locret.cache.limits import check_named
from locret.infer import chunk_size
from locret.infer.infer_options import ModelOptions
from locret.infer.methods import Method, check_heard
from locret.infer.sizing import AUTO, PlannedRun
from locret.infer.speed import methods
from locret.infer.speed.bench_options import MOST_PASSES, BenchOptions
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.shapes import PRESETS, SHAPES, Preset
from locret.loading.options import BackboneSource, ScorerOptions, WeightOptions
from locret.loading.plan import plan_weights
from locret.policy.resolve import check_no_turns, check_used, resolve
from locret.scorers import Scorer
from locret.scorers.chosen import check_matches, chosen_heads, load_scorer


def make_plan(options: BenchOptions, chosen: set[str]) -> BenchPlan:
    """Resolve every setting.

    Args:
        options: What the user typed.
        chosen: Names that the user set.

    Raises:
        ValueError: For anything that cannot be measured as asked.
        OSError: If a Hub refuses or cannot be reached.
    """
    if options.model is not None and "shape" in chosen:
        raise ValueError(f"--model {options.model} and --shape {options.shape} exclude each other; drop one of them")
    options = replace(options, heads=chosen_heads(options.heads, options.model))
    source = _source(options)
    preset, config = _backbone(options, source)
    if source is not None and source.device_map is not None:
        device: torch.device | None = loading.device_of_source(source)
    else:
        device = _device(options, preset)
    own = _own(options, chosen)
    compared = tuple(methods.get(name, own) for name in options.method_names())
    if options.heads is not None and not any(_with_heads(method) for method in compared):
        raise ValueError(f"--heads {options.heads}: no method of --methods uses them; add locret, or drop them")
    fresh = options.heads is None and any(map(_with_heads, compared))
    if options.hidden_dim is not None and not fresh:
        why = "--methods has none; add locret" if options.heads is None else "--heads have their own; drop one of them"
        raise ValueError(f"--hidden-dim {options.hidden_dim} is the width of fresh heads, but {why}, or drop it")
    policy_of = partial(_policy, options, preset, own)
    plan = BenchPlan(
        shape=None if options.model is not None else options.shape,
        model=options.model,
        config=config,
        methods=compared,
        lengths=options.prompt_lengths() or preset.lengths,
        policy=policy_of(_chunk_size(options)),
        chunk_choice=None,
        hidden_dim=_width(options, preset),
        heads=options.heads,
        new_tokens=options.new_tokens,
        repeats=options.repeats,
        threads=options.threads or torch.get_num_threads(),
        dtype=loading.resolve_dtype(options.dtype, config, device or torch.device("cuda")),
        device=device,
        seed=options.seed,
        memory_cap=options.cap_bytes(),
        source=source,
    )
    if options.chunk_size == AUTO:
        plan = with_chosen_chunk(plan, policy_of)
    policies = [one.policy(plan.policy) for one in _deciding(plan)]
    check_used(own, policies)
    check_no_turns(own)
    for policy in policies:
        check_named(policy)
    check_heard(own, [one.method if isinstance(one, methods.Bounded) else _plain(one.name) for one in plan.methods])
    _check(plan)
    return plan


def _source(options: BenchOptions) -> BackboneSource | None:
    """Return what loads a backbone from a folder or the Hub; None for one of random weights."""
    if options.model is None:
        return None
    weights = {field.name: getattr(options, field.name) for field in fields(WeightOptions)}
    return ModelOptions(model=options.model, dtype=options.dtype, **weights)


def _backbone(options: BenchOptions, source: BackboneSource | None) -> tuple[Preset, Any]:
    if source is not None:
        return Preset(), loading.load_config(source)
    if options.shape not in SHAPES:
        raise ValueError(f"--shape {options.shape} is unknown; choose one of {', '.join(SHAPES)}")
    return PRESETS[options.shape], SHAPES[options.shape]


def _device(options: BenchOptions, preset: Preset) -> torch.device | None:
    """Return where to measure; None where a GPU is asked for, or needed, and none is here."""
    if options.device.startswith("mps"):
        raise ValueError(f"--device {options.device}: its memory cannot be measured; use cpu or cuda")
    has_gpu = torch.cuda.is_available()
    if options.device == "auto":
        return torch.device("cuda") if has_gpu else None if preset.gpu else torch.device("cpu")
    if options.device.startswith("cuda") and not has_gpu:
        return None
    return loading.resolve_device(options.device)


def _chunk_size(options: BenchOptions) -> int | None:
    return chunk_size.LARGEST if isinstance(options.chunk_size, str) else options.chunk_size


def _own(options: BenchOptions, chosen: set[str]) -> dict[str, Any]:
    """Return the numbers of the policy that the user chose."""
    found = {field.name: getattr(options, field.name) for field in fields(RetentionPolicy)}
    return {name: value for name, value in found.items() if name in chosen or value != getattr(BenchOptions, name)}


def _policy(options: BenchOptions, preset: Preset, own: Mapping[str, Any], size: int | None) -> RetentionPolicy:
    """Return the policy: what the user chose, else what the heads recommend, else the shape's."""
    usual = {name: getattr(preset, name) for name in ("budget", "chunk_size", "stabilizers", "local_len")}
    if options.heads is not None:
        usual = load_scorer(ScorerOptions(heads=options.heads))[1] or usual
    return resolve({**own, "chunk_size": size}, usual)


def _width(options: BenchOptions, preset: Preset) -> int:
    """Return d_R: that of trained heads, else what the user chose, else the shape's."""
    if options.heads is not None:
        return RetainingHeads.from_pretrained(options.heads).config.hidden_dim
    return options.hidden_dim or preset.hidden_dim


def with_chosen_chunk(plan: BenchPlan, policy_of: Callable[[int], RetentionPolicy]) -> BenchPlan:
    """Return a plan with the chunk that `locret-infer` would take here, the same for all methods so that they compare.

    Bounded methods decide; `full` and `floor` follow. A chunk must fit whichever bounded method and length needs most,
    and be as large as whichever needs the largest least. Where only `full` or `floor` is measured, `locret` decides.

    Args:
        plan: Everything but the chunk size.
        policy_of: Its policy with a given chunk size.

    Raises:
        ValueError: If not even the smallest chunk fits.
    """
    runs = [(method, run) for method in _deciding(plan) for run in _runs(plan, method)]
    draft, device = policy_of(chunk_size.LARGEST), plan.device or torch.device("cuda")
    weights = plan_weights(plan.source or WeightOptions(), plan.config, device, plan.dtype).on(device)

    def needed(policy: RetentionPolicy) -> int:
        return weights + max(run.bytes_beside_weights(method.policy(policy)) for method, run in runs)

    choice = chunk_size.choose(
        policy_of,
        needed,
        device=f"{plan.device or 'cuda'}{'' if plan.memory_cap is None else ' within --memory-cap'}",
        free=_free_bytes(plan),
        least=max(run.least_chunk(method.policy(draft)) for method, run in runs),
    )
    return replace(plan, policy=policy_of(choice.chunk_size), chunk_choice=choice)


def _with_heads(method: methods.BenchMethod) -> bool:
    return isinstance(method, methods.Bounded) and method.has_heads


def _plain(name: str) -> Method:
    return Method(name, "reads without scores and eviction", plain=True)


def _deciding(plan: BenchPlan) -> list[methods.Bounded]:
    named = [method for method in plan.methods if isinstance(method, methods.Bounded)]
    default = methods.get("locret")
    assert isinstance(default, methods.Bounded)
    return named or [default]


def _runs(plan: BenchPlan, method: methods.Bounded) -> list[PlannedRun]:
    """Return what `locret-infer` would plan for each prompt."""
    scorer = _scorer(plan, method)
    return [
        PlannedRun(
            config=plan.config,
            scorer=scorer,
            dtype=plan.dtype,
            device=plan.device or torch.device("cuda"),
            prompt_tokens=length,
            new_tokens=plan.new_tokens,
        )
        for length in plan.lengths
    ]


def _scorer(plan: BenchPlan, method: methods.Bounded) -> RetainingHeads | Scorer:
    if not method.has_heads:
        return method.make_scorer(None)
    if plan.heads is not None:
        return RetainingHeads.from_pretrained(plan.heads)
    with torch.device("meta"):
        return RetainingHeads.for_model(plan.config, plan.hidden_dim)


def _free_bytes(plan: BenchPlan) -> int | None:
    """Return the bytes that a run may take; None where that is unknown, as for a GPU that is not here."""
    free = None if plan.device is None else chunk_size.free_bytes(plan.device)
    return min((count for count in (free, plan.memory_cap) if count is not None), default=None)


def _check(plan: BenchPlan) -> None:
    """Refuse a plan that a method or the heads contradict.

    Raises:
        ValueError: Saying which.
    """
    if plan.memory_cap is not None and plan.device is not None and plan.device.type == "cpu":
        raise ValueError("--memory-cap bounds device memory, but this runs on the CPU; drop it, or use --device cuda")
    if plan.heads is not None:
        scorer = ScorerOptions(heads=plan.heads)
        check_matches(scorer, load_scorer(scorer)[0], plan.config)
    for length in plan.lengths:
        _check_length(plan, length)
    for method in plan.methods:
        for length in plan.lengths:
            _check_memory(plan, method, length)
            method.reading(plan.sizes, plan.policy, length)


def _check_length(plan: BenchPlan, length: int) -> None:
    size = plan.policy.chunk_size
    if length > size * MOST_PASSES:
        raise ValueError(
            f"--lengths {length} is read in {-(-length // size):,} chunks of {size}, but at most {MOST_PASSES:,} are "
            f"measured; give at most {size * MOST_PASSES}, or raise --chunk-size"
        )
    if 8 * length > (has := psutil.virtual_memory().total):
        raise ValueError(
            f"--lengths {length}: the ids alone take {8 * length:,} bytes, but this machine has {has:,}; give at most "
            f"{has // 8}"
        )


def _check_memory(plan: BenchPlan, method: methods.BenchMethod, length: int) -> None:
    # A GPU says that it is out of memory; a system that is kills the process.
    if plan.device is None or plan.device.type != "cpu":
        return
    has, planned = psutil.virtual_memory().total, plan.planned_bytes(method, length)
    if (needed := planned.weights + planned.cache) > has:
        raise ValueError(
            f"--methods {method.name} at {length:,} tokens needs {needed / 2**30:,.1f} GiB of weights and cache, but "
            f"this machine has {has / 2**30:,.1f}; leave it out, or lower --lengths, --budget, "
            "--chunk-size, --local-len or --new-tokens"
        )
