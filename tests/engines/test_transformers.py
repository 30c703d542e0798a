"""Many questions at once in transformers: equal to `locret.generate`, in fixed memory, whatever else happens."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from core.families import build, prompt
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill, save_cache
from locret.engines.prefix import Prefix
from locret.engines.sampling import Sampling
from locret.engines.transformers import NoRoom, PagedContexts, Stored, Written

NEW = 12


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(10, 190, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Read:
    """A text that was read, and what `locret.generate` writes after it."""

    model: PreTrainedModel
    text: list[int]
    cache: RetentionCache
    prefix: Prefix

    @classmethod
    def by(cls, model: Any, scorer: Any, seed: int, *, units: int = 50, tokens: int = 300, **policy: Any) -> Read:
        uneven, policy = bool(policy), {"stabilizers": 8, **policy}
        policy = RetentionPolicy(budget=units - 16, chunk_size=96, local_len=16, **policy)
        cache, text = RetentionCache(model, scorer, policy), ids(tokens, seed)
        prefill(model, torch.tensor([text]), cache)
        prefix = Prefix.of(cache, uneven=uneven)
        assert prefix.units == units
        return cls(model, text, cache, prefix)

    def answer(self, question: list[int], new: int = NEW, **options: Any) -> Any:
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": new, **options}
        fed = torch.tensor([self.text + question])
        got = generate(self.model, fed, cache=self.cache.copy(), **options)
        return got if options.get("return_dict_in_generate") else got[0, fed.shape[1] :].tolist()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained("checkpoints/tiny").eval()


@pytest.fixture(scope="module")
def heads() -> RetainingHeads:
    return RetainingHeads.from_pretrained("checkpoints/tiny-heads")


@pytest.fixture(scope="module")
def books(model: PreTrainedModel, heads: RetainingHeads) -> list[Read]:
    return [Read.by(model, heads, seed) for seed in range(4)]


def engine_of(model: PreTrainedModel, units: int = 640, **options: int) -> PagedContexts:
    """Return an engine with room for so many units."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * width * model.dtype.itemsize
    return PagedContexts(model, kv_bytes=units * each, **options)


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[PagedContexts]:
    with engine_of(model) as running:
        yield running


