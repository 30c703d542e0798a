"""From options to a backbone and its tokenizer; every failure is one sentence."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from locret import backbone_names, hub, shipped
from locret.backbone.adapters import describe
from locret.base.fields import shown
from locret.base.files import read_json, shards
from locret.base.openmp import hand_back_cores
from locret.base.plugins import install
from locret.base.warned import warn_user
from locret.distributed.shard import load_sharded
from locret.heads.fingerprint import keep_samples, offloaded
from locret.loading import gguf, weights
from locret.loading.eight_bits import pack
from locret.loading.options import ADAPTER_CONFIG, CONFIG, BackboneSource

_MOST = {"num_hidden_layers": 1000, "num_attention_heads": 2**14, "num_key_value_heads": 2**14, "head_dim": 2**16}
_MOST |= {"hidden_size": 2**20, "intermediate_size": 2**24, "vocab_size": 2**28, "max_position_embeddings": 2**40}
"""What no backbone exceeds: with more, modules would be made for hours."""
_MOST_PER_BYTE = 8
"""Weights per byte: the most that quantisation to one bit gives."""


def resolve_device(name: str) -> torch.device:
    """Return the device that `--device` means on this machine."""
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise ValueError(f"--device {name} is unknown; choose auto, cpu, cuda, cuda:N or mps")
    device = torch.device(name)
    count = {"cpu": 1, "mps": int(has_mps), "cuda": torch.cuda.device_count()}[device.type]
    if (device.index or 0) >= count:
        raise ValueError(f"--device {name}: PyTorch sees {count} {device.type} devices here; use --device auto")
    return device


def device_of_source(options: BackboneSource, device: torch.device | None = None) -> torch.device:
    """Return where a backbone begins to compute: what its device map says, else `device`, or what `--device` means."""
    asked = weights.device_map_of(options)
    mapped = None if asked is None else weights.main_device(asked)
    return mapped or device or resolve_device(str(getattr(options, "device", "auto")))


def resolve_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype that `--dtype` means for a backbone on a device.

    `auto` is the backbone's own. On the CPU it is float32 all the same, unless the backbone is in bfloat16 and the CPU
    has instructions that multiply it: elsewhere half precisions are slow or missing.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if device.type == "cpu":
        return own if own == torch.bfloat16 and _cpu_multiplies_bfloat16() else torch.float32
    return own if isinstance(own, torch.dtype) else torch.float32


def _cpu_multiplies_bfloat16() -> bool:
    """Return whether the CPU has products in bfloat16; asked of it, not timed, so that every run here decides alike."""
    # Older PyTorch does not say.
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


class _Source(NamedTuple):
    """Where the parts of a backbone are."""

    model: str
    revision: str | None
    adapter: str | None
    tokenizer: str


def _source(options: BackboneSource) -> _Source:
    """Return where a backbone is; for the folder of an adapter that is its base model, with the adapter on it."""
    folder = options.local_folder()
    name = folder or options.place
    found = options.gguf is not None
    if not found:
        found = os.path.isfile(os.path.join(folder, CONFIG)) if folder else _fetch_config(name, options)
    return _Source(name, options.revision, options.adapter, name) if found else _under_adapter(name, options)


def _under_adapter(name: str, options: BackboneSource) -> _Source:
    """Return the base model of an adapter, as transformers' own `from_pretrained` finds it."""
    from peft import PeftConfig

    if options.adapter:
        raise ValueError(
            f"--model {name} is an adapter itself; give its base model, or drop --adapter {options.adapter}"
        )
    with _one_sentence(f"--model {name} is an adapter whose {ADAPTER_CONFIG} cannot be read"):
        adapter = PeftConfig.from_pretrained(name, **({"revision": options.revision} if options.revision else {}))
    base = adapter.base_model_name_or_path
    if not isinstance(base, str) or not base:
        raise ValueError(
            f"--model {name} is an adapter that does not name its base model; give the base model, and --adapter {name}"
        )
    under = _source(BackboneSource(model=base, revision=adapter.revision))
    if under.adapter:
        raise ValueError(f"--model {name} is an adapter on {base}, which is an adapter too; merge them")
    own = os.path.isfile(os.path.join(name, "tokenizer_config.json"))
    return _Source(under.model, under.revision, name, name if own else under.tokenizer)


