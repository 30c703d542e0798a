"""Gates in the files of their authors, read as heads.

KVzap:       a folder with config.json (model_type "kvzap": input_dim, output_dim, hidden_dim, n_modules) and
             model.safetensors: `layers.{i}.weight`, or `layers.{i}.0` and `.2` of an MLP, each with its bias.
Fast KVzip:  `{backbone}/q{G}_dim{R}_sink{M}.pt`, made by torch.save: under "module" one dict of weights per layer. The
             same names in a .safetensors file, `{i}.{name}`, are read first.
DMS:         entries `model.layers.{i}.self_attn.dms_proj_alpha.weight` and `dms_proj_alpha_norm.weight` of a whole
             model, whose config.json says `dms_separate_alpha`, `dms_alpha_scale`, `dms_initial_alpha_offset`,
             `dms_window_size`, `dms_alpha_per`. Shards without such entries are not opened.

Nothing in a file is believed: layers, shapes and numbers are compared with the backbone, and values must be finite.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from huggingface_hub import errors, hf_hub_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from locret import hub
from locret.backbone.adapters import describe_whole, hidden_size, unwrap
from locret.base.fields import shown
from locret.base.files import read_json, shards
from locret.heads import checkpoint, official
from locret.heads.config import HeadsConfig
from locret.heads.gates import WIDEST, is_number
from locret.labels.kvzip_plus import KVZIP_PLUS
from locret.labels.log_attention import LOG_ATTENTION

if TYPE_CHECKING:
    pass

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PARTS = {
    "kvzap-linear": {"out": ""},
    "kvzap-mlp": {"inner": ".0", "out": ".2"},
}
_FAST = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "q_norm.weight", "k_norm.weight", "k_base", "b")
_DMS = re.compile(r"(?:module\.)?(?:model\.)?layers\.(\d+)\.self_attn\.dms_proj_alpha(_norm)?\.(weight|bias)")
_MAKERS: tuple[Any, ...] = (np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0])
"""What arrays and numbers of NumPy are made with when they are unpickled, whatever its private modules are called."""
# What its authors' files hold besides weights are curves of losses, as arrays of NumPy.
_ARRAYS: tuple[Any, ...] = (
    np.ndarray,
    np.dtype,
    np.dtypes.Float64DType,
    np.dtypes.Float32DType,
    np.dtypes.ObjectDType,
    *((made, f"numpy.{core}.multiarray.{made.__name__}") for core in ("_core", "core") for made in _MAKERS),
)

Read = tuple[HeadsConfig, dict[str, Tensor]]


class Place:
    """Where files are: a folder, a file, or a repository of the Hub.

    Args:
        path: As the user gave it.
        what: What is looked for, for messages.
        revision: Branch, tag or commit of a repository.

    Raises:
        ValueError: If it is none of these.
    """

    def __init__(self, path: str, what: str, revision: str | None = None) -> None:
        self.path, self.what, self.revision = path, what, revision
        self.here = Path(path) if os.path.exists(path) else None
        if self.here is None and not _REPOSITORY.fullmatch(path):
            raise ValueError(f"there is no folder or file '{path}'; give {what}, or org/name on the Hub")
        if self.here is not None and revision is not None:
            raise ValueError(f"revision={revision} is for a repository of the Hub, but path={path} is here; drop it")

    def find(self, *names: str) -> Path:
        """Return the first of these files that is there, downloaded if need be.

        Raises:
            ValueError: If there is none.
            OSError: If the Hub refuses or cannot be reached.
        """
        lacks = f"has no {' or '.join(names)}; give {self.what}"
        if self.here is not None:
            if self.here.is_file():
                return self.here
            for name in names:
                if (self.here / name).is_file():
                    return self.here / name
            raise ValueError(f"{self.path} {lacks}")
        with hub.one_sentence("load", self.path, lacks=lacks):
            for name in names[:-1]:
                try:
                    return Path(hf_hub_download(self.path, name, revision=self.revision))
                except errors.EntryNotFoundError:
                    continue
            return Path(hf_hub_download(self.path, names[-1], revision=self.revision))


def read_kvzap(path: str, model_or_config: Any, revision: str | None = None) -> Read:
    """Read a KVzap model; the arguments are those of all readers.

    Args:
        path: Folder, file or repository.
        model_or_config: The backbone, or its transformers config.
        revision: Branch, tag or commit of a repository.

    Returns:
        The config of heads, and their float32 weights.

    Raises:
        ValueError: If it is no such gate, or not one of this backbone; the message says in what.
        OSError: If the Hub refuses or cannot be reached.
    """
    place = Place(path, "the folder of a KVzap model, with config.json and model.safetensors", revision)
    if place.here is not None and place.here.is_file():
        raise ValueError(f"'{path}' is a file; give its folder, with config.json and model.safetensors")
    file = place.find(CONFIG)
    values = _mapping(file, "kvzap")
    backbone = describe_whole(model_or_config)
    numbers = (
        ("input_dim", hidden_size(model_or_config), "hidden size"),
        ("output_dim", _alike(backbone, "KVzap"), "KV heads"),
        ("n_modules", backbone.num_layers, "layers"),
    )
    for name, wanted, meaning in numbers:
        if type(values.get(name)) is not int or values[name] != wanted:
            raise ValueError(
                f"{file} has {name}={shown(values.get(name))}, but {backbone.model_type} has {wanted} {meaning}; "
                "take the KVzap model of this backbone"
            )
    width = values.get("hidden_dim")
    if width is not None and (type(width) is not int or not 1 <= width <= WIDEST):
        raise ValueError(f"{file} has hidden_dim={shown(width)}; it must be null or a number from 1 to {WIDEST:,}")
    gate = "kvzap-linear" if width is None else "kvzap-mlp"
    config = _config(model_or_config, width, gate, KVZIP_PLUS.name, path)
    theirs = _kvzap_names(config, range(backbone.num_layers))
    weights = _from_safetensors(place.find(WEIGHTS), theirs.get, config, str(file))
    return config, weights


def _kvzap_names(config: HeadsConfig, layers: Any) -> dict[str, str]:
    """Return our names by theirs."""
    assert config.gate is not None
    parts = _PARTS[config.gate["name"]].items()
    return {
        f"layers.{layer}{theirs}.{kind}": f"heads.{layer}.{ours}.{kind}"
        for layer in layers
        for ours, theirs in parts
        for kind in ("weight", "bias")
    }


def read_fast_kvzip(path: str, model_or_config: Any, revision: str | None = None) -> Read:
    """Read the gates of Fast KVzip; see `read_kvzap`. A folder or repository may hold those of several backbones."""
    backbone, config = describe_whole(model_or_config), unwrap_config(model_or_config)
    group = backbone.num_heads // _alike(backbone, "Fast KVzip")
    own = Path(str(getattr(config, "_name_or_path", "") or "backbone").rstrip("/\\")).name.lower()
    name = f"q{group}_dim16_sink16"
    place = Place(path, "the gates of Fast KVzip, or the file of this backbone's", revision)
    if place.here is not None and place.here.is_dir():
        kinds = (sorted(place.here.glob(f"q{group}_dim*_sink*.{suffix}")) for suffix in ("safetensors", "pt"))
        found = next(filter(None, kinds), [])
        if len(found) > 1:
            raise ValueError(f"{path} has several gates ({', '.join(f.name for f in found[:4])}); name one of them")
        file = found[0] if found else place.find(*(f"{own}/{name}.{suffix}" for suffix in ("safetensors", "pt")))
    else:
        file = place.find(*(f"{own}/{name}.{suffix}" for suffix in ("safetensors", "pt")))
    layers = _fast_layers(file, backbone.num_layers)
    if len(layers) not in (backbone.num_layers, len(backbone.layers)):
        raise ValueError(
            f"{file} has gates of {len(layers)} layers, but {backbone.model_type} has {backbone.num_layers}; take "
            "those of this backbone"
        )
    every = len(layers) == backbone.num_layers  # else they are those of the layers with full attention, in order
    held = {layer: layers[layer if every else nth] for nth, layer in enumerate(backbone.layers)}
    first = held[backbone.layers[0]]
    width, sinks = (first[part].shape[axis] if first[part].ndim > axis else 0 for part, axis in _MEASURED)
    if not 1 <= width <= WIDEST or not 1 <= sinks <= WIDEST:
        raise ValueError(f"{file} has gates of width {width} with {sinks} sink keys; give those of Fast KVzip")
    made = _config(model_or_config, int(width), "fast-kvzip", LOG_ATTENTION.name, path, sinks=int(sinks))
    weights = {
        f"heads.{layer}.{_fast_name(part)}": checkpoint.as_float32(tensor, f"{part} of layer {layer}", str(file))
        for layer, parts in held.items()
        for part, tensor in parts.items()
    }
    return made, _fitting(weights, made, str(file))


_MEASURED = (("q_norm.weight", 0), ("k_base", 2))


def _fast_name(theirs: str) -> str:
    return theirs.removesuffix(".weight") if "norm" in theirs else theirs


def _fast_layers(file: Path, layers: int) -> list[dict[str, Tensor]]:
    """Return the weights of each layer by their authors' names.

    Raises:
        ValueError: If it is another kind of file.
    """
    if file.suffix == ".safetensors":
        found: dict[int, dict[str, Tensor]] = {}
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                index, _, part = name.partition(".")
                if not index.isascii() or not index.isdigit() or int(index) >= max(layers, 1):
                    raise ValueError(f"{file} has {shown(name)}; give the gates of Fast KVzip, such as 0.q_proj.weight")
                found.setdefault(int(index), {})[part] = tensors.get_tensor(name)
        modules: Any = [found[index] for index in sorted(found)] if sorted(found) == list(range(len(found))) else None
    else:
        modules = official.load_bin(file, _ARRAYS).get("module")
    if not isinstance(modules, list) or not modules:
        raise ValueError(f'{file} has no list of layers under "module"; give the gates of Fast KVzip')
    for layer, parts in enumerate(modules):
        if not isinstance(parts, Mapping) or sorted(map(str, parts)) != sorted(_FAST):
            names = shown(list(parts)) if isinstance(parts, Mapping) else f"a {type(parts).__name__}"
            raise ValueError(f"{file} has {names} for layer {layer}; the gates of Fast KVzip have {', '.join(_FAST)}")
        if strange := [part for part, tensor in parts.items() if not isinstance(tensor, Tensor)]:
            raise ValueError(f"{strange[0]} of layer {layer} in {file} is no tensor; download it again")
    return [dict(parts) for parts in modules]


def read_dms(path: str, model_or_config: Any, revision: str | None = None) -> Read:
    """Read the eviction adapters of DMS (`dms_separate_alpha`); see `read_kvzap`."""
    place, file = _dms_place(path, revision)
    numbers = dms_numbers(_mapping(file, None), str(file))
    if not numbers.pop("separate"):
        raise ValueError(
            f"{file} has dms_separate_alpha=false: its decisions are a number of its own queries, so they cannot be "
            f"taken to another backbone; give it as the backbone too (--model {path} --scorer dms:path={path})"
        )
    config = _config(model_or_config, None, "dms", None, path, **numbers)
    names = {f"heads.{layer}.{part}" for layer in config.layers for part in ("norm", "out.weight", "out.bias")}

    def ours(theirs: str) -> str | None:
        match = _DMS.fullmatch(theirs)
        if match is None:
            return None
        part = f"out.{match[3]}" if not match[2] else "norm" if match[3] == "weight" else "norm.bias"
        name = f"heads.{int(match[1])}.{part}"
        return name if name in names else f"heads.{int(match[1])}.{theirs}"

    index = place.find(INDEX, WEIGHTS)
    if index.name != INDEX:
        return config, _from_safetensors(index, ours, config, str(file), others=True)
    weights: dict[str, Tensor] = {}
    for shard in sorted({held for name, held in shards(index).items() if _DMS.fullmatch(name)}):
        local = place.find(shard.name)
        held = _tensors(local, ours, others=True)
        if twice := sorted(weights.keys() & held.keys()):
            raise ValueError(
                f"{local} holds {shown(twice[0])}, and so does another shard of {index}; download it again"
            )
        weights |= held
    return config, _fitting(weights, config, str(index))


def _dms_place(path: str, revision: str | None) -> tuple[Place, Path]:
    place = Place(path, "the folder of a model that DMS was trained on", revision)
    if place.here is not None and place.here.is_file():
        raise ValueError(f"'{path}' is a file; give its folder, with config.json")
    return place, place.find(CONFIG)


def dms_config(path: str, revision: str | None = None) -> dict[str, Any]:
    """Return what the config of a model in a folder or on the Hub says of DMS; see `dms_numbers`."""
    _, file = _dms_place(path, revision)
    return dms_numbers(_mapping(file, None), str(file))


def dms_numbers(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what a config says of DMS: the numbers of its gate, and whether that is `separate` from the queries.

    Raises:
        ValueError: If it says nothing, or nothing sensible.
    """
    if "dms_alpha_scale" not in values:
        raise ValueError(
            f"{where} says nothing of DMS (it has no dms_alpha_scale); give a model that DMS was trained on"
        )
    usual: dict[str, tuple[str, float]] = {
        "dms_alpha_scale": ("scale", 100.0),
        "dms_initial_alpha_offset": ("offset", 5.0),
        "dms_window_size": ("window", 512),
        "dms_separate_alpha": ("separate", False),
        "rms_norm_eps": ("epsilon", 1e-6),
        "attention_bias": ("bias", False),
    }
    found = {name: values.get(name, default) for name, (_, default) in usual.items()}
    for name, (ours, default) in usual.items():
        if not is_number(found[name], default, ours):
            raise ValueError(f"{where} has {name}={shown(found[name])}; give one such as {default}")
    per = values.get("dms_alpha_per", "head")
    if per not in ("head", "layer"):
        raise ValueError(f"{where} has dms_alpha_per={shown(per)}; it must be head or layer")
    return {
        "scale": float(found["dms_alpha_scale"]),
        "offset": float(found["dms_initial_alpha_offset"]),
        "window": found["dms_window_size"],
        "epsilon": float(found["rms_norm_eps"]),
        "bias": found["attention_bias"],
        "per_layer": per == "layer",
        "separate": found["dms_separate_alpha"],
    }


