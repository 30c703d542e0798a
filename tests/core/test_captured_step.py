"""Captured steps write the same tokens, units and scores as steps that are run as written; no read waits for a device.

Nothing is captured on a CPU: here every step runs over the buffers that a graph would read and write.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families import build, prompt
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill
from locret.backbone.instrument import instrumented
from locret.cache import captured_step
from locret.cache.captured_step import obstacle

READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__iter__", "__contains__"}
SIZED_BY_VALUES = {
    *("local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "repeat_interleave")
}


class _Operators(TorchDispatchMode):
    """Notes operations whose result is on the host, or whose shape follows from values."""

    def __init__(self, seen: list[str], more: tuple[str, ...]) -> None:
        super().__init__()
        self.seen, self.names = seen, {*SIZED_BY_VALUES, *more}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masked = any(index is not None and index.dtype == torch.bool for index in indices)
        if masked or name.lstrip("_") in self.names:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Notes values that Python reads of a tensor."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads(*more: str) -> Iterator[list[str]]:
    """Collect what would make a host wait for its device: values read, shapes that follow from values, and `more`."""
    seen: list[str] = []
    with _Operators(seen, more), _Functions(seen):
        yield seen


POLICY: dict[str, Any] = {"budget": 200, "chunk_size": 32, "stabilizers": 8, "local_len": 8}
SHARES = (0.7, 1.3, 1.2, 0.8, 1.0, 1.0)


class Captures:
    """Counts what is captured."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], Any]] = []

    def __call__(self, step: Callable[[], Any], _device: torch.device) -> Callable[[], Any]:
        for _ in range(2):  # as the run that warms up, and that which is captured
            step()
        self.steps.append(step)
        return step


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    found = Captures()
    monkeypatch.setattr(captured_step, "DEVICES", ("cpu",))
    monkeypatch.setattr(captured_step, "capture", found)
    monkeypatch.setattr(captured_step, "_FAILED", set())
    return found


FULL = {"layer_types": ["full_attention"] * 3}
"""Of families some of whose layers slide."""


def read(family: str, tokens: int, new: int, batch: int = 1, **policy: Any) -> RetentionCache:
    model = build(family.removesuffix("-full"), **FULL) if family.endswith("-full") else build(family)
    model.generation_config.eos_token_id = None
    if policy.get("head_budgets") == "shares":
        policy["head_shares"] = SHARES
    heads = RetainingHeads.for_model(model, hidden_dim=16, seed=3)
    cache = RetentionCache(model, heads, RetentionPolicy(**{**POLICY, **policy}))
    prefill(model, prompt(tokens, batch=batch), cache, new_tokens=new)
    return cache


def write(cache: RetentionCache, new: int, **options: Any) -> Any:
    return generate(cache.model, cache=cache, max_new_tokens=new, **{"do_sample": False, **options})


def as_written(cache: RetentionCache, new: int, **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_step, "DEVICES", ())
        return write(cache, new, **options)


def assert_same(one: RetentionCache, other: RetentionCache) -> None:
    assert one.seen == other.seen
    assert torch.equal(one.digest, other.digest)
    for index in one.backbone.layers:
        assert torch.equal(one.kept_positions(index), other.kept_positions(index))
        torch.testing.assert_close(one.kept_scores(index), other.kept_scores(index), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_budgets", ["uniform", "shares"])
@pytest.mark.parametrize("family", ["llama", "phi3-longrope", "gpt-oss-full", "gemma2-full"])
def test_captured_steps_write_the_same_tokens_and_keep_the_same_scores(
    family: str, head_budgets: str, captures: Captures
) -> None:
    logits = {"return_dict_in_generate": True, "output_logits": True}
    for tokens, new, batch, budget in ((61, 8, 1, 200), (170, 37, 3, 90)):
        captures.steps.clear()
        plain = read(family, tokens, new, batch, budget=budget, head_budgets=head_budgets)
        captured = plain.copy()
        expected, found = as_written(plain, new, **logits), write(captured, new, **logits)
        assert len(captures.steps) == 1
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=2e-5, rtol=1e-5)
        assert_same(plain, captured)
        assert captured.memory().actual <= captured.memory().planned


def state_of(model: torch.nn.Module) -> list[Any]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks), set(vars(m))) for m in model.modules()]


