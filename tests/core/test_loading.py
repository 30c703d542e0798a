"""Where weights go and in which numbers: refusals before weights, results as of the whole model, bytes as planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, loading, prefill
from locret.heads.fingerprint import weight_fingerprint
from locret.infer.infer_options import ModelOptions
from locret.loading import eight_bits
from locret.loading.eight_bits import pack
from locret.loading.weights import WeightPlan, label_of, plan_weights
from locret.train.step import train_step

TINY = "checkpoints/tiny"
CPU = torch.device("cpu")
WITH_VNNI = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="this CPU has no products of codes")
POLICY = RetentionPolicy(budget=32, chunk_size=64, stabilizers=8, local_len=16)


def plan_of(**options: Any) -> WeightPlan:
    source = ModelOptions(model=TINY, **options)
    return plan_weights(source, loading.load_config(source), loading.device_of_source(source), torch.float32)


def load(**options: Any) -> Any:
    source = ModelOptions(model=TINY, **options)
    return loading.load_model(source, loading.load_config(source), loading.device_of_source(source), torch.float32)


def results(model: Any) -> list[Tensor]:
    """Return what training, reading and answering give."""
    ids = torch.randint(5, 800, (1, 260), generator=torch.Generator().manual_seed(1))
    heads = RetainingHeads.for_model(model, 16, seed=0).requires_grad_(True)
    loss = train_step(model, heads, ids[:, :-20], ids[:, -20:]).total
    trained = RetainingHeads.from_pretrained("checkpoints/tiny-heads")
    cache = RetentionCache(model, trained, POLICY)
    logits = prefill(model, ids, cache)
    kept = [cache.kept_positions(layer) for layer in range(5)]
    gradients = [weight.grad for weight in heads.parameters() if weight.grad is not None]
    assert len(gradients) == 10
    return [loss, logits, *kept, *gradients, generate(model, cache=cache, max_new_tokens=4)]


@pytest.fixture(scope="module")
def whole() -> list[Tensor]:
    return results(load())


@pytest.mark.parametrize(
    "options",
    [{"device_map": "disk"}, {"device_map": "auto", "max_memory": {"cpu": "5MiB"}}],
    ids=["everything on disk", "what does not fit"],
)
def test_weights_on_disk_give_the_results_of_the_whole_model(options: dict[str, Any], whole: list[Tensor]) -> None:
    model = load(**options)
    planned, held = plan_of(**options), sum(weight.nbytes for weight in model.parameters() if not weight.is_meta)
    assert planned.places.get("cpu", 0) == held
    assert sum(planned.places.values()) == sum(weight.nbytes for weight in model.parameters())
    assert planned.on(CPU) == held + planned.gathered
    assert weight_fingerprint(model) == weight_fingerprint(load())
    for found, expected in zip(results(model), whole, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True}, "--load-in-4bit and --load-in-8bit exclude each other"),
        ({"device_map": "auto", "device": "cpu"}, "--device cpu and --device-map exclude each other"),
        ({"device_map": {"model.layers": "cpu", "": "disk"}}, "a mapping of modules to devices was retired"),
        ({"device_map": {"": 7}}, "names 7 for everything, which is not here"),
        ({"device_map": "everywhere"}, "--device-map 'everywhere' is none of auto, .* and one device"),
        ({"quantization_config": {"quant_method": "vptq"}}, "needs the package vptq, .*run pip install vptq"),
        ({"quantization_config": {"quant_method": "gguf"}}, 'quant_method "gguf" was retired; release 0.1.0'),
        ({"gguf_file": "model.gguf", "load_in_4bit": True}, "--load-in-4bit: model.gguf is quantised already"),
    ],
)
def test_what_cannot_be_is_one_sentence_before_weights_are_read(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("read"))
    for attempt in (plan_of, load):
        with pytest.raises(ValueError, match=message) as caught:
            attempt(**options)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the memory of a process from")
def test_eight_bits_leave_the_memory_of_the_wider_weights_to_others() -> None:
    def mebibytes() -> int:
        return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) // 1024

    torch.empty(6 * 2**20)  # once so much was freed, glibc takes smaller tensors from the heap
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))
    before = mebibytes()
    pack(model)
    assert before - mebibytes() > 48  # 96 MiB of weights become 24 of codes


@pytest.mark.parametrize("codes", [False, pytest.param(True, marks=WITH_VNNI)])
def test_eight_bits_on_a_cpu_compute_what_the_rounded_weights_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: bool
) -> None:
    monkeypatch.setattr(eight_bits, "multiplies_codes", lambda: codes)
    packed, whole, planned = load(load_in_8bit=True), load(), plan_of(load_in_8bit=True)
    assert (planned.label, planned.places) == ("torch 8 bits", {"cpu": sum(w.nbytes for w in packed.parameters())})
    for name, linear in packed.named_modules():
        if type(linear).__name__ == "EightBitLinear":
            rounded, given = rounded_weights(linear), whole.get_submodule(name)
            apart = rounded - given.weight
            if codes:
                assert apart.norm() < 0.01 * given.weight.norm()
            else:
                assert (apart.abs() <= given.weight.abs().amax(1)[:, None] / 200).all()
            given.weight = torch.nn.Parameter(rounded)  # untied: embeddings stay as they are
    ids = torch.randint(5, 800, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for count in (60, 8):  # few rows are multiplied in bfloat16, many as floats or as codes
            found, expected = (model(ids[:, :count]).logits for model in (packed, whole))
            if count > 8 and not codes:
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            else:
                assert 0 < (found - expected).abs().max() < 0.03 * expected.abs().max()
    head, width = packed.lm_head, packed.lm_head.in_features
    states = torch.randn(2, 2 * width).bfloat16()[:, 1 : 1 + width]  # neither back to back nor aligned
    assert torch.equal(head(states), head(states.clone()))
    assert label_of(packed) == planned.label
    with pytest.raises(ValueError, match=f"rounds what --adapter {tmp_path} changes; merge it"):
        load(load_in_8bit=True, adapter=str(tmp_path))
    assert weight_fingerprint(packed) == weight_fingerprint(load())
    packed.tie_weights()
    with torch.no_grad():
        states = 300 * torch.ones(16, width)  # sums of codes are beyond float16, the products are not
        for dtype, exact in ((torch.float16, 2e-3), (torch.float32, 1e-6)):
            found, expected = head.to(dtype)(states.to(dtype)).float(), states @ rounded_weights(head).T
            exact = 0.02 if codes else exact
            torch.testing.assert_close(found, expected, atol=exact * float(expected.abs().max()), rtol=exact)


def rounded_weights(linear: Any) -> Tensor:
    """Return the weights that codes stand for, turned back by the definition of Hadamard's matrix."""
    weights, size = linear.codes.float() * linear.scale.float()[:, None], 1 if linear.turn is None else len(linear.turn)
    turn = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]) / size**0.5
    return (weights.view(-1, size) @ turn).view(weights.shape)


