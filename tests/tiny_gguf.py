"""The embedded backbone as a GGUF file in float32, for tests; every other one is what llama.cpp's own script is for.

`convert_hf_to_gguf.py` refuses the embedded backbone's tokenizer, which knows 900 pieces of words. Here they become a
vocabulary of llama.cpp's kind "rwkv": a piece that begins a word is written with the space before it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

with suppress(ImportError):  # tests that write such a file are skipped without it
    import gguf


def write_gguf(checkpoint: str | Path, out: str | Path) -> None:
    """Write the embedded backbone as a GGUF file."""
    folder, writer = Path(checkpoint), gguf.GGUFWriter(out, "llama")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    _write_config(writer, config)
    _write_vocabulary(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    names, half = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"]), config["head_dim"] // 2
    for name, weight in load_file(folder / "model.safetensors").items():
        numbers = weight.astype(np.float32)
        if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbours here, transformers halves
            shape = numbers.shape
            numbers = np.ascontiguousarray(numbers.reshape(-1, 2, half, *shape[1:]).swapaxes(1, 2).reshape(shape))
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _write_vocabulary(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    special = {token["content"] for token in tokenizer["added_tokens"]}
    # A space of its own is the unknown piece, and a normal one: a text is cut at every special one before all else.
    vocabulary, unknown = tokenizer["model"]["vocab"], tokenizer["model"]["unk_token"]
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([_piece(text, special, unknown) for text in pieces])
    kinds = [gguf.TokenType.CONTROL if text in special - {unknown} else gguf.TokenType.NORMAL for text in pieces]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_unk_token_id(vocabulary[unknown])


def _piece(text: str, special: set[str], unknown: str) -> bytes:
    """Return a piece as llama.cpp's rwkv vocabulary writes it; a space that begins no known word is unknown."""
    if text == unknown:
        text = " "
    elif text.startswith("##"):
        text = text[2:]
    elif text not in special and text != "\n":
        text = f" {text}"
    return text.replace("\\", "\\\\").replace("\n", "\\n").encode()
