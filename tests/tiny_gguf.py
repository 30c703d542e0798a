"""The embedded backbone as a GGUF file, for llama.cpp; every other one is what llama.cpp's own script is for.

`convert_hf_to_gguf.py` refuses the embedded backbone's tokenizer, which knows 900 pieces of words. Here they become a
vocabulary of llama.cpp's kind "rwkv", which takes the longest piece that fits, as ours does: a piece that begins a word
is written with the space before it. So a text has the ids that it has here if a space is before every word, also before
the first one of a text and of a line; the chat template in the file sees to that.

    python tests/tiny_gguf.py tiny.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from locret import shipped
from locret.base.files import read_json, written_whole

_SCRIPT = "convert it with llama.cpp's convert_hf_to_gguf.py"
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_WORDS = (
    "{% set text = namespace(lines='') %}{% for line in message['content'].split('\\n') %}"
    "{% if not loop.first %}{% set text.lines = text.lines + '\\n' %}{% endif %}"
    "{% for word in line.split() %}{% set text.lines = text.lines + ' ' + word %}{% endfor %}{% endfor %}"
)
"""Puts one space before every word of a message, and leaves the line feeds."""


def write_gguf(checkpoint: str | Path, out: str | Path) -> None:
    """Write the embedded backbone, or another Llama with such a tokenizer, as a GGUF file in float32.

    Raises:
        ValueError: If it is another backbone.
        OSError: If a file cannot be read or written.
    """
    import gguf
    from safetensors.numpy import load_file

    folder = Path(checkpoint)
    config: dict[str, Any] = read_json(folder / "config.json", "the config of a backbone")
    tokenizer: dict[str, Any] = read_json(folder / "tokenizer.json", "a tokenizer")
    rope = config.get("rope_parameters") or {}
    if (config.get("model_type"), rope.get("rope_type"), tokenizer["model"]["type"]) != (
        "llama",
        "default",
        "WordPiece",
    ):
        raise ValueError(f"{folder} is not the embedded backbone, nor like it; {_SCRIPT}")
    with written_whole(out) as fresh:
        writer = gguf.GGUFWriter(fresh, "llama")
        _write_config(writer, config, folder.name)
        _write_vocabulary(writer, tokenizer, config, (folder / "chat_template.jinja").read_text(encoding="utf-8"))
        for name, weight in load_file(folder / "model.safetensors").items():
            writer.add_tensor(*_tensor(name, weight.astype(np.float32), config))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _write_config(writer: Any, config: dict[str, Any], name: str) -> None:
    import gguf

    writer.add_name(name)
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


def _write_vocabulary(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any], template: str) -> None:
    import gguf

    special = {token["content"] for token in tokenizer["added_tokens"]}
    # A space of its own is the unknown piece, and a normal one: a text is cut at every special one before all else.
    unknown = tokenizer["model"]["unk_token"]
    pieces = sorted(tokenizer["model"]["vocab"].items(), key=lambda piece: piece[1])
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([_piece(text, special, unknown) for text, _ in pieces])
    kinds = [gguf.TokenType.CONTROL if text in special - {unknown} else gguf.TokenType.NORMAL for text, _ in pieces]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_unk_token_id(tokenizer["model"]["vocab"][unknown])
    spaced = template.replace("{{ '<' + message['role']", _WORDS + "{{ '<' + message['role']")
    writer.add_chat_template(spaced.replace("'>' + message['content']", "'>' + text.lines"))


def _piece(text: str, special: set[str], unknown: str) -> bytes:
    """Return a piece as llama.cpp's rwkv vocabulary writes it; a space that begins no known word is unknown."""
    if text == unknown:
        text = " "
    elif text.startswith("##"):
        text = text[2:]
    elif text not in special and text != "\n":
        text = f" {text}"
    return text.replace("\\", "\\\\").replace("\n", "\\n").encode()


def _tensor(name: str, weight: NDArray[np.float32], config: dict[str, Any]) -> tuple[str, NDArray[np.float32]]:
    if name in _OUTER:
        return _OUTER[name], weight
    _, _, layer, rest = name.split(".", 3)
    stem, _, kind = rest.rpartition(".")
    if stem in ("self_attn.q_proj", "self_attn.k_proj"):  # llama.cpp rotates neighbours here, transformers halves
        half = config["head_dim"] // 2
        weight = weight.reshape(-1, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    return f"blk.{layer}.{_LAYER[stem]}.{kind}", np.ascontiguousarray(weight)


if __name__ == "__main__":
    write_gguf(shipped.find("checkpoints/tiny"), sys.argv[1])
