"""Gates are kvpress's own: its models are read here, ours there.

Needs kvpress (with cachetools and fire), which CI does not install:
`pip install --no-deps --target FOLDER kvpress cachetools fire termcolor`, and FOLDER on PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from locret import scorers
from locret.backbone.chunk import Attended
from locret.labels.labels import observe

pytestmark = pytest.mark.engine
kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed")

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def model() -> Any:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def layers_of(model: Any, text: Tensor) -> list[Attended]:
    """What each layer has computed, with the hidden states that its attention was given."""
    found: list[Attended] = []
    hidden: list[Tensor] = []

    def keep(chunk: Attended) -> None:
        found.append(chunk)
        assert chunk.projections.hidden is not None
        hidden.append(chunk.projections.hidden)

    observe(model, text, keep)
    for chunk, states in zip(found, hidden, strict=True):
        chunk.projections.hidden = states
    return found


def test_scores_of_kvzap_are_its_presss(model: Any, tmp_path: Path) -> None:
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel

    theirs = KVzapModel(KVzapConfig(input_dim=32, output_dim=2, n_modules=3, hidden_dim=24))
    theirs.save_pretrained(tmp_path)
    press = kvpress.KVzapPress(model_type="mlp")
    press.kvzap_model = theirs
    scorer = scorers.get("kvzap", path=str(tmp_path))
    heads = scorer.prepare(model)
    for chunk in layers_of(model, ids(40)):
        module, states = model.model.layers[chunk.layer_idx].self_attn, chunk.projections.hidden
        wanted = press.score(module, states, chunk.key, chunk.value, None, {})
        found = scorer.score_features(heads, chunk.layer_idx, states)
        assert torch.equal(found, wanted)


def test_scores_of_fast_kvzip_are_its_gates(model: Any, tmp_path: Path) -> None:
    from kvpress.presses.fastkvzip_press import FastKVzipGate

    gates = [FastKVzipGate(layer, 32, 2, 2, torch.float32) for layer in range(3)]
    for gate in gates:
        for weight in gate.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    torch.save({"module": [gate.state_dict() for gate in gates]}, tmp_path / "q2_dim16_sink16.pt")
    scorer = scorers.get("fast_kvzip", path=str(tmp_path))
    heads = scorer.prepare(model)
    for chunk in layers_of(model, ids(40)):
        states = chunk.projections.hidden
        wanted = gates[chunk.layer_idx](states)
        torch.testing.assert_close(
            scorer.score_features(heads, chunk.layer_idx, states).exp(), wanted, atol=1e-6, rtol=1e-4
        )
