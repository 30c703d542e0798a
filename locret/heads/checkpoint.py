"""The folder of a set of retaining heads, on disk or on the Hub: read strictly, written whole or not at all.

Files: `model.safetensors` (keys `heads.<layer>.fc1.weight`, `heads.<layer>.fc2.weight`), `config.json`, `README.md`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from locret import hub, shipped
from locret.base.files import read_json, written_whole
from locret.heads.config import HeadsConfig

C = TypeVar("C", bound=HeadsConfig)
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def find(name: str, *, revision: str | None = None, **download: object) -> Path:
    """Return the local folder of heads: the one named, or a download of the repository named.

    Raises:
        ValueError: If it is neither a folder nor a repository of heads.
        OSError: If the Hub refuses or cannot be reached.
    """
    name = shipped.find(name)
    if os.path.isdir(name):
        return Path(name)
    if os.path.exists(name):
        raise ValueError(f"'{name}' is a file; give the folder of retaining heads that holds {CONFIG} and {WEIGHTS}")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        raise ValueError(f"there is no folder '{name}'; give a folder of retaining heads, or org/name on the Hub")
    from huggingface_hub import hf_hub_download

    with hub.one_sentence("load", name):
        paths = [hf_hub_download(name, file, revision=revision, **download) for file in (CONFIG, WEIGHTS)]  # type: ignore[call-overload]
    return Path(paths[0]).parent


def read_config(folder: Path, kind: type[C] = HeadsConfig) -> C:  # type: ignore[assignment]
    """Read `config.json` as a config of this kind.

    Raises:
        ValueError: If it is missing, broken, or another kind of model's.
    """
    file = folder / CONFIG
    if not file.is_file():
        if (folder / "run.json").is_file() and any(folder.glob("checkpoint-*")):
            raise ValueError(
                f"the training in {folder} has not finished; go on with locret-train --resume {folder}, and give the "
                "folder when it has"
            )
        raise ValueError(
            f"{folder} has no {CONFIG}, so it does not hold retaining heads; give a folder that locret-train wrote"
        )
    return kind.from_json(read_json(file, "the config of retaining heads"), str(file))


def read_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]], device: str = "cpu") -> dict[str, Tensor]:
    """Read `model.safetensors` as float32, after comparing every key and shape with `shapes`.

    Raises:
        ValueError: If keys, layer count or shapes differ, or a weight is not finite; the message shows both sides.
    """
    file = folder / WEIGHTS
    if not file.is_file():
        found = sorted(path.name for path in folder.iterdir())
        raise ValueError(
            f"{folder} has no {WEIGHTS} (it has {', '.join(found)}); retaining heads are read from safetensors only"
        )
    try:
        with safe_open(file, framework="pt", device=device) as tensors:
            found_shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
            compare(found_shapes, shapes, str(file), f"its {CONFIG}")
            weights = {name: as_float32(tensors.get_tensor(name), name, str(file)) for name in shapes}
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}); copy or download it again") from error
    return weights


def compare(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], where: str, source: str
) -> None:
    """Refuse weights whose key set, layers or shapes are not those wanted.

    Raises:
        ValueError: With both sides: what `where` holds and what `source` says.
    """
    found_layers, wanted_layers = _layers(found), _layers(wanted)
    if found_layers != wanted_layers:
        raise ValueError(
            f"{where} has retaining heads for {len(found_layers)} layers ({_span(found_layers)}) but {source} says "
            f"{len(wanted_layers)} ({_span(wanted_layers)}); these weights belong to another backbone"
        )
    missing, foreign = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or foreign:
        raise ValueError(
            f"{where} has {len(found)} weights but {source} says {len(wanted)} "
            f"(missing: {', '.join(missing[:4]) or 'none'}; unexpected: {', '.join(foreign[:4]) or 'none'}); "
            "these are not the weights of these retaining heads"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(
                f"{name} is {list(found[name])} in {where} but {list(shape)} by {source}; "
                "these weights belong to another backbone or hidden_dim"
            )


def fitting(weights: Mapping[str, Tensor], config: HeadsConfig, where: str) -> dict[str, Tensor]:
    """Return the weights that heads of a config have; those of layers without a head are left out.

    Raises:
        ValueError: As `compare`.
    """
    wanted = config.weight_shapes
    without = tuple(f"heads.{layer}." for layer in set(range(config.num_hidden_layers)) - set(config.layers))
    shapes = {name: tuple(weight.shape) for name, weight in weights.items() if not name.startswith(without)}
    compare(shapes, wanted, where, f"the config of {config.base_name}")
    return {name: weights[name] for name in wanted}


def as_float32(weight: Any, name: str, where: str) -> Tensor:
    """Return a float32 copy that does not depend on the file.

    Raises:
        ValueError: If a value is not finite, or not a float: one NaN makes every score of its layer NaN.
    """
    if not isinstance(weight, Tensor) or weight.layout != torch.strided or weight.is_meta or weight.is_quantized:
        raise ValueError(f"{name} in {where} is no plain tensor with values; give the weights as they were published")
    if weight.dtype not in _DTYPES:
        kind = str(weight.dtype).removeprefix("torch.")
        raise ValueError(f"{name} in {where} is of {kind}; give float32, bfloat16, float16 or float64")
    if not bool(weight.isfinite().all()):
        raise ValueError(f"{name} in {where} holds values that are not finite numbers; train the heads again")
    with torch.inference_mode(False):  # a tensor made under inference mode could never be trained
        return weight.to(torch.float32, copy=True).contiguous()


def write(folder: Path, config: HeadsConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Write weights and config into a folder that exists; call inside `replacing`, which names what goes wrong."""
    text = json.dumps(config.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    tensors = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@contextmanager
def replacing(target: Path, kind: type[HeadsConfig] = HeadsConfig) -> Iterator[Path]:
    """Give an empty folder whose files take the place of the target's when the block ends well; others stay.

    Raises:
        ValueError: If the target is a file, or holds another model.
        OSError: If it cannot be written; the message names it.
    """
    refuse_foreign(target, kind)
    with written_whole(target, parents=True, last=CONFIG) as fresh:
        fresh.mkdir()
        yield fresh


def refuse_foreign(target: Path, kind: type[HeadsConfig] = HeadsConfig) -> None:
    """Refuse to write where something else is.

    Raises:
        ValueError: If the target is a file, or holds another model.
    """
    if target.exists() and not target.is_dir():
        raise ValueError(f"'{target}' is a file; choose a folder for the retaining heads")
    if (target / CONFIG).is_file():
        try:
            read_config(target, kind)
        except ValueError as error:
            raise ValueError(
                f"{target} holds something else than retaining heads, which would be overwritten ({error}); "
                "choose another folder"
            ) from error
    elif (target / WEIGHTS).exists():
        raise ValueError(f"{target} holds another model's {WEIGHTS}, which would be overwritten; choose another folder")


def _layers(names: Mapping[str, tuple[int, ...]]) -> list[int]:
    return sorted({int(match[1]) for name in names if (match := re.match(r"heads\.(\d+)\.", name))})


def _span(layers: list[int]) -> str:
    if not layers:
        return "none"
    shown = ", ".join(map(str, layers)) if len(layers) <= 8 else f"{layers[0]} to {layers[-1]}"
    return f"layer {shown}" if len(layers) == 1 else f"layers {shown}"
