"""A context in llama.cpp: the state of a sequence, for an answer in this process or as a slot file of llama-server.

The state, little endian and without padding (llama.cpp's src/llama-context.cpp and src/llama-kv-cache.cpp):

    a file begins with               u32 "ggsq", u32 version, u32 count, i32 token ids
    u32 1 stream (--kv-unified)      u32 cells
      each cell                      i32 position, u32 1, i32 sequence (not looked at)
                                     u32 0: values are not transposed (--flash-attn on), u32 layers
      keys, then values of a layer   i32 type, u64 bytes of a row, rows of KV heads x head dim

llama.cpp checks types, numbers and the version. It cannot know the order of a head or another model of the same shape:
those are checked here, or nowhere.
"""

# U units, K KV heads, D head dim, W width of a row: K x D

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from locret.base.fields import Refusal, shown
from locret.base.files import written_whole
from locret.base.plugins import install
from locret.cache.cache import RetentionCache
from locret.conversation.chat import LONGEST_ANSWER, Measured, now
from locret.conversation.context import Context
from locret.conversation.document import Decoder
from locret.engines.prefix import Prefix
from locret.loading.options import BackboneSource
from locret.policy.planned_bytes import full_bytes
from locret.policy.policy import RetentionPolicy

FORMAT = "locret-llamacpp-1"
STATE_VERSION = 3
"""LLAMA_STATE_SEQ_VERSION of builds since 2026."""
CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30}
"""Numbers of ggml's types (ggml/include/ggml.h)."""
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
INTERLEAVED = {
    **dict.fromkeys(
        ("arcee", "granite", "granitemoe", "llama", "ministral3", "mistral", "mixtral", "olmo", "smollm3"), True
    ),
    **dict.fromkeys(("apertus", "exaone4", "gemma", "nemotron", "olmo2", "phi3", "qwen2", "qwen2_moe"), False),
    **dict.fromkeys(("qwen3", "qwen3_moe", "seed_oss", "stablelm", "starcoder2"), False),
}
"""Whether llama.cpp rotates neighbours (NORM) instead of halves (NEOX), by transformers' model_type.

From `llama_model_rope_type` (src/llama-model.cpp) for the architecture that llama.cpp's conversion makes of a model; it
re-orders the rows of q and k of those that it rotates as neighbours. All of them were run once with random weights that
llama.cpp's own script had converted.
"""
CPU = torch.device("cpu")
_FILE_MAGIC = 0x67677371
_ANY_QUESTION = "LocretQuestion7f3a9c"
_ROOM = 4096
"""Tokens of question and answer that the suggested context size leaves room for."""


def export(
    source: Prefix | Context | RetentionCache | str | Path, out: str | Path, cache_type: str = "f16"
) -> tuple[Path, Path]:
    """Write a slot file for llama-server, and beside it a record with what a client has to know.

    The record, `book.json` of `book.bin`, holds the placeholder ids that stand for the units in a prompt, the text
    around a question (of a context; a file does not know the chat template) and the options that the server needs.

    Args:
        source: A context, a cache, a prefix, or the file of a saved context.
        out: The slot file, in the folder that the server is given as --slot-save-path.
        cache_type: Form of keys and values: f32, f16 or bf16 (llama-server: --cache-type-k, --cache-type-v).

    Returns:
        The slot file and its record.

    Raises:
        ValueError: If llama.cpp could not hold these units, or a file of another kind is there.
        OSError: If it cannot be written.
    """
    slot = Path(out)
    record = slot.with_suffix(".json")
    if record == slot or not slot.name:
        raise ValueError(f"{slot} is to be the slot file, and the record beside it ends in .json; choose book.bin")
    _check_replaceable(slot, record)
    if isinstance(source, str | Path):
        source = Prefix.from_file(source)
    prefix, question = source if isinstance(source, Prefix) else Prefix.of(source), _question(source)
    _check(prefix, cache_type)
    with written_whole(slot.parent, last=record.name) as fresh:
        fresh.mkdir(exist_ok=True)
        with (fresh / slot.name).open("wb") as file:
            file.write(struct.pack("<III", _FILE_MAGIC, STATE_VERSION, prefix.units))
            file.write(np.asarray(prefix.placeholders, "<i4").tobytes())
            file.writelines(_parts(prefix, cache_type))
            size = file.tell()
        text = json.dumps(_record(prefix, cache_type, slot.name, size, question), indent=1)
        (fresh / record.name).write_text(text + "\n", encoding="utf-8")
    return slot, record


def _question(source: Any) -> dict[str, str] | None:
    """Return the text before and after a question, as far as the source can tell: a context knows its chat template."""
    if not hasattr(source, "question_text"):
        return None
    before, _, after = source.question_text(_ANY_QUESTION).partition(_ANY_QUESTION)
    return {"before": before, "after": after}


