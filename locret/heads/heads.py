"""The retaining heads of a backbone, one per full-attention layer, as a thing to train, save, publish and load."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from huggingface_hub import ModelCard
from torch import Tensor, nn

from locret import hub
from locret.backbone.adapters import attention_modules, device_of, unwrap
from locret.backbone.chunk import Attended
from locret.backbone.head_ranks import HeadRanks
from locret.base.warned import warn_user
from locret.heads import card as model_card
from locret.heads import checkpoint
from locret.heads.config import HeadsConfig
from locret.heads.fingerprint import NORMS, norm_fingerprint, weight_fingerprint
from locret.heads.head import RetainingHead
from locret.loading.weights import EIGHT_BITS, label_of

_COMPARED: WeakKeyDictionary[RetainingHeads, WeakSet[nn.Module]] = WeakKeyDictionary()
"""Backbones whose weights have been compared with those that heads were trained on."""

__all__ = ["HeadsConfig", "RetainingHead", "RetainingHeads"]


class RetainingHeads(nn.Module):
    """One retaining head for every full-attention layer of a backbone: `heads[layer_idx]`.

    Sliding-window layers keep a bounded cache of their own and have no head. Iterating gives the layer indices.

    Args:
        config: Shape and provenance; see `for_model`, which fills it in.
        generator: Source of the fresh weights; torch's global one if None.

    Examples:
        >>> heads = RetainingHeads.from_pretrained("checkpoints/tiny-heads")
        >>> heads.layers
        (0, 1, 2, 3, 4)
        >>> untrained = RetainingHeads.for_model(model, hidden_dim=64, seed=0)
        >>> untrained.save_pretrained("untrained")
    """

    def __init__(self, config: HeadsConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.allow_other_base = False
        self.whole: str | None = None
        """Fingerprint of the whole heads where these are the part of one process; see `sharded`."""
        self.heads = nn.ModuleDict()
        for layer_idx in config.layers:
            self.heads[str(layer_idx)] = config.make(layer_idx, generator)

    @classmethod
    def for_model(cls, model_or_config: Any, hidden_dim: int | None = None, seed: int | None = None) -> RetainingHeads:
        """Make untrained heads for a backbone: normal weights with the backbone's own `initializer_range`.

        Args:
            model_or_config: A transformers causal LM or its config.
            hidden_dim: d_R; None: half the backbone's width as a power of two, at most the paper's 1,024.
            seed: Seed of the weights, which leaves torch's global generator untouched; None draws from the global one.

        Returns:
            Heads on the CPU, float32.

        Raises:
            ValueError: For a backbone without keys to evict, or `hidden_dim` below 1.
        """
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        # Weights made under inference mode could never be trained, and their changes are not counted.
        with torch.inference_mode(False):
            return cls(HeadsConfig.for_model(model_or_config, hidden_dim), generator)

    @classmethod
    def from_official(cls, path: str | Path, config: Any) -> RetainingHeads:
        """Read weights published by the original authors; see `locret.heads.published.read_locret`.

        Args:
            path: A `.bin` or `.safetensors` file, or a folder with one or with a sharded index; the backbone may be
                in it.
            config: The backbone's transformers config (or the backbone).

        Raises:
            ValueError: If layers or shapes do not fit the backbone; the message shows both sides.
        """
        from locret.heads import published

        heads_config, weights = published.read_locret(Path(path), config)
        return cls._with_weights(heads_config, weights)

    @classmethod
    def _with_weights(cls, config: HeadsConfig, weights: dict[str, Tensor]) -> RetainingHeads:
        with torch.inference_mode(False):
            with torch.device("meta"):  # fresh weights would be drawn only to be thrown away
                heads = cls(config)
            heads.load_state_dict(weights, assign=True)
        return heads.eval()

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the backbone's layers that have a head, ascending."""
        return self.config.layers

    def features(self, chunk: Attended, tokens: int | None = None) -> Tensor:
        """Return (B, L, F) of what the heads read of a layer: of its first tokens, without building that of others."""
        projections = chunk.projections if tokens is None else chunk.projections.first(tokens)
        return projections.features(self.config.reads)

    def fingerprint(self) -> str | None:
        """Return `weight_fingerprint` of the heads, of the whole ones where these are a part."""
        return self.whole or weight_fingerprint(self)

    def __getitem__(self, layer_idx: int) -> RetainingHead:
        if str(layer_idx) not in self.heads:
            raise KeyError(f"layer {layer_idx} has no retaining head; the layers with one are {list(self.layers)}")
        return self.heads[str(layer_idx)]  # type: ignore[return-value]

    def __contains__(self, layer_idx: object) -> bool:
        return str(layer_idx) in self.heads

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.heads)

    def check_matches(self, model_or_config: Any, *, allow_other_base: bool | None = None) -> None:
        """Make sure that these heads belong to a backbone.

        Args:
            model_or_config: The backbone or its transformers config.
            allow_other_base: Accept a backbone of the same shape under another Hub id; None uses what `from_pretrained`
                was given. Ids are compared only where both are known: a backbone in a folder has none.

        Raises:
            ValueError: If layers, dimensions, activation or base model differ; the message shows both sides.

        Warns:
            UserWarning: If a model given here has the shape of the heads' backbone and other weights, where the heads
                know a fingerprint.
        """
        allow = self.allow_other_base if allow_other_base is None else allow_other_base
        differences = self.config.differences(model_or_config, allow_other_base=allow)
        if not differences:
            self._warn_of_other_weights(model_or_config)
            return
        only_name = len(differences) == 1 and differences[0].startswith("base_model is")
        way_out = "pass allow_other_base=True to use them all the same" if only_name else "train heads for this model"
        raise ValueError(
            f"the retaining heads do not belong to this model: {'; '.join(differences)}; "
            f"load {self.config.base_name} that they were trained on, or {way_out}"
        )

    def _warn_of_other_weights(self, model_or_config: Any) -> None:
        expected = self.config.base_weights
        # Every cache asks again; reading all parameters once per pair is enough.
        known = _COMPARED.setdefault(self, WeakSet())
        if not isinstance(model_or_config, nn.Module) or model_or_config in known:
            return
        known.add(model_or_config)
        precision = (self.config.training or {}).get("precision")
        recorded = re.fullmatch(r"backbone \w+(?:, (.+))?, autocast \w+", precision or "")
        label = label_of(unwrap(model_or_config))
        # Half precisions and eight bits per row round so little that scores order the same units; other numbers do not.
        if recorded is not None and recorded[1] != label and not {recorded[1], label} <= {None, EIGHT_BITS}:
            warn_user(
                f"the retaining heads were trained on a backbone that was {_numbers(recorded[1])}, and this one is "
                f"{_numbers(label)}; some of the units that stay will be others (of NF4 about one in ten), so load it "
                "alike, or train heads for this one"
            )
        if not expected:
            return
        found = (norm_fingerprint if expected.startswith(NORMS) else weight_fingerprint)(model_or_config)
        if found and found != expected:
            theirs, its = expected.removeprefix(NORMS)[:12], found.removeprefix(NORMS)[:12]
            warn_user(
                f"the retaining heads were trained on other weights of this shape (fingerprint {theirs}, the model's "
                f"is {its}), so their scores may mean little here; load the backbone they were trained on, or train "
                "heads for this one"
            )

    def follow(self, model: nn.Module) -> RetainingHeads:
        """Put every head where its layer computes, and return these heads."""
        for index, module in enumerate(attention_modules(model)):
            if index in self.layers:
                self[index].to(device_of(module))
        return self

    def annotate(self, **notes: Any) -> RetainingHeads:
        """Note facts that go into `config.json` and the model card, and return these heads.

        Args:
            notes: Any of base_model, base_model_revision, base_weights, label, policy, training, evaluation, license;
                see `HeadsConfig`.

        Raises:
            ValueError: For any other name.
        """
        self.config = self.config.annotated(**notes)
        return self

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        map_location: str = "cpu",
        allow_other_base: bool = False,
        **download: Any,
    ) -> RetainingHeads:
        """Load heads from a folder or from the Hub: safetensors only, every key, layer and shape checked.

        Args:
            pretrained_model_name_or_path: Folder, or `org/name` on the Hub.
            revision: Branch, tag or commit on the Hub.
            map_location: Device of the weights.
            allow_other_base: As in `check_matches`.
            download: Those of huggingface_hub: `token`, `cache_dir`, `local_files_only`, `force_download`.

        Returns:
            Heads in evaluation mode, float32.

        Raises:
            ValueError: If there are no heads there, or files that do not fit together; the message shows both sides.
            OSError: If the Hub cannot be reached.
        """
        folder = checkpoint.find(str(pretrained_model_name_or_path), revision=revision, **download)
        config: HeadsConfig = checkpoint.read_config(folder)
        heads = cls._with_weights(config, checkpoint.read_weights(folder, config, map_location))
        heads.allow_other_base = allow_other_base
        return heads

    def save_pretrained(
        self, save_directory: str | Path, *, dtype: torch.dtype | str = torch.float32, repo_id: str | None = None
    ) -> None:
        """Write weights, `config.json` and a filled model card; a folder is never left half-written.

        Args:
            save_directory: A new folder, or one of heads, whose files are then replaced one by one.
            dtype: Of the weights in the file, which are float32 again once loaded: float32; or bfloat16 or float16, in
                half the bytes.
            repo_id: Repository that the card's example loads, if they go into one.

        Raises:
            ValueError: If the folder holds another model, or for another dtype.
            OSError: If it cannot be written; the message names it.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype={name} is not one that heads are written in; give float32, bfloat16 or float16")
        with checkpoint.replacing(Path(save_directory)) as fresh:
            checkpoint.write(fresh, self.config, self.state_dict(), getattr(torch, name))
            self.generate_model_card(repo_id=repo_id).save(fresh / checkpoint.CARD)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the heads with their model card, in one commit, and return where they are; see `locret.hub.upload`."""
        with tempfile.TemporaryDirectory() as place:
            self.save_pretrained(folder := Path(place, "heads"), repo_id=repo_id)
            return hub.upload(repo_id, {file.name: file for file in sorted(folder.iterdir())}, **options)[0]

    def generate_model_card(self, repo_id: str | None = None) -> ModelCard:
        """Return the filled model card, whose example loads `repo_id`."""
        return model_card.fill(self.config, repo_id)


