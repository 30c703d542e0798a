"""Weights in few bits: which way of transformers is asked for, whether it suits the backbone, and its name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from locret.base.fields import shown
from locret.base.files import read_json
from locret.loading.options import BackboneSource, WeightOptions

_PACKAGES = {
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "quanto": "optimum-quanto",
    "hqq": "hqq",
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "aqlm": "aqlm",
    "eetq": "kernels",
    "compressed-tensors": "compressed-tensors",
    "quark": "amd-quark",
    "vptq": "vptq",
    "higgs": "flute-kernel",
    "spqr": "spqr_quant",
    "auto-round": "auto-round",
}
"""What pip calls the package of a method, as transformers' documentation of it says."""


def config_of(source: WeightOptions, dtype: torch.dtype | None = None) -> Any:
    """Return transformers' quantisation config of what is asked for; None if the weights are taken as they are.

    Args:
        source: The options.
        dtype: What products are computed in.

    Raises:
        ValueError: If it cannot be read, or names no method of transformers.
    """
    if source.load_in_4bit or source.load_in_8bit:
        from transformers import BitsAndBytesConfig

        if source.load_in_8bit:
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype or torch.float32,
        )
    if source.quantization_config is None:
        return None
    return _read(source.quantization_config)


def _read(given: Any) -> Any:
    from transformers.quantizers import AutoQuantizationConfig

    if hasattr(given, "quant_method"):  # made in Python
        return given
    values = _values(given)
    # Its own quantisers need the package to read even the settings.
    method = str(values.get("quant_method") or ("bitsandbytes" if _bits(values) else None))
    flag = f"--quantization-config {shown(given)}"
    if method == "None":
        raise ValueError(f'{flag} names no quant_method; add one, such as "quant_method": "torchao"')
    _require(method, flag)
    known = dict(values)
    for name, value in values.items():
        if "dtype" in name and isinstance(value, str):
            known[name] = value.removeprefix("torch.")
    try:
        return AutoQuantizationConfig.from_dict(known)
    # Each method checks its settings in its own way.
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{flag} cannot be used ({reason}); check it against transformers' documentation") from error


def _values(given: Any) -> Mapping[str, Any]:
    if isinstance(given, str):
        text = given.strip()
        if text.startswith("{"):
            try:
                given = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"--quantization-config {shown(text)} is no JSON ({error})") from None
        else:
            path = Path(os.path.expanduser(text))
            if not path.is_file():
                raise ValueError(f"--quantization-config {shown(text)}: there is no such file; give one, or JSON")
            given = read_json(path, "a quantisation config")
    if not isinstance(given, Mapping):
        raise ValueError(f"--quantization-config {shown(given)} has no names; give an object with quant_method")
    inner = given.get("quantization_config")  # a whole config.json, say
    return inner if isinstance(inner, Mapping) else given


def _bits(values: Mapping[str, Any]) -> bool:
    return bool(values.get("load_in_4bit") or values.get("load_in_8bit"))


def check(source: BackboneSource, config: Any) -> None:
    """Refuse what transformers could not load, as far as the backbone's config tells, before weights are touched.

    Args:
        source: The options.
        config: The backbone's.

    Raises:
        ValueError: If a package is missing, or the backbone has been quantised in another way.
    """
    stored, wanted = _stored(config), config_of(source)
    flag = next(iter(source.quantising()), "")
    if stored is not None:
        _require(method_of(stored), f"--model {source.model}")
    if wanted is None:
        return
    if (method_of(wanted) == "gguf") != (source.gguf is not None):
        kind = "a GGUF file, which only quant_method gguf" if source.gguf else "no GGUF file, as quant_method gguf"
        raise ValueError(f"{flag}: --model {source.model} is {kind} is for; drop {flag}")
    _require(method_of(wanted), flag)
    if stored is not None and label(stored) != label(wanted):
        raise ValueError(
            f"{flag}: --model {source.model} is quantised already ({label(stored)}), and cannot be quantised again "
            f"({label(wanted)}); drop {flag}, or give the backbone that it was made from"
        )


def check_blocks(source: WeightOptions, model: torch.nn.Module) -> None:
    """Refuse a GGUF file whose blocks were to be kept and were not: transformers decides, by architecture and device.

    Raises:
        ValueError: With the way out.
    """
    if all(weight.dtype.is_floating_point for weight in model.parameters()):
        raise ValueError(
            f"--quantization-config: transformers cannot keep the blocks of {source.gguf} here (it has products for a "
            "few architectures, with the package kernels, on some devices); drop it for plain weights"
        )


def _stored(config: Any) -> Any:
    """Return the quantisation config that a backbone was saved with, as it was written; None without one."""
    found = getattr(config, "quantization_config", None)
    return found or getattr(config.get_text_config(), "quantization_config", None)


def method_of(config: Any) -> str:
    """Return the name of a method, as transformers spells it."""
    values = config if isinstance(config, Mapping) else config.to_dict()
    method = values.get("quant_method") or ("bitsandbytes" if _bits(values) else "unknown")
    return str(getattr(method, "value", method))


def label(config: Any) -> str:
    """Return how a quantisation config is named in records: the method, and what makes its numbers."""
    values = config if isinstance(config, Mapping) else config.to_dict()
    method = method_of(config)
    if method == "bitsandbytes":
        kind = f"4 bits, {values.get('bnb_4bit_quant_type', 'fp4')}" if values.get("load_in_4bit") else "8 bits"
        return f"{method} {kind}"
    kinds = [values.get(name) for name in ("bits", "nbits", "weights", "quant_type", "fmt")]
    named = [str(_kind(kind)) for kind in kinds if kind is not None]
    return " ".join([method, *named])


def _kind(value: Any) -> Any:
    """Return the name within torchao's nested description of a type."""
    if isinstance(value, Mapping):
        inner = value.get("default", value)
        return inner.get("_type", "") if isinstance(inner, Mapping) else inner
    return value if isinstance(value, str | int) else type(value).__name__


def label_of(model_or_config: Any) -> str | None:
    """Return the label of what a loaded backbone, or its config, is quantised with; None if it is not.

    Weights that were made whole again while they were loaded count as not quantised.
    """
    stored = _stored(getattr(model_or_config, "config", model_or_config))
    if stored is None or getattr(stored, "dequantize", False):
        return None
    return label(stored)


def _require(method: str, flag: str) -> None:
    from importlib.metadata import PackageNotFoundError, version

    package = _PACKAGES.get(method)
    if package is None:
        return
    try:
        version(package)
    except PackageNotFoundError:
        raise ValueError(
            f"{flag} needs the package {package}, which is not installed; run pip install {package}"
        ) from None