class Answer:
    """Collects an answer, and can keep the engine's thread waiting at a token."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.written, self.stop_at = list[Written](), stop_at
        self.there, self.go_on, self.over = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, written: Written) -> None:
        self.written.append(written)
        if len(self.written) == self.stop_at:
            self.there.set()
            assert self.go_on.wait(20)
        if written.finish is not None:
            self.over.set()

    def tokens(self) -> list[int | None]:
        assert self.over.wait(20)
        return [one.token for one in self.written]


def answered(engine: PagedContexts, asked: list[tuple[Read, list[int]]], new: int = NEW) -> bool:
    """Return whether questions are answered as `generate` answers each."""
    given = [(book.prefix, question) for book, question in asked]
    got = engine.generate_batch(given, max_new_tokens=new, end_ids=[])
    return got == [book.answer(question, new) for book, question in asked]


@pytest.mark.parametrize("room", [4000, 150])
def test_a_shuffled_batch_writes_what_generate_writes(model: PreTrainedModel, books: list[Read], room: int) -> None:
    asked = [(book, ids(5 + 3 * number, 100 + number)) for book in books for number in range(8)]
    random.Random(0).shuffle(asked)
    assert answered(engine_of(model, room), asked)  # with room for all, or for two contexts that take turns


UNEVEN = {
    "shares": {"head_budgets": "shares", "head_shares": (0.2, 3.0, 0.5, 0.3) * 5},
    "spaced": {"head_budgets": "shares", "head_shares": (4.0, 0.2, 0.2, 0.2) * 2 + (1.0,) * 12, "spacing": 16},
    "adaptive": {"head_budgets": "adaptive"},
    "layers": {"layer_budgets": "pyramid", "pyramid_beta": 4},
}


@pytest.mark.parametrize("sizes", UNEVEN)
def test_kv_heads_of_different_sizes_are_answered_as_by_generate(
    model: PreTrainedModel, heads: RetainingHeads, books: list[Read], sizes: str, tmp_path: Path
) -> None:
    """Together with contexts of equal heads and other requests, from files, in the bytes of equal heads."""
    policy = {"stabilizers": 2, **UNEVEN[sizes]}
    uneven = [Read.by(model, heads, seed, **policy) for seed in range(2)]
    for nth, book in enumerate(uneven):
        counts = [one for layer in book.prefix.counts for one in layer]
        assert max(counts) > min(counts), "each head has as many units, so nothing is tried"
        with pytest.raises(ValueError, match="uniform budgets"):
            Prefix.of(book.cache)
        save_cache(book.cache, tmp_path / f"{nth}.ctx")
        found = Prefix.from_file(tmp_path / f"{nth}.ctx", uneven=True)
        assert (found.digest, found.units, found.end) == (book.prefix.digest, book.prefix.units, book.prefix.end)
        book.prefix = found
    asked = [(book, ids(5 + 3 * number, 100 + number)) for book in (*uneven, books[0]) for number in range(6)]
    random.Random(0).shuffle(asked)
    assert answered(engine_of(model, 4000), asked)
    assert answered(engine_of(model, 115), asked)  # room for two contexts of 50 units per head, and an answer
    with engine_of(model, 4000) as engine:
        engine.generate_batch([(uneven[0].prefix, ids(5, 1))], max_new_tokens=1)
        (held,) = engine._held.values()
        beside = [one for one in vars(held).values() if isinstance(one, torch.Tensor)]
        assert sum(one.nbytes for one in beside) == 8 * len(held.rows), "more is held than units, and their rows"
    with pytest.raises(ValueError, match="80 positions, more than the 65 that an answer"):
        engine_of(model, 115).generate_batch([(uneven[0].prefix, ids(40, 1))], max_new_tokens=40)


def test_a_context_of_other_weights_is_refused(model: PreTrainedModel, books: list[Read]) -> None:
    other = AutoModelForCausalLM.from_pretrained("checkpoints/tiny", dtype=torch.bfloat16).eval()
    assert engine_of(other).generate_batch([(books[0].prefix, ids(5, 1))], max_new_tokens=2), "the same ones, rounded"
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    with pytest.raises(ValueError, match="read with other weights of this backbone, to which its units mean nothing"):
        engine_of(other).generate_batch([(books[0].prefix, ids(5, 1))])


FAMILIES = ["llama-mqa", "phi3-partial", "llama-yarn", "granite", "qwen3-moe", "smollm3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_ordinary_prefixes_answers_as_generate(family: str, tmp_path: Path) -> None:
    model = build(family, **({"no_rope_layers": [1, 0, 1, 1]} if family == "smollm3" else {}))
    books = [Read.by(model, "key_norm", seed, units=37, tokens=120) for seed in range(2)]
    for nth, book in enumerate(books):  # as a file says it
        save_cache(book.cache, tmp_path / f"{nth}.ctx")
        book.prefix = Prefix.from_file(tmp_path / f"{nth}.ctx")
    assert answered(
        engine_of(model, 320), [(book, ids(4 + number, number)) for number in range(3) for book in books], 6
    )


def test_plain_prompts_are_answered_beside_contexts_also_in_several_passes(model: Any, books: list[Read]) -> None:
    plain, wanted = [ids(length, length) for length in (1, 40, 200)], []
    for one in plain:
        fed, options = torch.tensor([one]), {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
        out = model.generate(fed, attention_mask=torch.ones_like(fed), **options)
        wanted.append(out[0, len(one) :].tolist())
    asked = [*((None, one) for one in plain), (books[0].prefix, ids(7, 1))]
    engine = engine_of(model, max_batch_tokens=32, max_requests=8)
    assert engine.generate_batch(asked, max_new_tokens=NEW, end_ids=[]) == [*wanted, books[0].answer(ids(7, 1))]


def test_all_that_is_allocated_is_planned_and_nothing_grows(model: Any, books: list[Read]) -> None:
    each = sum(states[:1].nbytes for states in (*books[0].prefix.keys, *books[0].prefix.values))
    with PagedContexts(model, kv_bytes=2_000_000) as engine:
        assert 2_000_000 - each < engine.planned_bytes <= 2_000_000
        counted = engine._rows.keys.nbytes + engine._rows.values.nbytes
        assert (counted, engine.used_bytes) == (engine.planned_bytes, 0)
        for _ in range(3):
            engine.generate_batch([(book.prefix, ids(9, 1)) for book in books], max_new_tokens=8)
            assert engine.used_bytes == 4 * 50 * each  # the contexts stay, and no answer has anything left


def test_contexts_are_loaded_once_those_that_are_asked_stay_and_the_oldest_others_go(
    model: Any, books: list[Read]
) -> None:
    loads, held, other = list[int](), Answer(stop_at=2), Answer()

    def stored(nth: int) -> Stored:
        @contextmanager
        def load() -> Iterator[Prefix]:
            loads.append(nth)
            yield books[nth].prefix

        return Stored(b"%d" % nth, 50, 50, load)

    with engine_of(model, 200) as engine:
        for nth in (0, 1, 2, 0):
            engine.submit(ids(6, 1), stored(nth), max_new_tokens=6, on_token=(first := Answer()))
            first.tokens()
        engine.submit(ids(6, 0), stored(2), max_new_tokens=20, on_token=held, end_ids=[])
        assert held.there.wait(20)
        with pytest.raises(NoRoom, match="ask again when one of them has ended"):
            engine.submit(ids(6, 0), stored(3), max_new_tokens=80, on_token=other)
        assert set(engine._held) == {b"0", b"1", b"2"}, "what cannot be answered evicts nothing"
        engine.submit(ids(1, 0), stored(3), max_new_tokens=5, on_token=other, end_ids=[])
        assert set(engine._held) == {b"0", b"2", b"3"}
        held.go_on.set()
        assert held.tokens() == books[2].answer(ids(6, 0), 20)
        assert other.tokens() == books[3].answer(ids(1, 0), 5)
        assert loads == [0, 1, 2, 3]


def test_a_context_that_was_not_taken_in_whole_is_taken_in_anew(
    engine: PagedContexts, books: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine._rows, "write", fail)
        with pytest.raises(MemoryError):
            engine.submit(ids(6, 0), books[0].prefix, max_new_tokens=4, on_token=Answer())
    assert answered(engine, [(books[0], ids(6, 0))])


def test_a_seed_draws_what_generate_draws_whoever_else_is_answered(engine: PagedContexts, books: list[Read]) -> None:
    options, question = {"temperature": 0.9, "top_k": 20, "top_p": 0.95}, ids(11, 3)
    torch.manual_seed(5)
    wanted = books[0].answer(question, do_sample=True, **options)
    assert wanted != books[0].answer(question)
    drawn, answers = Sampling(seed=5, **options), [Answer() for _ in range(4)]
    for answer, sampling in zip(answers, (drawn, Sampling(), Sampling(temperature=5.0), drawn), strict=True):
        engine.submit(question, books[0].prefix, max_new_tokens=NEW, on_token=answer, end_ids=[], sampling=sampling)
    assert answers[0].tokens() == answers[3].tokens() == wanted
    assert answers[1].tokens() == books[0].answer(question) != answers[2].tokens()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probabilities_are_the_backbones(engine: PagedContexts, books: list[Read], temperature: float) -> None:
    question, answer, prefix = ids(11, 4), Answer(), books[1].prefix
    sampling = Sampling(temperature=temperature, top_k=5, seed=1, top_logprobs=3)
    engine.submit(question, prefix, max_new_tokens=6, on_token=answer, end_ids=[], sampling=sampling)
    fed, cache = question + answer.tokens()[:-1], DynamicCache()
    for layer, (key, value) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
        cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], layer)
    with torch.no_grad():
        logits = books[1].model(torch.tensor([fed]), past_key_values=cache).logits[0, -6:]
    for one, wanted in zip(answer.written, logits.log_softmax(-1), strict=True):
        assert one.logprob == pytest.approx(wanted[one.token].item(), abs=1e-3)
        assert [token for token, _ in one.top] == wanted.topk(3).indices.tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(wanted.topk(3).values.tolist(), abs=1e-3)


def test_a_pass_that_fails_ends_its_answers_and_nothing_else(
    engine: PagedContexts, books: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, asked = engine._model.lm_head.forward, [(book.prefix, ids(6, 0)) for book in books]

    def fail(states: Tensor) -> Tensor:
        monkeypatch.setattr(engine._model.lm_head, "forward", forward)
        raise OSError("out of luck")

    monkeypatch.setattr(engine._model.lm_head, "forward", fail)
    with pytest.raises(RuntimeError, match="OSError: out of luck"):
        engine.generate_batch(asked, max_new_tokens=4)
    assert answered(engine, [(book, ids(6, 0)) for book in books], 4)


def test_stopping_ends_answers_and_leaves_neither_thread_nor_memory(model: Any, books: list[Read]) -> None:
    engine = engine_of(model)
    for _ in range(2):
        threads, answer = set(threading.enumerate()), Answer(stop_at=2)
        engine.start()
        with pytest.raises(ValueError, match="runs already"):
            engine.start()
        [thread] = set(threading.enumerate()) - threads
        engine.submit(ids(6, 0), books[0].prefix, max_new_tokens=400, on_token=answer, end_ids=[])
        assert answer.there.wait(20)
        memory = weakref.ref(engine._rows)
        threading.Timer(0.1, answer.go_on.set).start()
        engine.stop()
        engine.stop()
        assert not thread.is_alive()
        assert (answer.written[-1].finish, str(answer.written[-1].error)) == ("error", "the engine was stopped")
        assert (engine.used_bytes, memory()) == (0, None)
        with pytest.raises(ValueError, match="does not run; call start"):
            engine.submit(ids(6, 0), max_new_tokens=4, on_token=answer)


def other(family: str) -> Prefix:
    """Return the prefix of another backbone."""
    policy = RetentionPolicy(budget=16, chunk_size=32, stabilizers=4, local_len=4)
    cache = RetentionCache(build(family), "key_norm", policy)
    prefill(cache.model, prompt(60), cache)
    return Prefix.of(cache)


REFUSED: list[tuple[Callable[[PagedContexts], object], str]] = [
    (lambda e: PagedContexts(e._model, kv_bytes=9**9, max_batch_tokens=8), "max_batch_tokens=8 is too little; .* 128"),
    (lambda e: e.submit([], max_new_tokens=4, on_token=print), "there is no token to answer"),
    (lambda e: e.submit([5], max_new_tokens=0, on_token=print), "max_new_tokens=0 is too little"),
    (lambda e: e.generate_batch([(None, [5])], max_new_tokens=1000), "up to 1000 new ones are 1001 positions, more"),
    (lambda e: e.submit([5], other("llama"), max_new_tokens=4, on_token=print), "read the text with this backbone"),
    (lambda _: Sampling(temperature=-1.0), "temperature -1.0 makes no usable probabilities"),
    (lambda _: Sampling(seed=2**64), "seed=18446744073709551616 is not a whole number of 64 bits"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_is_refused(
    engine: PagedContexts, call: Callable[[PagedContexts], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(engine)
