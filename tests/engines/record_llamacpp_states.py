"""Record small states of the real llama.cpp, for tests of the layout that need none.

Two random models, converted by llama.cpp's own script, read five tokens; the states are what the library gives out.

python tests/engines/record_llamacpp_states.py LLAMA_CPP_SOURCE
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

import llama_cpp as lib
import numpy as np
import torch
from llamacpp_runs import Engine, Model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

HERE = Path(__file__).parent
IDS = [5, 99, 42, 7, 150]
SHAPE = {
    "vocab_size": 199,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, hidden_size=64, num_attention_heads=2, num_key_value_heads=2),
    "qwen2": Qwen2Config(**SHAPE, hidden_size=128, num_attention_heads=1, num_key_value_heads=1),
}
KINDS = {
    "llama": ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"],
    "qwen2": ["f32", "q8_0", "q4_0", "q5_1"],
}


def converted(config: PreTrainedConfig, source: str, folder: Path) -> Model:
    torch.manual_seed(3)
    name = config.model_type
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    script = [str(HERE / "convert_without_vocabulary.py"), source, str(folder / name), str(folder / f"{name}.gguf")]
    subprocess.run([sys.executable, *script], check=True, capture_output=True)
    return Model(folder / f"{name}.gguf")


def state(model: Model, cache_type: str, cache_type_v: str | None = None, **options: object) -> bytes:
    engine = Engine(model, cache_type, cache_type_v, **options)  # type: ignore[arg-type]
    engine.feed(IDS, 0, sequence := int(options.get("sequences", 1)) - 1)  # type: ignore[call-overload]
    taken = engine.state(sequence)
    engine.close()
    return taken


def slot_file(model: Model, folder: Path) -> bytes:
    engine, ids = Engine(model, "f16", flash=True), (ctypes.c_int32 * len(IDS))(*IDS)
    engine.feed(IDS, 0)
    lib.llama_state_seq_save_file(engine.pointer, str(folder / "slot.bin").encode(), 0, ids, len(IDS))
    engine.close()
    return (folder / "slot.bin").read_bytes()


def main(source: str) -> None:
    recorded = {}
    with tempfile.TemporaryDirectory() as made:
        for name, config in CONFIGS.items():
            model = converted(config, source, Path(made))
            for kind in KINDS[name]:
                recorded[f"{name} {kind}"] = state(model, kind, flash=True)
            if name == "llama":
                recorded["llama f16 transposed"] = state(model, "f16", flash=False)
                recorded["llama q8_0 f16 transposed"] = state(model, "q8_0", "f16", flash=False)
                recorded["llama f16 streams"] = state(model, "f16", flash=True, sequences=3, unified=False)
                recorded["llama f16 file"] = slot_file(model, Path(made))
    arrays = {name: np.frombuffer(blob, np.uint8) for name, blob in recorded.items()}
    np.savez_compressed(HERE / "llamacpp_states.npz", **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
