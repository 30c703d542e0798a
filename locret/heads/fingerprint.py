"""A short name for a backbone's weights, for those that have no other: heads of a local folder are told apart by it."""

from __future__ import annotations

import hashlib
import zlib

import torch
from torch import Tensor, nn

from locret.backbone.adapters import unwrap

_SAMPLES = 16
_EXACT = (torch.float64, torch.float32, torch.bfloat16)


@torch.no_grad()
def weight_fingerprint(model: nn.Module) -> str | None:
    """Return a SHA-256 over every parameter's name, shape and 16 evenly spaced values, rounded to bfloat16.

    The rounding makes it the same for a backbone loaded in float32 or in bfloat16. It tells other weights from these,
    not a change of a few single weights, and proves nothing to somebody who wants to cheat.

    Args:
        model: A backbone; an adapter's weights count too.

    Returns:
        64 hexadecimal digits; None if weights are not there to be read as they were saved: on the meta device,
        quantised, sharded, or in float16, which rounds otherwise.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(unwrap(model).named_parameters()):
        # Sharded and quantised weights are of other types.
        if type(weight) is not nn.Parameter or weight.is_meta or weight.dtype not in _EXACT or not weight.numel():
            return None
        values = _samples(weight).to(torch.bfloat16).view(torch.int16).cpu()
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
    digest, forms = hashlib.sha256(), set()
    for name, weight in sorted(unwrap(model).named_parameters()):
        if type(weight.data) is not torch.Tensor or weight.is_meta or not weight.numel():
            return None
        forms.add(str(weight.dtype).removeprefix("torch."))
        values = _samples(weight.data).contiguous().view(torch.uint8).cpu()
        digest.update(f"{name} {tuple(weight.shape)} {values.tolist()}\n".encode())
    return f"{' '.join(sorted(forms))}:{digest.hexdigest()}"


def crc(tensor: Tensor, start: int = 0) -> int:
    """Return the CRC-32 of a tensor's bytes, continued from that of others."""
    held = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(held.data, start) if held.size else start


def _samples(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[torch.linspace(0, flat.numel() - 1, _SAMPLES, dtype=torch.float64).long().to(flat.device)]
