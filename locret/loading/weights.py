"""How a backbone's weights come into memory: in which numbers, on which devices, and how many bytes that takes.

Counted on the meta device, with the quantiser's own modules, before a weight is read. Of a backbone in few bits, or in
parts, the count is an estimate: without scales (at most a few per cent) and without the padding of parts.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locret.backbone.adapters import find_decoder
from locret.base.fields import shown
from locret.base.files import read_json
from locret.base.nearest import check_retired
from locret.loading.eight_bits import EightBitLinear, pack
from locret.loading.options import MAPS, BackboneSource, WeightOptions

DISK, HOST = "disk", "cpu"
EIGHT_BITS = "torch 8 bits"
_PROCESSES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_PACKAGES = {
    **{name: name for name in ("bitsandbytes", "torchao", "hqq", "vptq", "auto-round")},
    **{"quanto": "optimum-quanto", "gptq": "gptqmodel", "awq": "gptqmodel"},
}
"""What pip calls the package of a method; of others transformers itself says what is missing."""


@dataclass(frozen=True)
class WeightPlan:
    """Bytes of weights by place, and the device map that puts them there."""

    places: dict[str, int]
    """Bytes by device, such as cuda:0, and on "cpu" and "disk"."""
    gathered: int
    """The most that is brought to the device at once of what is elsewhere."""
    device_map: dict[str, int | str] | None
    label: str | None
    """What the weights are quantised with."""

    def on(self, device: torch.device) -> int:
        """Return the bytes on a device, with room for what is brought there."""
        return self.places.get(name_of(device), 0) + self.gathered

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {**self.places, **({} if self.label is None else {"quantisation": self.label})}


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

    A `sketch`, which `sketch_of` has returned, is changed into what the quantiser makes of it.
    """
    if sketch is None:
        sketch = sketch_of(config, dtype, trust_remote_code=getattr(source, "trust_remote_code", False))
    if (shard := getattr(source, "shard", None)) is not None:
        return _sharded(sketch, dtype.itemsize, shard, getattr(source, "shard_offload", None), device)
    wanted = quantisation_of(source, dtype, device)
    if packs(source, device):
        pack(sketch)
    quantiser = _quantiser(sketch, config, wanted, dtype, device_map_of(source))
    device_map = _resolved(sketch, source, quantiser)
    main = device if device_map is None else main_device(device_map) or device
    places: dict[str, int] = defaultdict(int)
    leaves: dict[str, int] = defaultdict(int)
    for name, count in _sizes(sketch, quantiser):
        place = name_of(device) if device_map is None else _place_of(name, device_map)
        places[place] += count
        if device_map is not None and place in (HOST, DISK) and place != name_of(main):
            leaves[name.rpartition(".")[0]] += count
    label = label_of(config) if wanted is None else label_of_way(wanted)
    label = EIGHT_BITS if packs(source, device) else label
    return WeightPlan(dict(places), max(leaves.values(), default=0), device_map, label)


def _sizes(sketch: nn.Module, quantiser: Any) -> Iterator[tuple[str, int]]:
    """Yield every weight and saved buffer with its bytes, as they will be loaded; scales of few bits are left out."""
    saved = sketch.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = dict(sketch.named_parameters())
    tensors |= {name: tensor for name, tensor in sketch.named_buffers() if name in saved}
    for name, tensor in tensors.items():
        if quantiser is None:
            yield name, tensor.nbytes
        else:
            yield name, int(tensor.numel() * quantiser.param_element_size(sketch, name, tensor))


# -- several processes ------------------------------------------------------------------------------------------------


def _sharded(model: nn.Module, size: int, shard: str, offload: str | None, device: torch.device) -> WeightPlan:
    """Return about what one process of several takes that hold a part each."""
    own = size * _numbers(model) // int(os.environ.get("WORLD_SIZE", "1"))
    if shard == "tp":
        return WeightPlan({name_of(device): own}, 0, None, None)
    # What comes together at once: the layer that runs, and what comes before or after it.
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    layer = max(map(_numbers, find_decoder(model).layers))
    gathered = layer + max(layer, *map(_numbers, ends))
    place = {None: name_of(device), "cpu": HOST, "nvme": DISK}[offload]
    return WeightPlan({place: own}, size * gathered, None, None)


def _numbers(module: nn.Module | None) -> int:
    return 0 if module is None else sum(weight.numel() for weight in module.parameters())


# -- devices ----------------------------------------------------------------------------------------------------------


