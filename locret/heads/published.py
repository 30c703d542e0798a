"""Weights that others published, read as retaining heads: the files of Locret's authors, and gates of other methods.

Locret:      (and APB, same layout) `model.layers.{i}.self_attn.fc1.weight` (d_R, (H + 2 K) * D) and `...fc2.weight`
             (K, d_R). A file may hold the whole backbone. The original loader takes every entry with "fc" in its name
             and ignores what does not fit; this one takes only entries of that exact form, so that a backbone whose MLP
             layers are called fc1 and fc2 is left alone.
KVzap:       a folder with config.json (model_type "kvzap": input_dim, output_dim, hidden_dim, n_modules) and
             model.safetensors: `layers.{i}.weight`, or `layers.{i}.0` and `.2` of an MLP, each with its bias.
Fast KVzip:  `{backbone}/q{G}_dim{R}_sink{M}.pt`, made by torch.save: under "module" one dict of weights per layer.
DMS:         entries `model.layers.{i}.self_attn.dms_proj_alpha.weight` and `dms_proj_alpha_norm.weight` of a whole
             model, whose config.json says `dms_separate_alpha`, `dms_alpha_scale`, `dms_initial_alpha_offset`,
             `dms_window_size`, `dms_alpha_per`. Shards without such entries are not opened.

Nothing in a file is believed: layers, shapes and numbers are compared with the backbone, and values must be finite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import errors, hf_hub_download
from torch import Tensor

from locret import hub
from locret.backbone.adapters import config_of, describe_whole, hidden_size
from locret.base.fields import shown
from locret.base.files import read_json, shards
from locret.heads import checkpoint, gates
from locret.heads.config import HeadsConfig
from locret.labels.kinds import LOG_ATTENTION, LOGIT

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_ENTRY = re.compile(r"(?:module\.)?(?:model\.)?layers\.(\d+)\.self_attn\.(fc[12]\.(?:weight|bias))")
_KVZAP = re.compile(r"layers\.(\d+)(|\.0|\.2)\.(weight|bias)")
_KVZAP_PARTS = {"": "out", ".0": "inner", ".2": "out"}
_DMS = re.compile(r"(?:module\.)?(?:model\.)?layers\.(\d+)\.self_attn\.dms_proj_alpha(?:(_norm)\.weight|\.(\w+))")
_DMS_NUMBERS: dict[str, tuple[str, float]] = {
    "dms_alpha_scale": ("scale", 100.0),
    "dms_initial_alpha_offset": ("offset", 5.0),
    "dms_window_size": ("window", 512),
    "dms_separate_alpha": ("separate", False),
    "rms_norm_eps": ("epsilon", 1e-6),
    "attention_bias": ("bias", False),
}
_DMS_FOLDER = "the folder of a model that DMS was trained on"
_MAKERS: tuple[Any, ...] = (np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0])
"""What arrays and numbers of NumPy are made with when they are unpickled, whatever its private modules are called."""
# What the files of Fast KVzip hold besides weights are curves of losses, as arrays of NumPy.
_ARRAYS: tuple[Any, ...] = (
    np.ndarray,
    np.dtype,
    np.dtypes.Float64DType,
    np.dtypes.Float32DType,
    np.dtypes.ObjectDType,
    *((made, f"numpy.{core}.multiarray.{made.__name__}") for core in ("_core", "core") for made in _MAKERS),
)

Read = tuple[HeadsConfig, dict[str, Tensor]]


def read_locret(path: Path, model_or_config: Any) -> tuple[HeadsConfig, dict[str, Tensor]]:
    """Read the weights that Locret's authors published; see `RetainingHeads.from_official`. d_R is the file's."""
    weights = checkpoint.tensors_of(_files(path), _our_name)
    if not weights:
        raise ValueError(
            f"{path} has no retaining heads: no entry like model.layers.0.self_attn.fc1.weight; give the weights "
            "published for Locret"
        )
    hidden_dim = next((len(w) for name, w in weights.items() if name.endswith("fc1.weight") and w.ndim and len(w)), 1)
    config = HeadsConfig.for_model(model_or_config, hidden_dim).annotated(
        label={"kind": LOGIT.name, "include_last_prompt_token": False},  # as the published code has it
        training={"source": f"weights published by the authors of Locret ({path.name})"},
    )
    return config, checkpoint.fitting(weights, config, str(path), f"the config of {config.base_name}")


def _our_name(name: str) -> str | None:
    match = _ENTRY.fullmatch(name)
    return f"heads.{int(match[1])}.{match[2]}" if match else None


def _files(path: Path) -> list[Path]:
    """Return the files to read: the one given, or those of a folder."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"there is no file or folder '{path}'; download the published heads first (`hf download REPO`)"
        )
    for index in sorted(path.glob("*.index.json")):
        # Shards without heads are never opened: a backbone has gigabytes of them.
        files = sorted({file for name, file in shards(index).items() if _our_name(name)})
        if gone := [file.name for file in files if not file.is_file()]:
            raise ValueError(
                f"{index} names {shown(gone[0])}, which is not in its folder; download all parts that hold heads"
            )
        return files
    for suffix in ("safetensors", "bin"):
        files = sorted(path.glob(f"*.{suffix}"))
        if len(files) == 1:
            return files
        if files:
            raise ValueError(
                f"{path} has several .{suffix} files ({', '.join(f.name for f in files[:4])}); name one of them"
            )
    raise ValueError(f"{path} has no .safetensors or .bin file; give the file or folder of the published heads")


