"""Where the modules of a backbone go: a device map as transformers takes it, checked before weights are read."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from locret.base.fields import shown
from locret.base.files import read_json
from locret.loading.options import MAPS, WeightOptions

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
            torch.device(HOST if text == DISK or text.isdigit() else text)
        except RuntimeError:
            raise ValueError(
                f"--device-map {shown(text)} is neither {', '.join(MAPS)} nor a device, disk or a JSON file; give one, "
                'or JSON such as {"": "cpu"}'
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
    if isinstance(given, bool) or not _is_here(device):
        raise ValueError(f"--device-map puts {module or 'everything'} on {shown(given)}, which is not here; {_seen()}")
    return text if device.type != "cuda" else device.index or 0


def _is_here(device: torch.device) -> bool:
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(device.type, 0)
    return (device.index or 0) < count


def _seen() -> str:
    return f"PyTorch sees {torch.cuda.device_count()} cuda devices, cpu and disk"


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
    if not source.max_memory:
        raise ValueError("--max-memory is empty; write such as {0: 20GiB, cpu: 60GiB}, or drop it")
    found: dict[int | str, int] = {}
    for place, amount in source.max_memory.items():
        name: int | str = int(place) if str(place).isdigit() else str(place).removeprefix("cuda:")
        name = int(name) if str(name).isdigit() else name
        if name == DISK:
            raise ValueError("--max-memory does not limit the disk, which takes all that is left; drop disk from it")
        if not isinstance(name, int) and name not in (HOST, "mps"):
            raise ValueError(f"--max-memory names {shown(place)}; places are numbers of accelerators and cpu")
        if name != HOST and not _is_here(torch.device("cuda", name) if isinstance(name, int) else torch.device(name)):
            raise ValueError(f"--max-memory names {shown(place)}, which is not here; {_seen()}")
        try:
            found[name] = int(amount) if str(amount).isdigit() else convert_file_size_to_int(str(amount))
        except (ValueError, OverflowError):
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
        found = _apart(sketch, asked)
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


def _apart(module: nn.Module, asked: Mapping[str, int | str], name: str = "", outer: Any = None) -> dict[str, Any]:
    """Return a map in which no module is within another: hooks of an outer one would take what an inner one holds."""
    place = asked.get(name, outer)
    if not any(inner != name and f"{inner}.".startswith(f"{name}." if name else "") for inner in asked):
        return {} if place is None else {name: place}
    found: dict[str, Any] = {}
    for child, part in module.named_children():
        found |= _apart(part, asked, f"{name}.{child}" if name else child, place)
    return found


def _check_modules(sketch: nn.Module, device_map: Mapping[str, int | str]) -> None:
    tied = getattr(sketch, "all_tied_weights_keys", {})
    weights = {name for name, _ in sketch.named_parameters()} | set(tied)
    modules = {name for name, _ in sketch.named_modules()}
    if single := [name for name in device_map if name in weights - modules]:
        raise ValueError(
            f"--device-map names {single[0]}, which is one weight of a module; name the whole module, "
            f"{single[0].rpartition('.')[0]}"
        )
    if unknown := [name for name in device_map if name not in modules]:
        there = sorted(name for name, _ in sketch.named_children())
        raise ValueError(
            f"--device-map names {shown(unknown[0])}, which {type(sketch).__name__} does not have; its modules begin "
            f"with {', '.join(there)}, such as {sorted(weights)[0]}"
        )
    covered = tuple(f"{name}." for name in device_map)
    left = sorted(name for name in weights - set(tied) if not f"{name}.".startswith(covered))
    if left and "" not in device_map:
        raise ValueError(
            f"--device-map says nothing of {len(left)} weights, such as {left[0]}; name their modules, or give all "
            'others a place as ""'
        )
    for name, source in tied.items():
        places = [place_of(weight, device_map) for weight in (name, source)]
        if DISK in places and None not in places and places[0] != places[1]:
            raise ValueError(
                f"--device-map puts {name} on {places[0]} and {source} on {places[1]}, which are one weight; give "
                f"{name.rpartition('.')[0]} and {source.rpartition('.')[0]} the same place"
            )


def offload_room(folder: str) -> str:
    """Make a folder of this process's own in the one for weights on disk, so that nobody's files are overwritten.

    Raises:
        ValueError: If nothing can be written there.
    """
    path = os.path.abspath(os.path.expanduser(folder))
    try:
        os.makedirs(path, exist_ok=True)
        return tempfile.mkdtemp(prefix="locret-", dir=path)
    except OSError as error:
        raise ValueError(
            f"--offload-folder {folder} cannot be written to ({error.strerror}); give a folder that can"
        ) from error


@contextmanager
def removed_unless_loaded(room: str | None) -> Iterator[None]:
    """Remove what was written for a backbone that then could not be loaded."""
    try:
        yield
    except BaseException:
        if room is not None:
            shutil.rmtree(room, ignore_errors=True)
        raise


def place_of(weight: str, device_map: Mapping[str, int | str]) -> int | str | None:
    """Return the place of a weight: that of the innermost module which a device map names; None if it names none."""
    module = weight
    while module and module not in device_map:
        module = module.rpartition(".")[0]
    return device_map.get(module)


def _first(error: BaseException) -> str:
    """Return the first sentence of a message of many."""
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")[:300]
