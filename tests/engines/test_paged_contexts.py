"""Contexts in transformers' continuous batching: equal to `locret.generate`, in fixed memory, whatever else happens."""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from core.families import build, prompt
from torch import Tensor
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, PreTrainedModel

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill, save_cache
from locret.engines import continuous_batching
from locret.engines.prefix import Prefix
from locret.engines.transformers import NoRoom, PagedContexts, Sampling, Written

NEW = 12
OLD = "page_size" not in ContinuousBatchingConfig.__dataclass_fields__
"""Whether this is transformers 5.17, whose pages were others."""


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
    def by(cls, model: Any, scorer: Any, seed: int, *, units: int = 50, tokens: int = 300) -> Read:
        policy = RetentionPolicy(budget=units - 16, chunk_size=96, stabilizers=8, local_len=16)
        cache, text = RetentionCache(model, scorer, policy), ids(tokens, seed)
        prefill(model, torch.tensor([text]), cache)
        prefix = Prefix.of(cache)
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


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[PagedContexts]:
    with PagedContexts(model, pages=40, page_size=16) as running:
        yield running


class Answer:
    """Collects an answer, and can keep the engine's thread waiting at a token."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.written: list[Written] = []
        self.stop_at, self.there, self.go_on, self.over = (
            stop_at,
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )

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


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(("units", "page_size"), [(48, 16), (50, 16), (50, 64), (250, 32)])
def test_a_shuffled_batch_writes_what_generate_writes(
    model: PreTrainedModel, heads: RetainingHeads, units: int, page_size: int
) -> None:
    books = [Read.by(model, heads, seed, units=units, tokens=400) for seed in range(4)]
    asked = [(book, ids(5 + 3 * number, 100 + number)) for book in books for number in range(8)]
    random.Random(0).shuffle(asked)
    engine = PagedContexts(model, pages=9000 // page_size, page_size=page_size)
    got = engine.generate_batch([(book.prefix, question) for book, question in asked], max_new_tokens=NEW, end_ids=[])
    assert got == [book.answer(question) for book, question in asked]
    assert len({tuple(answer) for answer in got}) > 8


def test_what_a_step_gathers_is_bounded_whoever_attends_together(
    model: PreTrainedModel, books: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [(book.prefix, ids(3 + 5 * number, number)) for number in range(6) for book in books[:2]]
    asked += [(None, ids(20 * number, number)) for number in range(1, 5)]
    engine = PagedContexts(model, pages=60, page_size=16)
    wanted = engine.generate_batch(asked, max_new_tokens=NEW, end_ids=[])
    monkeypatch.setattr(continuous_batching, "_GATHERED", 64)
    monkeypatch.setattr(continuous_batching, "_LOGITS", 300)
    gathered = []
    grouped = continuous_batching._grouped
    monkeypatch.setattr(continuous_batching, "_grouped", lambda *args: gathered.append(grouped(*args)) or gathered[-1])
    assert engine.generate_batch(asked, max_new_tokens=NEW, end_ids=[]) == wanted
    assert max(len(group.own) for group in gathered) > 2
    assert max(group.own.numel() for group in gathered) <= 64
    assert max(group.own.numel() + len(group.own) * len(group.shared) for group in gathered) <= 300


@pytest.mark.parametrize("family", ["llama-mqa", "qwen3", "phi3-partial", "llama-yarn", "granite", "qwen3-moe", "phi3"])
def test_every_family_of_ordinary_prefixes_answers_as_generate(family: str) -> None:
    model = build(family)
    books = [Read.by(model, "key_norm", seed, units=37, tokens=120) for seed in range(2)]
    asked = [(book, ids(4 + number, number)) for number in range(3) for book in books]
    engine = PagedContexts(model, pages=40, page_size=8)
    got = engine.generate_batch([(book.prefix, question) for book, question in asked], max_new_tokens=6, end_ids=[])
    assert got == [book.answer(question, 6) for book, question in asked]


def test_a_file_of_a_backbone_with_layers_that_rotate_nothing_answers_as_generate(tmp_path: Path) -> None:
    model = build("smollm3", no_rope_layers=[1, 0, 1, 1])
    book = Read.by(model, "key_norm", 0, units=37, tokens=120)
    save_cache(book.cache, tmp_path / "book.ctx")
    prefix = Prefix.from_file(tmp_path / "book.ctx")
    assert prefix.rotary["still"] == [1]
    engine, asked = PagedContexts(model, pages=40, page_size=8), [(prefix, ids(5, 1))]
    [got] = engine.generate_batch(asked, max_new_tokens=6, end_ids=[])
    assert got == book.answer(ids(5, 1), 6)


def test_a_backbone_in_bfloat16_answers_as_generate(heads: RetainingHeads) -> None:
    model = AutoModelForCausalLM.from_pretrained("checkpoints/tiny", dtype=torch.bfloat16).eval()
    book = Read.by(model, heads, 0)
    asked = [(book.prefix, ids(6, number)) for number in range(4)]
    got = PagedContexts(model, pages=40, page_size=16).generate_batch(asked, max_new_tokens=6, end_ids=[])
    assert got == [book.answer(question, 6) for _, question in asked]


def test_plain_prompts_are_answered_beside_contexts(engine: PagedContexts, model: Any, books: list[Read]) -> None:
    plain = [ids(length, length) for length in (1, 40, 200)]
    asked = [(None, one) for one in plain] + [(books[0].prefix, ids(7, 1))]
    wanted = []
    for one in plain:
        fed = torch.tensor([one])
        out = model.generate(
            fed, attention_mask=torch.ones_like(fed), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        wanted.append(out[0, len(one) :].tolist())
    got = engine.generate_batch(asked, max_new_tokens=NEW, end_ids=[])
    assert got == [*wanted, books[0].answer(ids(7, 1))]


def test_a_prompt_longer_than_a_step_takes_several(model: Any) -> None:
    fed = torch.tensor([ids(150, 3)])
    out = model.generate(fed, attention_mask=torch.ones_like(fed), max_new_tokens=4, do_sample=False, eos_token_id=None)
    engine = PagedContexts(model, pages=20, page_size=16, max_batch_tokens=32, max_requests=8)
    assert engine.generate_batch([(None, fed[0].tolist())], max_new_tokens=4, end_ids=[]) == [out[0, 150:].tolist()]


def test_placeholders_as_a_prompt_and_contexts_do_not_meet(engine: PagedContexts, books: list[Read]) -> None:
    book, question = books[0], ids(40, 5)
    wanted = book.answer(question)
    poison = (None, book.prefix.placeholders + question)
    asked = [poison, (book.prefix, question), poison, (book.prefix, question)]
    first, again = (engine.generate_batch(asked, max_new_tokens=NEW, end_ids=[]) for _ in range(2))
    assert first == again
    assert first[1] == first[3] == wanted
    assert first[0] == first[2] != wanted


def test_more_contexts_than_room_take_turns_in_fixed_memory(model: Any, heads: Any, books: list[Read]) -> None:
    asked = [(book, ids(9, number)) for number in range(4) for book in books]
    # A context takes 4 pages and a question 2: two contexts are there at once.
    engine = PagedContexts(model, pages=12, page_size=16, max_requests=4)
    with engine:
        got = engine.generate_batch([(book.prefix, question) for book, question in asked], max_new_tokens=8, end_ids=[])
        assert engine.used_bytes <= engine.planned_bytes
    assert got == [book.answer(question, 8) for book, question in asked]


def test_all_that_is_allocated_is_planned_and_nothing_grows(model: Any, books: list[Read]) -> None:
    engine = PagedContexts(model, kv_bytes=2_000_000, page_size=16)
    assert 1_900_000 < engine.planned_bytes <= 2_000_000
    with engine:
        batching = engine._allocated()
        assert batching.counted_bytes == engine.planned_bytes
        batching.close()
        assert engine.used_bytes == 0
        for _ in range(3):
            engine.generate_batch([(book.prefix, ids(9, 1)) for book in books], max_new_tokens=8)
            page = sum(states[:16].nbytes for states in (*books[0].prefix.keys, *books[0].prefix.values))
            assert engine.used_bytes == 4 * 4 * page  # the contexts stay; no answer has a page left


def test_contexts_that_are_asked_stay_and_the_oldest_others_go(model: Any, books: list[Read]) -> None:
    first, second, third, fourth = (book.prefix for book in books)
    held, running = Answer(stop_at=2), Answer(stop_at=1)
    # A context takes 4 pages, a question 2; transformers 5.17 may take one more.
    with PagedContexts(model, pages=13 + OLD, page_size=16) as engine:
        for prefix in (first, second, third):
            engine.hold(prefix)
        engine.hold(first)  # so that the second one was asked least recently
        engine.submit(ids(6, 0), third, max_new_tokens=20, on_token=held, end_ids=[])
        assert held.there.wait(20)
        assert set(engine._held) == {third.digest, first.digest}
        engine.hold(third)
        with pytest.raises(NoRoom, match="ask again when one of them has ended"):
            engine.submit(ids(6, 0), fourth, max_new_tokens=60, on_token=running)
        assert set(engine._held) == {third.digest, first.digest}, "what cannot be answered evicts nothing"
        engine.hold(fourth)
        assert set(engine._held) == {third.digest, fourth.digest}
        with pytest.raises(NoRoom):
            engine.submit(ids(6, 0), max_new_tokens=150, on_token=running)
        held.go_on.set()
        assert held.tokens() == books[2].answer(ids(6, 0), 20)
        answers = engine.generate_batch(
            [(prefix, ids(6, 1)) for prefix in (first, fourth)], max_new_tokens=6, end_ids=[]
        )
        assert answers == [books[0].answer(ids(6, 1), 6), books[3].answer(ids(6, 1), 6)]


def test_a_cancelled_answer_says_nothing_more_and_gives_back_its_pages(
    engine: PagedContexts, books: list[Read]
) -> None:
    before, answers = engine.used_bytes, [Answer(stop_at=3), Answer(), Answer()]
    cancels = [engine.submit(ids(6, 0), max_new_tokens=100, on_token=answer, end_ids=[]) for answer in answers]
    assert answers[0].there.wait(20)
    for cancel in (cancels[0], cancels[1], cancels[0]):
        cancel()
    told = [len(answer.written) for answer in answers]
    answers[0].go_on.set()
    assert len(answers[2].tokens()) == 100
    assert [len(answer.written) for answer in answers[:2]] == told[:2]
    wait_until(lambda: engine.used_bytes == before)


def test_a_seed_draws_what_generate_draws_whoever_else_is_answered(engine: PagedContexts, books: list[Read]) -> None:
    options = {"temperature": 0.9, "top_k": 20, "top_p": 0.95}
    question = ids(11, 3)
    torch.manual_seed(5)
    wanted = books[0].answer(question, do_sample=True, **options)
    assert wanted != books[0].answer(question)
    drawn = Sampling(seed=5, **options)
    alone = engine.generate_batch([(books[0].prefix, question)], max_new_tokens=NEW, end_ids=[], sampling=drawn)
    answers = [Answer() for _ in range(4)]
    for answer, sampling in zip(answers, (drawn, Sampling(), Sampling(temperature=1.0), drawn), strict=True):
        engine.submit(question, books[0].prefix, max_new_tokens=NEW, on_token=answer, end_ids=[], sampling=sampling)
    assert alone == [wanted]
    assert answers[0].tokens() == answers[3].tokens() == wanted
    assert answers[1].tokens() == books[0].answer(question)


def test_an_answer_without_a_seed_is_another_one_each_time(engine: PagedContexts, books: list[Read]) -> None:
    hot = Sampling(temperature=5.0)
    drawn = engine.generate_batch([(None, [5])] * 4, max_new_tokens=NEW, end_ids=[], sampling=hot)
    assert len({tuple(one) for one in drawn}) == 4


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probabilities_are_the_backbones(engine: PagedContexts, books: list[Read], temperature: float) -> None:
    question, answer = ids(11, 4), Answer()
    sampling = Sampling(temperature=temperature, top_k=5, seed=1, top_logprobs=3)
    engine.submit(question, books[1].prefix, max_new_tokens=6, on_token=answer, end_ids=[], sampling=sampling)
    tokens = answer.tokens()
    fed = question + tokens[:-1]
    out = books[1].answer(question, 6, return_dict_in_generate=True, output_logits=True)
    if temperature == 0:
        logits = torch.cat(out.logits)
    else:  # the backbone's logits along the drawn answer
        states = books[1].prefix
        cache = transformers.DynamicCache()
        for layer, (key, value) in enumerate(zip(states.keys, states.values, strict=True)):
            cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], layer)
        with torch.no_grad():
            logits = books[1].model(torch.tensor([fed]), past_key_values=cache).logits[0, -6:]
    for one, wanted in zip(answer.written, logits.log_softmax(-1), strict=True):
        assert one.token is not None
        assert one.logprob == pytest.approx(wanted[one.token].item(), abs=1e-3)
        assert [token for token, _ in one.top] == wanted.topk(3).indices.tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(wanted.topk(3).values.tolist(), abs=1e-3)
    none = Answer()
    engine.submit(question, max_new_tokens=2, on_token=none, end_ids=[], sampling=Sampling(top_logprobs=0))
    none.tokens()
    assert all(one.top == () and one.logprob is not None for one in none.written)


def test_an_end_id_stops_an_answer_and_is_its_last_token(engine: PagedContexts, books: list[Read]) -> None:
    full = books[0].answer(ids(6, 2))
    end = full[4]
    stopped, long = Answer(), Answer()
    engine.submit(ids(6, 2), books[0].prefix, max_new_tokens=NEW, on_token=stopped, end_ids=[end, 7])
    engine.submit(ids(6, 2), books[0].prefix, max_new_tokens=3, on_token=long, end_ids=[])
    assert stopped.tokens() == full[: full.index(end) + 1]
    assert long.tokens() == full[:3]
    assert [one.finish for one in long.written] == [None, None, "length"]
    assert stopped.written[-1].finish == "stop"
    eos = engine._ends
    assert engine._end_ids(None) == {eos} if isinstance(eos, int) else set(eos)


def test_reading_and_answering_at_once_are_each_as_alone(
    model: PreTrainedModel, heads: RetainingHeads, engine: PagedContexts, books: list[Read]
) -> None:
    asked = [(book.prefix, ids(9, number)) for number in range(12) for book in books]
    wanted = engine.generate_batch(asked, max_new_tokens=NEW, end_ids=[])
    alone = Read.by(model, heads, 77, tokens=2000)
    reading: list[Read] = []
    implementation = model.config._attn_implementation
    reader = threading.Thread(target=lambda: reading.extend(Read.by(model, heads, 77, tokens=2000) for _ in range(2)))
    reader.start()
    rounds = 0
    while reader.is_alive() or not rounds:
        assert engine.generate_batch(asked, max_new_tokens=NEW, end_ids=[]) == wanted
        rounds += 1
    reader.join()
    assert [one.prefix.digest for one in reading] == [alone.prefix.digest] * 2
    assert model.config._attn_implementation == implementation


def test_the_second_tree_of_modules_has_the_same_weights(model: PreTrainedModel) -> None:
    engine = PagedContexts(model, pages=8, page_size=16)
    twin = engine._model
    mine, theirs = ({**dict(one.named_parameters()), **dict(one.named_buffers())} for one in (model, twin))
    assert {name: tensor.data_ptr() for name, tensor in mine.items()} == {
        name: tensor.data_ptr() for name, tensor in theirs.items()
    }
    assert not {id(module) for module in model.modules()} & {id(module) for module in twin.modules()}
    assert twin.config is not model.config


def test_a_step_that_fails_ends_its_answers_and_nothing_else(
    engine: PagedContexts, books: list[Read], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [(book.prefix, ids(6, 0)) for book in books]
    engine.generate_batch(asked, max_new_tokens=4)
    forward = engine._model.lm_head.forward

    def fail(states: Tensor) -> Tensor:
        monkeypatch.setattr(engine._model.lm_head, "forward", forward)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine._model.lm_head, "forward", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.generate_batch(asked, max_new_tokens=4)
    assert engine.generate_batch(asked, max_new_tokens=4, end_ids=[]) == [book.answer(ids(6, 0), 4) for book in books]


def test_a_listener_that_raises_ends_its_own_answer_only(engine: PagedContexts, books: list[Read]) -> None:
    def broken(_written: Written) -> None:
        raise ValueError("mine")

    good = Answer()
    engine.submit(ids(6, 0), books[0].prefix, max_new_tokens=30, on_token=broken)
    engine.submit(ids(6, 0), books[0].prefix, max_new_tokens=NEW, on_token=good, end_ids=[])
    assert good.tokens() == books[0].answer(ids(6, 0))


def test_stopping_ends_answers_and_leaves_neither_thread_nor_pages(model: Any, books: list[Read]) -> None:
    engine = PagedContexts(model, pages=40, page_size=16)
    for _ in range(2):
        threads = set(threading.enumerate())
        engine.start()
        with pytest.raises(ValueError, match="runs already"):
            engine.start()
        [thread] = set(threading.enumerate()) - threads
        answer = Answer(stop_at=2)
        engine.submit(ids(6, 0), books[0].prefix, max_new_tokens=400, on_token=answer, end_ids=[])
        assert answer.there.wait(20)
        threading.Timer(0.1, answer.go_on.set).start()
        engine.stop()
        engine.stop()
        assert not thread.is_alive()
        assert answer.over.is_set()
        assert (answer.written[-1].finish, answer.written[-1].message) == ("error", "the engine was stopped")
        with pytest.raises(ValueError, match="does not run; call start"):
            engine.hold(books[0].prefix)
    batching = engine._allocated()
    rows = weakref.ref(batching._rows[0][0].untyped_storage())
    batching.close()
    del batching
    assert rows() is None


def test_batches_of_several_threads_share_an_engine_that_none_has_started(model: Any, books: list[Read]) -> None:
    engine, asked = PagedContexts(model, pages=60, page_size=16), [(book.prefix, ids(6, 0)) for book in books]
    answers: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda new=new: answers.append(engine.generate_batch(asked, max_new_tokens=new)))
        for new in (2, 40, 4, 20, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == len(threads)
    assert not [thread for thread in threading.enumerate() if thread.name == "locret-answers"]
    with engine:
        engine.generate_batch(asked, max_new_tokens=2)
        engine.hold(books[0].prefix)  # who started it keeps it


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_no_engine_and_says_so(engine: PagedContexts, books: list[Read]) -> None:
    if not (child := os.fork()):
        try:
            engine.hold(books[0].prefix)
        except ValueError as error:
            os._exit(7 if "does not run; call start" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert engine.generate_batch([(books[0].prefix, ids(6, 0))], max_new_tokens=4, end_ids=[]) == [
        books[0].answer(ids(6, 0), 4)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "kv_bytes and pages are one setting"),
        ({"pages": 9, "kv_bytes": 9}, "kv_bytes and pages are one setting"),
        ({"pages": 2}, "pages=2 is too little; give at least [34]"),
        ({"kv_bytes": 100_000}, r"kv_bytes=100000 holds 0 pages; give at least \d+"),
        ({"pages": 9, "page_size": 3}, "page_size=3 is too little; give at least 4"),
        ({"pages": 9, "max_batch_tokens": 8}, "max_batch_tokens=8 is too little; give at least 128"),
        ({"pages": 9, "max_requests": 0}, "max_requests=0 is too little"),
    ],
)
def test_impossible_sizes_are_refused(model: PreTrainedModel, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedContexts(model, **options)


@pytest.mark.parametrize(("family", "message"), [("gemma2", "slide over a window"), ("phi3-longrope", "in two ways")])
def test_backbones_without_ordinary_prefixes_are_refused(family: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedContexts(build(family), pages=9)


@pytest.mark.parametrize(
    ("question", "new", "message"),
    [
        ([], 4, "there is no token to answer"),
        ([-1], 4, "token id -1 is none of the backbone's 0 to"),
        ([10**6], 4, "token id 1000000 is none"),
        ([5], 0, "max_new_tokens=0 is too little"),
        ([5], 1000, r"50 units, 1 tokens and up to 1000 new ones are 1051 positions, more than the \d+"),
    ],
)
def test_impossible_questions_are_refused(
    engine: PagedContexts, books: list[Read], question: list[int], new: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.submit(question, books[0].prefix, max_new_tokens=new, on_token=print)
    with pytest.raises(ValueError, match=message.replace("50 units", "0 units").replace("1051", "1001")):
        engine.generate_batch([(None, question)], max_new_tokens=new)


def test_the_longest_answer_fits(model: PreTrainedModel, books: list[Read]) -> None:
    engine = PagedContexts(model, pages=9, page_size=16)
    new = engine.longest - 50 - 3
    [answer] = engine.generate_batch([(books[0].prefix, ids(3, 0))], max_new_tokens=new, end_ids=[])
    assert len(answer) == new


def test_contexts_of_other_backbones_are_refused(engine: PagedContexts) -> None:
    for family, message in (("llama", "read the text with this backbone"), ("qwen3", "read the text")):
        other = build(family)
        cache = RetentionCache(other, "key_norm", RetentionPolicy(budget=16, chunk_size=32, stabilizers=4, local_len=4))
        prefill(other, prompt(60), cache)
        with pytest.raises(ValueError, match=message):
            engine.hold(Prefix.of(cache))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0 makes no usable probabilities"),
        ({"top_p": 0.0}, "top_p=0.0 is no share"),
        ({"top_p": 1.5}, "top_p=1.5 is no share"),
        ({"top_k": -1}, "top_k=-1 tokens"),
        ({"top_logprobs": -1}, "top_logprobs=-1 tokens"),
        ({"seed": 2**64}, "seed=18446744073709551616 is no whole number of 64 bits"),
        ({"seed": 1.5}, "seed=1.5 is no whole number"),
    ],
)
def test_impossible_sampling_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)  # type: ignore[arg-type]


def test_what_transformers_moved_is_said_in_one_sentence(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching import continuous_api

    monkeypatch.delattr(continuous_api.ContinuousBatchProcessor, "update_batch")
    engine = PagedContexts(model, pages=9)
    with pytest.raises(RuntimeError, match=rf"transformers {transformers.__version__} .*update_batch.*5.17 to 5.23"):
        engine.start()
    monkeypatch.undo()
    # What is still there, but is not asked any more, would be worse.
    monkeypatch.setattr(continuous_api.PagedAttentionCache, "search_prefix_match", None)
    monkeypatch.setattr(
        "transformers.generation.continuous_batching.scheduler.Scheduler._infer_request_tokens",
        lambda self, state, _: state.tokens_to_process if state.generated_tokens else state.remaining_prefill_tokens,
    )
    with pytest.raises(RuntimeError, match="install transformers 5.17 to 5.23"):
        engine.start()
