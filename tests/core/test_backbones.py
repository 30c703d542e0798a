"""Backbones and adapters: those that work, and those whose effect would be lost, which are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import SHAPE, build, prompt
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill

POLICY = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6)
ROOMY = RetentionPolicy(budget=100, chunk_size=10, stabilizers=5, local_len=6)
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 5}
IDS = prompt(60)
WINDOW = {"sliding_window": 24}


def random_model(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**SHAPE, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mistral", WINDOW, "every layer of mistral slides over a window of 24 tokens, .* would govern nothing"),
        ("mamba", {}, "no layer of mamba has softmax attention, so there is nothing to evict"),
        ("deepseek_v4", {}, "the layers of deepseek_v4 choose by an indexer of their own what they attend to"),
        ("llama4_text", {"head_dim": 8}, "llama4_text has layers of chunked_attention"),
    ],
)
def test_what_would_not_work_is_refused_before_anything_is_read(model_type: str, changes: Any, message: str) -> None:
    model = random_model(model_type, **changes)
    for make in (lambda: RetentionCache(model, "snapkv", POLICY), lambda: RetainingHeads.for_model(model)):
        with pytest.raises(ValueError, match=message) as refused:
            make()
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("model_type", ["doge", "diffllama"])
def test_attention_of_another_kind_is_refused_while_it_is_read(model_type: str) -> None:
    model = random_model(model_type)
    with pytest.raises(ValueError, match="masks what it attends to itself, or attends more than once"):
        prefill(model, IDS, RetentionCache(model, "snapkv", POLICY))


@pytest.mark.parametrize("model_type", ["glm4", "cohere", "ernie4_5"])
@pytest.mark.parametrize("positions", ["compact", "original"])
def test_interleaved_rotary_embeddings_work(model_type: str, positions: str) -> None:
    model = random_model(model_type)
    policy = RetentionPolicy(budget=100, chunk_size=10, stabilizers=5, local_len=6, positions=positions)
    logits = prefill(model, IDS, RetentionCache(model, "snapkv", policy))
    with torch.no_grad():
        torch.testing.assert_close(logits, model(IDS).logits[:, -1], atol=1e-4, rtol=0)


# -- adapters ---------------------------------------------------------------------------------------------------------


def adapted(config: Any) -> Any:
    torch.manual_seed(0)
    model = peft.get_peft_model(build("llama"), config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 1.0 if isinstance(config, peft.IA3Config) else 0.0, 0.3)
    return model


TASK = {"task_type": "CAUSAL_LM"}
LAYERS = {"target_modules": ["q_proj", "k_proj", "v_proj"]}
KEPT = {
    "lora": peft.LoraConfig(**LAYERS, **TASK),
    "dora": peft.LoraConfig(use_dora=True, **LAYERS, **TASK),
    "ia3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **TASK),
    "loha": peft.LoHaConfig(**LAYERS, **TASK),
    "oft": peft.OFTConfig(oft_block_size=4, **LAYERS, **TASK),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm"], **TASK),
    "trainable tokens": peft.TrainableTokensConfig(token_indices=[5, 6, 7], target_modules=["embed_tokens"], **TASK),
}
DROPPED = {
    "PROMPT_TUNING": peft.PromptTuningConfig(num_virtual_tokens=4, **TASK),
    "P_TUNING": peft.PromptEncoderConfig(num_virtual_tokens=4, **TASK),
    "PREFIX_TUNING": peft.PrefixTuningConfig(num_virtual_tokens=4, **TASK),
    "ADAPTION_PROMPT": peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **TASK),
    "POLY": peft.PolyConfig(r=4, n_tasks=2, **LAYERS, **TASK),
    "activated LoRA": peft.LoraConfig(alora_invocation_tokens=[5, 6], **LAYERS, **TASK),
}


@pytest.mark.parametrize("kind", KEPT)
def test_adapters_of_the_layers_work(kind: str) -> None:
    model = adapted(KEPT[kind])
    with torch.no_grad():
        expected, plain = model(IDS).logits[:, -1], build("llama")(IDS).logits[:, -1]
    assert (expected - plain).abs().max() > 1e-2
    cache = RetentionCache(model, "snapkv", ROOMY)
    torch.testing.assert_close(prefill(model, IDS, cache), expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(generate(model, cache=cache, **GREEDY), model.generate(input_ids=IDS, **GREEDY)[:, 60:])


@pytest.mark.parametrize("kind", DROPPED)
def test_adapters_that_would_be_dropped_are_refused(kind: str) -> None:
    model, cache = adapted(DROPPED[kind]), None
    message = f"adapter 'default' is of the kind {kind}, which works outside of the backbone's layers"
    with pytest.raises(ValueError, match=message):
        cache = RetentionCache(model, "snapkv", POLICY)
    assert cache is None
    with pytest.raises(ValueError, match=message):
        RetainingHeads.for_model(model)
    if kind not in ("ADAPTION_PROMPT", "POLY"):  # these replace attention modules and projections
        base = model.base_model if kind != "activated LoRA" else build("llama")
        with pytest.raises(ValueError, match=message):
            prefill(model, IDS, RetentionCache(base, "snapkv", POLICY))


# -- rotary embeddings whose frequencies change -----------------------------------------------------------------------

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.fixture
def dynamic() -> Any:
    return random_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=48)


@pytest.mark.parametrize("length", [40, 60, 600])
def test_dynamic_ntk_reads_any_length_within_its_original_context(dynamic: Any, length: int) -> None:
    static, ids = build("llama"), prompt(length)
    static.load_state_dict(dynamic.state_dict())
    ours, theirs = (RetentionCache(model, "key_norm", POLICY) for model in (dynamic, static))
    torch.testing.assert_close(prefill(dynamic, ids, ours), prefill(static, ids, theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("changes", [{"budget": 39}, {"chunk_size": 30}])
def test_dynamic_ntk_beyond_its_original_context_is_refused_with_compact_positions(dynamic: Any, changes: Any) -> None:
    policy = RetentionPolicy(**{**POLICY.to_dict(), **changes})
    cache = RetentionCache(dynamic, "key_norm", policy)
    with pytest.raises(ValueError, match=r"changes its rotary frequencies beyond 48 positions, but budget=.* reach"):
        prefill(dynamic, prompt(90), cache)
    assert not cache.seen
    prefill(dynamic, prompt(40), cache)
    with pytest.raises(ValueError, match="changes its rotary frequencies beyond 48 positions"):
        generate(dynamic, prompt(40), cache=cache.fresh(), max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("changes", [{}, {"decode_budget": 40, "decode_interval": 4}, {"positions": "original"}])
def test_an_answer_beyond_the_original_context_of_dynamic_ntk_is_refused_before_its_first_token(
    dynamic: Any, changes: Any
) -> None:
    policy = RetentionPolicy(**{**POLICY.to_dict(), **changes})
    cache = RetentionCache(dynamic, "key_norm", policy)
    prefill(dynamic, prompt(40), cache)
    room = 48 - cache.next_position
    with pytest.raises(ValueError, match=r"beyond 48 positions, .* answer reach 49"):
        generate(dynamic, cache=cache, max_new_tokens=room + 1, do_sample=False)
    assert cache.held_back
    assert generate(dynamic, cache=cache, max_new_tokens=room, do_sample=False).shape[1] == room


def test_dynamic_ntk_with_original_positions_is_right_within_its_original_context_and_refused_beyond(
    dynamic: Any,
) -> None:
    policy = RetentionPolicy(budget=90, chunk_size=7, stabilizers=5, local_len=6, positions="original")
    cache = RetentionCache(dynamic, "key_norm", policy)
    answer = generate(dynamic, prompt(40), cache=cache, **GREEDY)
    assert torch.equal(answer, dynamic.generate(input_ids=prompt(40), **GREEDY))
    message = r"dynamic NTK changes its rotary frequencies beyond 48 positions, keys .*, and text and answer reach 49"
    with pytest.raises(ValueError, match=message):
        prefill(dynamic, prompt(49), cache.fresh())
    with pytest.raises(ValueError, match="and the length of the text is unknown"):
        prefill(dynamic, iter(prompt(60)[0].tolist()), cache.fresh())


# -- weights that are elsewhere ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scorer", ["heads", "snapkv", "sirllm"])
def test_layers_offloaded_to_disk_read_and_answer_alike(scorer: str, tmp_path: Path) -> None:
    from accelerate import disk_offload

    from locret import load_cache, save_cache

    model, away = build("llama"), build("llama")
    disk_offload(away, tmp_path / "weights", execution_device=torch.device("cpu"))
    assert next(away.model.layers[0].parameters()).is_meta

    def chosen(one: Any) -> Any:
        return RetainingHeads.for_model(one, hidden_dim=8, seed=0) if scorer == "heads" else scorer

    here, there = RetentionCache(model, chosen(model), POLICY), RetentionCache(away, chosen(away), POLICY)
    ids, mask = prompt(60, batch=2), torch.ones(2, 60, dtype=torch.long)
    mask[1, :9] = 0
    assert torch.equal(prefill(model, ids, here, mask), prefill(away, ids, there, mask))
    for layer in range(3):
        assert torch.equal(here.kept_positions(layer), there.kept_positions(layer))
        torch.testing.assert_close(here.kept_scores(layer), there.kept_scores(layer))
    save_cache(there, tmp_path / "cache.safetensors")
    there = load_cache(tmp_path / "cache.safetensors", away, chosen(away))
    assert torch.equal(generate(model, cache=here, **GREEDY), generate(away, cache=there, **GREEDY))
