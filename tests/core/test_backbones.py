"""Backbones and adapters: those that work, and those whose effect would be lost, which are refused with the reason."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from families import SHAPE, build, prompt
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill

POLICY = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6)
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
DROPPED = {
    "PROMPT_TUNING": peft.PromptTuningConfig(num_virtual_tokens=4, **TASK),
    "P_TUNING": peft.PromptEncoderConfig(num_virtual_tokens=4, **TASK),
    "PREFIX_TUNING": peft.PrefixTuningConfig(num_virtual_tokens=4, **TASK),
    "ADAPTION_PROMPT": peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **TASK),
    "POLY": peft.PolyConfig(r=4, n_tasks=2, **LAYERS, **TASK),
    "activated LoRA": peft.LoraConfig(alora_invocation_tokens=[5, 6], **LAYERS, **TASK),
}


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


# -- weights that are elsewhere ---------------------------------------------------------------------------------------