def _numbers(label: str | None) -> str:
    return "not quantised" if label is None else f"quantised ({label})"


def sharded(heads: RetainingHeads, ranks: HeadRanks | None) -> RetainingHeads:
    """Return this process's part of heads; they themselves where nobody shares them, or they are a part already.

    A head's first product is split by its inputs, the q, k and v of this process, and one sum over the processes makes
    the same hidden numbers everywhere; the second is split by its outputs, the KV heads of this process. Files hold
    whole heads, whatever the number of processes.

    Raises:
        ValueError: For gates, which read whole hidden states.
    """
    if ranks is None or heads.whole:
        return heads
    if heads.config.gate is not None:
        raise ValueError(
            f"gates ({heads.config.gate['name']}) are not shared by processes, as tensor parallelism would have it; "
            "leave out --shard tp"
        )
    with torch.device("meta"):
        parts = RetainingHeads(heads.config)
    parts.whole, parts.allow_other_base = weight_fingerprint(heads), heads.allow_other_base
    with torch.inference_mode(False), torch.no_grad():
        for layer in heads:
            whole, own, shape = heads[layer], parts[layer], heads.config.shape(layer)
            keys, values = shape.num_kv_heads * shape.head_dim, shape.num_kv_heads * shape.value_dim
            states = whole.fc1.weight.split([shape.num_heads * shape.query_dim, keys, values], dim=1)
            own.fc1.weight = _frozen(torch.cat([ranks.own(one, 1) for one in states], dim=1))
            own.fc2.weight = _frozen(ranks.own(whole.fc2.weight, 0))
            own.fc1.in_features, own.fc2.out_features = own.fc1.weight.shape[1], own.fc2.weight.shape[0]
            own.ranks = ranks
    return parts.eval()


def _frozen(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone(), requires_grad=False)
