"""Contexts in transformers: many questions to many contexts at once, each context held once.

All questions about a context share the rows that hold its units; ordinary prompts are answered beside them. Memory is
allocated at the start and does not grow, and an answer has all that it may need before it begins. Answers are those of
`locret.generate`, but for penalties that the backbone's generation_config recommends, which are not applied here.
"""

from __future__ import annotations

import copy
import logging
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from locret.backbone.adapters import describe, find_decoder, unwrap
from locret.backbone.instrument import exclusively
from locret.backbone.rotary import fixed_reach, rotary_parameters, uses_long_factors
from locret.backbone.shape import Backbone
from locret.base.openmp import hand_back_cores
from locret.engines.prefix import Prefix
from locret.engines.rows import NAME, Feed, Rows, Shared
from locret.engines.sampling import Draws, Sampling
from locret.generation import check_finite_logits
from locret.heads.fingerprint import any_fingerprint, other_weights

Finish = Literal["stop", "length", "error"]
_LOG = logging.getLogger(__name__)


class NoRoom(Exception):
    """Running answers need all the memory there is: what was asked has to wait until one of them ends."""


class NotRunning(ValueError):
    """The engine has not been started, or has ended."""


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
    error: Exception | None = None
    """What failed."""


@dataclass(frozen=True)
class Stored:
    """A context that is loaded only where the engine does not hold it."""

    digest: bytes
    """What tells its units from all others."""
    units: int
    """Units per KV head, on average where they differ."""
    end: int
    """The position of the token that follows."""
    load: Callable[[], AbstractContextManager[Prefix]]
    """Gives the units while they are taken in."""


@dataclass(eq=False)
class _Request:
    shared: Shared | None
    rows: Tensor
    """Its own."""
    pending: list[int]
    """Tokens that are not in rows yet."""
    left: int
    """New tokens that it may still have."""
    end_ids: frozenset[int]
    draws: Draws
    on_token: Callable[[Written], None]
    done: int = 0
    """How many of them are written."""
    over: bool = False
    """Whether it has ended or was cancelled; then nothing is told any more."""