def device_map_of(source: WeightOptions) -> str | dict[str, int | str] | None:
    """Return the device map that is asked for: the name of one, or one place for everything; None where none is."""
    given: Any = source.device_map
    if given is None:
        return None
    for name in _PROCESSES:
        if os.environ.get(name, "1").isdigit() and int(os.environ.get(name, "1")) > 1:
            raise ValueError(
                f"--device-map spreads one process's weights, but {name}={os.environ[name]} processes were started, "
                "each of which would take all devices; start one, or drop it"
            )
    one = given[""] if isinstance(given, Mapping) and [*given] == [""] else given
    if str(one) in (*MAPS, HOST, DISK) or re.fullmatch(r"\d+|(cuda|mps)(:\d+)?", str(one)):
        return one if one in MAPS else {"": _place("everything", one)}
    raise ValueError(
        f"--device-map {shown(given)} is none of {', '.join(MAPS)} and one device; a mapping of modules to devices was "
        "retired, so give one of those, with --max-memory"
    )


def _place(what: str, given: Any) -> int | str:
    """Return a device of this machine as transformers takes it: a number of an accelerator, "cpu" or "disk"."""
    text = str(given).removeprefix("cuda:")
    if text in (HOST, DISK):
        return text
    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    number = int(text) if text.isdigit() else 0
    kind = "cuda" if text.isdigit() or text == "cuda" else text
    if isinstance(given, bool) or number >= counts.get(kind, 0):
        raise ValueError(
            f"--device-map or --max-memory names {shown(given)} for {what}, which is not here; PyTorch sees "
            f"{counts['cuda']} cuda devices, cpu and disk"
        )
    return kind if kind == "mps" else number


def main_device(device_map: str | Mapping[str, int | str]) -> torch.device | None:
    """Return where a backbone under a device map begins to compute; None where transformers chooses."""
    if isinstance(device_map, str):
        return None
    return as_device(next((place for place in device_map.values() if place not in (HOST, DISK)), HOST))


def as_device(place: int | str) -> torch.device:
    """Return the device that a place of a device map computes on; what is on disk is computed on by others."""
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(HOST if place == DISK else place)


def _most_memory(source: WeightOptions) -> dict[int | str, int] | None:
    """Return the bytes that each place may hold, as `--max-memory` says."""
    from accelerate.utils import convert_file_size_to_int

    if source.max_memory is None:
        return None
    if not source.max_memory or DISK in source.max_memory:
        raise ValueError("--max-memory limits devices and cpu, not the disk; write such as {0: 20GiB, cpu: 60GiB}")
    amounts = {_place("memory", place): str(amount) for place, amount in source.max_memory.items()}
    return {at: int(text) if text.isdigit() else convert_file_size_to_int(text) for at, text in amounts.items()}


def _resolved(sketch: nn.Module, source: WeightOptions, quantiser: Any) -> dict[str, int | str] | None:
    """Return the device of every module, of what is asked for and the backbone's modules; None for one device."""
    if (asked := device_map_of(source)) is None:
        return None
    try:
        if isinstance(asked, str):
            from transformers.integrations.accelerate import _get_device_map as made  # private: none is public

            made_map: dict[str, Any] = made(sketch, asked, _most_memory(source), quantiser)
            found = {name: at.index or 0 if isinstance(at, torch.device) else at for name, at in made_map.items()}
        else:
            found = asked
        if quantiser is not None:
            quantiser.validate_environment(device_map=found)
    except (ValueError, ImportError, RuntimeError) as error:
        why = first_sentence(error)
        raise ValueError(why if why.startswith("--") else f"--device-map {shown(source.device_map)}: {why}") from error
    return found


def _place_of(weight: str, device_map: Mapping[str, int | str]) -> str:
    """Return the place of a weight, as plans name it: that of the innermost module which a device map names."""
    module = weight
    while module and module not in device_map:
        module = module.rpartition(".")[0]
    place = device_map[module]
    return DISK if place == DISK else name_of(as_device(place))


# -- quantisation -----------------------------------------------------------------------------------------------------


def packs(source: WeightOptions, device: torch.device) -> bool:
    """Return whether weights are rounded to eight bits here, once they are loaded, instead of by transformers."""
    return source.load_in_8bit and device.type == "cpu" and source.device_map is None


def quantisation_of(source: WeightOptions, dtype: torch.dtype | None, device: torch.device) -> Any:
    """Return transformers' quantisation config of what is asked for; None if it is to take the weights as they are."""
    if packs(source, device):
        return None
    if source.load_in_8bit or source.load_in_4bit:
        from transformers import BitsAndBytesConfig

        if source.load_in_8bit:
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype or torch.float32,
        )
    given: Any = source.quantization_config
    if given is None or hasattr(given, "quant_method"):  # made in Python
        return given
    values = _settings(given)
    values = values.get("quantization_config", values)  # a whole config.json, say
    flag, method = f"--quantization-config {shown(given)}", method_of(values)
    if method == "unknown":
        raise ValueError(f'{flag} names no quant_method; add one, such as "quant_method": "torchao"')
    check_retired("quant_method", method)
    _require(method, flag)
    known = {
        name: value.removeprefix("torch.") if "dtype" in name and isinstance(value, str) else value
        for name, value in values.items()
    }
    from transformers.quantizers import AutoQuantizationConfig

    try:
        return AutoQuantizationConfig.from_dict(known)
    except Exception as error:  # each method checks its settings in its own way
        why = first_sentence(error) or type(error).__name__
        raise ValueError(f"{flag} cannot be used ({why}); check it against transformers' documentation") from error