def _check_replaceable(slot: Path, record: Path) -> None:
    """Refuse to write over what is not ours, such as the context itself."""
    for path, begins, what in ((slot, struct.pack("<I", _FILE_MAGIC), "slot file"), (record, b"{", "record")):
        if path.is_dir():
            raise ValueError(f"{path} is a folder; choose the name of a file, such as {path.name}.bin")
        if not path.is_file():
            continue
        with path.open("rb") as file:
            head = file.read(200)
        ours = head.startswith(begins) and (path == slot or FORMAT.encode() in head)
        if head and not ours:
            raise ValueError(f"{path} is there already and is no {what}; choose another file, or remove it first")


def writer_of(source: BackboneSource, policy: RetentionPolicy) -> Path:
    """Return the GGUF file with which llama.cpp writes what a backbone from it has read.

    Raises:
        ValueError: If there is none, or llama.cpp could not hold what the policy leaves.
    """

    def refused(rule: str) -> Refusal:
        return Refusal("engine", "llamacpp", rule)

    file = source.gguf_path
    if file is None:
        raise refused("writes with a GGUF file on this machine; name it with --model, or leave --engine out")
    if source.adapter is not None:
        raise refused(f"knows nothing of --adapter {source.adapter}; leave one of them out")
    if find_spec("llama_cpp") is None:
        raise refused(f"needs the package llama-cpp-python; {install('llamacpp')}")
    if policy.has_host or policy.head_budgets != "uniform" or policy.layer_budgets != "uniform":
        raise refused("holds as many units in each KV head and no second tier; read with --head-budgets uniform")
    if policy.positions != "compact":
        raise refused("holds no gaps between positions; read with --positions compact")
    return file


def ask(
    context: Context,
    question: str,
    file: str | Path,
    *,
    max_new_tokens: int = LONGEST_ANSWER,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_strings: list[str] | None = None,
    write: Callable[[str], object] | None = None,
) -> Measured:
    """Ask a context, and let llama.cpp read the question and write the answer in this process; the context stays.

    Its weights stay packed while it writes, and the context's units are held once more, in float16 where they fit.

    Args:
        context: With as many units in each KV head, at compact positions.
        question: What to ask.
        file: GGUF file of the backbone that has read the context; of another of its shape nothing is noticed.
        max_new_tokens: Longest answer in tokens.
        temperature: Of sampling, with `top_p`, `top_k` and `seed`; 0 always takes the likeliest token.
        top_p: Draw from the likeliest tokens that have this probability together; 1 is all.
        top_k: Draw from this many likeliest tokens; 0 is all.
        seed: Of sampling.
        stop_strings: Texts that end the answer, which includes them.
        write: Takes the answer as it is written.

    Raises:
        ValueError: If llama.cpp could not hold these units, or does not take the file.
    """
    from llama_cpp import Llama, llama_state_seq_get_size, llama_state_seq_load_file  # an extra

    start, prefix, end_ids = now(CPU), Prefix.of(context), {*context.lm.end_ids}
    asked, threads = context.question_ids(question)[0].tolist(), torch.get_num_threads()
    small = all(bool((one.abs() <= torch.finfo(torch.float16).max).all()) for one in (*prefix.keys, *prefix.values))
    cache_type = "f16" if small else "f32"
    room, kind = _room(prefix, len(asked) + max_new_tokens), CACHE_TYPES[cache_type]
    same = {"n_threads": threads, "n_threads_batch": threads, "type_k": kind, "type_v": kind, "seed": seed}
    decoder, new, text, began = Decoder(context.lm.tokenizer), list[int](), "", 0.0
    with closing(Llama(str(file), n_ctx=room, flash_attn=True, verbose=False, **same)) as llama:
        with TemporaryDirectory() as folder:
            slot, _ = export(prefix, Path(folder, "context.bin"), cache_type)
            ids, count = (ctypes.c_int32 * prefix.units)(), ctypes.c_size_t()
            if not llama_state_seq_load_file(llama.ctx, bytes(slot), 0, ids, prefix.units, ctypes.byref(count)):
                raise ValueError(f"{file} is of another shape than the context, or llama.cpp of another version")
        llama.n_tokens = prefix.units
        for token in llama.generate(asked, reset=False, temp=temperature, top_p=top_p, top_k=top_k, min_p=0.0):
            began = began or now(CPU)
            new.append(token)
            ends = token in end_ids or len(new) == max_new_tokens
            text += (part := decoder.add([token], last=ends))
            if write is not None and part:
                write(part)
            if ends or any(stop in text for stop in stop_strings or ()):
                break
        ended, held = now(CPU), room * llama_state_seq_get_size(llama.ctx, 0) // llama.n_tokens
    memory, tokens = context.memory(), context.cache.seen + len(asked)
    return Measured(
        answer=text,
        prompt_tokens=tokens,
        new_tokens=len(new),
        kept_units=prefix.units + len(asked),
        planned_cache_bytes=memory.planned + held,
        peak_cache_bytes=max(memory.peak, memory.actual + held),
        full_cache_bytes=full_bytes(context.cache.backbone, tokens, context.lm.model.dtype.itemsize),
        host_bytes=0,
        moved_bytes=0,
        prefill_seconds=began - start,
        decode_seconds=ended - began,
        prefill_tokens_per_second=len(asked) / (began - start),
        decode_tokens_per_second=len(new) / (ended - began),
        finished=len(new) < max_new_tokens or new[-1] in end_ids,
    )


