"""Reads a prompt of any length into a bounded cache, answers, and measures both."""

# K KV heads, C kept units

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from locret import RetentionCache, generate, prefill
from locret.backbone.adapters import input_device, unwrap
from locret.conversation.chat import AnswerStreamer, Chat
from locret.conversation.document import PositionWarning, ReadingBar, as_prompt
from locret.conversation.rules import DOCUMENT, SYSTEM, USER, check_named
from locret.conversation.templates import decode, leading_special_ids
from locret.conversation.text_stream import TokenStream, trimmed
from locret.conversation.transcript import PromptFrame, Transcript, render_prompt
from locret.conversation.turns import Layout
from locret.infer.infer_options import GenerationOptions, PromptOptions
from locret.infer.kept_text import share_of_heads


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
    """Tokenising included, which happens block by block in between, unless the prompt had to be counted first."""
    decode_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    finished: bool
    """Whether the answer ended by itself, rather than at max_new_tokens."""


class MeasuredCache(RetentionCache):
    """A cache that remembers the copy a beam search works on, so that its bytes are counted too."""

    beams: MeasuredCache | None = None

    @classmethod
    def of(cls, cache: RetentionCache) -> MeasuredCache:
        """Return a copy of a cache that is measured."""
        if isinstance(cache, cls) and cache.policy.recalls_blocks:  # which the state of a cache has no place for
            return RetentionCache.copy(cache)
        measured = cls(cache.model, cache.scorer, cache.policy, store=cache.store, disk=cache.disk)
        tensors, numbers = cache.copy().state()
        measured.load(tensors, numbers)
        return measured

    def copy(self) -> MeasuredCache:
        """Return an independent copy."""
        twin: MeasuredCache = super().copy()  # type: ignore[assignment]
        self.beams = twin
        return twin


def prompt_ids(
    tokenizer: Any,
    pieces: Iterable[str],
    options: PromptOptions,
    question: str | None = None,
    layout: Layout | None = None,
) -> Iterator[list[int]]:
    """Tokenise a document with its question and chat template, in bounded memory.

    White space around the document is dropped, as chat templates do; without a template it stays.

    Args:
        tokenizer: The backbone's.
        pieces: The document, cut anywhere; the first piece is read at once.
        options: System message and template.
        question: What is asked about the document; None if the document is the whole turn.
        layout: Learns where the turns are, by a stream that nothing has been given to.

    Yields:
        Lists of token ids.

    Raises:
        ValueError: If the document is empty, the template is missing or refuses it, or a rule of the layout names
            nothing that there is.
    """
    frame = render_prompt(tokenizer, question=question, system=options.system, template=options.template)
    dropped = list[int]()
    pieces = (piece for piece in pieces if piece) if options.template == "none" else trimmed(pieces, dropped.append)
    first = next(pieces, None)
    if first is None:
        name = "standard input" if options.prompt_file in (None, "-") else options.prompt_file
        raise ValueError(f"--prompt-file: {name} is empty; give a text to read")
    layout = layout or Layout((), TokenStream(tokenizer))
    system_end = Transcript(tokenizer, options.template, options.system).system_end()
    roles = [*([SYSTEM] if system_end else []), DOCUMENT, *([] if question is None else [USER])]
    try:
        check_named(layout.rules, roles)
    except ValueError as error:
        raise ValueError(str(error).replace("protect=", "--protect ")) from None
    if system_end:
        layout.turn(SYSTEM)
    layout.turn(DOCUMENT, system_end or None)
    layout.document(len(frame.prefix) - sum(dropped))
    special = leading_special_ids(tokenizer) if frame.add_special_tokens else []
    return _tokenised(layout, special, frame, chain([first], pieces), asked=question is not None)


def _tokenised(
    layout: Layout, special: list[int], frame: PromptFrame, pieces: Iterable[str], *, asked: bool
) -> Iterator[list[int]]:
    """Yield the tokens of a prompt, and tell the layout where the question begins once that is known."""

    def text() -> Iterator[str]:
        count = len(frame.prefix)
        yield frame.prefix
        for piece in pieces:
            count += len(piece)
            yield piece
        layout.document_ends(count)
        if asked:
            layout.turn(USER, count)
        yield frame.suffix

    if special:
        yield special
    stream = layout.stream
    yield from stream.add(text())
    if ids := stream.finish():
        yield ids