def _settings(given: Any) -> Mapping[str, Any]:
    """Return what `--quantization-config` gives, as a mapping, JSON or a JSON file."""
    if isinstance(given, str):
        text = given.strip()
        path = Path(os.path.expanduser(text))
        if text.startswith("{"):
            try:
                given = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"--quantization-config {shown(text)} is no JSON ({error})") from None
        elif path.is_file():
            given = read_json(path, "what --quantization-config takes")
        else:
            raise ValueError(f"--quantization-config {shown(text)} is no file that is there; give one, or JSON")
    if not isinstance(given, Mapping):
        raise ValueError(f"--quantization-config {shown(given)} has no names; give a mapping")
    return given


def check_quantisation(source: BackboneSource, config: Any, device: torch.device) -> None:
    """Refuse what could not be loaded, as far as the backbone's config tells, before weights are touched."""
    stored, wanted = _stored(config), quantisation_of(source, None, device)
    flag = next(iter(source.quantising()), "")
    if stored is not None:
        _require(method_of(stored), f"--model {source.model}")
    label = EIGHT_BITS if packs(source, device) else None if wanted is None else label_of_way(wanted)
    if label is None:
        return
    if wanted is not None:
        _require(method_of(wanted), flag)
        source.check_no_gguf(flag)
    if stored is not None and label_of_way(stored) != label:
        raise ValueError(
            f"{flag}: --model {source.model} is quantised already ({label_of_way(stored)}), and cannot be quantised "
            f"again ({label}); drop {flag}, or give the backbone that it was made from"
        )


def _quantiser(sketch: nn.Module, config: Any, wanted: Any, dtype: torch.dtype, device_map: Any) -> Any:
    """Return transformers' quantiser after it has put its modules into the sketch; None where nothing is quantised."""
    from transformers.quantizers import AutoHfQuantizer

    if (stored := _stored(config)) is None and wanted is None:
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
        why = first_sentence(error)
        raise ValueError(f"the weights cannot be {label_of_way(wanted)} here: {why}") from error
    return quantiser


def _stored(config: Any) -> Any:
    """Return the quantisation config that a backbone was saved with, as it was written; None without one."""
    found = getattr(config, "quantization_config", None)
    return found or getattr(config.get_text_config(), "quantization_config", None)


def method_of(config: Any) -> str:
    """Return the name of a method, as transformers spells it."""
    values = config if isinstance(config, Mapping) else config.to_dict()
    own = "bitsandbytes" if values.get("load_in_4bit") or values.get("load_in_8bit") else "unknown"
    method = values.get("quant_method") or own
    return str(getattr(method, "value", method))


def label_of_way(config: Any) -> str:
    """Return how a quantisation config is named in records: the method, and what makes its numbers."""
    values = config if isinstance(config, Mapping) else config.to_dict()
    method = method_of(config)
    if method == "bitsandbytes":
        four = f"4 bits, {values.get('bnb_4bit_quant_type', 'fp4')}"
        return f"{method} {four if values.get('load_in_4bit') else '8 bits'}"
    named = list[str]()
    for kind in (values.get(name) for name in ("bits", "nbits", "weights", "quant_type", "fmt")):
        inner = kind.get("default", kind) if isinstance(kind, Mapping) else kind  # torchao nests its types
        inner = inner.get("_type", "") if isinstance(inner, Mapping) else inner
        if kind is not None:
            named.append(str(inner) if isinstance(inner, str | int) else type(inner).__name__)
    return " ".join([method, *named])


def label_of(model_or_config: Any) -> str | None:
    """Return the label of what a loaded backbone, or its config, is quantised with; None if it is not.

    Weights that were made whole again while they were loaded count as not quantised.
    """
    if isinstance(model_or_config, nn.Module) and any(isinstance(m, EightBitLinear) for m in model_or_config.modules()):
        return EIGHT_BITS
    stored = _stored(getattr(model_or_config, "config", model_or_config))
    if stored is None or getattr(stored, "dequantize", False):
        return None
    return label_of_way(stored)


def _require(method: str, flag: str) -> None:
    package = _PACKAGES.get(method)
    try:
        version(package or "torch")
    except PackageNotFoundError:
        raise ValueError(
            f"{flag} needs the package {package}, which is not installed; run pip install {package}"
        ) from None


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of a message of many."""
    return re.split(r"(?<=[a-z\])'\"])\. ", " ".join(str(error).split()))[0].rstrip(".")[:400]