@WITH_VNNI
@pytest.mark.parametrize("large", [1, 1000])
def test_rows_of_a_chunk_are_rounded_one_by_one_and_gradients_are_not(
    monkeypatch: pytest.MonkeyPatch, large: float
) -> None:
    monkeypatch.setattr(eight_bits, "multiplies_codes", lambda: True)
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(96, 40)
    packed = eight_bits.EightBitLinear(linear)
    monkeypatch.setattr(eight_bits, "_MANY", 0)
    states = torch.randn(3, 5, 96, generator=generator) * torch.logspace(-3, 3, 15).view(3, 5, 1)
    states[..., 7] *= large
    states[1, 2] = 0
    exact = states @ rounded_weights(packed).T + linear.bias
    given = states.clone().requires_grad_(True)
    torch.testing.assert_close(packed(given), exact, atol=0, rtol=1e-3)
    packed(given).sum().backward()
    found = packed(states).detach()
    assert torch.equal(states, given)
    assert (found[1, 2] == linear.bias).all()
    assert torch.equal(found.flatten(0, 1)[4:14], packed(states.flatten(0, 1)[4:14]).detach())
    errors, sizes = ((one - linear.bias).flatten(0, 1).norm(dim=1) for one in (found - exact + linear.bias, exact))
    assert (errors <= 0.02 * sizes).all()
    states[0, 0, 0] = torch.nan  # in place: what was rounded of these states before is not what is multiplied
    assert packed(states).isnan().all(-1).flatten().tolist() == [True] + 14 * [False]
    elsewhere, narrow = packed.to("meta"), eight_bits.EightBitLinear(torch.nn.Linear(96, 8)).to("meta")
    nothing = torch.empty(20, 96, device="meta")
    assert [layer(nothing).shape[1] for layer in (elsewhere, narrow)] == [40, 8]  # each has scales of its own