def unwrap_config(model_or_config: Any) -> Any:
    """Return the transformers config of a backbone, or the config that is given."""
    return unwrap(model_or_config).config if hasattr(model_or_config, "forward") else model_or_config


def _config(
    model_or_config: Any, width: int | None, gate: str, label: str | None, path: str, **numbers: Any
) -> HeadsConfig:
    config = HeadsConfig.for_model(model_or_config, width, gate, **numbers)
    source = f"a gate that others published ({Path(path).name})"
    notes = {"label": None if label is None else {"kind": label}, "training": {"source": source}}
    return config.annotated(**notes)


def _alike(backbone: Any, what: str) -> int:
    """Return the number of KV heads of all layers.

    Raises:
        ValueError: If layers differ in it.
    """
    counts = sorted({shape.num_kv_heads for shape in backbone.full_shapes})
    if len(counts) > 1:
        raise ValueError(f"{what} has layers of one shape, but {backbone.model_type} has layers of {counts} KV heads")
    return int(counts[0])


def _mapping(file: Path, model_type: str | None) -> dict[str, Any]:
    values = read_json(file, "the config of a gate")
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(values, dict) or (model_type is not None and kind != model_type):
        raise ValueError(f'{file} has model_type {shown(kind)}, not "{model_type}"; give the folder of such a model')
    return values


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}); copy or download it again") from error


