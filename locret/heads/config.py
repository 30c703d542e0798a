"""What `config.json` says about a set of retaining heads: whose they are, their shape, and how they were trained.

Strict on purpose: a key that is unknown, missing or of the wrong type is an error, never a default, because heads that
are read wrongly still produce scores, only bad ones.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import Self

from locret._version import __version__
from locret.backbone.adapters import config_of, describe_whole, hidden_size, text_config
from locret.backbone.chunk import PROJECTIONS
from locret.backbone.shape import Backbone, LayerShape
from locret.base.fields import Range, check_fields, check_ranges, checked_values, shown
from locret.base.nearest import check_retired
from locret.heads import gates
from locret.heads.head import RetainingHead
from locret.policy.policy import RetentionPolicy, without_retired

FORMAT_VERSION = 1
PAPER_WIDTH = 1024
"""d_R (Locret, section 4.1)."""
MOST_RECOMMENDED = 2**20
"""Whoever takes a stranger's heads is promised bounded memory, so their numbers are bounded."""
_FILE = re.compile(r"[/\\]|patterns=")
NOTES = ("base_model", "base_model_revision", "base_weights", "label", "policy", "training", "evaluation", "license")
"""The fields that `RetainingHeads.annotate` may set: facts about the heads that their weights do not show."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WORD = re.compile(r"[\w.+/-]{1,200}")
_CACHED = re.compile(r"models--(.+?)--(.+?)[/\\]snapshots[/\\]([0-9a-f]{40})")


def usual_width(model_or_config: Any) -> int:
    """Return the width of heads for which none was asked: half the backbone's, down to a power of two, at most 1,024.

    The paper's 1,024 (section 4.1) is for backbones 3,072 and 4,096 wide; heads of 1,024 weigh a fifth of one of 576.
    """
    width: int = min(PAPER_WIDTH, 1 << ((max(2, hidden_size(model_or_config)) // 2).bit_length() - 1))
    return width


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """Everything about retaining heads except their weights."""

    part: ClassVar[str] = "heads"
    """What the names of weights begin with."""

    base_model: str | None = None
    """Hub id of the backbone; None for one that came from a local folder."""
    base_model_revision: str | None = None
    """Commit of the backbone, where known."""
    base_weights: str | None = None
    """`norm_fingerprint` of a backbone with a Hub id, `weight_fingerprint` of one that has none."""
    base_model_type: str
    """The backbone's `model_type` (not called that, so that nothing takes heads for a transformers model)."""
    base_architecture: str | None = None
    """Class of the backbone, as its config names it."""
    num_hidden_layers: int
    """Decoder layers of the backbone, including those without a head."""
    layers: tuple[int, ...]
    """Indices of the layers that have a head: those with full attention."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_dim: int
    """Width between a head's two layers, d_R (paper: 1024)."""
    hidden_act: str
    """Activation between the two layers: the backbone's own."""
    initializer_range: float
    """Standard deviation of untrained weights: the backbone's own."""
    gate: dict[str, Any] | None = None
    """Architecture of the heads where it is not Locret's: `name`, one of `locret.heads.gates.GATES`; `hidden_size` of
    the backbone; and the gate's own numbers. `hidden_dim` is the gate's width then, 1 where it has none."""
    shapes: dict[str, Any] | None = None
    """By layer its `LayerShape` as plain data, where layers differ or values are not as wide as keys; the three numbers
    above are the first layer's then."""
    label: dict[str, Any] | None = None
    """Definition of the training labels: `kind`, `include_last_prompt_token`, ..."""
    policy: dict[str, Any] | None = None
    """Recommended retention policy, as keyword arguments of `RetentionPolicy`."""
    training: dict[str, Any] | None = None
    """Summary of the training run: `dataset`, `dataset_revision`, other facts; `earlier`: the run before it."""
    evaluation: dict[str, Any] | None = None
    """Measured results by name."""
    license: str = "apache-2.0"
    """Licence of the head weights, as the Hub spells it."""
    toolkit_version: str = __version__
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        check_fields(self)
        counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_dim")
        check_ranges(self, {**dict.fromkeys(counts, Range(1)), "initializer_range": Range(0)})
        last = self.num_hidden_layers
        if not self.layers or not all(a < b for a, b in pairwise((-1, *self.layers, last))):
            raise ValueError(
                f"layers={shown(list(self.layers))} must be ascending indices below num_hidden_layers={last}; "
                "list the full-attention layers"
            )
        for name, value in vars(self).items():
            # They go into the model card's code and its YAML.
            if isinstance(value, str) and not _WORD.fullmatch(value):
                raise ValueError(
                    f"{name}={shown(value)} is not a name; use letters, digits, '-', '_', '.', '+' and '/'"
                )
            if name in ("label", "training", "evaluation") and not _is_plain(value):
                raise ValueError(
                    f"{name} has values that are not plain (finite numbers, texts, lists, mappings by name)"
                )
        if self.shapes is not None and list(self.shapes) != [str(layer) for layer in self.layers]:
            raise ValueError(f"shapes={shown(list(self.shapes))} are not those of layers={shown(list(self.layers))}")
        for layer in self.layers if self.shapes is not None else ():
            if min(asdict(shape := self.shape(layer)).values()) < 1:
                raise ValueError(f"shapes has {shown(shape)} for layer {layer}; its numbers must be at least 1")
        self._check_gate()
        self._check_policy()

    def _check_policy(self) -> None:
        """Whether the numbers agree is known only with those that the user gives; whether they are bounds, now."""
        if self.policy is not None:
            object.__setattr__(self, "policy", without_retired(self.policy))
        for name, value in checked_values(RetentionPolicy, self.policy or {}, "policy").items():
            if type(value) is int and value > MOST_RECOMMENDED:
                raise ValueError(
                    f"policy: {name}={shown(value)} is no bound that heads may recommend, which is "
                    f"{MOST_RECOMMENDED:,} or less; give it yourself if you mean it"
                )
            if isinstance(value, str) and _FILE.search(value):
                raise ValueError(
                    f"policy: {name}={shown(value)} names a file, which heads may not recommend; give it yourself"
                )

    def _check_gate(self) -> None:
        if self.gate is None:
            return
        kind = gates.get(str(self.gate.get("name")))
        wanted = {"hidden_size": 1, **kind.numbers}
        if sorted(self.gate) != sorted(["name", *wanted]):
            raise ValueError(f"gate has {shown(list(self.gate))}; that of {kind.name} has name, {', '.join(wanted)}")
        for name, usual in wanted.items():
            if not gates.is_number(self.gate[name], usual):
                raise ValueError(f"gate has {name}={shown(self.gate[name])}; give one such as {usual}")

    @property
    def reads(self) -> str:
        """What the heads read of a token, one of `locret.backbone.chunk.SOURCES`."""
        return PROJECTIONS if self.gate is None else gates.get(self.gate["name"]).source

    def width(self, layer: int) -> int:
        """Return the width of the input of a layer's head."""
        return self.shape(layer).feature_dim if self.gate is None else int(self.gate["hidden_size"])

    def make(self, layer: int, generator: torch.Generator | None = None) -> nn.Module:
        """Return a layer's head with fresh weights."""
        shape = self.shape(layer)
        if self.gate is not None:
            numbers = {name: value for name, value in self.gate.items() if name not in ("name", "hidden_size")}
            return gates.get(self.gate["name"])(shape, self.gate["hidden_size"], self.hidden_dim, **numbers)
        return RetainingHead(
            shape.feature_dim,
            self.hidden_dim,
            shape.num_kv_heads,
            self.hidden_act,
            initializer_range=self.initializer_range,
            generator=generator,
        )

    def shape(self, layer: int) -> LayerShape:
        """Return the shape of the attention of one of `layers`."""
        if self.shapes is None:
            return LayerShape(self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        return LayerShape(**checked_values(LayerShape, self.shapes[str(layer)], "shapes"))

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight by name, without making any."""
        with torch.device("meta"):
            made = {layer: self.make(layer).named_parameters() for layer in self.layers}
        return {f"{self.part}.{layer}.{name}": tuple(one.shape) for layer, named in made.items() for name, one in named}

    @property
    def num_weights(self) -> int:
        """Weights of all heads."""
        return sum(prod(shape) for shape in self.weight_shapes.values())

    @property
    def base_name(self) -> str:
        """The backbone, for a message."""
        return self.base_model or f"a {self.base_model_type} model"

    @classmethod
    def for_model(cls, model_or_config: Any, hidden_dim: int | None = None) -> HeadsConfig:
        """Describe heads for a backbone, from the backbone or its transformers config.

        Args:
            model_or_config: The backbone or its config.
            hidden_dim: Width between a head's layers; None: `usual_width`.

        Raises:
            ValueError: For a backbone that retaining heads cannot work on, or `hidden_dim` below 1.
        """
        backbone = describe_whole(model_or_config)
        name, revision = base_identity(model_or_config)
        config = config_of(model_or_config)
        return cls(
            base_model=name,
            base_model_revision=revision,
            base_architecture=(getattr(config, "architectures", None) or [None])[0],
            hidden_dim=usual_width(model_or_config) if hidden_dim is None else hidden_dim,
            initializer_range=backbone.initializer_range,
            **_dimensions(backbone, config),
        )

    @classmethod
    def from_json(cls, values: Any, where: str) -> Self:
        """Check a parsed `config.json`; `where` names the file in messages.

        Raises:
            ValueError: If it is not the config of retaining heads, or not one this version reads.
        """
        if not isinstance(values, Mapping) or "hidden_dim" not in values or "format_version" not in values:
            kind = str(values.get("model_type")) if isinstance(values, Mapping) else type(values).__name__
            raise ValueError(
                f"{where} is not the config of retaining heads (it has no hidden_dim and format_version; model_type is "
                f"{shown(kind)[1:-1]}); give a folder written by locret-train or RetainingHeads.save_pretrained"
            )
        if values["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"{where} has format_version {shown(values['format_version'])}, this toolkit ({__version__}) reads "
                f"{FORMAT_VERSION}; use the toolkit version that wrote it ({shown(values.get('toolkit_version'))})"
            )
        if values.get("neighbours"):
            check_retired("option", "--neighbours")
        known = checked_values(cls, values, where)
        missing = [one.name for one in fields(cls) if one.default is MISSING and one.name not in known]
        if missing:
            raise ValueError(f"{where} lacks {', '.join(missing)}; the file is incomplete, write the heads again")
        try:
            return cls(**known)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json` can write and `from_json` reads back."""
        written = {**asdict(self), "layers": list(self.layers)}
        for name in ("shapes", "gate"):
            if not written[name]:  # toolkits that do not know the key can read the rest
                del written[name]
        return written

    def annotated(self, **notes: Any) -> Self:
        """Return a copy with some of `NOTES` set.

        Raises:
            ValueError: For any other name.
        """
        for name in notes:
            if name not in NOTES:
                raise ValueError(f"'{name}' cannot be noted on retaining heads; the choices are {', '.join(NOTES)}")
        return replace(self, **notes)

    def differences(self, model_or_config: Any, *, allow_other_base: bool = False) -> list[str]:
        """List how a backbone differs from the one these heads are for, both sides in each line."""
        backbone = describe_whole(model_or_config)
        theirs = _dimensions(backbone, config_of(model_or_config))
        lines = [
            f"{name} is {_show(getattr(self, name))} in the heads and {_show(value)} in the model"
            for name, value in theirs.items()
            if getattr(self, name) != value
        ]
        if self.gate is not None and (found := hidden_size(model_or_config)) != self.gate["hidden_size"]:
            lines.append(f"hidden_size is {self.gate['hidden_size']} in the heads and {found} in the model")
        name, _ = base_identity(model_or_config)
        # An unknown name proves nothing: a backbone that was copied to a folder is still the same backbone.
        known = name is not None and self.base_model is not None
        if known and not allow_other_base and name.lower() != self.base_model.lower():  # type: ignore[union-attr]
            lines.append(f"base_model is {self.base_model} in the heads and {name} in the model")
        return lines


def _is_plain(value: Any) -> bool:
    """Return whether JSON can hold a value and give the same one back."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False, ensure_ascii=False).encode()) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def base_identity(model_or_config: Any) -> tuple[str | None, str | None]:
    """Return the Hub id and commit a backbone was loaded from; None where it came from a folder or from nowhere."""
    config = config_of(model_or_config)
    name = str(getattr(config, "_name_or_path", "") or "")
    revision = getattr(config, "_commit_hash", None)
    cached = _CACHED.search(name)
    if cached:
        return f"{cached[1]}/{cached[2]}", cached[3]
    if not _HUB_ID.fullmatch(name) or os.path.exists(name):
        return None, None
    return name, revision


def _dimensions(backbone: Backbone, config: Any) -> dict[str, Any]:
    """Return what heads and backbone must agree on, under the names of `HeadsConfig`."""
    # The text part's type: the heads see text layers only.
    return {
        "base_model_type": getattr(text_config(config), "model_type", backbone.model_type),
        "num_hidden_layers": backbone.num_layers,
        "layers": tuple(backbone.layers),
        "num_attention_heads": backbone.num_heads,
        "num_key_value_heads": backbone.num_kv_heads,
        "head_dim": backbone.head_dim,
        "hidden_act": backbone.hidden_act,
        "shapes": {str(i): asdict(backbone.shape(i)) for i in backbone.layers} if backbone.shapes else None,
    }


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        shown = ", ".join(map(str, value[:6])) + (", ..." if len(value) > 6 else "")
        return f"[{shown}] ({len(value)} layers)"
    return str(value)
