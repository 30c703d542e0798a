"""Contexts answered by an unchanged llama.cpp: through its C functions, `llama_cpp.Llama` and llama-server.

Run in an environment that has llama-cpp-python and gguf besides the package; two variables name what else there is:

    LLAMA_SERVER=.../llama-server LLAMA_CPP_SOURCE=.../llama.cpp python -m pytest tests/engines/test_llamacpp_engine.py

Both come from the sdist of llama-cpp-python, which holds all of llama.cpp (docs/engines.md).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from embedded import many_keys

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

import numpy as np
import torch
from llamacpp_runs import Engine, Model, Server, served
from tiny_gguf import write_gguf
from transformers import AutoConfig, AutoModelForCausalLM

from locret import LongContextModel, RetentionCache, RetentionPolicy, generate, prefill
from locret.cache.cache_file import save_cache
from locret.engines import llamacpp
from locret.engines.llamacpp import INTERLEAVED, Layout, export, sequence_state
from locret.engines.prefix import Prefix

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SOURCE = os.environ.get("LLAMA_CPP_SOURCE")
PROGRAM = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
needs_server = pytest.mark.skipif(not PROGRAM, reason="LLAMA_SERVER names no llama-server of the same build")
needs_source = pytest.mark.skipif(not SOURCE, reason="LLAMA_CPP_SOURCE names no folder of llama.cpp")
TOKENS, QUESTION = 8192, 48
POLICY = RetentionPolicy(budget=224, chunk_size=512, stabilizers=64, local_len=32)


@dataclass
class Book:
    """A text that was read, and what locret.generate answers to questions about it."""

    text: list[int]
    prefix: Prefix
    questions: list[tuple[list[int], list[int]]]
    """Ids of a question, and of its answer."""


@pytest.fixture(scope="module")
def lm() -> LongContextModel:
    torch.set_num_threads(1)
    return LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy=POLICY)


def book(lm: LongContextModel, seed: int) -> Book:
    sample = many_keys(lm.tokenizer, TOKENS, seed=seed)
    asked = re.findall(r"for (\w+)", sample.content[-200:])[-1]
    cut = sample.content.rfind(asked)

    def ids_of(key: str) -> torch.Tensor:
        text = sample.content[:cut] + key + sample.content[cut + len(asked) :]
        turn = [{"role": "user", "content": text}]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        return lm.tokenizer.apply_chat_template(turn, **options)["input_ids"]

    text = ids_of(asked)[:, :-QUESTION]
    cache = RetentionCache(lm.model, lm.scorer, POLICY)
    prefill(lm.model, text, cache)
    questions = []
    for key, truth in re.findall(r"for (\w+) is: (\d+)", sample.content)[:8]:
        ids = ids_of(key)
        assert torch.equal(ids[:, :-QUESTION], text)
        answer = generate(lm.model, ids, cache=cache.copy(), max_new_tokens=16)[0, ids.shape[1] :].tolist()
        assert truth in lm.tokenizer.decode(answer)
        questions.append((ids[0, -QUESTION:].tolist(), answer))
    return Book(text[0].tolist(), Prefix.of(cache), questions)


@pytest.fixture(scope="module")
def books(lm: LongContextModel) -> list[Book]:
    return [book(lm, seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf("checkpoints/tiny", path)
    return path


@pytest.fixture(scope="module")
def model(gguf_file: Path) -> Model:
    return Model(gguf_file)


def right(engine: Engine, one: Book, sequence: int = 0) -> int:
    """Ask all questions, one after the other, about the units in a sequence; count the answers that are ours."""
    same = 0
    for ids, answer in one.questions:
        engine.forget(sequence, one.prefix.units)
        same += engine.answer(ids, one.prefix.units, sequence) == answer
    return same


LAYOUTS = [
    ("f32", None, False),
    ("f32", None, True),
    ("f32", None, None),
    ("f16", None, False),
    ("f16", None, True),
    ("f16", None, None),
    ("bf16", None, False),
    ("bf16", None, True),
    ("q8_0", None, True),
    ("q8_0", "f16", False),
]


@pytest.mark.parametrize(("keys", "values", "flash"), LAYOUTS)
def test_answers_are_those_of_generate(
    model: Model, books: list[Book], keys: str, values: str | None, flash: bool | None
) -> None:
    engine = Engine(model, keys, values, flash=flash)
    transposed = flash is False
    layout = Layout(cache_type=keys, cache_type_v=values, flash_attention=not transposed)
    same = 0
    for one in books:
        blob = sequence_state(one.prefix, layout)
        assert engine.set(blob) == len(blob)
        assert engine.state() == blob
        same += right(engine, one)
    engine.close()
    assert same == 16


def test_a_slot_file_is_read_with_its_placeholders(model: Model, books: list[Book], tmp_path: Path) -> None:
    engine = Engine(model)
    slot, _ = export(books[0].prefix, tmp_path / "a.bin")
    assert engine.load(slot) == (slot.stat().st_size, books[0].prefix.placeholders)
    assert right(engine, books[0]) == 8
    engine.close()


def asked(server: Server, one: Book, slot: int = 0, **options: Any) -> int:
    """Ask all questions of a running server; count the answers that are ours and came from the units."""
    same = 0
    for ids, answer in one.questions:
        reply = server.ask([*one.prefix.placeholders, *ids], slot, **options)
        got = [token for token in reply["tokens"] if token != 2]
        same += got == [token for token in answer if token != 2] and reply["timings"]["cache_n"] >= one.prefix.units
    return same


@needs_server
def test_the_options_in_the_record_are_those_the_server_needs(
    gguf_file: Path, books: list[Book], tmp_path: Path
) -> None:
    for layout in (Layout(cache_type="q8_0"), Layout(streams=2, flash_attention=False)):
        _, record = export(books[0].prefix, tmp_path / "book.bin", layout)
        facts = json.loads(record.read_text())
        with served(Path(PROGRAM), gguf_file, tmp_path, *facts["server"]) as server:
            assert server.restore(facts["file"])["n_restored"] == facts["units"]
            assert asked(server, books[0]) == 8


# Families: model_type, what it differs in from the shape below, how much logits differ because activations do.
SHAPE = {
    "vocab_size": 199,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + i / 20 for i in range(16)],
    "long_factor": [1.5 + i * 0.4 for i in range(16)],
    "original_max_position_embeddings": 256,
}
PHI3 = {"sliding_window": 4096, "original_max_position_embeddings": 4096}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: list[tuple[str, dict[str, Any], float]] = [
    ("llama", {}, 2e-4),
    ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}}, 2e-4),
    ("llama", {"rope_parameters": YARN}, 2e-4),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, 2e-4),
    ("mistral", {"sliding_window": None}, 2e-4),
    ("mixtral", {**LOCAL_MIXTURE, "sliding_window": None}, 2e-4),
    ("ministral3", {"head_dim": 32, "max_position_embeddings": 131072}, 2e-4),
    ("smollm3", {}, 2e-4),
    ("arcee", {}, 2e-4),
    ("olmo", {}, 2e-4),
    ("granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}, 2e-4),
    ("granitemoe", LOCAL_MIXTURE, 2e-3),
    ("qwen2", {}, 2e-4),
    ("qwen2_moe", {**MIXTURE, "shared_expert_intermediate_size": 32}, 2e-4),
    ("qwen3", {"head_dim": 64}, 2e-4),
    ("qwen3_moe", {**MIXTURE, "head_dim": 32, "norm_topk_prob": True}, 2e-4),
    ("phi3", PHI3, 2e-4),
    ("phi3", {**PHI3, "rope_parameters": {**PARTIAL, "original_max_position_embeddings": 4096}}, 2e-4),
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 256}, 2e-4),
    ("gemma", {"head_dim": 32, "tie_word_embeddings": True}, 5e-2),  # llama.cpp's gelu is a table
    ("olmo2", {}, 2e-4),
    ("stablelm", {}, 2e-4),
    ("starcoder2", {"sliding_window": None}, 1e-2),
    ("seed_oss", {"head_dim": 32}, 2e-4),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, 2e-4),
    ("nemotron", {}, 2e-4),
    ("apertus", {}, 2e-4),
]


def random_model(model_type: str, changes: dict[str, Any], folder: Path) -> tuple[Any, Path]:
    """Return a random model, with norms and biases that do something, and its GGUF file by llama.cpp's own script."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **{**SHAPE, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.save_pretrained(folder)
    script = [str(Path(__file__).parent / "convert_without_vocabulary.py"), str(SOURCE), str(folder)]
    out = folder / "model.gguf"
    subprocess.run([sys.executable, *script, str(out)], check=True, capture_output=True)
    return model, out


