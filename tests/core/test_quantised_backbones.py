"""Backbones in few bits, by the packages themselves: training, reading and answering, and bytes as planned.

bitsandbytes, torchao and optimum-quanto are not in the test environment; to run these:

    pip install --no-deps --target DIR bitsandbytes torchao optimum-quanto
    PYTHONPATH=DIR python -m pytest tests/core/test_quantised_backbones.py
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, loading, prefill
from locret.infer.infer_options import ModelOptions
from locret.loading.weights import label_of, plan_weights
from locret.train.step import train_step

pytestmark = pytest.mark.engine
TINY, CPU = "checkpoints/tiny", torch.device("cpu")
TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
}
WAYS: dict[str, tuple[str, dict[str, Any], float]] = {
    "bitsandbytes 4 bits, nf4": ("bitsandbytes", {"load_in_4bit": True}, 0.8),
    "bitsandbytes 8 bits": ("bitsandbytes", {"load_in_8bit": True}, 0.9),
    "quanto int8": ("optimum.quanto", {"quantization_config": {"quant_method": "quanto", "weights": "int8"}}, 0.9),
    "torchao Int8WeightOnlyConfig": ("torchao", {"quantization_config": TORCHAO}, 0.9),
}
"""The package, the options, and the least share of kept units that are those of float32."""


def load(model: str, **options: Any) -> Any:
    source = ModelOptions(model=model, **options)
    return loading.load_model(source, loading.load_config(source), CPU, torch.float32)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors that a weight is made of."""
    if hasattr(value, "__tensor_flatten__") and type(value) not in (Tensor, torch.nn.Parameter):
        for name in value.__tensor_flatten__()[0]:
            yield from tensors(getattr(value, name))
    else:
        yield value.data
        state = getattr(value, "quant_state", None)
        while state is not None:
            yield from (part for part in (state.absmax, state.code, state.offset) if torch.is_tensor(part))
            state = state.state2
        if torch.is_tensor(getattr(value, "SCB", None)):
            yield value.SCB


def counted_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all memory behind a model's weights."""
    parts = [part for weight in model.parameters() for part in tensors(weight)]
    return sum({part.data_ptr(): part.nbytes for part in parts}.values())


def kept(model: torch.nn.Module, ids: Tensor) -> list[set[int]]:
    heads = RetainingHeads.from_pretrained("checkpoints/tiny-heads")
    cache = RetentionCache(model, heads, RetentionPolicy(budget=64, chunk_size=128, stabilizers=16, local_len=16))
    assert prefill(model, ids, cache).isfinite().all()
    assert cache.memory().peak == cache.memory().planned
    assert generate(model, cache=cache, max_new_tokens=3).shape == (1, 3)
    return [set(row.tolist()) for layer in range(5) for row in cache.kept_positions(layer)[0]]


@pytest.mark.parametrize("way", WAYS)
def test_a_quantised_backbone_trains_reads_and_answers(way: str) -> None:
    package, options, least = WAYS[way]
    pytest.importorskip(package, reason=f"{package} is not installed")
    model, source = load(TINY, **options), ModelOptions(model=TINY, **options)
    config = loading.load_config(source)
    planned = plan_weights(source, config, CPU, torch.float32)
    assert label_of(model) == planned.label == way
    assert planned.total == pytest.approx(counted_bytes(model), rel=0.01)
    ids = torch.randint(5, 800, (1, 500), generator=torch.Generator().manual_seed(1))
    heads = RetainingHeads.for_model(model, 16, seed=0).requires_grad_(True)
    assert train_step(model, heads, ids[:, :-20], ids[:, -20:]).total.isfinite()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in heads.parameters())
    pairs = zip(kept(model, ids), kept(load(TINY), ids), strict=True)
    assert sum(len(ours & theirs) / len(theirs) for ours, theirs in pairs) / 20 > least


@pytest.mark.parametrize("named", [False, True])
def test_a_gguf_file_holds_the_weights_that_were_written(named: bool, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    from tiny_gguf import write_gguf

    write_gguf(TINY, tmp_path / "tiny.gguf")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(TINY, name), tmp_path)
    path = {"model": str(tmp_path), "gguf_file": "tiny.gguf"} if named else {"model": str(tmp_path / "tiny.gguf")}
    source = ModelOptions(**path)
    config = loading.load_config(source)
    model, original = loading.load_model(source, config, CPU, torch.float32), load(TINY)
    found, expected = dict(model.named_parameters()), dict(original.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert plan_weights(source, config, CPU, torch.float32).total == sum(weight.nbytes for weight in found.values())
    tokenizers = [loading.load_tokenizer(one) for one in (source, ModelOptions(model=TINY))]
    ids, expected_ids = (tokenizer("The pass key is 43600.").input_ids for tokenizer in tokenizers)
    assert ids == expected_ids
