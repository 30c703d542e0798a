"""What a profile is sorted by: named stages of reading and training, marked from outside and only while profiling."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from torch import nn
from torch.autograd import DeviceType
from torch.profiler import record_function

MARK = "locret: "
ELSEWHERE = "elsewhere"
_HEADS = "retaining heads: forward and backward"
_MODULES = {
    "q_proj": "q, k, v projections",
    "k_proj": "q, k, v projections",
    "v_proj": "q, k, v projections",
    "qkv_proj": "q, k, v projections",
    "o_proj": "output projection",
    "mlp": "MLP",
    "rotary_emb": "rotary tables",
    "embed_tokens": "embeddings",
    "lm_head": "language-model head",
    "self_attn": "attention block: rotation, reshapes",
}
_CALLS = {
    "locret.backbone.instrument.attend": "attention kernel",
    "locret.cache.cache.RetentionCache.update": "cache update: append",
    "locret.cache.layer.RetentionLayer.view": "rotation of kept keys",
    "locret.cache.reader.Reader.attended": "scores",
    "locret.cache.layer.RetentionLayer.evict": "eviction",
}
_TRAINING_CALLS = {
    "locret.train.step.layer_labels": "labels",
    "locret.train.step.learn_layer": _HEADS,
    "locret.infer.speed.lab.training_setup.TrainingSetup.update": "optimizer: clip, AdamW",
}


@contextmanager
def marked_stages(model: nn.Module, training: bool) -> Iterator[None]:
    """Mark every stage for the profiler until the block ends.

    Args:
        model: The backbone.
        training: Whether the trainer is profiled.
    """
    with ExitStack() as stack:
        for name, module in model.named_modules():
            last = name.rpartition(".")[2]
            stage = _MODULES.get(last, "norms" if last.endswith("norm") else None)
            if stage is not None:
                _mark_module(module, stage, stack)
        for path, stage in {**_CALLS, **(_TRAINING_CALLS if training else {})}.items():
            _mark_call(path, stage, stack)
        yield


def by_stage(events: Iterable[Any], time_of: Callable[[Any], float]) -> dict[str, float]:
    """Return each stage's own time: that of all operations whose innermost stage it is.

    Args:
        events: Those of a profile; kernels count as part of the operation that launched them.
        time_of: Own time of an event.
    """
    times: dict[str, float] = defaultdict(float)
    for event in events:
        if event.device_type != DeviceType.CPU:
            continue
        times[_stage_of(event)] += time_of(event)
    return {name: time for name, time in times.items() if time}


def _stage_of(event: Any) -> str:
    while event is not None:
        if event.name.startswith(MARK):
            return str(event.name.removeprefix(MARK))
        if event.cpu_parent is None and event.name.startswith("autograd::"):
            return _HEADS  # on a GPU, gradients are computed by a thread of their own
        event = event.cpu_parent
    return ELSEWHERE


def _mark_module(module: nn.Module, stage: str, stack: ExitStack) -> None:
    spans: list[record_function] = []

    def enter(*_: Any) -> None:
        spans.append(record_function(MARK + stage))
        spans[-1].__enter__()

    def leave(*_: Any) -> None:
        spans.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(enter).remove)
    # Hooks run in the order they were registered; those that steer the backbone come later and are outside the span.
    stack.callback(module.register_forward_hook(leave).remove)


def _mark_call(path: str, stage: str, stack: ExitStack) -> None:
    """Wrap a function of a module, or a method of a class of one."""
    owner, _, name = path.rpartition(".")
    try:
        holder: Any = import_module(owner)
    except ModuleNotFoundError:
        module, _, cls = owner.rpartition(".")
        holder = getattr(import_module(module), cls)
    call = getattr(holder, name)

    @functools.wraps(call)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(MARK + stage):
            return call(*args, **kwargs)

    setattr(holder, name, marked)
    stack.callback(setattr, holder, name, call)
