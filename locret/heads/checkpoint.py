"""The folder of a set of retaining heads, on disk or on the Hub: read strictly, written whole or not at all.

Files: `model.safetensors` (keys `heads.<layer>.fc1.weight`, `heads.<layer>.fc2.weight`), `config.json`, `README.md`.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """Return the local folder of heads: the one named, or a download of the repository named."""
    name = shipped.find(name)
    if os.path.isdir(name):
        return Path(name)
    if os.path.exists(name):
        raise ValueError(f"'{name}' is a file; give the folder of retaining heads that holds {CONFIG} and {WEIGHTS}")
    if not hub.REPOSITORY.fullmatch(name):
        raise ValueError(f"there is no folder '{name}'; give a folder of retaining heads, or org/name on the Hub")
    from huggingface_hub import hf_hub_download

    with hub.one_sentence("load", name):
        paths = [hf_hub_download(name, file, revision=revision, **download) for file in (CONFIG, WEIGHTS)]  # type: ignore[call-overload]
    return Path(paths[0]).parent


def read_config(folder: Path, kind: type[C] = HeadsConfig) -> C:  # type: ignore[assignment]
    """Read `config.json` as a config of this kind."""
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


def read_weights(folder: Path, config: HeadsConfig, device: str = "cpu") -> dict[str, Tensor]:
    """Read `model.safetensors` as float32; every name and shape must be the config's."""
    file = folder / WEIGHTS
    if not file.is_file():
        found = sorted(path.name for path in folder.iterdir())
        raise ValueError(
            f"{folder} has no {WEIGHTS} (it has {', '.join(found)}); retaining heads are read from safetensors only"
        )
    return fitting(tensors_of([file], device=device), config, str(file), f"its {CONFIG}")


def fitting(weights: Mapping[str, Tensor], config: HeadsConfig, where: str, source: str) -> dict[str, Tensor]:
    """Return weights in the order of a config, after comparing names and shapes."""
    wanted = config.weight_shapes
    missing, foreign = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    if missing or foreign:
        raise ValueError(
            f"{where} has {len(weights)} weights but {source} says {len(wanted)} "
            f"(missing: {', '.join(missing[:4]) or 'none'}; unexpected: {', '.join(foreign[:4]) or 'none'}); "
            "these are not the weights of these retaining heads, or those of another backbone"
        )
    for name, shape in wanted.items():
        if weights[name].shape != shape:
            raise ValueError(
                f"{name} is {list(weights[name].shape)} in {where} but {list(shape)} by {source}; "
                "these weights belong to another backbone or hidden_dim"
            )
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


def tensors_of(
    files: Iterable[Path], ours: Callable[[str], str | None] = lambda name: name, device: str = "cpu"
) -> dict[str, Tensor]:
    """Return float32 weights of `.safetensors` and `.bin` files under our names; those without one are left out."""
    weights: dict[str, Tensor] = {}
    for file in files:
        for theirs, tensor in _wanted(file, ours, device):
            name = str(ours(theirs))
            if name in weights:
                raise ValueError(f"{file} has {name.removeprefix('heads.')} of a layer twice; keep one of the two")
            weights[name] = as_float32(tensor, theirs, str(file))
    return weights


def _wanted(file: Path, ours: Callable[[str], str | None], device: str) -> list[tuple[str, Any]]:
    if file.suffix != ".safetensors":
        return [(name, value) for name, value in load_bin(file).items() if ours(name)]
    try:
        with safe_open(file, framework="pt", device=device) as tensors:
            return [(name, tensors.get_tensor(name)) for name in tensors.keys() if ours(name)]  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}); copy or download it again") from error


def load_bin(file: Path, also: Sequence[Any] = ()) -> dict[str, Any]:
    """Return what torch.save wrote, tensors and plain data by name; nothing in it is run.

    Raises:
        ValueError: If it is damaged, or holds anything else.
    """
    try:
        # Memory-mapped where the format allows it: the file may hold a backbone of which only the heads are read.
        with torch.serialization.safe_globals(list(also)):
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file) or None)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} holds more than tensors, and loading it could run code; convert it to safetensors"
        ) from error
    # What a damaged pickle makes the unpickler raise has no end: IndexError, KeyError, TypeError, ...
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{file} is not a file that torch.save wrote ({reason}); download it again") from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError(
            f"{file} holds a {type(state).__name__} and not weights by name; give a state dict of the heads"
        )
    return state


def write(folder: Path, config: HeadsConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Write weights and config into a folder that exists; call inside `replacing`, which names what goes wrong."""
    text = json.dumps(config.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    tensors = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@contextmanager
def replacing(target: Path, kind: type[HeadsConfig] = HeadsConfig) -> Iterator[Path]:
    """Give an empty folder whose files take the place of the target's when the block ends well; others stay."""
    refuse_foreign(target, kind)
    with written_whole(target, parents=True, last=CONFIG) as fresh:
        fresh.mkdir()
        yield fresh


def refuse_foreign(target: Path, kind: type[HeadsConfig] = HeadsConfig) -> None:
    """Refuse to write where something else is."""
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
