"""Where the modules of a backbone go: a device map as transformers takes it, checked before weights are read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from locret.cli.option_values import shown
from locret.files import read_json
from locret.load_options import MAPS, WeightOptions

DISK, HOST = "disk", "cpu"
_PROCESSES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def device_map_of(source: WeightOptions) -> str | dict[str, int | str] | None:
    """Return the device map that is asked for: the name of one, or a mapping; None for one device.

    Raises:
        ValueError: If it cannot be read, names a device that is not here, or several processes would share it.
    """
    given: str | Mapping[str, Any] | None = source.device_map
    if given is None:
        return None
    _check_alone()
    if isinstance(given, str) and given not in MAPS:
        given = _read(given)
    if isinstance(given, str):
        return given
    if not given:
        raise ValueError("--device-map is empty; give a name such as auto, or a mapping of modules to devices")
    found = {name: _place(place, name) for name, place in given.items()}
    if source.offload_folder is not None and DISK not in found.values():
        raise ValueError(
            f"--offload-folder {source.offload_folder} would stay empty, because --device-map puts nothing on disk; "
            "drop it"
        )
    return found


def _check_alone() -> None:
    for name in _PROCESSES:
        if os.environ.get(name, "1").isdigit() and int(os.environ.get(name, "1")) > 1:
            raise ValueError(
                f"--device-map spreads one process's weights, but {name}={os.environ[name]} processes were started, "
                "each of which would take all devices; start one, or drop it"
            )


def _read(text: str) -> str | Mapping[str, Any]:
    text = text.strip()
    path = Path(os.path.expanduser(text))
    if text.startswith("{"):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--device-map {shown(text)} is no JSON ({error})") from None
    elif path.is_file():
        values = read_json(path, "a device map")
    else:
        try:
            torch.device(text)
        except RuntimeError:
            raise ValueError(
                f"--device-map {shown(text)} is neither {', '.join(MAPS)} nor a device nor a JSON file; give one, or "
                'JSON such as {"": "cpu"}'
            ) from None
        return {"": text}
    if not isinstance(values, Mapping):
        raise ValueError(f"--device-map {shown(text)} has no names; give a mapping of modules to devices")
    return values


def _place(given: Any, module: str) -> int | str:
    """Return a device of this machine as transformers takes it: a number of an accelerator, "cpu" or "disk"."""
    text = str(given)
    if text in (HOST, DISK):
        return text
    try:
        device = torch.device(f"cuda:{text}" if text.isdigit() else text)
    except RuntimeError:
        device = torch.device("meta")
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(device.type, 0)
    if isinstance(given, bool) or (device.index or 0) >= count:
        has = f"{torch.cuda.device_count()} cuda devices"
        raise ValueError(
            f"--device-map puts {module or 'everything'} on {shown(given)}, which is not here; PyTorch sees {has}, cpu "
            "and disk"
        )
    return text if device.type != "cuda" else device.index or 0


def main_device(device_map: str | Mapping[str, int | str]) -> torch.device | None:
    """Return where a backbone under a device map begins to compute; None where transformers chooses."""
    if isinstance(device_map, str):
        return None
    first = next((place for place in device_map.values() if place not in (HOST, DISK)), HOST)
    return as_device(first)


def as_device(place: int | str) -> torch.device:
    """Return the device that a place of a device map computes on; what is on disk is computed on by others."""
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(HOST if place == DISK else place)


def most_memory(source: WeightOptions) -> dict[int | str, int] | None:
    """Return the bytes that each place may hold, as `--max-memory` says.

    Raises:
        ValueError: For an unknown place, or an amount that is none.
    """
    from accelerate.utils import convert_file_size_to_int

    if source.max_memory is None:
        return None
    found: dict[int | str, int] = {}
    for place, amount in source.max_memory.items():
        name: int | str = int(place) if str(place).isdigit() else str(place).removeprefix("cuda:")
        name = int(name) if str(name).isdigit() else name
        if isinstance(name, int):
            _place(name, "--max-memory")
        elif name not in (HOST, DISK, "mps"):
            raise ValueError(f"--max-memory names {shown(place)}; places are numbers of accelerators, cpu and disk")
        try:
            found[name] = int(amount) if str(amount).isdigit() else convert_file_size_to_int(str(amount))
        except ValueError:
            raise ValueError(
                f"--max-memory gives {shown(place)} {shown(amount)}, which is no amount; write one such as 20GiB"
            ) from None
        if found[name] < 0:
            raise ValueError(f"--max-memory gives {shown(place)} {shown(amount)}, which is below 0; raise it")
    return found


def resolve(sketch: nn.Module, source: WeightOptions, quantiser: Any) -> dict[str, int | str] | None:
    """Return the device of every module, of what is asked for and the backbone's modules; None for one device.

    Args:
        sketch: The backbone on the meta device, with the quantiser's modules.
        source: The options.
        quantiser: transformers' own, if weights are quantised.

    Raises:
        ValueError: If the map names modules that the backbone lacks, leaves some out, or the quantiser objects.
    """
    asked = device_map_of(source)
    if asked is None:
        return None
    if isinstance(asked, str):
        found = _made(sketch, asked, most_memory(source), quantiser)
    else:
        _check_modules(sketch, asked)
        found = asked
    if quantiser is not None:
        try:
            quantiser.validate_environment(device_map=found)
        except (ValueError, ImportError, RuntimeError) as error:
            raise ValueError(f"--device-map {shown(source.device_map)}: {_first(error)}") from error
    return found


def _made(sketch: nn.Module, name: str, most: dict[int | str, int] | None, quantiser: Any) -> dict[str, int | str]:
    try:
        from transformers.integrations.accelerate import _get_device_map as made  # private: there is no public one
    except ImportError as error:  # pragma: no cover - no transformers of today
        raise ValueError(f"this transformers makes no --device-map {name} ({error}); give a mapping") from error
    try:
        found: dict[str, Any] = made(sketch, name, most, quantiser)
    except (ValueError, ImportError, RuntimeError) as error:
        raise ValueError(f"--device-map {name}: {_first(error)}") from error
    return {module: place.index or 0 if isinstance(place, torch.device) else place for module, place in found.items()}


def _check_modules(sketch: nn.Module, device_map: Mapping[str, int | str]) -> None:
    tied = getattr(sketch, "all_tied_weights_keys", {})
    weights = {name for name, _ in sketch.named_parameters()} | set(tied)
    modules = {name for name, _ in sketch.named_modules()} | weights
    if unknown := [name for name in device_map if name not in modules]:
        there = sorted(name for name, _ in sketch.named_children())
        raise ValueError(
            f"--device-map names {shown(unknown[0])}, which {type(sketch).__name__} does not have; its modules begin "
            f"with {', '.join(there)}, such as {sorted(weights)[0]}"
        )
    if "" in device_map:
        return
    covered = tuple(f"{name}." for name in device_map)
    left = sorted(name for name in weights - set(tied) if not f"{name}.".startswith(covered))
    if left:
        raise ValueError(
            f"--device-map says nothing of {len(left)} weights, such as {left[0]}; name their modules, or give all "
            'others a place as ""'
        )


def _first(error: BaseException) -> str:
    """Return the first sentence of a message of many."""
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")[:300]
