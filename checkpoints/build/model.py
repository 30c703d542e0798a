"""The untrained backbone."""

from __future__ import annotations

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    if options.init:
        _inherit(model, tokenizer, options)
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


@torch.no_grad()
def _inherit(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, options: BackboneTraining) -> None:
    """Copy the weights of `options.init`; new words begin as strangers of the usual size.

    Raises:
        ValueError: If it has other words, another shape, or not as many layers as there is room for.
    """
    old = LlamaForCausalLM.from_pretrained(options.init, dtype="float32")
    words = AutoTokenizer.from_pretrained(options.init).get_vocab()
    here = tokenizer.get_vocab()
    if any(here.get(word) != index for word, index in words.items()):
        raise ValueError(f"init={options.init} has other words than the vocabulary of today; start from random weights")
    places = [index for index in range(options.num_layers) if index not in options.silent_layers]
    if len(places) != old.config.num_hidden_layers:
        raise ValueError(
            f"init={options.init} has {old.config.num_hidden_layers} layers, but num_layers={options.num_layers} and "
            f"silent_layers={options.silent_layers} leave room for {len(places)}; change one of them"
        )
    if old.config.rope_parameters != model.config.rope_parameters:
        raise ValueError(
            f"init={options.init} turns its keys by {old.config.rope_parameters}, not {model.config.rope_parameters}; "
            "change rope_theta"
        )
    pairs = [(model.model.norm, old.model.norm)]
    pairs += [(model.model.layers[place], layer) for place, layer in zip(places, old.model.layers, strict=True)]
    for new, known in pairs:
        try:
            new.load_state_dict(known.state_dict())
        except RuntimeError as error:
            raise ValueError(f"init={options.init} has layers of another shape; give its own widths") from error
    embeddings = model.get_input_embeddings().weight
    before = old.get_input_embeddings().weight
    embeddings.copy_(torch.randn_like(embeddings) * before.std(dim=0) + before.mean(dim=0))
    embeddings[: len(words)] = before
