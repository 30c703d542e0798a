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
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from locret.backbone.adapters import compute_dtype
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
_OPTIONS = ("max_new_tokens", "do_sample", "temperature", "top_k", "stop_strings")
_NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "top_p": 1.0}
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


def writer_of(source: BackboneSource, options: Mapping[str, Any]) -> Path:
    """Return the GGUF file with which llama.cpp writes what a backbone from it has read.

    Raises:
        ValueError: If there is none, or llama.cpp does not write by these options of `Context.ask`.
    """
    if source.gguf_path is None:
        rule = "writes with a GGUF file on this machine; name it with --model, or leave --engine out"
        raise Refusal("engine", "llamacpp", rule)
    if source.adapter is not None:
        raise Refusal("engine", "llamacpp", f"knows nothing of --adapter {source.adapter}; leave one of them out")
    check_options(options)
    return source.gguf_path


def check_policy(policy: RetentionPolicy) -> None:
    """Refuse what llama.cpp could not hold, before a text is read."""
    if policy.has_host or policy.head_budgets != "uniform" or policy.layer_budgets != "uniform":
        rule = "holds as many units in each KV head and no second tier; read with --head-budgets uniform"
        raise Refusal("engine", "llamacpp", rule)
    if policy.decode_budget is not None:
        rule = f"evicts nothing while it answers; leave out --decode-budget {policy.decode_budget}"
        raise Refusal("engine", "llamacpp", rule)
    if policy.positions != "compact":
        raise Refusal("engine", "llamacpp", "holds no gaps between positions; read with --positions compact")


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of an answer that llama.cpp has not, or does in another way (top_p before the temperature)."""
    if find_spec("llama_cpp") is None:
        raise Refusal("engine", "llamacpp", f"needs the package llama-cpp-python; {install('llamacpp')}")
    for name, value in options.items():
        if name not in _OPTIONS and value != _NEUTRAL.get(name):
            raise Refusal(name, shown(value), "is not for llama.cpp; leave it out")


def ask(
    context: Context,
    question: str,
    file: str | Path,
    *,
    max_new_tokens: int = LONGEST_ANSWER,
    seed: int = 0,
    write: Callable[[str], object] | None = None,
    **options: Any,
) -> Measured:
    """Ask a context, and let llama.cpp write the answer in this process; the context stays as it is.

    The question is read as `Context.ask` reads it. Then llama.cpp holds all units once more, in float16 where they fit,
    with room for the longest answer, and writes with weights that stay packed.

    Args:
        context: With as many units in each KV head, at compact positions.
        question: What to ask.
        file: GGUF file of the backbone that has read the context; of another of its shape nothing is noticed.
        max_new_tokens: Longest answer in tokens.
        seed: Of sampling.
        write: Takes the answer as it is written.
        **options: As for `Context.ask`: temperature, top_k and stop_strings.

    Raises:
        ValueError: If llama.cpp could not hold these units, does not take the file, or has no such option.
    """
    from llama_cpp import Llama, llama_state_seq_get_size, llama_state_seq_load_file  # an extra

    check_options(options)
    check_policy(context.cache.policy)
    settings, start, chat = context.lm.settings(max_new_tokens, options), now(CPU), context.chat()
    chat.read_turn(question, 1)
    memory, tokens, read = chat.cache.memory(), chat.cache.seen, chat.cache.seen - context.cache.seen
    (last,) = cast(Tensor, chat.cache.last_tokens)[0].tolist()
    prefix = Prefix.of(chat.cache)
    units, room = prefix.units, _room(prefix, max_new_tokens)
    if room >= 1 << 31:
        raise Refusal("max_new_tokens", f"{max_new_tokens:,}", "is more than llama.cpp can hold; lower it")
    small = all(bool((one.abs() <= torch.finfo(torch.float16).max).all()) for one in (*prefix.keys, *prefix.values))
    cache_type, threads = "f16" if small else "f32", torch.get_num_threads()
    same = {"n_threads": threads, "n_threads_batch": threads, "flash_attn": True, "verbose": False}
    same |= dict.fromkeys(("type_k", "type_v"), CACHE_TYPES[cache_type])
    with TemporaryDirectory() as folder:
        slot, _ = export(prefix, Path(folder, "context.bin"), cache_type)
        del prefix, chat
        with redirect_stderr(StringIO()):  # what it says of positions, the model has said
            try:
                llama = Llama(str(file), n_ctx=room, **same)
            except ValueError as error:
                why = f"{error}; give the GGUF file that has read the text, or lower max_new_tokens ({room:,} tokens)"
                raise ValueError(why) from error
        ids, count = (ctypes.c_int32 * units)(), ctypes.c_size_t()
        taken = llama_state_seq_load_file(llama.ctx, bytes(slot), 0, ids, units, ctypes.byref(count))
    decoder, new, text = Decoder(context.lm.tokenizer), list[int](), ""
    with closing(llama):
        if not taken:
            raise ValueError(f"{file} is of another shape than the context, or llama.cpp of another version")
        held = room * llama_state_seq_get_size(llama.ctx, 0) // units
        llama.set_seed(seed % 0xFFFFFFFF)  # the largest stands for a random one, as 0 does where a model is made
        llama.n_tokens = units - 1  # the last token is fed once more, for its logits
        drawn = {"temp": settings["temperature"] if settings["do_sample"] else 0.0, "top_k": settings.get("top_k") or 0}
        began, ends, stops = now(CPU), {*context.lm.end_ids}, settings.get("stop_strings") or ()
        for token in llama.generate([last], reset=False, top_p=1.0, min_p=0.0, **drawn):
            new.append(token)
            over = token in ends or len(new) == max_new_tokens
            text += (part := decoder.add([token], last=over))
            if write is not None and part:
                write(part)
            if over or any(stop in text for stop in ([stops] if isinstance(stops, str) else stops)):
                break
        ended = now(CPU)
    return Measured(
        answer=text,
        prompt_tokens=tokens,
        new_tokens=len(new),
        kept_units=units,
        planned_cache_bytes=memory.planned + held,
        peak_cache_bytes=max(memory.peak, memory.actual + held),
        full_cache_bytes=full_bytes(context.cache.backbone, tokens, compute_dtype(context.lm.model).itemsize),
        host_bytes=0,
        moved_bytes=0,
        prefill_seconds=began - start,
        decode_seconds=ended - began,
        prefill_tokens_per_second=read / (began - start),
        decode_tokens_per_second=len(new) / (ended - began),
        finished=len(new) < max_new_tokens or new[-1] in ends,
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