def load_config(options: BackboneSource) -> Any:
    """Read the backbone's config and refuse an architecture that cannot work, before any weights are touched."""
    from transformers import AutoConfig

    source = _source(options)
    packed = _gguf(options)
    if os.path.isdir(source.model) and not packed:
        values = read_json(Path(source.model, "config.json"), "the config of a backbone")
        if not isinstance(values, dict):
            raise ValueError(f"--model {source.model} has a config.json without names; give the folder of a backbone")
        if "base_model_type" in values and "hidden_dim" in values:
            raise ValueError(
                f"--model {options.model} holds retaining heads; give them as --heads {options.model}, and their "
                "backbone as --model"
            )
    read = options.gguf_flag if packed else f"--model {source.model} has a config.json that"
    with _one_sentence(f"{read} cannot be read"), gguf.read_once(options.gguf):
        config = AutoConfig.from_pretrained(
            source.model, revision=source.revision, trust_remote_code=options.trust_remote_code, **packed
        )
        _check_config(config)
    if packed and config.dtype is None:
        config.dtype = torch.bfloat16  # a block's numbers have fewer bits than that
    _name(config, options)
    try:
        describe(config)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"--model {source.model} has a config.json that says too little ({' '.join(str(error).split())[:200]}); "
            "give the folder of a backbone with full attention"
        ) from error
    weights.check_quantisation(options, config, device_of_source(options))
    return config


def _name(config: Any, options: BackboneSource) -> None:
    """Let a backbone with a short name be known by its name on the Hub, in whichever form it is."""
    if name := backbone_names.hub_id(options.model):
        config.name_or_path = name


def _gguf(options: BackboneSource) -> dict[str, str]:
    """Return what tells transformers of a GGUF file, if one is loaded."""
    if options.gguf is None:
        return {}
    if find_spec("gguf") is None:
        raise ValueError(f"{options.gguf_flag} needs the package gguf; {install('gguf')}")
    return {"gguf_file": options.gguf}


def _check_config(config: Any) -> None:
    """Refuse numbers that no backbone has, before modules are made of them."""
    text = config.get_text_config()
    # Layers may differ, as in Gemma-4.
    differing = getattr(text, "per_layer_attributes", None) or ()
    for name, most in _MOST.items():
        for layer in text.per_layer_config if name in differing else [text]:
            value = getattr(layer, name, None)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
                raise ValueError(f"{name} is {shown(value)} instead of a whole number from 1 to {most:,}")
    for name, value in (getattr(text, "rope_parameters", None) or {}).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {shown(value)}")


def _fetch_config(name: str, options: BackboneSource) -> bool:
    """Download the config alone, because huggingface_hub's errors are clearer than what transformers makes of them.

    Returns:
        Whether the repository holds a backbone; else it holds an adapter.
    """
    from huggingface_hub import errors, hf_hub_download

    with _all_places(options.model), hub.one_sentence("load", name):
        for file in ("config.json", ADAPTER_CONFIG):
            try:
                hf_hub_download(name, file, revision=options.revision)
                return file == "config.json"
            except errors.LocalEntryNotFoundError:
                raise
            except errors.EntryNotFoundError:
                continue
        raise ValueError("it has no config.json, so it is not a backbone; check --model")


@contextmanager
def _all_places(model: str) -> Iterator[None]:
    """Say of a short name that the Hub does not give where else it was looked for, or which one may be meant."""
    try:
        yield
    except (ValueError, OSError) as error:
        if model not in backbone_names.NAMES:
            raise type(error)(f"{error}{backbone_names.hint(model)}") from error
        raise type(error)(f"{backbone_names.elsewhere(model)}; {error}") from error


def load_tokenizer(options: BackboneSource) -> Any:
    """Load the backbone's own tokenizer; an adapter may bring one, and a GGUF file has one of its own."""
    from transformers import AutoTokenizer

    source = _source(options)
    revision = source.revision if source.tokenizer == source.model else options.revision
    # A tokenizer beside a GGUF file is the original, which the file describes in its own way.
    beside = os.path.isfile(os.path.join(source.tokenizer, "tokenizer_config.json"))
    inside = {} if beside else _gguf(options)
    unreadable = f"--model {options.model} has no tokenizer that can be read"
    with _one_sentence(unreadable), gguf.read_once(inside.get("gguf_file")):
        return AutoTokenizer.from_pretrained(
            source.tokenizer, revision=revision, trust_remote_code=options.trust_remote_code, **inside
        )


def tokenizer_of(name: str) -> Any:
    """Load the tokenizer of a backbone by its name, or of a folder or repository that holds nothing else."""
    from transformers import AutoTokenizer

    found = backbone_names.find(name)
    if found.lower().endswith(backbone_names.GGUF):
        return load_tokenizer(BackboneSource(model=name))
    return AutoTokenizer.from_pretrained(shipped.find(found))