def _room(prefix: Prefix, more: int) -> int:
    """Return the size of a context in llama.cpp that holds a prefix and `more` tokens."""
    context = prefix.units + more
    if prefix.rotary.get("rope_type") == "longrope":
        # llama.cpp takes the long factors, as we do, if a sequence may be longer than the original context.
        original = prefix.rotary.get("original_max_position_embeddings")
        if not isinstance(original, int):
            raise ValueError(f"the original context length of {prefix.model_type} is {shown(original)}; save it again")
        context = max(context, original + 1)
    return context


def _record(prefix: Prefix, cache_type: str, name: str, size: int, question: dict[str, str] | None) -> dict[str, Any]:
    """Return what a client and whoever starts the server have to know, as plain data."""
    return {
        "format": FORMAT,
        "file": name,
        "bytes": size,
        "model_type": prefix.model_type,
        "units": prefix.units,
        "tokens": prefix.tokens,
        "digest": prefix.digest.hex(),
        "server": [
            *("--ctx-size", str(_room(prefix, _ROOM)), "--kv-unified", "--flash-attn", "on"),
            *("--cache-type-k", cache_type, "--cache-type-v", cache_type),
        ],
        "use": (
            "Start llama-server with the options under server and --slot-save-path on this folder, POST "
            f'{{"filename": "{name}"}} to /slots/0?action=restore, then send the placeholders and the question as the '
            f"prompt of /completion with id_slot 0. Each reply has to have timings.cache_n of {prefix.units} or more; "
            "restore again if it has less."
        ),
        "question": question,
        "placeholders": prefix.placeholders,
    }


def _check(prefix: Prefix, cache_type: str) -> None:
    """Refuse what llama.cpp could not hold, or of which it is not known how it would."""
    rope, kind = prefix.rotary, prefix.model_type
    if cache_type not in CACHE_TYPES:
        raise ValueError(f'cache_type="{cache_type}" is unknown; choose one of {", ".join(CACHE_TYPES)}')
    if kind not in INTERLEAVED:
        known = ", ".join(sorted(INTERLEAVED))
        raise ValueError(f"in which order llama.cpp holds the keys of {shown(kind)} is not known; it is for {known}")
    partial = INTERLEAVED[kind] and rope.get("partial_rotary_factor", 1.0) != 1.0
    if partial or rope.get("rope_type") == "dynamic":
        why = "rotates whole heads and unscaled where this backbone rotates a part, or scales dynamically"
        raise ValueError(f"llama.cpp {why}; answer in another engine")


def _parts(prefix: Prefix, cache_type: str) -> Iterator[bytes]:
    """Yield the bytes of a prefix in llama.cpp's cache, layer by layer."""
    yield struct.pack("<II", 1, prefix.units)
    yield np.array([[place, 1, 0] for place in range(prefix.units)], "<i4").tobytes()
    yield struct.pack("<II", False, len(prefix.keys))
    for keys in prefix.keys:
        if INTERLEAVED[prefix.model_type]:  # element i of a head's first half is to stand beside that of the second
            keys = torch.stack(keys.chunk(2, dim=-1), dim=-1).flatten(-2)
        yield from _rows(keys, cache_type)
    for values in prefix.values:
        yield from _rows(values, cache_type)


def _rows(states: Tensor, kind: str) -> Iterator[bytes]:
    """Yield (U, K, D) as one row for each unit, in a type of ggml."""
    rows = states.detach().flatten(1).to("cpu", torch.float32)
    if not bool(rows.isfinite().all()):
        raise ValueError("some units are no finite numbers, with which nothing can be answered; read the text again")
    rows = rows.to(_DTYPES[kind])
    if not bool(rows.isfinite().all()):
        name, wider = str(rows.dtype).removeprefix("torch."), "bf16 or f32" if kind == "f16" else "f32"
        raise ValueError(f"some units are beyond the range of {name}; give cache_type={wider}")
    yield struct.pack("<iQ", CACHE_TYPES[kind], rows.shape[1] * rows.itemsize)
    yield rows.view(torch.uint8).numpy().tobytes()
