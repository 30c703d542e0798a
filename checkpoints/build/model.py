"""The untrained backbone."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from checkpoints.build import attention
from checkpoints.build.options import BackboneTraining
from checkpoints.build.start import connect, initialize, order_numbers


def build_model(options: BackboneTraining, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained backbone in float32; the seed decides its weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        max_position_embeddings=options.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": options.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(config)
    if options.start == "distances":
        initialize(model)
    if options.ordered_numbers:
        order_numbers(model, tokenizer)
    if options.copying_layer is not None:
        connect(model, options.copying_layer)
    for layer in options.silent_layers:
        torch.nn.init.zeros_(model.model.layers[layer].self_attn.o_proj.weight)
        torch.nn.init.zeros_(model.model.layers[layer].mlp.down_proj.weight)
    model.set_attn_implementation(attention.NAME)
    return model