def test_a_backbone_that_was_quantised_otherwise_is_not_quantised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locret.loading.weights._require", lambda *_: None)
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    values = json.loads(Path(TINY, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_config": stored}))
    source = ModelOptions(model=str(tmp_path), load_in_8bit=True)
    with pytest.raises(ValueError, match=r"quantised already \(bitsandbytes 4 bits, nf4\), and cannot .* 8 bits"):
        loading.load_config(source)
    same = ModelOptions(model=source.model, load_in_4bit=True)
    assert loading.load_config(same).quantization_config


def adapter_of(kind: str) -> Any:
    places = ["q_proj", "k_proj", "v_proj", "down_proj"]
    if kind == "ia3":
        return IA3Config(
            target_modules=places, feedforward_modules=["down_proj"], init_ia3_weights=False, task_type="CAUSAL_LM"
        )
    return LoraConfig(
        r=4, use_dora=kind == "dora", target_modules=places, init_lora_weights=False, task_type="CAUSAL_LM"
    )


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_adapters_read_as_in_peft(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = torch.randint(5, 800, (1, 100), generator=torch.Generator().manual_seed(1))
    theirs = get_peft_model(load(), adapter_of(kind)).eval()
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected, plain = theirs(ids).logits[:, -1], load()(ids).logits[:, -1]
    assert (expected - plain).abs().max() > 1
    model = load(adapter=str(tmp_path))
    cache = RetentionCache(model, "streaming", RetentionPolicy(budget=128, chunk_size=32, local_len=8))
    torch.testing.assert_close(prefill(model, ids, cache), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="PEFT would write into the backbone's own files"):
        load(adapter=str(tmp_path), device_map="disk")


def test_heads_of_a_backbone_in_other_numbers_say_so() -> None:
    heads = RetainingHeads.from_pretrained("checkpoints/tiny-heads")
    training = {**heads.config.training, "precision": "backbone bfloat16, bitsandbytes 4 bits, nf4, autocast bf16"}
    with pytest.warns(UserWarning, match=r"was quantised \(bitsandbytes 4 bits, nf4\), and this one is not quantised"):
        heads.annotate(training=training).check_matches(load())
    heads.annotate(training={**training, "precision": "backbone bfloat16, autocast bf16"}).check_matches(load())


# -- few bits, by the packages themselves -----------------------------------------------------------------------------
# pip install --no-deps --target DIR bitsandbytes torchao optimum-quanto; PYTHONPATH=DIR python -m pytest THIS_FILE

INT8 = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": INT8}}
WAYS: dict[str, tuple[str, dict[str, Any], float]] = {
    "bitsandbytes 4 bits, nf4": ("bitsandbytes", {"load_in_4bit": True}, 0.8),
    "quanto int8": ("optimum.quanto", {"quantization_config": {"quant_method": "quanto", "weights": "int8"}}, 0.9),
    "torchao Int8WeightOnlyConfig": ("torchao", {"quantization_config": TORCHAO}, 0.9),
}
"""The package, the options, and the least share of kept units that are those of float32."""


@pytest.mark.engine
@pytest.mark.parametrize("way", WAYS)
def test_a_quantised_backbone_trains_reads_and_answers(way: str) -> None:
    package, options, least = WAYS[way]
    pytest.importorskip(package, reason=f"{package} is not installed")
    model, planned = load(**options), plan_of(**options)
    assert label_of(model) == planned.label == way
    ids = torch.randint(5, 800, (1, 500), generator=torch.Generator().manual_seed(1))
    heads = RetainingHeads.for_model(model, 16, seed=0).requires_grad_(True)
    assert train_step(model, heads, ids[:, :-20], ids[:, -20:]).total.isfinite()
    kept = []
    for one in (model, load()):
        policy = RetentionPolicy(budget=64, chunk_size=128, stabilizers=16, local_len=16)
        cache = RetentionCache(one, RetainingHeads.from_pretrained("checkpoints/tiny-heads"), policy)
        assert prefill(one, ids, cache).isfinite().all()
        assert cache.memory().peak == cache.memory().planned
        assert generate(one, cache=cache, max_new_tokens=3).shape == (1, 3)
        kept.append([set(row.tolist()) for layer in range(5) for row in cache.kept_positions(layer)[0]])
    assert sum(len(ours & theirs) / len(theirs) for ours, theirs in zip(*kept, strict=True)) / 20 > least
