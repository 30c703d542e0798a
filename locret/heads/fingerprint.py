"""A short name for a backbone's weights, for those that have no other: heads of a local folder are told apart by it.

And what changes what the same ids compute, besides weights: adapters in force, their scale, and numbers of the layers.
PEFT switches adapters without touching a weight, and a configuration with another epsilon or attention scale makes the
same weights compute something else. Keys and values of before mean nothing to the model after.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from locret.backbone.adapters import sharers_of, unwrap

_SAMPLES = 16
NORM, NORMS = "norm.weight", "norms-"
"""How the weights of norms end, in transformers' names and in those of GGUF files; how their fingerprint begins."""
_EXACT = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class _Sample:
    """What counts of one parameter."""

    name: str
    shape: tuple[int, ...]
    values: Tensor
    """(16,) of its values, on the CPU."""
    plain: bool
    """Whether it is of no class of its own, as quantised weights are."""


_GATHERED: WeakKeyDictionary[nn.Module, list[_Sample]] = WeakKeyDictionary()
"""Samples of weights that cannot be read later: of backbones that no process holds as a whole, and of rounded ones."""


def weight_fingerprint(model: nn.Module) -> str | None:
    """Return a SHA-256 over every parameter's name, shape and 16 evenly spaced values, rounded to bfloat16.

    The rounding makes it the same for a backbone loaded in float32 or in bfloat16. It tells other weights from these,
    not a change of a few single weights, and proves nothing to somebody who wants to cheat. Processes that share the
    weights by tensor parallelism get that of the whole; all have to ask for the first time.

    Args:
        model: A backbone; the weights of an adapter that is in force count too.

    Returns:
        64 hexadecimal digits; None if weights are not there to be read as they were saved: on the meta device (but for
        those that a device map leaves elsewhere), quantised, in float16, which rounds otherwise, or sharded, unless
        `keep_samples` took them before.
    """
    found = any_fingerprint(model)
    return None if found is None or ":" in found else found


def any_fingerprint(model: nn.Module) -> str | None:
    """Return `weight_fingerprint`, or one that holds for weights in this very form: quantised, or in float16.

    Returns:
        The digits, for the second kind with the form and a colon before them; None if weights are not there to be read.
    """
    digest, forms, without = hashlib.sha256(), set(), inactive_adapters(model)
    samples = [one for name, one in _samples(model) if without.isdisjoint(pairwise(name.split(".")))]
    exact = all(one and one.plain and one.values.dtype in _EXACT for one in samples)
    for one in samples:
        if one is None:
            return None
        forms.add(str(one.values.dtype).removeprefix("torch."))
        values = one.values.to(torch.bfloat16).view(torch.int16) if exact else one.values.contiguous().view(torch.uint8)
        digest.update(f"{one.name} {one.shape} {values.tolist()}\n".encode())
    return digest.hexdigest() if exact else f"{' '.join(sorted(forms))}:{digest.hexdigest()}"


def norm_fingerprint(model: nn.Module) -> str | None:
    """Return a fingerprint of the norms alone, which a backbone in float16, quantised or in a GGUF file still has.

    Returns:
        "norms-" and 64 hexadecimal digits, of 16 values of each, in bfloat16; None if not all are there to be read.
    """
    norms = [one for name, one in _samples(model) if name.endswith(NORM)]
    return digest_of_norms(one.values for one in norms if one) if all(norms) else None


def digest_of_norms(weights: Iterable[Tensor]) -> str | None:
    """Return `norm_fingerprint` of (size,) weights in any order; None if there are none."""
    found = sorted(bytes(_values(one).to(torch.bfloat16).view(torch.uint8).tolist()) for one in weights)
    return f"{NORMS}{hashlib.sha256(b''.join(found)).hexdigest()}" if found else None


def other_weights(one: str | None, another: str | None) -> bool | None:
    """Return whether two of `any_fingerprint` are of other weights; None if that is unknown, or the forms differ."""
    (form, _, digits), (other_form, _, others) = (str(given or "").rpartition(":") for given in (one, another))
    return digits != others if digits and others and form == other_form else None


def keep_samples(model: nn.Module) -> None:
    """Sample weights for good, before they are rounded; or those that processes hold parts of, which all call it."""
    samples = []
    for name, weight in sorted(unwrap(model).named_parameters()):
        with torch.no_grad(), _whole(weight) as gathered:
            samples.append(_Sample(name, tuple(gathered.shape), _values(gathered), plain=True))
    _GATHERED[unwrap(model)] = samples


@contextmanager
def _whole(weight: Any) -> Iterator[Tensor]:
    """Bring a parameter together that all processes may hold a part of; all must enter the block."""
    if hasattr(weight, "ds_id"):
        import deepspeed  # an extra

        with deepspeed.zero.GatheredParameters([weight]):
            yield weight.data
    else:
        yield weight.full_tensor() if hasattr(weight, "full_tensor") else weight.data


def _samples(model: nn.Module) -> Iterator[tuple[str, _Sample | None]]:
    """Yield the name and what counts of each parameter; None for one that is not there to be read."""
    base = unwrap(model)
    if base not in _GATHERED and sharers_of(base) is not None:
        keep_samples(base)
    if base in _GATHERED:
        yield from ((one.name, one) for one in _GATHERED[base])
        return
    for name, weight in sorted(base.named_parameters()):
        if weight.is_meta and (held := offloaded(base, name)) is not None:
            yield name, _Sample(name, tuple(held.shape), _values(held), type(weight) is nn.Parameter)
        elif type(weight.data) is not Tensor or weight.is_meta or not weight.numel():
            yield name, None
        else:
            yield name, _Sample(name, tuple(weight.shape), _values(weight.data), type(weight) is nn.Parameter)


def offloaded(model: nn.Module, name: str) -> Tensor | None:
    """Return a weight that accelerate keeps in host memory or on disk; None if it keeps none of that name."""
    module, _, own = name.rpartition(".")
    hook = getattr(model.get_submodule(module), "_hf_hook", None)
    for single in getattr(hook, "hooks", (hook,)):
        if (held := getattr(single, "weights_map", None)) is not None:
            weight: Tensor = held[own]
            return weight
    return None


def crc(tensor: Tensor, start: int = 0) -> int:
    """Return the CRC-32 of a tensor's bytes, continued from that of others."""
    held = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(held.data, start) if held.size else start


def _values(weight: Tensor) -> Tensor:
    places = torch.linspace(0, weight.numel() - 1, _SAMPLES, dtype=torch.float64).long()
    flat = weight.detach().reshape(-1)
    return flat[places.to(flat.device)].cpu()


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
