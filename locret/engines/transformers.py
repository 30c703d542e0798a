"""Contexts in transformers' continuous batching: many questions to many contexts at once, each context held once.

The units of a context lie in pages that all its questions share; ordinary prompts are answered beside them. Memory is
allocated at the start and does not grow. Answers are those of `locret.generate`, but for penalties that the backbone's
generation_config recommends, which are not applied here.
"""

# V vocabulary

from __future__ import annotations

import copy
import logging
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from locret.backbone.adapters import Backbone, describe, find_decoder, unwrap
from locret.backbone.instrument import exclusively
from locret.backbone.rotary import fixed_reach, rotary_parameters, uses_long_factors
from locret.base.fields import check_sampling, shown
from locret.engines.continuous_batching import ContinuousBatching, Shared, Sizes, page_bytes, planned_bytes
from locret.engines.prefix import Prefix
from locret.generation import check_finite_logits

Finish = Literal["stop", "length", "error"]
_LOG = logging.getLogger(__name__)


class NoRoom(Exception):
    """Running answers need all the pages there are: what was asked has to wait until one of them ends."""


class NotRunning(ValueError):
    """The engine has not been started, or has ended."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of an answer are chosen."""

    temperature: float = 0.0
    """0 takes the likeliest token, and the next three have no effect."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0 is all."""
    seed: int | None = None
    """Equal seeds give equal answers whatever else is answered meanwhile; None draws another one each time."""
    top_logprobs: int | None = None
    """Likeliest tokens to name at each step with their log-probabilities, which are the backbone's, before temperature,
    top_p and top_k; with 0 only the chosen token's is given, with None none."""

    def __post_init__(self) -> None:
        if self.temperature:
            check_sampling("temperature", self.temperature)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is no share of the probability; give more than 0, up to 1")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} tokens cannot be drawn from; give 0 for all, or more")
        if self.seed is not None and not (isinstance(self.seed, int) and -(2**63) <= self.seed < 2**64):
            raise ValueError(f"seed={shown(self.seed)} is no whole number of 64 bits; give one, or None")
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise ValueError(f"top_logprobs={self.top_logprobs} tokens cannot be named; give 0 or more")


@dataclass(frozen=True)
class Written:
    """One token of an answer, or why there are no more."""

    token: int | None
    """The new token, also where it is one that ends the answer; None with an error."""
    finish: Finish | None = None
    """Set with the last one: an end id was written, as many tokens as were allowed, or something failed."""
    logprob: float | None = None
    """Natural log-probability of the token, if it was asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities, the likeliest one first."""
    message: str = ""
    """What failed, in one sentence."""


@dataclass(eq=False)
class _Held:
    """A context and its pages; `shared` has none before the engine's thread has written them."""

    prefix: Prefix | None
    shared: Shared
    pages: int
    users: int = 0


@dataclass(eq=False)
class _Request:
    name: str
    pages: int
    held: _Held | None
    end_ids: frozenset[int]
    sampling: Sampling
    on_token: Callable[[Written], None]
    processors: LogitsProcessorList
    generator: torch.Generator | None = None
    told: list[tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=list)
    """Log-probabilities of each token, where they were asked for."""
    sent: int = 0


class _Batch:
    """Collects the answers of `generate_batch`."""

    def __init__(self, count: int) -> None:
        self.answers: list[list[int]] = [[] for _ in range(count)]
        self.failed = ""
        self._left, self._ended = count, threading.Condition()

    def write(self, number: int, written: Written) -> None:
        if written.token is not None:
            self.answers[number].append(written.token)
        if written.finish is not None:
            with self._ended:
                self._left -= 1
                self.failed = self.failed or written.message
                self._ended.notify_all()

    def wait(self, left: int, timeout: float | None = None) -> None:
        """Wait until at most so many answers are left, or one has failed."""
        with self._ended:
            self._ended.wait_for(lambda: self._left <= left or self.failed, timeout)

    def submitted(self, submit: Callable[[], Callable[[], None]]) -> Callable[[], None] | None:
        """Return what cancels a question, or None after waiting for room."""
        left = self._left
        try:
            return submit()
        except NoRoom:
            self.wait(left - 1, timeout=1)  # somebody else may have room made too
            return None


