"""LoCoCo's kernels: one small convolution per full-attention layer, as a thing to train, save and load."""

# B rows and KV heads, S units, M merged slots, D head dim

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d

from locret.heads import checkpoint
from locret.heads.config import HeadsConfig

WHAT = "merging kernels"


@dataclass(frozen=True, kw_only=True)
class KernelsConfig(HeadsConfig):
    """Everything about merging kernels except their weights: what a config of heads says, and their width.

    `hidden_dim` is the number of slots that a KV head merges into.
    """

    part = "kernels"
    kernel_size: int
    """Units that a convolution sees at once, an odd number (the paper's 21)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size} is not odd; use such as 21")

    @property
    def slots(self) -> int:
        """Merged units of every KV head."""
        return self.hidden_dim

    def make(self, layer: int, generator: torch.Generator | None = None) -> MergingKernel:
        return MergingKernel(self.slots, self.shape(layer).unit_dim, self.kernel_size, generator)


class MergingKernel(nn.Module):
    """Weights with which the units of a KV head are merged, from their keys and values."""

    def __init__(self, slots: int, unit_dim: int, kernel_size: int, generator: Any) -> None:
        super().__init__()
        reach = 1 / sqrt(unit_dim * kernel_size)  # as torch's own convolutions begin
        shapes = (slots, unit_dim, kernel_size), (slots,)
        drawn = (torch.empty(shape).uniform_(-reach, reach, generator=generator) for shape in shapes)
        self.weight, self.bias = map(nn.Parameter, drawn)
        self.alpha = nn.Parameter(torch.full((1,), 0.5))

    @property
    def slots(self) -> int:
        """M."""
        return self.weight.shape[0]

    def forward(self, keys_BSD: Tensor, values_BSD: Tensor, empty_BS: Tensor) -> Tensor:
        """Return (B, M, S) weights of the convolution; each slot's sum to one, empty units' are 0."""
        units = torch.cat([keys_BSD, values_BSD], dim=-1).masked_fill(empty_BS[..., None], 0.0).transpose(1, 2)
        raised = conv1d(units, self.weight, self.bias, padding=self.weight.shape[-1] // 2).relu()
        return raised.masked_fill(empty_BS[:, None], -torch.inf).softmax(-1)


class MergingKernels(nn.Module):
    """One convolution for every full-attention layer of a backbone: `kernels[layer_idx]`.

    Examples:
        >>> kernels = MergingKernels.for_model(model, slots=8, seed=0)
        >>> kernels.save_pretrained("untrained-kernels")
        >>> MergingKernels.from_pretrained("untrained-kernels").config.slots
        8
    """

    def __init__(self, config: KernelsConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.kernels = nn.ModuleDict({str(layer): config.make(layer, generator) for layer in config.layers})

    @classmethod
    def for_model(
        cls, model_or_config: Any, slots: int, kernel_size: int = 21, seed: int | None = None
    ) -> MergingKernels:
        """Make untrained kernels for a backbone, each KV head of which merges into so many slots (paper: 21 wide)."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        shape = HeadsConfig.for_model(model_or_config, slots)
        return cls(KernelsConfig(**vars(shape), kernel_size=kernel_size), generator)

    def __getitem__(self, layer_idx: int) -> MergingKernel:
        return self.kernels[str(layer_idx)]  # type: ignore[return-value]

    def check_matches(self, model_or_config: Any) -> None:
        """Make sure that these kernels belong to a backbone."""
        differences = self.config.differences(model_or_config)
        if differences:
            raise ValueError(
                f"the {WHAT} do not belong to this model: {'; '.join(differences)}; load {self.config.base_name} that "
                "they were trained on, or train kernels for this model"
            )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, revision: str | None = None, **kwargs: Any
    ) -> MergingKernels:
        """Load kernels from a folder or from the Hub: safetensors only, every key and shape checked.

        Args:
            pretrained_model_name_or_path: Folder, or `org/name` on the Hub.
            revision: Branch, tag or commit on the Hub.
            kwargs: Those of huggingface_hub (`token`, `cache_dir`, `local_files_only`), and `map_location`.
        """
        device = kwargs.pop("map_location", "cpu")
        folder = checkpoint.find(str(pretrained_model_name_or_path), revision=revision, **kwargs)
        config = checkpoint.read_config(folder, KernelsConfig)
        weights = checkpoint.read_weights(folder, config, device)
        kernels = cls(config)
        kernels.load_state_dict(weights)
        return kernels.eval()

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write weights and `config.json`; a folder is never left half-written."""
        with checkpoint.replacing(Path(save_directory), KernelsConfig) as staging:
            checkpoint.write(staging, self.config, self.state_dict())
