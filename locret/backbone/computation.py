"""What changes what the same ids compute, besides weights: adapters in force, their scale, and numbers of the layers.

PEFT switches adapters without touching a weight, and a configuration with another epsilon or attention scale makes the
same weights compute something else. Keys and values of before mean nothing to the model after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from locret.backbone.adapters import unwrap

_OTHERS = ("dropout", "loss", "noise", "std", "norm_type", "attention_scaling")
"""Parts of the names of numbers that change no forward pass, or belong to the rotation, which is compared by itself."""


def computation(model: nn.Module) -> dict[str, Any]:
    """Return the numbers by name, as JSON holds them: for each, the values that layers have, in ascending order."""
    found: dict[str, set[Any]] = {"adapters": set()}
    for module in unwrap(model).modules():
        for name, value in vars(module).items():
            if type(value) is float and name != "p" and not any(part in name for part in _OTHERS):
                found.setdefault(name, set()).add(value)
        for adapter in _active(module):
            found["adapters"].add(adapter)
            scale = getattr(module, "scaling", None)
            if isinstance(scale, Mapping) and adapter in scale:
                found.setdefault(f"scale of {adapter}", set()).add(float(scale[adapter]))
    return {name: sorted(values) for name, values in found.items()}


def different_computation(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return what differs, in words; None if nothing does. A number that only one of them knows is not compared."""
    for name in before.keys() & now.keys():
        if list(before[name]) != now[name]:
            return f"{name}: {_said(before[name])} then, {_said(now[name])} now"
    return None


def inactive_adapters(model: nn.Module) -> frozenset[tuple[str, str]]:
    """Return neighbouring parts of the names of parameters that belong to an adapter that is not in force."""
    every: set[tuple[str, str]] = set()
    active: set[str] = set()
    for module in unwrap(model).modules():
        every |= {
            (kind, name) for kind in getattr(module, "adapter_layer_names", ()) for name in getattr(module, kind, ())
        }
        active |= set(_active(module))
    return frozenset(pair for pair in every if pair[1] not in active)


def _active(module: nn.Module) -> Iterator[str]:
    names = getattr(module, "active_adapters", None)
    if isinstance(names, list) and not getattr(module, "disable_adapters", False):
        yield from names


def _said(values: Any) -> str:
    return ", ".join(map(str, values)) if values else "none"
