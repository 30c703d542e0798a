"""How many bytes a backbone's weights take, and where: counted on the meta device, with the quantiser's own modules."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locret.loading import placement, quantisation
from locret.loading.options import WeightOptions
from locret.loading.placement import DISK, HOST
from locret.loading.shares import WeightCount

_BLOCK, _NESTED = 64, 256
"""Weights that share a scale in bitsandbytes' four bits, and scales that share one where they are quantised again."""


@dataclass(frozen=True)
class WeightPlan:
    """Bytes of weights by place, and the device map that puts them there."""

    places: dict[str, int]
    """Bytes by device, such as cuda:0, and on "cpu" and "disk"."""
    gathered: int
    """The most that is brought to the device at once of what is elsewhere, or unpacked for one product."""
    device_map: dict[str, int | str] | None
    label: str | None
    """What the weights are quantised with."""

    def on(self, device: torch.device) -> int:
        """Return the bytes on a device, with room for what is brought there and unpacked."""
        return self.places.get(name_of(device), 0) + self.gathered

    @property
    def total(self) -> int:
        """All bytes, wherever they are."""
        return sum(self.places.values())

    def elsewhere(self, device: torch.device) -> dict[str, int]:
        """Return the bytes by place, without those on a device."""
        return {place: count for place, count in self.places.items() if place != name_of(device)}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        quantised = {} if self.label is None else {"quantisation": self.label}
        return {**self.places, **quantised}


def name_of(device: torch.device) -> str:
    """Return the name of a device in plans; the first accelerator is the one without a number."""
    return f"{device.type}:{device.index or 0}" if device.type == "cuda" else device.type


def sketch_of(config: Any, dtype: torch.dtype | None = None, *, trust_remote_code: bool = False) -> nn.Module:
    """Return a backbone without weights, on the meta device; without a dtype, in that of its config."""
    from transformers import AutoModelForCausalLM

    own = {} if dtype is None else {"dtype": dtype}  # None is PyTorch's default to transformers, and changes the config
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **own)
    return model


def plan_weights(
    source: WeightOptions, config: Any, device: torch.device, dtype: torch.dtype, sketch: nn.Module | None = None
) -> WeightPlan:
    """Return where the weights of a backbone will be, and how many bytes they take there.

    Args:
        source: The options.
        config: The backbone's.
        device: Where it runs.
        dtype: Type of weights that are not quantised.
        sketch: What `sketch_of` returned; it is changed into what the quantiser makes of it.

    Raises:
        ValueError: If the options do not go together, or with the backbone.
    """
    if sketch is None:
        sketch = sketch_of(config, dtype, trust_remote_code=getattr(source, "trust_remote_code", False))
    if (shard := getattr(source, "shard", None)) is not None:
        return _sharded(WeightCount(sketch, dtype), shard, getattr(source, "shard_offload", None), device)
    wanted = quantisation.config_of(source, dtype)
    quantiser = _quantiser(sketch, config, wanted, dtype, placement.device_map_of(source))
    device_map = placement.resolve(sketch, source, quantiser)
    places: dict[str, int] = defaultdict(int)
    leaves: dict[str, int] = defaultdict(int)
    for name, count in _sizes(sketch, quantiser):
        place = _place(name, device_map, device)
        places[place] += count
        if device_map is not None and place in (HOST, DISK) and place != name_of(_main(device_map, device)):
            leaves[name.rpartition(".")[0]] += count
    gathered = max(max(leaves.values(), default=0), _unpacked(sketch, quantiser, dtype))
    label = quantisation.label_of(config) if wanted is None else quantisation.label(wanted)
    return WeightPlan(dict(places), gathered, device_map, label)


def _sharded(weights: WeightCount, shard: str, offload: str | None, device: torch.device) -> WeightPlan:
    """Return the plan of one process of several that hold a part each."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if shard == "tp":
        return WeightPlan({name_of(device): weights.split(processes) or weights.total}, 0, None, None)
    place = {None: name_of(device), "cpu": HOST, "nvme": DISK}[offload]
    return WeightPlan({place: weights.shard(processes)}, weights.gathered(), None, None)


def _unpacked(sketch: nn.Module, quantiser: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the largest weight of less than a byte, which is unpacked before it is multiplied."""
    if quantiser is None:
        return 0
    sizes = ((weight, quantiser.param_element_size(sketch, name, weight)) for name, weight in sketch.named_parameters())
    return max((weight.numel() * dtype.itemsize for weight, size in sizes if size < 1), default=0)


def _main(device_map: dict[str, int | str], device: torch.device) -> torch.device:
    return placement.main_device(device_map) or device


def _place(weight: str, device_map: dict[str, int | str] | None, device: torch.device) -> str:
    if device_map is None:
        return name_of(device)
    place = placement.place_of(weight, device_map)
    assert place is not None  # `placement.resolve` has seen to it
    return DISK if place == DISK else name_of(placement.as_device(place))


def _quantiser(sketch: nn.Module, config: Any, wanted: Any, dtype: torch.dtype, device_map: Any) -> Any:
    """Return transformers' quantiser after it has put its modules into the sketch; None where nothing is quantised."""
    from transformers.quantizers import AutoHfQuantizer

    stored = quantisation._stored(config)
    if stored is None and wanted is None:
        return None
    try:
        if stored is not None:
            wanted = AutoHfQuantizer.merge_quantization_configs(stored, None)
        quantiser = AutoHfQuantizer.from_config(wanted, pre_quantized=stored is not None)
        quantiser.validate_environment(device_map=device_map)
        quantiser.update_dtype(dtype)
        with torch.device("meta"):
            quantiser.preprocess_model(model=sketch, dtype=dtype, device_map=device_map, checkpoint_files=None)
    # Every method has its own checks.
    except (ValueError, ImportError, RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the weights cannot be {quantisation.label(wanted)} here: {placement._first(error)}"
        ) from error
    return quantiser


def _sizes(sketch: nn.Module, quantiser: Any) -> Iterator[tuple[str, int]]:
    """Yield every weight and saved buffer with its bytes, as they will be loaded."""
    saved = sketch.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = dict(sketch.named_parameters())
    tensors |= {name: tensor for name, tensor in sketch.named_buffers() if name in saved}
    for name, tensor in tensors.items():
        if quantiser is None:
            yield name, tensor.nbytes
        else:
            size = quantiser.param_element_size(sketch, name, tensor)
            yield name, int(tensor.numel() * size) + _scales(sketch, name, tensor, quantiser)


def _scales(sketch: nn.Module, name: str, weight: Tensor, quantiser: Any) -> int:
    """Return the bytes of the scales that bitsandbytes keeps beside a weight; those of others are in its rows."""
    if not quantiser.param_needs_quantization(sketch, name):
        return 0
    config = quantiser.quantization_config
    if getattr(config, "load_in_4bit", False):
        scales = -(-weight.numel() // _BLOCK)
        if not config.bnb_4bit_use_double_quant:
            return 4 * scales + 16 * 4  # and the table of the sixteen values
        return scales + 4 * (-(-scales // _NESTED)) + 16 * 4 + 256 * 4 + 4
    rows = weight.shape[0] if weight.ndim > 1 else 0
    return 4 * rows if getattr(config, "load_in_8bit", False) else weight.element_size() * rows