@pytest.mark.parametrize("fails_at", [None, 0, 1, 5])
def test_the_model_is_afterwards_what_it_was_and_a_failed_capture_loses_no_answer(
    fails_at: int | None, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = read("llama", 61, 9)
    captured, again, model, calls = plain.copy(), plain.copy(), plain.model, []
    expected = as_written(plain, 9)
    before, attention = state_of(model), model.config._attn_implementation
    real = captured_step.attend_slots

    def fails(*args: Any, **options: Any) -> Tensor:
        calls.append(1)
        if fails_at is not None and len(calls) > fails_at:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return real(*args, **options)

    monkeypatch.setattr(captured_step, "attend_slots", fails)
    if fails_at is None or fails_at >= 2 * len(plain.backbone.layers):
        answer = write(captured, 9)
    else:
        with pytest.warns(UserWarning, match=r"could not be captured \(operation not permitted when stream"):
            answer = write(captured, 9)
        with warnings.catch_warnings():  # it is not tried again
            warnings.simplefilter("error")
            assert torch.equal(write(again, 9), expected)
    assert torch.equal(answer, expected)
    assert_same(plain, captured)
    assert state_of(model) == before
    assert model.config._attn_implementation == attention
    with instrumented(model):
        pass


@pytest.mark.parametrize("head_budgets", ["uniform", "shares"])
@pytest.mark.parametrize("family", ["llama", "phi3-longrope", "qwen3", "gemma2-full"])
def test_no_operation_of_a_step_waits_for_the_device(
    family: str, head_budgets: str, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def watched(step: Callable[[], Any], _device: torch.device) -> Callable[[], Any]:
        step()
        with host_reads("lift_fresh") as seen:  # a graph captures no copy from the host either
            step()
        found.extend(seen)
        return step

    monkeypatch.setattr(captured_step, "capture", watched)
    write(read(family, 90, 9, budget=60, head_budgets=head_budgets), 9)
    assert not found


@pytest.mark.parametrize(
    ("family", "options", "policy", "reason"),
    [
        ("gemma2", {}, {}, "not all layers attend to units of their own"),
        ("llama", {"num_beams": 2}, {}, "beams or answers change places"),
        ("llama", {"max_new_tokens": 7}, {}, "an answer of 7 tokens is shorter than a capture"),
        ("llama", {"output_hidden_states": True, "return_dict_in_generate": True}, {}, "hidden states of every step"),
        ("llama", {}, {"decode_budget": 100}, "units go or come at every step"),
        ("llama", {}, {"key_bits": 8, "value_bits": 8}, "no slots of its own for every unit"),
    ],
)
def test_where_steps_cannot_be_captured_they_run_as_written(
    family: str, options: dict[str, Any], policy: dict[str, Any], reason: str, captures: Captures
) -> None:
    cache = read(family, 90, 9, **policy)
    given = {"max_new_tokens": 9, "do_sample": False, **options}
    copies = max(given.get("num_beams", 1), given.get("num_return_sequences", 1))
    said = obstacle(cache.model, cache, GenerationConfig(**given), given["max_new_tokens"], copies)
    assert said is not None
    assert reason in said
    generate(cache.model, cache=cache, **given)
    assert not captures.steps


# -- nothing waits for the device -------------------------------------------------------------------------------------


def test_the_watch_sees_a_host_that_waits() -> None:
    for read in (torch.Tensor.item, torch.Tensor.tolist, bool, lambda t: t.view(1)[t.view(1) > 0]):
        with host_reads() as seen:
            read(torch.tensor(1.0))
        assert seen


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("scorer", ["retaining_heads", "snapkv", "h2o"])
@pytest.mark.parametrize("family", ["llama", "phi3-longrope"])
def test_chunks_after_the_first_wait_for_nothing(family: str, scorer: str, positions: str) -> None:
    model = build(family)
    with host_reads() as plain:
        model.model(prompt(10), position_ids=torch.arange(10).unsqueeze(0))
    if plain:
        pytest.skip("this transformers itself reads positions on the host, to choose between LongRoPE's factors")
    chosen = RetainingHeads.for_model(model, hidden_dim=16, seed=3) if scorer == "retaining_heads" else scorer
    policy = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6, positions=positions)
    cache, waits = RetentionCache(model, chosen, policy), []
    with host_reads() as seen:

        def chunk_done(_cache: RetentionCache) -> None:
            waits.append(list(seen))
            seen.clear()

        prefill(model, prompt(77), cache, on_chunk=chunk_done)
    assert len(waits) == 8
    assert not any(waits[1:])
    assert not seen