class PagedContexts:
    """Answers questions to contexts, and ordinary prompts, many at once on one copy of each context.

    The model is used through a second tree of modules over the same weights, so that `locret.prefill` may read with
    it at the same time. Use it as a context manager, or call `start` and `stop`; all methods may be called from any
    thread.

    Args:
        model: The backbone.
        kv_bytes: Memory for contexts and answers.
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
        self, model: nn.Module, *, kv_bytes: int, max_batch_tokens: int = 512, max_requests: int = 128
    ) -> None:
        _check_at_least("max_requests", max_requests, 1)
        _check_at_least("max_batch_tokens", max_batch_tokens, max_requests)
        base: PreTrainedModel = unwrap(model)
        self.backbone = _ordinary(base)
        shape = self.backbone.check_alike("an engine")
        self._row_bytes = self.backbone.num_layers * shape.num_kv_heads * shape.unit_dim * base.dtype.itemsize
        self._count, decoder = kv_bytes // self._row_bytes, find_decoder(base)
        _check_at_least("kv_bytes", kv_bytes, 2 * self._row_bytes)
        self.planned_bytes = self._count * self._row_bytes
        """Bytes that are allocated once."""
        self._positions: int = min(self.backbone.max_positions, fixed_reach(decoder) or self.backbone.max_positions)
        self._max_tokens, self._max_requests = max_batch_tokens, max_requests
        self._rotary, self._vocab_size = rotary_parameters(decoder), int(base.config.get_text_config().vocab_size)
        ends = base.generation_config.eos_token_id if base.generation_config is not None else None
        self._weights = any_fingerprint(model)
        self._ends = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        self._model = _second_tree(base)
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._rows: Rows | None = None
        self._held: OrderedDict[bytes, Shared] = OrderedDict()
        self._running: list[_Request] = []

    # -- the life of the engine --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Allocate the memory and begin to answer.

        Raises:
            ValueError: If it runs already, or there is not as much memory.
        """
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                raise ValueError("the engine runs already; stop it first")
            self._rows, self._stopping = Rows(self._model, self._count), False
            self._thread = threading.Thread(target=self._run, name="locret-answers", daemon=True)
            hand_back_cores()
            self._thread.start()

    def stop(self) -> None:
        """End all answers, each with an error, and give back memory and the thread; does nothing if none runs."""
        with self._lock:
            thread, self._stopping = self._thread, True
            self._lock.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> PagedContexts:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether it answers: it was started, and has not been stopped since."""
        return not self._stopping and self._thread is not None and self._thread.is_alive()

    @property
    def used_bytes(self) -> int:
        """Bytes that contexts and running answers have now, of which answers have all they may need."""
        with self._lock:
            return 0 if self._rows is None else self._row_bytes * (self._count - len(self._rows.free))

    # -- asking --------------------------------------------------------------------------------------------------------

    def submit(
        self,
        ids: Sequence[int],
        prefix: Prefix | Stored | None = None,
        *,
        max_new_tokens: int,
        on_token: Callable[[Written], None],
        end_ids: Iterable[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Callable[[], None]:
        """Begin an answer; returns at once. The context is taken in first, and stays while it is asked.

        Args:
            ids: Token ids of the question, those that follow the context's; without a context the whole prompt.
            prefix: What has been read before, or where it is.
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
        ids, sampling, units = [int(one) for one in ids], sampling or Sampling(), 0 if prefix is None else prefix.units
        self._check_question(ids, prefix, max_new_tokens, sampling)
        ends = self._ends if end_ids is None else frozenset(end_ids)
        digest = b"" if prefix is None else prefix.digest  # takes a while for large units, hence not under the lock
        more = len(ids) + max_new_tokens
        with self._loaded(prefix, more) as loaded, self._lock:
            if loaded is not None:
                self._check_prefix(loaded)
            shared = self._take_in(loaded, digest, units, more)
            assert self._rows is not None
            rows = self._rows.index(self._rows.take(more))
            request = _Request(shared, rows, ids, max_new_tokens, ends, Draws(sampling), on_token)
            self._running.append(request)
            self._lock.notify_all()
            hand_back_cores()
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
            ValueError: If one of them could never be answered, or the backbone's logits are not finite.
            RuntimeError: If an answer failed.
        """
        ends = None if end_ids is None else frozenset(end_ids)
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "end_ids": ends, "sampling": sampling}
        answers: list[list[int]] = [[] for _ in asked]
        told, waiting, cancels = queue.SimpleQueue[tuple[int, Written]](), deque(enumerate(asked)), []
        left = len(asked)
        with nullcontext() if self.running else self:
            try:
                while left:
                    try:
                        while waiting:
                            nth, (prefix, ids) = waiting[0]
                            on_token = partial(lambda nth, written: told.put((nth, written)), nth)
                            cancels.append(self.submit(ids, prefix, on_token=on_token, **how))
                            waiting.popleft()
                    except NoRoom:
                        pass  # until one has ended, of these or of others
                    try:
                        nth, written = told.get(timeout=1)
                    except queue.Empty:
                        continue
                    if written.error is not None:
                        raise written.error
                    answers[nth].append(written.token or 0)
                    left -= written.finish is not None
            finally:
                for cancel in cancels:
                    cancel()
        return answers

    # -- what is checked before anything is done -------------------------------------------------------------------

    def room(self, units: int = 0, end: int = 0) -> int:
        """Return how many tokens may follow so many units per KV head, the next of them at position `end`."""
        tokens: int = min(self._count - units, self._positions - end)
        return tokens

    def _check_question(self, ids: Sequence[int], prefix: Prefix | Stored | None, new: int, sampling: Sampling) -> None:
        if not ids:
            raise ValueError("there is no token to answer; give at least one that follows what was read")
        if wrong := [one for one in ids if not 0 <= one < self._vocab_size]:
            raise ValueError(f"token id {wrong[0]} is none of the backbone's 0 to {self._vocab_size - 1}")
        _check_at_least("max_new_tokens", new, 1)
        if (sampling.top_logprobs or 0) > self._vocab_size:
            raise ValueError(f"top_logprobs={sampling.top_logprobs} are more than the {self._vocab_size} tokens")
        units, end = (0, 0) if prefix is None else (prefix.units, prefix.end)
        if (more := len(ids) + new) > (room := self.room(units, end)):
            raise ValueError(
                f"{len(ids)} tokens and up to {new} new ones are {more} positions, more than the {max(room, 0)} that "
                f"an answer can have after {units} units; ask for fewer new tokens, or give the engine more memory"
            )

    def _check_prefix(self, prefix: Prefix) -> None:
        # Files name the layers that rotate nothing as well, which follow from the backbone's type and shape.
        rotary = {name: value for name, value in prefix.rotary.items() if name != "still"}
        backbone, kind = self.backbone, prefix.model_type or self.backbone.model_type
        shape = (prefix.units, backbone.num_kv_heads, backbone.head_dim)
        theirs = len(prefix.keys), prefix.shapes, prefix.vocab_size, kind
        ours = backbone.num_layers, {shape}, self._vocab_size, backbone.model_type
        if theirs != ours or (prefix.model_type and rotary != self._rotary):
            raise ValueError(
                "the context was read with another backbone: layers, shapes of units, vocabulary, type and rotation "
                f"are {theirs} {rotary} in it, and {ours} {self._rotary} here; read the text with this backbone"
            )

        if other_weights(prefix.weights, self._weights):
            raise ValueError(
                "the context was read with other weights of this backbone, to which its units mean nothing; read the "
                "text with these, or start the engine with those"
            )

    def _loaded(self, prefix: Prefix | Stored | None, more: int) -> AbstractContextManager[Prefix | None]:
        """Return the units of a context; where it is held, or waits for room, it is not loaded for them."""
        if not isinstance(prefix, Stored):
            return nullcontext(prefix)
        with self._lock:
            held, _ = self._room(prefix.digest, prefix.units, more)
        return prefix.load() if held is None else nullcontext()

    # -- what is whose: all under the lock -----------------------------------------------------------------------------

    def _room(self, digest: bytes, units: int, more: int) -> tuple[Shared | None, list[bytes]]:
        """Return a context if it is held, and which have to go so that its units and `more` rows have room."""
        if not self.running or self._rows is None:
            raise NotRunning("the engine does not run; call start, or use it as a context manager")
        held, leaving = self._held.get(digest), list[bytes]()
        lacking, asked = more + (units if held is None else 0) - len(self._rows.free), {r.shared for r in self._running}
        for key, one in self._held.items():  # those that were asked least recently first
            if lacking > 0 and one not in asked and one is not held:
                leaving.append(key)
                lacking -= len(one.rows)
        if lacking > 0:
            raise NoRoom("running answers use all memory; ask again when one of them has ended")
        return held, leaving

    def _take_in(self, prefix: Prefix | None, digest: bytes, units: int, more: int) -> Shared | None:
        """Hold a context of so many units, if there is one, and let `more` rows be free then."""
        held, leaving = self._room(digest, units, more)
        if held is None and prefix is None and units:
            raise NoRoom("the context has just made room for others; ask again")
        assert self._rows is not None
        for key in leaving:
            self._rows.free += self._held.pop(key).rows.tolist()
        if not units:
            return None
        if held is None:
            assert prefix is not None
            # No pass that runs looks at them; if this fails, they are still free.
            held = self._held[digest] = self._rows.write(self._rows.free[-units:], prefix)
            self._rows.take(units)
        self._held.move_to_end(digest)
        return held

    def _cancel(self, request: _Request) -> None:
        with self._lock:
            request.over = True  # its rows are its own until the engine's thread has seen it
            self._lock.notify_all()

    def _give_back(self) -> None:
        assert self._rows is not None
        for request in [one for one in self._running if one.over]:
            self._running.remove(request)
            self._rows.free += request.rows.tolist()

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._running:
                    hand_back_cores()
                self._lock.wait_for(lambda: self._running or self._stopping)
                self._give_back()
                if self._stopping:
                    break
                requests = self._served()
            try:
                self._step(requests)
            except Exception as error:
                _LOG.exception("a pass failed, which ends its answers")
                self._fail(error if isinstance(error, ValueError) else RuntimeError(f"{type(error).__name__}: {error}"))
        self._fail(RuntimeError("the engine was stopped"))
        with self._lock:
            self._rows, self._thread = None, None
            self._held.clear()

    def _served(self) -> list[tuple[_Request, int]]:
        """Return the requests of the next pass, and how many tokens of each: what answers comes first."""
        room, found = self._max_tokens, []
        for request in sorted(self._running, key=lambda one: len(one.pending) > 1)[: self._max_requests]:
            if count := min(room, len(request.pending)):
                found.append((request, count))
                room -= count
        return found

    def _step(self, served: Sequence[tuple[_Request, int]]) -> None:
        """Feed the next tokens of requests, and tell what they write."""
        feeds = []
        for request, count in served:
            rows, last = request.rows[: request.done + count], count == len(request.pending)
            feeds.append(Feed(request.pending[:count], rows, request.shared, last))
        if not feeds:
            return
        assert self._rows is not None
        logits_RV = self._rows.run(feeds)
        check_finite_logits(self._model, logits_RV)
        answering = [request for (request, _), feed in zip(served, feeds, strict=True) if feed.last]
        chosen = [request.draws.next(row) for request, row in zip(answering, logits_RV, strict=True)]
        for request, count in served:
            request.done, request.pending = request.done + count, request.pending[count:]
        for request, (token, more) in zip(answering, chosen, strict=True):
            request.pending, request.left = [token], request.left - 1
            finish: Finish | None = "stop" if token in request.end_ids else "length" if not request.left else None
            self._tell(request, Written(token, finish, *more))
        with self._lock:
            self._give_back()

    def _tell(self, request: _Request, written: Written) -> None:
        with self._lock:
            if request.over:
                return
            request.over = written.finish is not None
            if request.over:  # so that whoever is told of the end finds its memory free
                self._give_back()
        try:
            request.on_token(written)
        except Exception:
            _LOG.exception("an answer's on_token raised, so that the answer ends")
            self._cancel(request)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            failed = list(self._running)
        for request in failed:
            self._tell(request, Written(None, "error", error=error))


def _check_at_least(setting: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{setting}={value} is too little; give at least {least}")


def _ordinary(model: PreTrainedModel) -> Backbone:
    backbone = describe(model)
    if not backbone.uniform:
        raise ValueError(
            f"{backbone.model_type} has layers that slide over a window or carry a state, whose units are no ordinary "
            "prefix; answer with locret.generate"
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
    tree.set_attn_implementation(NAME)
    return tree.eval().requires_grad_(False)
