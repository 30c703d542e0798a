"""A short name for a backbone's weights, for those that have no other: heads of a local folder are told apart by it."""

from __future__ import annotations

import hashlib
import zlib

import torch
from torch import Tensor, nn

from locret.backbone.adapters import sharers_of, unwrap
from locret.backbone.head_ranks import HeadRanks, is_spread, samples_of_spread

_SAMPLES = 16
_EXACT = (torch.float64, torch.float32, torch.bfloat16)


@torch.no_grad()
def weight_fingerprint(model: nn.Module) -> str | None:
    """Return a SHA-256 over every parameter's name, shape and 16 evenly spaced values, rounded to bfloat16.

    The rounding makes it the same for a backbone loaded in float32 or in bfloat16. It tells other weights from these,
    not a change of a few single weights, and proves nothing to somebody who wants to cheat. Processes that share the
    weights by tensor parallelism all have to ask, and get that of the whole.

    Args:
        model: A backbone; an adapter's weights count too.

    Returns:
        64 hexadecimal digits; None if weights are not there to be read as they were saved: on the meta device,
        quantised, sharded, or in float16, which rounds otherwise.
    """
    digest, ranks = hashlib.sha256(), sharers_of(model)
    for name, weight in sorted(unwrap(model).named_parameters()):
        # Weights of FSDP and quantised ones are of other types.
        plain = type(weight) is nn.Parameter or (ranks is not None and is_spread(weight))
        if not plain or weight.is_meta or weight.dtype not in _EXACT or not weight.numel():
            return None
        values = _samples(weight, ranks).to(torch.bfloat16).view(torch.int16).cpu()
        digest.update(f"{name} {tuple(weight.shape)} {values.tolist()}\n".encode())
    return digest.hexdigest()


@torch.no_grad()
def any_fingerprint(model: nn.Module) -> str | None:
    """Return `weight_fingerprint`, or one that holds for weights in this very form: quantised, or in float16.

    Returns:
        The digits, for the second kind with the form and a colon before them; None if weights are not there to be read.
    """
    if exact := weight_fingerprint(model):
        return exact
    digest, forms, ranks = hashlib.sha256(), set(), sharers_of(model)
    for name, weight in sorted(unwrap(model).named_parameters()):
        plain = type(weight.data) is torch.Tensor or (ranks is not None and is_spread(weight))
        if not plain or weight.is_meta or not weight.numel():
            return None
        forms.add(str(weight.dtype).removeprefix("torch."))
        values = _samples(weight.data, ranks).contiguous().view(torch.uint8).cpu()
        digest.update(f"{name} {tuple(weight.shape)} {values.tolist()}\n".encode())
    return f"{' '.join(sorted(forms))}:{digest.hexdigest()}"


def crc(tensor: Tensor, start: int = 0) -> int:
    """Return the CRC-32 of a tensor's bytes, continued from that of others."""
    held = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(held.data, start) if held.size else start


def _samples(weight: Tensor, ranks: HeadRanks | None = None) -> Tensor:
    places = torch.linspace(0, weight.numel() - 1, _SAMPLES, dtype=torch.float64).long()
    if ranks is not None and is_spread(weight):
        return samples_of_spread(weight.detach(), places, ranks)
    flat = weight.detach().reshape(-1)
    return flat[places.to(flat.device)]