def read(model: Any, folder: Path) -> tuple[Prefix, list[int], torch.Tensor]:
    """Read 600 random ids; return the units, a question, and the logits of locret.generate after it."""
    ids, question = (torch.randint(3, 199, (1, n), generator=torch.Generator().manual_seed(n)) for n in (600, 20))
    cache = RetentionCache(model, "key_norm", RetentionPolicy(budget=96, chunk_size=64, stabilizers=16, local_len=16))
    prefill(model, ids, cache)
    save_cache(cache, folder / "read.ctx")
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    asked: Any = generate(model, torch.cat([ids, question], 1), cache=cache, **options)
    return Prefix.from_file(folder / "read.ctx"), question[0].tolist(), asked.logits[0][0]


@needs_source
@pytest.mark.parametrize(("model_type", "changes", "close"), FAMILIES)
def test_every_family_is_held_in_its_order(
    model_type: str, changes: dict[str, Any], close: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = random_model(model_type, changes, tmp_path)
    prefix, question, wanted = read(model, tmp_path)
    assert prefix.model_type == model_type
    engine = Engine(Model(path), "f32", flash=False, length=1024)
    layout = Layout(cache_type="f32", flash_attention=False)
    engine.set(sequence_state(prefix, layout))
    assert np.abs(engine.feed(question, prefix.units) - wanted.numpy()).max() < close
    monkeypatch.setitem(llamacpp.INTERLEAVED, model_type, not INTERLEAVED[model_type])
    if "partial_rotary_factor" not in prefix.rotary:
        engine.forget()
        engine.set(sequence_state(prefix, layout))
        assert np.abs(engine.feed(question, prefix.units) - wanted.numpy()).max() > 1
    engine.close()


def test_every_known_family_is_tried() -> None:
    assert {family for family, *_ in FAMILIES} == set(INTERLEAVED)