def load_model(options: BackboneSource, config: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Load the backbone, with its adapter if there is one, frozen and in evaluation mode."""
    from transformers import AutoModelForCausalLM

    source = _source(options)
    if source.adapter and options.shard == "tp":
        raise ValueError(
            f"--adapter {source.adapter} changes weights that --shard tp splits; merge it into the backbone, or use "
            "--shard fsdp"
        )
    if source.adapter and weights.packs(options, device):
        raise ValueError(f"--load-in-8bit rounds what --adapter {source.adapter} changes; merge it into the backbone")
    where = _where(source, options, config, device, dtype)
    with _one_sentence(f"--model {options.model} cannot be loaded"):
        model: nn.Module
        read = partial(
            AutoModelForCausalLM.from_pretrained,
            source.model,
            config=config,
            revision=source.revision,
            trust_remote_code=options.trust_remote_code,
            dtype=dtype,
            attn_implementation=options.attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
        if options.shard is not None:
            model, found = load_sharded(options, config, device, dtype, read)
        else:
            logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # it warns of what was asked for
            with gguf.read_once(options.gguf, last=True):
                model, found = read(**where)
        if missing := sorted(found["missing_keys"]):
            raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}, and would be random")
        # Of weights that are left on disk nobody looks at the shape before a layer runs.
        other = [
            (name, held.shape, weight.shape)
            for name, weight in model.named_parameters()
            if weight.is_meta and (held := offloaded(model, name)) is not None and held.shape != weight.shape
        ]
        for name, held, wanted in sorted([*found["mismatched_keys"], *other]):
            raise ValueError(f"{name} has the shape {(*held,)}, and its config.json describes {(*wanted,)}")
    if foreign := sorted(found["unexpected_keys"]):
        warn_user(
            f"--model {options.model}: its config.json has no use for {len(foreign)} of its weights, such as "
            f"{foreign[0]}"
        )
    _name(model.config, options)
    if weights.packs(options, device):
        keep_samples(model)
        pack(model)
    if source.adapter:
        model = _with_adapter(model, source)
    if options.shard is not None:
        keep_samples(model)
    hand_back_cores()  # answers may be written by other threads
    return model.eval().requires_grad_(False)


def _where(
    source: _Source, options: BackboneSource, config: Any, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return what tells transformers where weights go, and in which numbers."""
    from transformers import GgufConfig

    folder, sketch = Path(source.model), None
    if folder.is_dir():
        with _one_sentence(f"--model {options.model} cannot be loaded"):
            sketch = weights.sketch_of(config, dtype, trust_remote_code=options.trust_remote_code)
            _check_weights(folder, sketch, options.gguf)
    where: dict[str, Any] = _gguf(options)
    if (quantised := weights.quantisation_of(options, dtype, device)) is not None:
        where["quantization_config"] = quantised
    elif where:
        where["quantization_config"] = GgufConfig(dequantize=True)
    if options.device_map is not None:
        plan = weights.plan_weights(options, config, device, dtype, sketch)
        assert plan.device_map is not None
        if source.adapter and weights.DISK in plan.device_map.values():
            raise ValueError(
                f"--adapter {source.adapter} cannot be put on weights that --device-map leaves on disk, because PEFT "
                "would write into the backbone's own files; merge the adapter, or make room with --max-memory"
            )
        return {**where, "device_map": plan.device_map}
    # Straight to the device: the host need not hold the weights.
    return {**where, "device_map": None if device.type == "cpu" and quantised is None else {"": device}}


def _with_adapter(model: nn.Module, source: _Source) -> nn.Module:
    from peft import PeftModel, PeftType

    assert source.adapter is not None
    with _one_sentence(f"--adapter {source.adapter} cannot be put on --model {source.model}"):
        # Left to itself, it would spread the weights anew.
        device_map = getattr(model, "hf_device_map", None) or {}
        spread = {f"base_model.model.{name}" if name else "": place for name, place in device_map.items()}
        placed: dict[str, Any] = {"device_map": spread} if spread else {}
        model = PeftModel.from_pretrained(model, source.adapter, **placed)
        for kind in model.peft_config.values():
            if kind.is_prompt_learning:
                raise ValueError(f"{PeftType(kind.peft_type).value} works outside of the layers and would be dropped")
        describe(model)
    return model


def _check_weights(folder: Path, sketch: nn.Module, packed: str | None) -> None:
    """Refuse a config that describes far more weights than a local folder holds, before memory is taken for them."""
    for index in folder.glob("*.index.json"):
        shards(index)
    patterns = ("*.safetensors", "*.bin") if packed is None else (packed,)
    held = sum(file.stat().st_size for pattern in patterns for file in folder.glob(pattern))
    described = sum(weight.numel() for weight in sketch.parameters())
    if described > _MOST_PER_BYTE * held:
        raise ValueError(f"its config.json describes {described:,} weights and its files hold {held:,} bytes")


@contextmanager
def _one_sentence(what: str) -> Iterator[None]:
    """Turn the paragraphs that loaders raise into the first line that says something."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    # Not a list of classes: a damaged file makes unpicklers, validators and Rust (whose panics are no Exception) raise
    # whatever they like.
    except BaseException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = weights.first_sentence(Exception(" ".join(lines[:2])))
        if isinstance(error, (KeyError, IndexError, AttributeError)):
            reason = f"{type(error).__name__}: {reason}"
        reason = "".join(letter if letter.isprintable() else "?" for letter in reason)
        raise ValueError(f"{what} ({reason}); check that it is whole and of the right kind") from error