class PagedContexts:
    """Answers questions to contexts, and ordinary prompts, many at once on one copy of each context.

    The model is used through a second tree of modules over the same weights, so that `locret.prefill` may read with
    it at the same time. Use it as a context manager, or call `start` and `stop`; all methods may be called from any
    thread.

    Args:
        model: The backbone.
        kv_bytes: Memory for contexts and answers, and for all that is allocated once beside them.
        pages: Instead of it: pages for contexts and answers.
        page_size: Units of one page. Contexts whose units are a multiple of it are shared as a whole; of others each
            answer copies the last, unfinished page.
        max_batch_tokens: Tokens that one forward pass takes; longer prompts take several.
        max_requests: Answers that one forward pass continues.

    Raises:
        ValueError: If a setting is impossible, or the backbone is none whose contexts are ordinary prefixes.

    Examples:
        >>> with PagedContexts(lm.model, kv_bytes=64 << 20) as engine:
        ...     prefix = Prefix.of(context)
        ...     asked = [(prefix, context.question_ids(text)[0].tolist()) for text in questions]
        ...     answers = [lm.tokenizer.decode(ids, skip_special_tokens=True) for ids in engine.generate_batch(asked)]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        kv_bytes: int | None = None,
        pages: int | None = None,
        page_size: int = 32,
        max_batch_tokens: int = 512,
        max_requests: int = 128,
    ) -> None:
        if (kv_bytes is None) == (pages is None):
            raise ValueError("kv_bytes and pages are one setting; give one of them")
        _check_at_least("page_size", page_size, 4)
        _check_at_least("max_requests", max_requests, 1)
        _check_at_least("max_batch_tokens", max_batch_tokens, max_requests)
        base: PreTrainedModel = unwrap(model)
        self.backbone = _ordinary(base)
        sizes = partial(Sizes, page_size=page_size, max_batch_tokens=max_batch_tokens, max_requests=max_requests)
        planned = partial(planned_bytes, self.backbone, base.dtype)
        if pages is None:
            assert kv_bytes is not None
            pages = _most_pages(kv_bytes, lambda count: planned(sizes(pages=count)))
        self._sizes = sizes(pages=pages)
        _check_at_least("pages", pages, 3 + self._sizes.spare)
        self.planned_bytes = planned(self._sizes)
        """Bytes of all that is allocated once: pages, and the indices of a step."""
        self._page_bytes = page_bytes(self.backbone, base.dtype, page_size)
        decoder = find_decoder(base)
        self._rotary = rotary_parameters(decoder)
        room = (pages - 1 - self._sizes.spare) * page_size
        self.longest = min(room, self.backbone.max_positions, fixed_reach(decoder) or room)
        """Most positions that one answer can have: units, question and new tokens."""
        self._vocab_size = int(base.config.get_text_config().vocab_size)
        self._ends = base.generation_config.eos_token_id if base.generation_config is not None else None
        self._model = _second_tree(base)
        self._names = count()
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._batches: int | None = None
        self._reset()

    def _reset(self) -> None:
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._running: dict[str, _Request] = {}
        self._orders: deque[Callable[[ContinuousBatching], None]] = deque()
        self._cancelled: list[_Request] = []
        self._reserved = 0

    # -- the life of the engine --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Allocate the pages and begin to answer.

        Raises:
            ValueError: If it runs already, or there is not as much memory.
            RuntimeError: If this version of transformers has moved what is needed.
        """
        with self._lock:
            if self._lives():
                raise ValueError("the engine runs already; stop it first")
            self._reset()
            self._stopping, self._batches = False, None
            batching = self._allocated()
            self._thread = threading.Thread(target=self._run, args=(batching,), name="locret-answers", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End all answers, each with an error, and give back memory and the thread; does nothing if none runs."""
        with self._lock:
            thread, self._stopping = self._thread, True
            self._lock.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _lives(self) -> bool:
        """Whether there is a thread; those of a process that forked are not in the new one."""
        return self._thread is not None and self._thread.is_alive()

    @contextmanager
    def _running_meanwhile(self) -> Iterator[None]:
        """Let the engine run; whoever is the last to need what was started here stops it."""
        with self._lock:
            self._lock.wait_for(lambda: not (self._stopping and self._lives()))
            if not self._lives():
                self.start()
                self._batches = 0
            counted = self._batches is not None
            if self._batches is not None:
                self._batches += 1
        try:
            yield
        finally:
            with self._lock:
                if counted and self._batches is not None:
                    self._batches -= 1
                    self._stopping = self._stopping or not self._batches
                stops = counted and self._stopping
            if stops:
                self.stop()

    def __enter__(self) -> PagedContexts:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def _allocated(self) -> ContinuousBatching:
        return ContinuousBatching(self._model, self._sizes, self._deliver, self._choose)

    @property
    def running(self) -> bool:
        """Whether it answers: it was started, and has not been stopped or failed since."""
        return not self._stopping and self._lives()

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that contexts and running answers have now, of which answers have all they may need."""
        with self._lock:
            return self._page_bytes * (self._sizes.pages - self._free_pages())

    # -- asking --------------------------------------------------------------------------------------------------------

    def hold(self, prefix: Prefix) -> None:
        """Take in a context, unless it is there; those that were asked least recently make room for it.

        Raises:
            NoRoom: If running answers use all there is.
            NotRunning: If the engine does not run.
            ValueError: If it could never be held, or is of another backbone.
        """
        self._check_runs()  # also before the lock, which nobody may ever give back in a process that was forked
        self._check_prefix(prefix)
        digest = prefix.digest  # takes a while for large units, hence not under the lock
        with self._lock:
            self._check_runs()
            self._hold(prefix, digest, 0)

    def submit(
        self,
        ids: Sequence[int],
        prefix: Prefix | None = None,
        *,
        max_new_tokens: int,
        on_token: Callable[[Written], None],
        end_ids: Iterable[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Callable[[], None]:
        """Begin an answer; returns at once. The context is taken in first, and stays while it is asked.

        Args:
            ids: Token ids of the question, those that follow the context's; without a context the whole prompt.
            prefix: What has been read before.
            max_new_tokens: Longest answer in tokens.
            on_token: Called for each token from the engine's thread; must return quickly. The last call has a `finish`.
                If it raises, the answer ends.
            end_ids: Tokens that end the answer; if None, the backbone's.
            sampling: How tokens are chosen; if None, the likeliest one is taken.

        Returns:
            What cancels the answer: its memory is given back, and `on_token` is not called again, but for a call that
            is under way.

        Raises:
            NoRoom: If running answers use all there is.
            NotRunning: If the engine does not run.
            ValueError: If it could never be answered.
        """
        self._check_runs()
        ids, sampling, ends = [int(one) for one in ids], sampling or Sampling(), self._end_ids(end_ids)
        units = self._check_question(ids, prefix, max_new_tokens, sampling)
        rest = units % self._sizes.page_size
        pages = math.ceil((rest + len(ids) + max_new_tokens) / self._sizes.page_size) + self._sizes.spare
        digest = b"" if prefix is None else prefix.digest
        with self._lock:
            self._check_runs()
            held = None
            if prefix is None:
                self._make_room(pages, None)
            else:
                held = self._hold(prefix, digest, pages)
                held.users += 1
            self._reserved += pages
            name = f"{next(self._names)}"
            request = _Request(name, pages, held, ends, sampling, on_token, _processors(sampling))
            self._running[name] = request
            shared = held.shared if held is not None else None
            self._order(lambda batching: batching.add(name, [0] * units + ids, max_new_tokens, ends, shared))
        return partial(self._cancel, request)

    def generate_batch(
        self,
        asked: Sequence[tuple[Prefix | None, Sequence[int]]],
        *,
        max_new_tokens: int = 256,
        end_ids: Iterable[int] | None = None,
        sampling: Sampling | None = None,
    ) -> list[list[int]]:
        """Answer many questions; starts the engine for as long as it takes, unless it runs.

        Args:
            asked: For each question its context, or None, and the token ids that follow it.
            max_new_tokens: Longest answer in tokens.
            end_ids: As in `submit`.
            sampling: As in `submit`; with a seed, questions draw from equal ones.

        Returns:
            The new token ids of each answer, the one that ended it included.

        Raises:
            ValueError: If one of them could never be answered.
            RuntimeError: If an answer failed.
            ValueError: If the backbone's logits are not finite.
        """
        ends = None if end_ids is None else frozenset(end_ids)
        with self._running_meanwhile():
            return self._generate_batch(asked, max_new_tokens, ends, sampling)

    def _generate_batch(
        self,
        asked: Sequence[tuple[Prefix | None, Sequence[int]]],
        max_new_tokens: int,
        ends: frozenset[int] | None,
        sampling: Sampling | None,
    ) -> list[list[int]]:
        batch, cancels = _Batch(len(asked)), []
        try:
            for number, (prefix, ids) in enumerate(asked):
                submit = partial(
                    self.submit,
                    ids,
                    prefix,
                    max_new_tokens=max_new_tokens,
                    on_token=partial(batch.write, number),
                    end_ids=ends,
                    sampling=sampling,
                )
                while (cancel := batch.submitted(submit)) is None:
                    pass
                cancels.append(cancel)
            batch.wait(0)
        finally:
            for cancel in cancels:
                cancel()
        if batch.failed:
            kind, _, said = batch.failed.partition(": ")
            raise ValueError(said) if kind == "ValueError" else RuntimeError(batch.failed)
        return batch.answers

    # -- what is checked before anything is done -------------------------------------------------------------------

    def _check_runs(self) -> None:
        if not self.running:
            raise NotRunning("the engine does not run; call start, or use it as a context manager")

    def _check_prefix(self, prefix: Prefix) -> None:
        shape = (prefix.units, self.backbone.num_kv_heads, self.backbone.head_dim)
        shapes = {tuple(states.shape) for states in (*prefix.keys, *prefix.values)}
        if len(prefix.keys) != self.backbone.num_layers or shapes != {shape} or prefix.vocab_size != self._vocab_size:
            raise ValueError(
                f"the context has {len(prefix.keys)} layers of units {sorted(shapes)} and {prefix.vocab_size} token "
                f"ids, but the backbone has {self.backbone.num_layers} layers of {shape} and {self._vocab_size}; read "
                "the text with this backbone"
            )
        # Files name the layers that rotate nothing as well, which follow from the backbone's type and shape.
        rotary = {name: value for name, value in prefix.rotary.items() if name != "still"}
        if prefix.model_type and (prefix.model_type, rotary) != (self.backbone.model_type, self._rotary):
            raise ValueError(
                f"the context was rotated as {prefix.model_type} {dict(prefix.rotary)}, but the backbone rotates as "
                f"{self.backbone.model_type} {self._rotary}; read the text with this backbone"
            )

    def _check_question(self, ids: Sequence[int], prefix: Prefix | None, new: int, sampling: Sampling) -> int:
        """Return the units in front of the question."""
        if not ids:
            raise ValueError("there is no token to answer; give at least one that follows what was read")
        if wrong := [one for one in ids if not 0 <= one < self._vocab_size]:
            raise ValueError(f"token id {wrong[0]} is none of the backbone's 0 to {self._vocab_size - 1}")
        _check_at_least("max_new_tokens", new, 1)
        if (sampling.top_logprobs or 0) > self._vocab_size:
            raise ValueError(f"top_logprobs={sampling.top_logprobs} are more than the {self._vocab_size} tokens")
        if prefix is not None:
            self._check_prefix(prefix)
        units = 0 if prefix is None else prefix.units
        if (length := units + len(ids) + new) > self.longest:
            raise ValueError(
                f"{units} units, {len(ids)} tokens and up to {new} new ones are {length} positions, more than the "
                f"{self.longest} that one answer can have; ask for fewer new tokens, or give the engine more memory"
            )
        return units

    def _end_ids(self, given: Iterable[int] | None) -> frozenset[int]:
        if given is None:
            given = [] if self._ends is None else [self._ends] if isinstance(self._ends, int) else self._ends
        return frozenset(given)

    # -- what is whose: counted here, under the lock, before the engine's thread does it -------------------------------

    def _free_pages(self) -> int:
        return self._sizes.pages - self._reserved - sum(held.pages for held in self._held.values())

    def _hold(self, prefix: Prefix, digest: bytes, more: int) -> _Held:
        """Take in a prefix so that `more` pages are free then."""
        held = self._held.get(digest)
        if held is not None:
            self._make_room(more, held)
        else:
            pages = math.ceil(prefix.units / self._sizes.page_size)
            self._make_room(pages + more, None)
            held = self._held[digest] = _Held(prefix, Shared([], prefix.units), pages)
            self._order(partial(_load, held))
        self._held.move_to_end(digest)
        return held

    def _make_room(self, pages: int, wanted: _Held | None) -> None:
        """Evict contexts that nobody asks, the one that was asked least recently first."""
        if pages > self._sizes.pages - (wanted.pages if wanted is not None else 0):
            raise ValueError(f"{pages} pages are more than the {self._sizes.pages} there are; give more memory")
        idle = [(digest, held) for digest, held in self._held.items() if not held.users and held is not wanted]
        missing = pages - self._free_pages()
        if missing > sum(held.pages for _, held in idle):
            raise NoRoom("running answers use all pages; ask again when one of them has ended")
        for digest, held in idle:
            if missing <= 0:
                return
            missing -= held.pages
            del self._held[digest]
            self._order(partial(_unload, held))

    def _order(self, order: Callable[[ContinuousBatching], None]) -> None:
        self._orders.append(order)
        self._lock.notify_all()

    def _cancel(self, request: _Request) -> None:
        with self._lock:
            if self._running.pop(request.name, None) is not None:
                # Its pages are its own until the engine's thread has taken them back.
                self._cancelled.append(request)
                self._order(lambda batching: batching.cancel(request.name))

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _run(self, batching: ContinuousBatching) -> None:
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._orders or self._running or self._stopping)
                    if self._stopping:
                        return
                    orders, self._orders = self._orders, deque()
                    cancelled, self._cancelled = self._cancelled, []
                try:
                    self._work(batching, orders)
                except Exception as error:
                    _LOG.exception("continuous batching failed and begins anew")
                    batching.close()
                    self._fail(f"{type(error).__name__}: {error}")
                    batching = self._allocated()
                    continue
                with self._lock:
                    for request in cancelled:
                        batching.forget(request.name)
                        self._release(request)
        finally:
            batching.close()
            self._fail("the engine was stopped", ended=True)

    def _work(self, batching: ContinuousBatching, orders: Iterable[Callable[[ContinuousBatching], None]]) -> None:
        for order in orders:
            order(batching)
        if not batching.step():
            with self._lock:
                stuck = self._running and not self._orders
            if stuck:
                raise RuntimeError(f"{len(self._running)} answers cannot go on")

    def _release(self, request: _Request) -> None:
        self._reserved -= request.pages
        if request.held is not None:
            request.held.users -= 1

    def _fail(self, message: str, *, ended: bool = False) -> None:
        """End all answers with an error, and forget all contexts."""
        with self._lock:
            failed = list(self._running.values())
            self._reset()
            if ended:
                self._thread = None
                self._lock.notify_all()
        for request in failed:
            self._tell(request, Written(None, "error", message=message))

    def _deliver(self, name: str, tokens: Sequence[int], error: str | None, over: bool) -> None:
        """Hand over what is new of an answer."""
        request = self._running.get(name)
        if request is None:
            return
        new, request.sent = tokens[request.sent :], max(len(tokens), request.sent)
        told = [(None, ())] * len(new) if request.sampling.top_logprobs is None else request.told[: len(new)]
        del request.told[: len(new)]
        written = [Written(token, None, *more) for token, more in zip(new, told, strict=True)]
        if over:
            with self._lock:
                if self._running.pop(name, None) is None:
                    return
                self._release(request)
            if error is not None:
                written.append(Written(None, "error", message=error))
            else:
                written[-1] = replace(written[-1], finish="stop" if tokens[-1] in request.end_ids else "length")
        for one in written:
            self._tell(request, one)

    def _tell(self, request: _Request, written: Written) -> None:
        try:
            request.on_token(written)
        except Exception:
            _LOG.exception("an answer's on_token raised, so that the answer ends")
            self._cancel(request)

    def _choose(self, names: Sequence[str], logits_RV: Tensor) -> Tensor:
        check_finite_logits(self._model, logits_RV)
        tokens = logits_RV.argmax(-1)
        for row, name in enumerate(names):
            request = self._running.get(name)
            if request is None:
                continue
            sampling = request.sampling
            if sampling.temperature:
                if request.generator is None:
                    request.generator = torch.Generator(logits_RV.device)
                    if sampling.seed is None:
                        request.generator.seed()
                    else:
                        request.generator.manual_seed(sampling.seed)
                scores = request.processors(torch.empty(1, 0, dtype=torch.long), logits_RV[row : row + 1])
                tokens[row] = torch.multinomial(scores.softmax(-1), 1, generator=request.generator)[0, 0]
            if sampling.top_logprobs is not None:
                logprobs = logits_RV[row].log_softmax(-1)
                best = logprobs.topk(sampling.top_logprobs)
                top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
                request.told.append((logprobs[tokens[row]].item(), top))
        return tokens


def _load(held: _Held, batching: ContinuousBatching) -> None:
    assert held.prefix is not None
    held.shared.pages.extend(batching.take(held.pages))
    batching.write(held.shared.pages, held.prefix.keys, held.prefix.values)
    held.prefix = None


def _unload(held: _Held, batching: ContinuousBatching) -> None:
    batching.give(held.shared.pages)


def _processors(sampling: Sampling) -> LogitsProcessorList:
    """Return what `generate` does to scores before it draws."""
    processors = LogitsProcessorList()
    if sampling.temperature not in (0.0, 1.0):
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors


def _check_at_least(setting: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{setting}={value} is too little; give at least {least}")


def _most_pages(kv_bytes: int, planned: Callable[[int], int]) -> int:
    """Return how many pages fit."""
    least, most = 0, max(1, kv_bytes // max(1, planned(1) - planned(0)))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if planned(middle) <= kv_bytes else (least, middle - 1)
    if least < 4:
        raise ValueError(f"kv_bytes={kv_bytes} holds {least} pages; give at least {planned(4)}")
    return least


def _ordinary(model: PreTrainedModel) -> Backbone:
    backbone = describe(model)
    if backbone.recurrent:
        raise ValueError(
            f"layers of {backbone.model_type} carry a recurrent state, which no page of keys and values holds; answer "
            "with locret.generate"
        )
    if not backbone.uniform:
        raise ValueError(
            f"{backbone.model_type} has layers that slide over a window, whose units are no ordinary prefix; answer "
            "with locret.generate"
        )
    if uses_long_factors(find_decoder(model)):
        raise ValueError(
            f"{backbone.model_type} rotates short and long prompts in two ways, which one batch cannot mix; answer "
            "with locret.generate"
        )
    return backbone


def _second_tree(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of all modules over the same weights, so that what is set on one is not set on the other."""
    with exclusively(model):
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        tree = copy.deepcopy(model, shared)
    # A window that no layer slides over would still make pages of another kind.
    config = tree.config.get_text_config()
    config.sliding_window = None
    return tree.eval().requires_grad_(False)