def _find(path: str, what: str, revision: str | None, *names: str, file: bool = False) -> Path:
    """Return the first of these files of a folder, or a repository of the Hub; a `file` may be the path itself."""
    here, lacks = Path(path), f"has no {' or '.join(names)}; give {what}"
    if here.is_file() and file:
        return here
    if here.is_file():
        raise ValueError(f"'{path}' is a file; give its folder, with config.json")
    if here.exists():
        if revision is not None:
            raise ValueError(f"revision={revision} is for a repository of the Hub, but path={path} is here; drop it")
        if found := [here / name for name in names if (here / name).is_file()]:
            return found[0]
        raise ValueError(f"{path} {lacks}")
    if not hub.REPOSITORY.fullmatch(path):
        raise ValueError(f"there is no folder or file '{path}'; give {what}, or org/name on the Hub")
    with hub.one_sentence("load", path, lacks=lacks):
        for name in names[:-1]:
            try:
                return Path(hf_hub_download(path, name, revision=revision))
            except errors.EntryNotFoundError:
                continue
        return Path(hf_hub_download(path, names[-1], revision=revision))


def read_kvzap(path: str, model_or_config: Any, revision: str | None = None) -> Read:
    """Read a KVzap model: the config of heads, and their float32 weights, as all readers do."""
    what = "the folder of a KVzap model, with config.json and model.safetensors"
    file = _find(path, what, revision, CONFIG)
    values = _mapping(file)
    if values.get("model_type") != "kvzap":
        raise ValueError(f'{file} has model_type {shown(values.get("model_type"))}, not "kvzap"; give {what}')
    width = values.get("hidden_dim")
    config = _config(model_or_config, width, "kvzap-linear" if width is None else "kvzap-mlp", "kvzip_plus", path)

    def ours(theirs: str) -> str:
        match = _KVZAP.fullmatch(theirs)
        return f"heads.{int(match[1])}.{_KVZAP_PARTS[match[2]]}.{match[3]}" if match else theirs

    weights = _find(path, what, revision, WEIGHTS)
    return config, _fitting(checkpoint.tensors_of([weights], ours), config, str(weights))


def read_fast_kvzip(path: str, model_or_config: Any, revision: str | None = None) -> Read:
    """Read the gates of Fast KVzip; see `read_kvzap`. A folder or repository may hold those of several backbones."""
    backbone, config = describe_whole(model_or_config), config_of(model_or_config)
    group = backbone.num_heads // backbone.num_kv_heads
    own = Path(str(getattr(config, "_name_or_path", "") or "backbone").rstrip("/\\")).name.lower()
    found = sorted(Path(path).glob(f"q{group}_dim*_sink*.pt"))
    if len(found) > 1:
        raise ValueError(f"{path} has several gates ({', '.join(f.name for f in found[:4])}); name one of them")
    name = found[0].name if found else f"{own}/q{group}_dim16_sink16.pt"
    file = _find(path, "the gates of Fast KVzip, or the file of this backbone's", revision, name, file=True)
    layers = checkpoint.load_bin(file, _ARRAYS).get("module")
    if not isinstance(layers, list) or not all(isinstance(parts, Mapping) for parts in layers):
        raise ValueError(f'{file} has no list of layers under "module"; give the gates of Fast KVzip')
    # Of all layers, or of those with full attention, in order.
    indices = next((at for at in (range(backbone.num_layers), backbone.layers) if len(at) == len(layers)), None)
    if indices is None:
        raise ValueError(
            f"{file} has gates of {len(layers)} layers, but {backbone.model_type} has {backbone.num_layers}; take "
            "those of this backbone"
        )
    weights = {
        f"heads.{layer}.{part}".replace("_norm.weight", "_norm"): checkpoint.as_float32(
            tensor, f"{part} of layer {layer}", str(file)
        )
        for layer, parts in zip(indices, layers, strict=True)
        for part, tensor in parts.items()
    }
    norm, sinks = (weights.get(f"heads.{backbone.layers[0]}.{part}") for part in ("q_norm", "k_base"))
    if norm is None or sinks is None or norm.ndim != 1 or sinks.ndim != 4:
        raise ValueError(f"{file} has no q_norm and k_base as Fast KVzip writes them; download it again")
    made = _config(model_or_config, len(norm), "fast-kvzip", LOG_ATTENTION.name, path, sinks=sinks.shape[2])
    return made, _fitting(weights, made, str(file))


