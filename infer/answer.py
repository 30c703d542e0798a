"""Answers a question about what has been read, and says what that took."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from locret.backbone.adapters import input_device
from locret.conversation.chat import AnswerStreamer, Chat
from locret.conversation.model import LongContextModel
from locret.conversation.text import decode
from locret.infer.infer_options import GenerationOptions


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer, and what it took: units per KV head, bytes of the whole cache, seconds."""

    answer: str
    prompt_tokens: int
    new_tokens: int
    kept_units: int
    """Units per KV head when the prompt had been read."""
    final_units: int
    """Units per KV head when the answer had been written (of one beam, in a beam search)."""
    planned_cache_bytes: int
    peak_cache_bytes: int
    """Counted from the cache's tensors; in a beam search with the beams' copy."""
    planned_host_bytes: int
    """Of the second tier in host memory, without indexes; 0 without one."""
    host_bytes: int
    planned_disk_bytes: int
    """Of the second tier in a file."""
    disk_bytes: int
    moved_bytes: int
    """Fetched from the second tier, for the prompt's last tokens and the answer."""
    peak_device_bytes: int | None
    """Weights and all else that was on the CUDA device; None elsewhere."""
    prefill_seconds: float
    """Of the text, where it was read for this answer, and of the question; tokenising included."""
    decode_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    finished: bool
    """Whether the answer ended by itself, rather than at max_new_tokens."""


def answer(
    chat: Chat,
    question: str | None,
    options: GenerationOptions,
    *,
    stream: bool = False,
    read_tokens: int = 0,
    read_seconds: float = 0.0,
) -> Answer:
    """Answer a question from a chat of its own.

    Args:
        chat: A conversation about what has been read.
        question: The user's turn, unless it has been read already; None: the text is all of it.
        options: How the answer is written.
        stream: Print the answer on standard output as it is written (a beam search prints nothing).
        read_tokens: Tokens of the text that were read for this answer alone.
        read_seconds: How long that took.

    Returns:
        The answer and its measurements.
    """
    lm, cache = chat.lm, chat.cache
    device, tokenizer = input_device(lm.model), lm.tokenizer
    torch.manual_seed(options.seed)
    streamer = AnswerStreamer(tokenizer, _print) if stream and options.num_beams == 1 else None
    start, before = now(device), cache.seen
    if chat.asked is None:
        chat.read_turn(question, options.max_new_tokens)
    middle, prompt_tokens, kept_units = now(device), cache.seen, cache.memory().units
    new = chat.write_answer(generation_settings(options, lm), streamer)
    end = now(device)
    if streamer is not None:
        _print("\n")
    own, copies = cache.memory(), cache.copies_memory
    every = [own] if copies is None else [own, copies]
    return Answer(
        answer=decode(tokenizer, new),
        prompt_tokens=prompt_tokens,
        new_tokens=len(new),
        kept_units=kept_units,
        final_units=every[-1].units,
        planned_cache_bytes=sum(one.planned for one in every),
        peak_cache_bytes=own.peak if copies is None else max(own.peak, own.actual + copies.actual),
        planned_host_bytes=sum(one.host_planned for one in every),
        host_bytes=sum(one.host for one in every),
        planned_disk_bytes=sum(one.disk_planned for one in every),
        disk_bytes=sum(one.disk for one in every),
        moved_bytes=every[-1].moved,  # a copy goes on counting
        peak_device_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        prefill_seconds=read_seconds + middle - start,
        decode_seconds=end - middle,
        prefill_tokens_per_second=(read_tokens + prompt_tokens - before) / (read_seconds + middle - start),
        decode_tokens_per_second=len(new) / (end - middle),
        finished=len(new) < options.max_new_tokens or new[-1] in lm.end_ids,
    )


def _print(part: str) -> None:
    sys.stdout.write(part)
    sys.stdout.flush()


def generation_settings(options: GenerationOptions, lm: LongContextModel) -> dict[str, Any]:
    """Return the arguments of `locret.generate`."""
    # Every setting is given, neutral ones too: what is missing would be filled from the backbone's generation_config.
    pad = lm.tokenizer.pad_token_id
    return {
        "max_new_tokens": options.max_new_tokens,
        "do_sample": options.temperature > 0,
        "temperature": options.temperature or 1.0,
        "top_p": options.top_p,
        "top_k": options.top_k if options.temperature else 50,
        "num_beams": options.num_beams,
        "repetition_penalty": options.repetition_penalty,
        "stop_strings": options.stop or None,
        "pad_token_id": pad if pad is not None else next(iter(lm.end_ids), None),
    }


@contextmanager
def kernels(attn: str) -> Iterator[None]:
    """Use PyTorch's plain attention kernel meanwhile, if `attn` says so."""
    if attn != "math":
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


def now(device: torch.device) -> float:
    """Return the time in seconds once a device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
