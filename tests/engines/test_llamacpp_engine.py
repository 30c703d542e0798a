"""Contexts answered by an unchanged llama.cpp: through its C functions, `llama_cpp.Llama` and llama-server.

Run in an environment that has llama-cpp-python and gguf besides the package; two variables name what else there is:

    LLAMA_SERVER=.../llama-server LLAMA_CPP_SOURCE=.../llama.cpp python -m pytest tests/engines/test_llamacpp_engine.py

Both come from the sdist of llama-cpp-python, which holds all of llama.cpp (docs/engines.md).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from embedded import many_keys

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

import llama_cpp
import numpy as np
import torch
from llamacpp_runs import OLD, Engine, Model, Server, served
from tiny_gguf import write_gguf
from transformers import AutoConfig, AutoModelForCausalLM

from locret import LongContextModel, RetentionCache, RetentionPolicy, generate, prefill
from locret.cache.cache_file import save_cache
from locret.engines import llamacpp
from locret.engines.llamacpp import INTERLEAVED, Layout, export, sequence_state, slot_file
from locret.engines.prefix import Prefix

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SOURCE = os.environ.get("LLAMA_CPP_SOURCE")
PROGRAM = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
needs_server = pytest.mark.skipif(not PROGRAM or OLD, reason="LLAMA_SERVER names no llama-server of the same build")
needs_source = pytest.mark.skipif(not SOURCE or OLD, reason="LLAMA_CPP_SOURCE names no folder of llama.cpp")
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


@pytest.fixture(scope="module")
def version(model: Model) -> int:
    """The build's LLAMA_STATE_SEQ_VERSION; blobs of version 3 begin with a magic number."""
    engine = Engine(model)
    engine.feed([5, 6, 7], 0)
    magic = struct.unpack_from("<I", engine.state())[0]
    engine.close()
    return 3 if magic == 0xAF143CD8 else 2


def right(engine: Engine, one: Book, sequence: int = 0) -> int:
    """Ask all questions, one after the other, about the units in a sequence; count the answers that are ours."""
    same = 0
    for ids, answer in one.questions:
        engine.forget(sequence, one.prefix.units)
        same += engine.answer(ids, one.prefix.units, sequence) == answer
    return same


@pytest.mark.skipif(OLD, reason="its options have another form")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_units_of_the_weights_as_they_were_fit_quantised_ones(
    gguf_file: Path, books: list[Book], version: int, tmp_path: Path, kind: str
) -> None:
    quantised, options = tmp_path / f"{kind}.gguf", llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), 1
    assert llama_cpp.llama_model_quantize(str(gguf_file).encode(), str(quantised).encode(), options) == 0
    assert quantised.stat().st_size < gguf_file.stat().st_size / 3
    engine = Engine(Model(quantised))
    for one in books:
        assert engine.set(sequence_state(one.prefix, Layout(state_version=version)))
        assert right(engine, one) == 8
    engine.close()


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
    ("q5_1", None, True),
    ("q5_0", None, True),
    ("q4_1", None, True),
    ("q4_0", None, True),
]


@pytest.mark.parametrize(("keys", "values", "flash"), LAYOUTS)
def test_answers_are_those_of_generate(
    model: Model, books: list[Book], version: int, keys: str, values: str | None, flash: bool | None
) -> None:
    engine = Engine(model, keys, values, flash=flash)
    transposed = flash is False or (OLD and flash is None)  # auto did not exist then
    layout = Layout(cache_type=keys, cache_type_v=values, flash_attention=not transposed, state_version=version)
    same = 0
    for one in books:
        blob = sequence_state(one.prefix, layout)
        assert engine.set(blob) == len(blob)
        assert engine.state() == blob
        same += right(engine, one)
    engine.close()
    assert same == 16


