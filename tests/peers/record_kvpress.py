"""Record what kvpress scores and keeps, for test_kvpress_agreement. Runs in an environment of its own.

    python -m venv /some/where && /some/where/bin/pip install kvpress==0.5.5
    /some/where/bin/python tests/peers/record_kvpress.py

kvpress pins an older transformers than this project needs, so the two never meet in one process: this half writes
numbers to tests/peers/kvpress/, the other half (tests/core/test_kvpress_agreement.py) reads them.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvpress
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

HERE = Path(__file__).parent
MODELS = HERE.parent / "golden"
RATIO = 0.5
"""Share of the units that kvpress removes."""

PRESSES: dict[str, tuple[str, dict[str, Any]]] = {
    "snapkv": ("SnapKVPress", {}),
    "snapkv_narrow": ("SnapKVPress", {"window_size": 16, "kernel_size": 7}),
    "tova": ("TOVAPress", {}),
    "observed_attention": ("ObservedAttentionPress", {}),
    "knorm": ("KnormPress", {}),
    "streaming_llm": ("StreamingLLMPress", {}),
    "expected_attention": ("ExpectedAttentionPress", {}),
    "expected_attention_mean": ("ExpectedAttentionPress", {"use_covariance": False, "n_future_positions": 64}),
    "expected_attention_epsilon": ("ExpectedAttentionPress", {"epsilon": 0.01, "n_sink": 2}),
    "expected_attention_unweighed": ("ExpectedAttentionPress", {"use_vnorm": False}),
    "keydiff": ("KeyDiffPress", {}),
}
SPLITS: dict[str, tuple[str, dict[str, Any], float]] = {
    "snapkv": ("SnapKVPress", {"window_size": 16, "kernel_size": 7}, 0.2),
    "knorm": ("KnormPress", {}, 0.2),
    "knorm_free": ("KnormPress", {}, 0.005),
    "keydiff": ("KeyDiffPress", {}, 0.5),
}
"""AdaKVPress around a press, and the share of the budget that every head keeps."""
PYRAMIDS = [
    {"layers": layers, "tokens": tokens, "ratio": ratio, "window_size": window, "beta": beta}
    for layers, tokens, ratio, window, beta in [
        (20, 8000, 0.75, 64, 20),  # everything divides
        (39, 8000, 0.75, 64, 20),
        (5, 1000, 0.5, 8, 1),
        (32, 8000, 0.75, 64, 20),  # the slope is a fraction
        (32, 8000, 0.9, 8, 20),
        (28, 4093, 0.7, 16, 13),
        (32, 8000, 0.5, 64, 20),
        (32, 8000, 0.5, 64, 200),  # the first layer would keep all there is, but for some of the window
        (32, 8000, 0.3, 64, 20),  # fewer tokens than twice the budget
        (32, 2000, 0.9, 64, 20),  # the last layer would keep less than the window
        (1, 8000, 0.75, 64, 20),
    ]
]


def read(model: Any, ids: torch.Tensor, press: Any = None) -> DynamicCache:
    cache = DynamicCache()
    with torch.no_grad():
        if press is None:
            model(ids, past_key_values=cache)
        else:
            with press(model):
                model(ids, past_key_values=cache)
    return cache


def record(model: Any, ids: torch.Tensor, kind: str, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (layers, K, T) scores of a press and the (layers, K, C) slots that it keeps, ascending."""
    press = getattr(kvpress, kind)(compression_ratio=RATIO, **options)
    rate, scores = press.score, []

    def watched(*args: Any) -> torch.Tensor:
        scores.append(rate(*args))
        return scores[-1]

    press.score = watched
    full, pruned = read(model, ids), read(model, ids, press)
    kept = []
    for whole, rest in zip(full.layers, pruned.layers, strict=True):
        # Which keys are still there says what was kept, whatever the press did to get there.
        same = (rest.keys[0, :, :, None] == whole.keys[0, :, None]).all(-1)
        assert (same.sum(-1) == 1).all()
        kept.append(same.int().argmax(-1).sort(-1).values)
    return torch.cat(scores), torch.stack(kept)


def split(model: Any, ids: torch.Tensor, kind: str, options: dict[str, Any], floor: float) -> torch.Tensor:
    """Return (layers, K, T) bool: what stays where all heads of a layer compete; kvpress masks the rest."""
    press = kvpress.AdaKVPress(getattr(kvpress, kind)(compression_ratio=RATIO, **options), alpha_safeguard=floor)
    read(model, ids, press)
    kept = []
    for layer in model.model.layers:
        stays = torch.ones(model.config.num_key_value_heads, ids.shape[1], dtype=torch.bool)
        _, heads, slots = layer.self_attn.masked_key_indices
        stays[heads, slots] = False
        kept.append(stays)
    return torch.stack(kept)


def budgets(layers: int, tokens: int, ratio: float, window_size: int, beta: int) -> list[int]:
    press = kvpress.PyramidKVPress(compression_ratio=ratio, window_size=window_size, beta=beta)
    config = SimpleNamespace(num_hidden_layers=layers)
    return [press.get_layer_budget(SimpleNamespace(config=config, layer_idx=i), tokens) for i in range(layers)]


def main() -> None:
    torch.set_num_threads(1)
    (HERE / "kvpress").mkdir(exist_ok=True)
    for case in ("A_llama_gqa", "C_phi3_mha"):
        model = AutoModelForCausalLM.from_pretrained(
            MODELS / case, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        ids = load_file(MODELS / case / "inputs.safetensors")["prompt_ids"]
        tensors = {}
        for name, (kind, options) in PRESSES.items():
            scores, kept = record(model, ids, kind, options)
            tensors[f"{name}.scores"] = scores.contiguous()
            tensors[f"{name}.kept"] = kept.to(torch.int16)
        save_file(tensors, HERE / "kvpress" / f"{case}.safetensors")
        model.set_attn_implementation("sdpa")  # kvpress masks nothing with eager attention
        splits = {f"{name}.kept": split(model, ids, *args).to(torch.uint8) for name, args in SPLITS.items()}
        save_file(splits, HERE / "kvpress" / f"{case}_heads.safetensors")
    about = {
        "versions": {name: version(name) for name in ("kvpress", "transformers", "torch")},
        "ratio": RATIO,
        "presses": {name: {"class": kind, **options} for name, (kind, options) in PRESSES.items()},
        "splits": {
            name: {"class": kind, **options, "alpha_safeguard": floor}
            for name, (kind, options, floor) in SPLITS.items()
        },
        "pyramids": [{**case, "budgets": budgets(**case)} for case in PYRAMIDS],
    }
    (HERE / "kvpress" / "about.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
