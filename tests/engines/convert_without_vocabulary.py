"""Convert a checkpoint with llama.cpp's own script, but without a vocabulary, which random models have none of.

python tests/engines/convert_without_vocabulary.py LLAMA_CPP_SOURCE CHECKPOINT OUT.gguf
"""

import sys
from pathlib import Path

source, checkpoint, out = sys.argv[1:]
sys.path[:0] = [source, f"{source}/gguf-py"]

import gguf  # noqa: E402 (the source's own)
import torch  # noqa: E402
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class  # noqa: E402

facts = ModelBase.load_hparams(Path(checkpoint), False)
kind = get_model_class(get_model_architecture(facts, ModelType.TEXT))
with torch.inference_mode():
    model = kind(Path(checkpoint), gguf.LlamaFileType.ALL_F32, Path(out))
    # One of its architectures hands everything over to another object.
    inner = getattr(model, "impl", model)
    inner.set_vocab = inner._set_vocab_none
    if not issubclass(kind, get_model_class("LlamaForCausalLM")) and inner is model:
        model.gguf_writer.add_vocab_size(facts["vocab_size"])
    model.write()