def test_many_questions_share_the_units_of_two_contexts(model: Model, books: list[Book], version: int) -> None:
    engine = Engine(model, length=2048, sequences=18)
    same, target = 0, 2
    layout = Layout(state_version=version, flash_attention=not OLD)
    for number, one in enumerate(books):
        assert engine.set(sequence_state(one.prefix, layout), number)
        for ids, answer in one.questions:
            engine.copy(number, target)
            same += engine.answer(ids, one.prefix.units, target) == answer
            target += 1
    assert engine.state(0) == sequence_state(books[0].prefix, layout)
    engine.close()
    assert same == 16


def test_streams_are_one_for_each_slot(model: Model, books: list[Book], version: int) -> None:
    engine = Engine(model, length=2048, sequences=4, unified=False)
    layout = Layout(streams=4, state_version=version, flash_attention=not OLD)
    for slot in range(4):
        one = books[slot % 2]
        assert engine.set(sequence_state(one.prefix, layout), slot)
        assert right(engine, one, slot) == 8
    unified = replace(layout, streams=1)
    assert engine.set(sequence_state(books[0].prefix, unified), 0) == 0
    engine.close()


def test_a_slot_file_is_read_with_its_placeholders(
    model: Model, books: list[Book], version: int, tmp_path: Path
) -> None:
    engine = Engine(model)
    slot, _ = export(books[0].prefix, tmp_path / "a.bin", Layout(state_version=version, flash_attention=not OLD))
    assert engine.load(slot) == (slot.stat().st_size, books[0].prefix.placeholders)
    assert right(engine, books[0]) == 8
    other = slot_file(books[0].prefix, Layout(state_version=5 - version, flash_attention=not OLD))
    slot.write_bytes(other)
    assert engine.load(slot)[0] == 0
    engine.close()


def test_the_python_class_takes_a_context(gguf_file: Path, books: list[Book], version: int) -> None:
    llama = llama_cpp.Llama(str(gguf_file), n_ctx=1024, n_threads=1, n_batch=512, verbose=False)
    flash = False if OLD else bool(llama.context_params.flash_attn_type)
    same = 0
    for one in books:
        blob = sequence_state(one.prefix, Layout(flash_attention=flash, state_version=version))
        buffer, units = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob), one.prefix.units
        llama.reset()
        pointer = getattr(llama, "ctx", None) or llama._ctx.ctx
        assert llama_cpp.llama_state_seq_set_data(pointer, buffer, len(blob), 0) == len(blob)
        llama.input_ids[:units], llama.n_tokens = one.prefix.placeholders, units
        for ids, answer in one.questions:
            written: list[int] = []
            for token in llama.generate([*one.prefix.placeholders, *ids], temp=0.0, top_k=1):
                written.append(token)
                if token == 2 or len(written) == 16:
                    break
            same += written == answer
    llama.close()
    assert same == 16