def _tensors(file: Path, ours: Callable[[str], str | None], *, others: bool = False) -> dict[str, Tensor]:
    """Return float32 weights under our names; `others` lets a file hold what is none of them."""
    found: dict[str, Tensor] = {}
    with _opened(file) as tensors:
        for theirs in tensors.keys():  # noqa: SIM118 (not a dict)
            name = ours(theirs)
            if name is None and others:
                continue
            name = name or theirs
            if name in found:
                raise ValueError(f"{file} has {shown(theirs)} of a layer twice; keep one of the two")
            found[name] = checkpoint.as_float32(tensors.get_tensor(theirs), theirs, str(file))
    return found


def _from_safetensors(
    file: Path, ours: Callable[[str], str | None], config: HeadsConfig, source: str, *, others: bool = False
) -> dict[str, Tensor]:
    if file.suffix != ".safetensors":
        raise ValueError(f"{file} is no safetensors file; gates of this kind are read from safetensors only")
    return _fitting(_tensors(file, ours, others=others), config, str(file), source)


def _fitting(
    weights: dict[str, Tensor], config: HeadsConfig, where: str, source: str | None = None
) -> dict[str, Tensor]:
    """Return the weights that heads of this config have, after comparing names and shapes; others' layers are left out.

    Raises:
        ValueError: If some are missing, strange or of another shape; the message shows both sides.
    """
    wanted = config.weight_shapes
    windows = {f"heads.{layer}." for layer in set(range(config.num_hidden_layers)) - set(config.layers)}
    held = {name: weight for name, weight in weights.items() if not name.startswith(tuple(windows))}
    checkpoint.compare(
        {name: tuple(weight.shape) for name, weight in held.items()},
        wanted,
        where,
        source or f"the config of {config.base_name}",
    )
    return {name: held[name] for name in wanted}
