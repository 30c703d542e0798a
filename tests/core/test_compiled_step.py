"""Compiled steps write the same tokens, units and scores as steps that are run as written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import build, prompt

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill
from locret.backbone.instrument import instrumented
from locret.cache.compiled_step import attend_slots, weighed

POLICY: dict[str, Any] = {"budget": 200, "chunk_size": 32, "stabilizers": 8, "local_len": 8}
TRACED = "eager"
"""The backend that traces a step into one program and runs its operations as they are: no compiler is waited for."""


@pytest.fixture(autouse=True)
def _no_programs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def read(family: str, tokens: int, new: int, batch: int = 1, **policy: Any) -> RetentionCache:
    model = build(family)
    model.generation_config.eos_token_id = None
    heads = RetainingHeads.for_model(model, hidden_dim=16, seed=3)
    cache = RetentionCache(model, heads, RetentionPolicy(**{**POLICY, **policy}))
    prefill(model, prompt(tokens, batch=batch), cache, new_tokens=new)
    return cache


def write(cache: RetentionCache, new: int, **options: Any) -> torch.Tensor:
    return generate(cache.model, cache=cache, max_new_tokens=new, **{"do_sample": False, **options})


def assert_same(one: RetentionCache, other: RetentionCache) -> None:
    assert one.seen == other.seen
    for index in one.backbone.layers:
        assert torch.equal(one.kept_positions(index), other.kept_positions(index))
        torch.testing.assert_close(one.kept_scores(index), other.kept_scores(index), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("tokens", "new", "batch"), [(250, 21, 1), (61, 1, 1), (170, 37, 2)])
@pytest.mark.parametrize("family", ["llama", "llama-mha", "phi3", "phi3-longrope", "qwen3"])
@pytest.mark.slow
def test_a_compiled_step_writes_the_same_tokens_and_keeps_the_same_scores(
    family: str, tokens: int, new: int, batch: int
) -> None:
    plain = read(family, tokens, new, batch)
    compiled = plain.copy()
    assert torch.equal(write(plain, new), write(compiled, new, compile=TRACED))
    assert_same(plain, compiled)
    assert compiled.memory().actual <= compiled.memory().planned


@pytest.mark.slow
def test_sampling_draws_the_same_tokens_and_a_conversation_goes_on() -> None:
    plain = read("llama", 120, 10)
    compiled = plain.copy()
    answers = []
    for cache, how in ((plain, False), (compiled, TRACED)):
        torch.manual_seed(5)
        first = write(cache, 10, do_sample=True, compile=how)
        prefill(cache.model, prompt(90, seed=2), cache, new_tokens=7)
        answers.append(torch.cat([first, write(cache, 7, compile=how)], dim=1))
    assert torch.equal(*answers)
    assert_same(plain, compiled)


def test_whole_conversations_are_continued_by_compiled_steps() -> None:
    model, ids = build("llama"), prompt(77)
    heads = RetainingHeads.for_model(model, hidden_dim=16, seed=3)
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    plain, compiled = (RetentionCache(model, heads, RetentionPolicy(**POLICY)) for _ in range(2))
    expected = generate(model, ids, cache=plain, **options)
    assert torch.equal(generate(model, ids, cache=compiled, compile=TRACED, **options), expected)
    assert_same(plain, compiled)


@pytest.mark.slow
def test_one_program_serves_answers_of_any_length() -> None:
    programs: list[Any] = []

    def count(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        programs.append(graph)
        return graph.forward

    first = read("llama", 250, 5)
    for tokens, new in ((250, 5), (230, 6), (170, 7), (250, 19), (140, 3), (90, 2)):
        cache = first.fresh()
        prefill(cache.model, prompt(tokens), cache, new_tokens=new)
        write(cache, new, compile=count)
    assert len(programs) <= 3, "one for the first answer, one for any length, one for any room for features"


@pytest.mark.slow
def test_the_model_is_afterwards_what_it_was() -> None:
    cache = read("llama", 61, 4)
    model = cache.model
    before, attention = (
        [(len(module._forward_hooks), set(vars(module))) for module in model.modules()],
        model.config._attn_implementation,
    )
    write(cache, 4, compile=TRACED)
    assert [(len(module._forward_hooks), set(vars(module))) for module in model.modules()] == before
    assert model.config._attn_implementation == attention
    with instrumented(model):
        pass


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_one_token_attends_to_the_slots_that_the_mask_leaves(softcap: float | None) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 1, 8), torch.randn(2, 3, 13, 8), torch.randn(2, 3, 13, 8)
    mask = torch.zeros(1, 1, 1, 13)
    mask[..., 9:] = -torch.inf
    out, _ = attend_slots(torch.nn.Identity(), query, key, value, mask, scaling=0.3, softcap=softcap)
    assert out.shape == (2, 1, 6, 8)
    for head in range(6):
        logits = (query[:, head] @ key[:, head // 2, :9].transpose(-1, -2)) * 0.3
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        expected = logits.softmax(-1) @ value[:, head // 2, :9]
        torch.testing.assert_close(out[:, :, head], expected)


@pytest.mark.parametrize("slots", [3, 8, 61, 64, 97])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_are_weighed_in_pieces_as_in_one_product(dtype: torch.dtype, slots: int) -> None:
    torch.manual_seed(0)
    weights, held = torch.randn(2, 3, 4, slots).softmax(-1), torch.randn(2, 3, 100, 16, dtype=dtype)
    value = held[:, :, :slots]
    out = weighed(weights, value)
    assert out.dtype == dtype
    error = (out.double() - weights.double() @ value.double()).abs()
    # Weights, sums of pieces and the whole are rounded once each; products in float32 add a little.
    rounded = 3 * torch.finfo(dtype).eps / 2 + 1e-6
    assert bool((error <= rounded * (weights.double() @ value.double().abs())).all())


@pytest.mark.parametrize(
    ("family", "options", "policy", "reason"),
    [
        ("gemma2", {}, {}, "layers of gemma2 slide over a window"),
        ("llama", {"num_beams": 2}, {}, "2 beams or answers change places between steps"),
        ("llama", {"max_new_tokens": None}, {}, "max_new_tokens is not given"),
        ("llama", {}, {"decode_budget": 100}, "decode_budget=100 evicts while an answer is written"),
        ("llama", {}, {"head_budgets": "adaptive"}, "layers or heads hold different numbers of units"),
        ("llama", {}, {"budget": 30, "layer_budgets": "pyramid"}, "layers or heads hold different numbers of units"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    family: str, options: dict[str, Any], policy: dict[str, Any], reason: str
) -> None:
    cache = read(family, 90, 4, **policy)
    with pytest.raises(ValueError, match=f"^generation cannot be compiled here: .*{reason}; leave out compile$"):
        generate(cache.model, cache=cache, compile=True, **{"max_new_tokens": 4, **options})


def test_a_scorer_that_looks_at_attention_is_refused() -> None:
    model = build("llama")
    cache = RetentionCache(model, "h2o", RetentionPolicy(**POLICY))
    prefill(model, prompt(61), cache)
    with pytest.raises(ValueError, match="scorer h2o looks at every step's attention; retaining heads do not"):
        generate(model, cache=cache, max_new_tokens=4, compile=True)


def test_a_machine_without_a_compiler_says_so() -> None:
    def fails(_graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        raise RuntimeError("no compiler is here\nlong story")

    cache = read("llama", 61, 4)
    with pytest.raises(ValueError, match=r"^this machine cannot compile a step \(.*no compiler is here\); leave out"):
        write(cache, 4, compile=fails)


@pytest.mark.slow
def test_inductor_writes_the_same_tokens() -> None:
    plain = read("llama", 250, 21)
    compiled = plain.copy()
    assert torch.equal(write(plain, 21), write(compiled, 21, compile=True))
    assert_same(plain, compiled)
