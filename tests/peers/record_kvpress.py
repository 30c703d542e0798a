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
from typing import Any

import kvpress
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

HERE = Path(__file__).parent
MODELS = HERE.parent / "golden"
ABOUT = HERE / "kvpress/about.json"
"""The presses that are recorded, and the versions with which they were."""
CASES = json.loads(ABOUT.read_text())


def read(model: Any, ids: torch.Tensor, press: Any = None) -> DynamicCache:
    cache = DynamicCache()
    with torch.no_grad():
        if press is None:
            model(ids, past_key_values=cache)
        else:
            with press(model):
                model(ids, past_key_values=cache)
    return cache


def record(model: Any, ids: torch.Tensor, case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (layers, K, T) scores of a press and the (layers, K, C) slots that it keeps, ascending."""
    options = {name: value for name, value in case.items() if name != "class"}
    press = getattr(kvpress, case["class"])(compression_ratio=CASES["ratio"], **options)
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


def main() -> None:
    torch.set_num_threads(1)
    for name in ("A_llama_gqa", "C_phi3_mha"):
        model = AutoModelForCausalLM.from_pretrained(
            MODELS / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        ids = load_file(MODELS / name / "inputs.safetensors")["prompt_ids"]
        tensors = {}
        for press, case in CASES["presses"].items():
            scores, kept = record(model, ids, case)
            tensors[f"{press}.scores"] = scores.contiguous()
            tensors[f"{press}.kept"] = kept.to(torch.int16)
        save_file(tensors, HERE / "kvpress" / f"{name}.safetensors")
    CASES["versions"] = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    ABOUT.write_text(json.dumps(CASES, indent=1) + "\n")


if __name__ == "__main__":
    main()