def read_dms(path: str, model_or_config: Any, revision: str | None = None) -> Read:
    """Read the eviction adapters of DMS (`dms_separate_alpha`); see `read_kvzap`."""
    numbers = dms_config(path, revision)
    if not numbers.pop("separate"):
        raise ValueError(
            f"{path} has dms_separate_alpha=false: its decisions are a number of its own queries, so they cannot be "
            f"taken to another backbone; give it as the backbone too (--model {path} --scorer dms:path={path})"
        )
    config = _config(model_or_config, None, "dms", None, path, **numbers)

    def ours(theirs: str) -> str | None:
        match = _DMS.fullmatch(theirs)
        return match and f"heads.{int(match[1])}." + ("norm" if match[2] else f"out.{match[3]}")

    index = _find(path, _DMS_FOLDER, revision, INDEX, WEIGHTS)
    files = [index]
    if index.name == INDEX:
        names = sorted({held.name for name, held in shards(index).items() if ours(name)})
        files = [_find(path, _DMS_FOLDER, revision, name) for name in names]
    return config, _fitting(checkpoint.tensors_of(files, ours), config, str(index))


def dms_config(path: str, revision: str | None = None) -> dict[str, Any]:
    """Return what the config of a model in a folder or on the Hub says of DMS; see `dms_numbers`."""
    file = _find(path, _DMS_FOLDER, revision, CONFIG)
    return dms_numbers(_mapping(file), str(file))


def dms_numbers(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what a config says of DMS: the numbers of its gate, and whether that is `separate` from the queries."""
    if "dms_alpha_scale" not in values:
        raise ValueError(
            f"{where} says nothing of DMS (it has no dms_alpha_scale); give a model that DMS was trained on"
        )
    numbers: dict[str, Any] = {}
    for name, (ours, usual) in _DMS_NUMBERS.items():
        found = values.get(name, usual)
        if not gates.is_number(found, usual) or (ours == "scale" and found == 0):
            raise ValueError(f"{where} has {name}={shown(found)}; give one such as {usual}")
        numbers[ours] = float(found) if type(usual) is float else found
    per = values.get("dms_alpha_per", "head")
    if per not in ("head", "layer"):
        raise ValueError(f"{where} has dms_alpha_per={shown(per)}; it must be head or layer")
    return {**numbers, "per_layer": per == "layer"}


def _config(
    model_or_config: Any, width: int | None, gate: str, label: str | None, path: str, **numbers: Any
) -> HeadsConfig:
    kind = gates.get(gate)
    made = {"name": gate, "hidden_size": hidden_size(model_or_config), **kind.numbers, **numbers}
    config = replace(HeadsConfig.for_model(model_or_config, width or kind.width or 1), gate=made)
    source = f"a gate that others published ({Path(path).name})"
    return config.annotated(label=None if label is None else {"kind": label}, training={"source": source})


def _fitting(weights: dict[str, Tensor], config: HeadsConfig, where: str) -> dict[str, Tensor]:
    """Return the weights that heads of a config have; those of layers without a head are left out."""
    without = tuple(f"heads.{layer}." for layer in set(range(config.num_hidden_layers)) - set(config.layers))
    held = {name: weight for name, weight in weights.items() if not name.startswith(without)}
    return checkpoint.fitting(held, config, where, f"the config of {config.base_name}")


def _mapping(file: Path) -> dict[str, Any]:
    values = read_json(file, "the config of a gate")
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not the config of a model; give the folder of one")
    return values
