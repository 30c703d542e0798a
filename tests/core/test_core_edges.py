"""Ways to break a cache: each test here failed when it was written."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from families import build, prompt

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache, scorers
from locret.backbone.adapters import find_decoder
from locret.backbone.chunk import Chunk
from locret.backbone.rotary import Rotary
from locret.cache.store import DenseStore
from locret.scorers import Rated, Scorer

POLICY = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6)
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
both_stores = pytest.mark.parametrize("head_budgets", ["uniform", "adaptive"])


def new_cache(model: Any, scorer: Scorer | str = "heads", **changes: Any) -> RetentionCache:
    rater: Any = RetainingHeads.for_model(model, hidden_dim=16, seed=3) if scorer == "heads" else scorer
    return RetentionCache(model, rater, dataclasses.replace(POLICY, **changes))


class Stop(BaseException):
    """Stands for KeyboardInterrupt, or for memory that is not there."""


def stops_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def stopping(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Stop
        return function(*args, **named)

    return stopping


# -- other results than before the restructuring ----------------------------------------------------------------------


def test_nacl_keeps_its_first_units_when_an_answer_evicts_what_the_prompts_end_selected() -> None:
    # The prompt's end pins 6 first units; the answer's smaller budget pins 3, and the others score less than any drawn.
    model, scorer = build("llama"), scorers.get("nacl", protect_share=0.5, most_proxies=8)
    changes = {"decode_budget": 14, "decode_interval": 2, "when": "prompt_end", "positions": "original"}
    numbers = {"chunk_size": 33, "stabilizers": 3, "local_len": 2}
    cache = new_cache(model, scorer, **changes, **numbers)
    prefill(model, prompt(130, seed=1), cache)
    first = [0, 1, 2, 3, 4, 5]
    assert cache.kept_positions(0)[0, 0, :6].tolist() == first
    generate(model, cache=cache, max_new_tokens=1, **GREEDY)
    # as before the restructuring
    assert cache.kept_positions(0)[0, 0].tolist() == [*first, 11, 24, 35, 126, 127, 128, 129]


# -- several threads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", range(12))
def test_a_rotary_table_is_the_one_that_was_asked_for_whenever_another_thread_asks(line: int) -> None:
    # Copies of a cache share one Rotary, so copies that are read in several threads get each other's tables: read in
    # three threads they fail with tensors of different sizes, or, where sizes agree, are rotated to other positions.
    rotary, like, passed = Rotary(find_decoder(build("llama"))), torch.zeros(1), 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal passed
        if frame.f_code is not Rotary.table.__code__:
            return None
        if event == "line":
            passed += 1
            if passed == line:  # as if the thread were changed before this line
                sys.settrace(None)
                rotary.table(0, 7, like)
        return trace

    rotary.table(0, 3, like)
    sys.settrace(trace)
    try:
        cos, _ = rotary.table(0, 3 if line < 6 else 5, like)
    finally:
        sys.settrace(None)
    assert len(cos) == (3 if line < 6 else 5)


def test_a_plain_call_that_is_refused_inside_a_pass_leaves_the_pass_alone() -> None:
    model = build("llama")
    expected, busy = prefill(model, prompt(60), new_cache(model)), []

    def plain(*_: object) -> None:
        if not busy:
            busy.append(1)
            with pytest.raises(ValueError, match="was called without this RetentionCache"):
                model(prompt(4))
            busy.clear()

    handle = model.model.layers[1].register_forward_hook(plain)
    try:
        assert torch.equal(prefill(model, prompt(60), new_cache(model)), expected)
    finally:
        handle.remove()


# -- interrupted outside a read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["take_back", "select_rows"])
def test_a_change_that_stopped_between_two_layers_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Half of the layers have forgotten the token, or have another row first; the cache says it is whole.
    model = build("llama")
    cache = new_cache(model)
    prefill(model, prompt(60, 2), cache)
    change = {"take_back": cache.take_back, "select_rows": lambda: cache.select_rows(torch.tensor([1, 0]))}[name]
    with monkeypatch.context() as patch:
        patch.setattr(DenseStore, name, stops_at(2, getattr(DenseStore, name)))
        with pytest.raises(Stop):
            change()
    with pytest.raises(ValueError, match="interrupted"):
        cache.copy()


def test_rows_that_could_not_be_joined_leave_a_cache_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # `seen` is 60 by then, and no layer holds anything.
    model = build("llama")
    cache, mask = new_cache(model), torch.ones(2, 60, dtype=torch.long)
    mask[0, :9] = 0
    with monkeypatch.context() as patch:
        patch.setattr(DenseStore, "join", stops_at(1, DenseStore.join))
        with pytest.raises(Stop):
            prefill(model, prompt(60, 2), cache, mask)
    if cache.seen:
        with pytest.raises(ValueError, match="interrupted"):
            cache.copy()


def test_a_padded_batch_is_refused_before_it_is_read_into_an_interrupted_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")
    cache, mask, passes = new_cache(model), torch.ones(2, 60, dtype=torch.long), []
    mask[0, :9] = 0
    with monkeypatch.context() as patch:
        patch.setattr(DenseStore, "append", stops_at(2, DenseStore.append))
        with pytest.raises(Stop):
            prefill(model, prompt(60), cache)
    handle = model.model.register_forward_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match="interrupted"):
        prefill(model, prompt(60, 2), cache, mask)
    handle.remove()
    assert not passes


def test_scores_that_could_not_be_computed_when_an_answer_ended_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The units' scores are what was in the memory before.
    model = build("llama")
    cache = new_cache(model, budget=200)
    prefill(model, prompt(300), cache)
    monkeypatch.setattr(type(cache.scorer), "score_features", stops_at(2, type(cache.scorer).score_features))
    with pytest.raises(Stop):
        generate(model, cache=cache, max_new_tokens=4, **GREEDY)
    with pytest.raises(ValueError, match="interrupted"):
        cache.copy()


@both_stores
def test_an_answer_that_finds_no_memory_can_be_asked_for_again_in_less(head_budgets: str) -> None:
    # `_resize` notes the capacity before there are buffers of it, so the next append writes behind the old ones.
    model = build("llama")
    cache = new_cache(model, head_budgets=head_budgets)
    prefill(model, prompt(90), cache)
    expected = generate(model, cache=cache.copy(), max_new_tokens=20, **GREEDY)
    with pytest.raises(RuntimeError, match="alloc"):
        generate(model, cache=cache, max_new_tokens=10**13, **GREEDY)
    assert torch.equal(generate(model, cache=cache, max_new_tokens=20, **GREEDY), expected)


# -- the newest token -------------------------------------------------------------------------------------------------


def test_an_answer_to_a_prompt_of_one_token() -> None:
    # Features of the first layer look for room in the workspace, before the others have buffers.
    model = build("llama")
    answer = generate(model, prompt(1), cache=new_cache(model), max_new_tokens=4, **GREEDY)
    assert torch.equal(answer, model.generate(prompt(1), max_new_tokens=4, **GREEDY))


def test_a_text_read_after_an_answer_that_did_not_begin_follows_the_whole_prompt() -> None:
    # `generate` has taken the last token back to feed it; `prefill` goes on without it.
    model = build("llama")
    cache = new_cache(model)
    prefill(model, prompt(90), cache)
    with pytest.raises(ValueError, match="not_an_option"):
        generate(model, cache=cache, max_new_tokens=3, not_an_option=1, **GREEDY)
    prefill(model, prompt(20, seed=5), cache)
    assert cache.seen == 110


def test_a_token_to_be_fed_again_counts_once_after_saving_too(tmp_path: Path) -> None:
    # `fed_again` is not in the file.
    model = build("llama")
    cache = new_cache(model, "h2o")
    prefill(model, prompt(90), cache)
    cache.take_back()
    save_cache(cache, tmp_path / "cache")
    loaded = load_cache(tmp_path / "cache", model, "h2o")
    for each in (cache, loaded):
        generate(model, cache=each, max_new_tokens=1, **GREEDY)
    torch.testing.assert_close(loaded.kept_scores(0), cache.kept_scores(0))


# -- inference mode ---------------------------------------------------------------------------------------------------


@both_stores
@pytest.mark.parametrize("change", ["copy", "select_rows"])
def test_a_cache_changed_in_inference_mode_can_be_answered_from(change: str, head_budgets: str) -> None:
    # Buffers made in inference mode cannot be written outside of it, and `generate` leaves it.
    model = build("llama")
    cache = new_cache(model, head_budgets=head_budgets)
    prefill(model, prompt(60, 2), cache, new_tokens=40)
    expected = generate(model, cache=cache.copy(), max_new_tokens=5, **GREEDY)
    with torch.inference_mode():
        if change == "copy":
            cache = cache.copy()
        else:
            cache.select_rows(torch.arange(2))
    assert torch.equal(generate(model, cache=cache, max_new_tokens=5, **GREEDY), expected)


# -- a method of one's own --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class QueriesSeen(Scorer):
    """Counts the queries that have seen a unit, in a column."""

    name: ClassVar[str] = "queries_seen"
    positions: ClassVar[str] = "original"
    causal: ClassVar[bool] = False
    by_head: ClassVar[bool] = True
    columns: ClassVar[Mapping[str, torch.dtype]] = MappingProxyType({"queries": torch.float32})

    def score(self, chunk: Chunk) -> Rated:
        new, slots = chunk.new_tokens, chunk.key.shape[2]
        saw = (slots - torch.arange(slots)).clamp_max(new)
        return Rated(chunk.unit_positions.float(), {"queries": chunk.columns["queries"] + saw})


@both_stores
def test_a_token_fed_twice_counts_once_in_columns_too(head_budgets: str) -> None:
    # The scores of older units are cut off, but not their columns.
    model = build("llama")
    cache = new_cache(model, QueriesSeen(), head_budgets=head_budgets, budget=64)
    prefill(model, prompt(20), cache)
    expected = torch.arange(20, 0, -1).float()
    assert torch.equal(cache.governed[0].store.held("queries")[0, 0], expected)
    generate(model, cache=cache, max_new_tokens=1, **GREEDY)
    assert torch.equal(cache.governed[0].store.held("queries")[0, 0], expected)


@both_stores
def test_a_file_without_a_methods_columns_is_loaded_or_refused_in_a_sentence(head_budgets: str, tmp_path: Path) -> None:
    model = build("llama")
    cache = new_cache(model, "random", head_budgets=head_budgets, positions="original")
    prefill(model, prompt(60), cache)
    save_cache(cache, tmp_path / "cache")
    try:
        load_cache(tmp_path / "cache", model, QueriesSeen())
    except ValueError as refused:
        assert "queries" in str(refused)  # noqa: PT017


@pytest.mark.parametrize("name", ["keys", "values", "scores", "positions", "counts", "row_start"])
def test_a_column_cannot_take_a_name_that_a_store_uses(name: str) -> None:
    # A column called "keys" is moved by evictions instead of the keys.
    scorer = type("Clash", (QueriesSeen,), {"columns": MappingProxyType({name: torch.float32})})()
    with pytest.raises(ValueError, match=name):
        new_cache(build("llama"), scorer)


@both_stores
@pytest.mark.parametrize("count", ["one", "fewer", "more"])
def test_a_method_that_rates_another_number_of_units_is_refused(count: str, head_budgets: str) -> None:
    # Units that got no score have what was in the memory before, so the selection differs from run to run.
    class Short(QueriesSeen):
        columns: ClassVar[Mapping[str, torch.dtype]] = MappingProxyType({})
        causal: ClassVar[bool] = True

        def score(self, chunk: Chunk) -> Any:
            units = {"one": 1, "fewer": chunk.new_tokens - 1, "more": chunk.key.shape[2] + 1}[count]
            return torch.rand(1, chunk.key.shape[1], units)

    model = build("llama")
    with pytest.raises(ValueError, match="queries_seen"):
        prefill(model, prompt(60), new_cache(model, Short(), head_budgets=head_budgets))


# -- memory and the model ---------------------------------------------------------------------------------------------


def test_room_for_an_answer_to_a_padded_batch_selected_at_its_end_is_made_once() -> None:
    # `join` makes the room, and `end_reading(0)` gives it back at once.
    model, mask = build("llama"), torch.ones(2, 60, dtype=torch.long)
    mask[0, :9] = 0
    cache = new_cache(model, when="prompt_end")
    prefill(model, prompt(60, 2), cache, mask, new_tokens=40)
    assert cache.governed[0].capacity >= cache.governed[0].fill + 40


def test_a_method_that_somebody_has_put_on_the_model_is_still_there_after_a_read() -> None:
    model = build("phi3-longrope")
    model.prepare_inputs_for_generation = own = model.prepare_inputs_for_generation
    prefill(model, prompt(40), new_cache(model))
    assert vars(model).get("prepare_inputs_for_generation") is own


def test_a_forward_that_somebody_has_put_on_the_decoder_is_still_there_after_an_answer() -> None:
    # As accelerate does, to move the weights of a layer to its device.
    model = build("llama")
    model.model.forward = own = model.model.forward
    generate(model, prompt(40), cache=new_cache(model), max_new_tokens=3, **GREEDY)
    assert vars(model.model).get("forward") is own