def answer(
    model: nn.Module,
    tokenizer: Any,
    ids: Tensor | Iterable[list[int]],
    cache: MeasuredCache,
    options: GenerationOptions,
    *,
    attn: str = "auto",
    stream: bool = False,
    bar: ReadingBar | None = None,
    on_read: Callable[[RetentionCache], None] | None = None,
    layout: Layout | None = None,
) -> Answer:
    """Read a prompt and answer it.

    Args:
        model: The backbone of the cache.
        tokenizer: The backbone's.
        ids: Lists of token ids, never held as a whole if they are more than the cache can hold; or (1, N) ids.
        cache: An empty cache; holds prompt and answer afterwards.
        options: How the answer is written.
        attn: One of `locret.infer.infer_options.ATTENTION`.
        stream: Print the answer on standard output as it is written (a beam search prints nothing).
        bar: Shows how far reading has got.
        on_read: Called with the cache when the prompt has been read, before the answer.
        layout: Where the turns of the ids are, and what of them is protected.

    Returns:
        The answer and its measurements.

    Raises:
        ValueError: For an empty prompt.
    """

    def read() -> int:
        warn = PositionWarning(cache.backbone, cache.policy)

        def on_chunk(cache: RetentionCache) -> None:
            warn(cache)
            if bar is not None:
                bar(cache)

        if isinstance(ids, Tensor):
            prompt: Tensor | Iterable[list[int]] = ids
            if layout is not None:
                cache.protect(layout.spans(ids.shape[1]))
        else:
            watched = ids if layout is None else layout.watched(ids, cache)
            prompt = as_prompt(watched, cache.policy, cache.policy.prefill_units)
        if bar is not None:
            bar.start()
        prefill(model, prompt, cache, new_tokens=options.max_new_tokens, on_chunk=on_chunk)
        warn(cache)
        if layout is not None:
            layout.fixed(cache.seen)  # refuses what was not there
            cache.protect(layout.spans(cache.seen))  # what went on ends here: the answer is no part of it
        if bar is not None:
            bar.end()
            bar.close()
        if on_read is not None:
            on_read(cache)
        return cache.seen

    def write(streamer: AnswerStreamer | None) -> list[int]:
        settings = generation_settings(options, model, tokenizer)
        ids = generate(model, cache=cache, tokenizer=tokenizer, streamer=streamer, **settings)
        return ids[0].tolist()  # type: ignore[no-any-return]

    return _measured(model, tokenizer, cache, options, read, write, attn=attn, stream=stream)


def answer_turn(
    chat: Chat, cache: MeasuredCache, question: str, options: GenerationOptions, *, attn: str, stream: bool
) -> Answer:
    """Answer a question about what has been read; see `answer`. Of the prompt only the question is read, and timed.

    Args:
        chat: A conversation in that cache.
        cache: The cache of the conversation.
        question: The user's turn.
        options: How the answer is written.
        attn: One of `locret.infer.infer_options.ATTENTION`.
        stream: Print the answer as it is written.
    """
    model, tokenizer = chat.lm.model, chat.lm.tokenizer

    def read() -> int:
        before = cache.seen
        chat.read_turn(question, options.max_new_tokens)
        return cache.seen - before

    def write(streamer: AnswerStreamer | None) -> list[int]:
        return chat.write_answer(generation_settings(options, model, tokenizer), streamer)

    return _measured(model, tokenizer, cache, options, read, write, attn=attn, stream=stream)


def _measured(
    model: nn.Module,
    tokenizer: Any,
    cache: MeasuredCache,
    options: GenerationOptions,
    read: Callable[[], int],
    write: Callable[[AnswerStreamer | None], list[int]],
    *,
    attn: str,
    stream: bool,
) -> Answer:
    """Read so many tokens, write an answer, and say what both took."""
    device = input_device(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(options.seed)
    streamer = AnswerStreamer(tokenizer, _print) if stream and options.num_beams == 1 else None
    with _kernels(attn):
        start = _now(device)
        tokens = read()
        middle = _now(device)
        prompt_tokens, kept_units = cache.seen, cache.memory().units
        if cache.policy.head_budgets == "shares" and len(cache.kept_positions(cache.backbone.layers[0])) == 1:
            kept_units = round(float(share_of_heads(cache).sum()))  # a mean: some heads may hold the whole text
        new = write(streamer)
        end = _now(device)
    if streamer is not None:
        _print("\n")
    return Answer(
        answer=decode(tokenizer, new),
        prompt_tokens=prompt_tokens,
        new_tokens=len(new),
        kept_units=kept_units,
        final_units=(cache.beams or cache).memory().units,
        **_memory(cache),
        peak_device_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        prefill_seconds=middle - start,
        decode_seconds=end - middle,
        prefill_tokens_per_second=tokens / (middle - start),
        decode_tokens_per_second=len(new) / (end - middle),
        finished=len(new) < options.max_new_tokens or new[-1] in _end_ids(model),
    )


def _print(part: str) -> None:
    sys.stdout.write(part)
    sys.stdout.flush()


def generation_settings(options: GenerationOptions, model: nn.Module, tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of `locret.generate`."""
    # Every setting is given, neutral ones too: what is missing would be filled from the backbone's generation_config.
    ends = _end_ids(model)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ends), None)
    return {
        "max_new_tokens": options.max_new_tokens,
        "do_sample": options.temperature > 0,
        "temperature": options.temperature or 1.0,
        "top_p": options.top_p,
        "top_k": options.top_k if options.temperature else 50,
        "num_beams": options.num_beams,
        "repetition_penalty": options.repetition_penalty,
        "stop_strings": options.stop or None,
        "pad_token_id": pad,
    }


def _end_ids(model: nn.Module) -> list[int]:
    ends: Any = unwrap(model).generation_config.eos_token_id  # type: ignore[union-attr]
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _memory(cache: MeasuredCache) -> dict[str, int]:
    own, copy = cache.memory(), None if cache.beams is None else cache.beams.memory()
    if copy is None:
        found = {"planned_cache_bytes": own.planned, "peak_cache_bytes": own.peak}
    else:
        peak = max(own.peak, own.actual + copy.actual)
        found = {"planned_cache_bytes": own.planned + copy.planned, "peak_cache_bytes": peak}
    return {
        **found,
        "planned_host_bytes": own.host_planned + (copy.host_planned if copy else 0),
        "host_bytes": own.host + (copy.host if copy else 0),
        "planned_disk_bytes": own.disk_planned + (copy.disk_planned if copy else 0),
        "disk_bytes": own.disk + (copy.disk if copy else 0),
        "moved_bytes": (copy or own).moved,  # a copy goes on counting
    }


def _kernels(attn: str) -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH) if attn == "math" else nullcontext()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