def test_nothing_else_answers(model: Model, books: list[Book], version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(cache_type="f32", state_version=version, flash_attention=not OLD)
    engine, (one, other) = Engine(model, "f32"), books
    good = sequence_state(one.prefix, layout)
    monkeypatch.setitem(INTERLEAVED, "llama", False)
    assert engine.set(sequence_state(one.prefix, layout))
    assert right(engine, one) == 0
    monkeypatch.undo()
    assert engine.set(sequence_state(other.prefix, layout))
    assert right(engine, one) == 0
    for ids in (one.prefix.placeholders, one.text[-one.prefix.units :]):
        engine.forget()
        engine.feed(ids, 0)
        assert right(engine, one) == 0
    for wrong in ({"cache_type": "f16"}, {"streams": 2}, {"flash_attention": OLD}):
        assert engine.set(sequence_state(one.prefix, replace(layout, **wrong))) == 0
    assert engine.set(good[:-100]) == 0
    assert engine.set(good) == len(good)
    assert right(engine, one) == 8
    engine.close()


def test_texts_have_the_ids_that_they_have_here(gguf_file: Path, lm: LongContextModel) -> None:
    llama = llama_cpp.Llama(str(gguf_file), vocab_only=True, verbose=False)
    texts = [many_keys(lm.tokenizer, 600, seed=seed).content for seed in range(3)]
    texts += ["The\n\nkey \\n 'is' {12345}; \"a_b\"", "<user> a <assistant> 1 <eos>"]
    for text in texts:
        theirs = llama.tokenize(spaced_turn(text).encode(), add_bos=False, special=True)
        assert theirs == lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    # A word of unknown letters is one unknown piece here, and may be several there, but it is never passed over.
    assert set(llama.tokenize(" ☃".encode(), add_bos=False)) == {lm.tokenizer.unk_token_id}


def spaced(text: str) -> str:
    """Put one space before every word, as the vocabulary of the embedded backbone's GGUF file wants it."""
    return "\n".join("".join(f" {word}" for word in line.split()) for line in text.split("\n"))


SERVERS = [
    (["-np", "1", "-fa", "on", "-ctk", "f32", "-ctv", "f32"], {"cache_type": "f32"}),
    (["-np", "1"], {}),
    (["-np", "1", "-fa", "off"], {"flash_attention": False}),
    (["-np", "1", "-ctk", "q8_0", "-ctv", "q8_0"], {"cache_type": "q8_0"}),
    (["-np", "1", "-ctk", "q4_0", "-ctv", "q4_0"], {"cache_type": "q4_0"}),
    ([], {}),  # four slots
    (["-np", "4", "--no-kv-unified"], {"streams": 4}),
]


@pytest.fixture
def shelf(books: list[Book], tmp_path: Path) -> Path:
    """A folder of two slot files in the default layout."""
    for number, one in enumerate(books):
        export(one.prefix, tmp_path / f"{number}.bin")
    return tmp_path


def asked(server: Server, one: Book, slot: int = 0, **options: Any) -> int:
    """Ask all questions of a running server; count the answers that are ours and came from the units."""
    same = 0
    for ids, answer in one.questions:
        reply = server.ask([*one.prefix.placeholders, *ids], slot, **options)
        got = [token for token in reply["tokens"] if token != 2]
        same += got == [token for token in answer if token != 2] and reply["timings"]["cache_n"] >= one.prefix.units
    return same


@needs_server
@pytest.mark.parametrize(("options", "layout"), SERVERS)
def test_a_restored_slot_answers(
    gguf_file: Path, books: list[Book], tmp_path: Path, options: list[str], layout: dict[str, Any]
) -> None:
    with served(Path(PROGRAM), gguf_file, tmp_path, "-c", "4096", *options) as server:
        for number, one in enumerate(books):
            slot = number if "1" not in options else 0
            export(one.prefix, tmp_path / f"{number}.bin", Layout(**layout))
            assert server.restore(f"{number}.bin", slot)["n_restored"] == one.prefix.units
            assert asked(server, one, slot) == 8
        if "1" not in options:  # both are still there, and a slot that is not named is found by its placeholders
            assert sum(asked(server, one, -1) for one in books) == 16


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


@needs_server
def test_a_question_can_be_text(gguf_file: Path, lm: LongContextModel, tmp_path: Path) -> None:
    sample = many_keys(lm.tokenizer, 2000, seed=5)
    document, _, question = sample.content.rpartition("\n")
    context = lm.read(document, name="keys")
    _, record = export(context, tmp_path / "keys.bin")
    facts = json.loads(record.read_text())
    with served(Path(PROGRAM), gguf_file, tmp_path, *facts["server"]) as server:
        server.restore("keys.bin")
        for key, truth in re.findall(r"for (\w+) is: (\d+)", document)[:4]:
            text = re.sub(r"for \w+ mentioned", f"for {key} mentioned", question)
            turn = facts["question"]["before"] + text + facts["question"]["after"]
            reply = server.ask([*facts["placeholders"], spaced_turn(turn)])
            ids = context.question_ids(text)[0].tolist()
            told = server.ask([*facts["placeholders"], *ids])
            assert reply["tokens"] == told["tokens"]
            assert truth in reply["content"].replace(" ", "")
            wanted = context.ask(text, max_new_tokens=16)
            assert wanted.split() == reply["content"].split()


def spaced_turn(text: str) -> str:
    """As `spaced`, but special tokens stay as they are."""
    return "".join(part if part.startswith("<") else spaced(part) for part in re.split(r"(<\w+>)", text))


@needs_server
def test_a_slot_that_lost_its_units_says_so_by_what_was_cached(gguf_file: Path, books: list[Book], shelf: Path) -> None:
    one, other = books
    with served(Path(PROGRAM), gguf_file, shelf, "-c", "1024", "-np", "1", "--cache-ram", "0") as server:
        assert asked(server, one) == 0  # never restored: the placeholders are read as text
        server.restore("0.bin")
        assert asked(server, one) == 8
        server.ask([*one.prefix.placeholders, *one.questions[0][0]], cache_prompt=False)
        assert asked(server, one) == 0
        server.restore("0.bin")
        server.ask(other.text[:300])
        assert asked(server, one) == 0
        server.restore("1.bin")
        assert asked(server, other) == 8


@needs_server
def test_a_layout_that_the_server_has_not_is_refused_by_it(gguf_file: Path, books: list[Book], shelf: Path) -> None:
    for number, layout in enumerate(
        (Layout(cache_type="f32"), Layout(flash_attention=False), Layout(streams=2), Layout(state_version=2))
    ):
        export(books[0].prefix, shelf / f"wrong{number}.bin", layout)
    with served(Path(PROGRAM), gguf_file, shelf, "-c", "1024", "-np", "1") as server:
        for number in range(4):
            assert server.restore(f"wrong{number}.bin")["http"] == 400
        server.restore("0.bin")
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


@needs_source
@pytest.mark.parametrize(("model_type", "dim"), [("llama", 64), ("qwen3", 128)])
def test_quantised_heads_are_turned(model_type: str, dim: int, tmp_path: Path) -> None:
    model, path = random_model(model_type, {"head_dim": dim}, tmp_path)
    prefix, question, wanted = read(model, tmp_path)
    loaded = Model(path)

    def wrong(rotation: bool | None, keys: str, values: str) -> float:
        flash = values != "f16"
        engine = Engine(loaded, keys, values, flash=flash)
        layout = Layout(cache_type=keys, cache_type_v=values, flash_attention=flash, attention_rotation=rotation)
        engine.set(sequence_state(prefix, layout))
        moved = float(np.abs(engine.feed(question, prefix.units) - wanted.numpy()).max())
        engine.close()
        return moved

    for values in ("q8_0", "f16"):
        assert wrong(None, "q8_0", values) < 0.5
        assert wrong(False, "q8_0", values) > 2


@needs_source
def test_without_the_turn_where_it_is_switched_off(tmp_path: Path) -> None:
    """LLAMA_ATTN_ROT_DISABLE is read when a context is made, by a process of its own."""
    model, path = random_model("qwen3", {"head_dim": 64}, tmp_path)
    prefix, question, wanted = read(model, tmp_path)
    blob = sequence_state(prefix, Layout(cache_type="q8_0", attention_rotation=False))
    (tmp_path / "blob").write_bytes(blob)
    code = (
        "import sys, json; from pathlib import Path; from llamacpp_runs import Engine, Model; "
        f"engine = Engine(Model(Path({str(path)!r})), 'q8_0', flash=True); "
        f"assert engine.set(Path({str(tmp_path / 'blob')!r}).read_bytes()); "
        f"print(json.dumps(engine.feed({question}, {prefix.units}).tolist()))"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "LLAMA_ATTN_ROT_DISABLE": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert np.abs(np.array(json.loads(done.stdout)) - wanted.numpy()).max() < 0.5
