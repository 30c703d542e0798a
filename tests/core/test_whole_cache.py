"""The whole cache: whatever the policy, the scorer, the family and the length of the text, the same claims hold.

Each test draws a run from `runs()`: one to three parts of a policy over small numbers, a scorer and a backbone. What
cannot go together has to be refused in one sentence. The draws of the fast run are always the same; the slow run draws
others, and more.
"""

from __future__ import annotations

import functools
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

import oracle as reference
import torch
from families import build, merger, prompt
from hypothesis import Phase, assume, example, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache, scorers
from locret.policy.schedule import protected
from locret.policy.sizes import divided, shared_budgets

ASKED: dict[str, Any] = {
    "do_sample": False,
    "eos_token_id": None,
    "output_logits": True,
    "return_dict_in_generate": True,
}
HEADS = "heads"
SCORERS = (
    HEADS,
    "random",
    "key_norm",
    "h2o",
    "snapkv:window=7",
    "tova",
    "key_difference",
    "scissorhands:history=8",
    "nacl:most_proxies=6",
    "sage_kv",
    "sirllm",
    "streaming",
    "expected_attention:queries=8,future=30",
)
MIXED = ("gemma3", "gpt-oss", "qwen3-next")
"""Families with layers of other kinds, whose bytes a short text does not reach."""
FAMILIES = ("llama", "llama-mqa", "qwen3", "gemma3", "gpt-oss", "phi3-longrope", "mixtral", "qwen3-next")
SLOW = int(os.environ.get("LOCRET_EXAMPLES", "10"))
"""By how much more the slow run draws."""

# What a policy is put together from; `budget` is drawn first, and numbers that depend on it are functions of it.
PARTS: dict[str, dict[str, Any]] = {
    "positions": {"positions": "original"},
    "moment": {"when": "prompt_end"},
    "turns": {"turns": "text"},
    "pyramid": {"layer_budgets": "pyramid", "pyramid_beta": 4},
    "adaptive heads": {"head_budgets": "adaptive"},
    "head shares": {"head_budgets": "shares", "stabilizers": 0},
    "spaced head shares": {"head_budgets": "shares", "stabilizers": 0, "spacing": 5},
    "diverse": {"diversity": 0.3},
    "linear": {"memory": "linear"},
    "square_sqrt": {"memory": "square_sqrt"},
    "adaptive memory": {"memory": "adaptive"},
    "decremental": {"memory": "sqrt", "decremental": True, "min_chunk": 3},
    "tier": {"host_budget": 17, "recall": 4},
    "tier of everything": {"host_budget": "all", "recall": 5},
    "tier by quest": {"host_budget": 17, "recall": 4, "recall_by": "quest:page=4"},
    "8 bits": {"key_bits": 8, "value_bits": 8},
    "4 bits": {"key_bits": 4, "value_bits": 4, "rounding": "channel:group=4", "exact_recent": 6},
    "2 bits": {"value_bits": 2, "rounding": "token:group=8", "exact_layers": 1},
    "bounded answer": {"decode_budget": lambda budget: budget + 12, "decode_interval": 4},
    "merger": {"merge": lambda _: merger("llama")},
    "sparse": {"prefill_attention": "xattention:threshold=0.7,stride=2,block=4"},
}

ROUNDED = ("8 bits", "4 bits", "2 bits")
EXACT = tuple(part for part in PARTS if part not in ROUNDED)
"""Where numbers are rounded, the last bit of a sum may decide, and other kernels come to other units."""
GROWING = ("linear", "square_sqrt", "adaptive memory", "decremental")


@dataclass(frozen=True)
class Run:
    """A text that is read by a policy; hashable, so that what is drawn twice is read once."""

    family: str
    scorer: str
    parts: tuple[str, ...]
    numbers: tuple[int, int, int, int]
    """Budget, chunk size, stabilizers, local tokens."""
    tokens: int

    def cache(self, **changes: Any) -> RetentionCache:
        """Return an empty cache; skip what is refused, in one sentence."""
        note(repr(self))
        try:
            rules = self.policy(**changes)
            return RetentionCache(model_of(self.family), scorer_of(self.scorer, self.family), rules)
        except ValueError as error:
            if "\n" in str(error):
                raise
            assume(False)
            raise

    def policy(self, **changes: Any) -> RetentionPolicy:
        """Return the rules."""
        names = ("budget", "chunk_size", "stabilizers", "local_len")
        rules: dict[str, Any] = dict(zip(names, self.numbers, strict=True))
        for part in self.parts:
            rules |= {name: v(rules["budget"]) if callable(v) else v for name, v in PARTS[part].items()}
        layers, kv_heads = shape_of(self.family)
        if rules.get("head_budgets") == "shares":
            rules["head_shares"] = tuple(1 + nth % 3 for nth in range(layers * kv_heads))
        return RetentionPolicy(**{**rules, **changes})


@contextmanager
def double() -> Iterator[None]:
    """Let the oracle make its tensors in double precision too."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@once
def model_of(family: str) -> Any:
    """Return a backbone of double precision: where two units are nearly as good, rounding would decide.

    Its padding has an embedding too: to a query of zeros, all units are equal.
    """
    model = build(family, _experts_implementation="eager").double()  # other experts know no double precision
    with torch.no_grad():
        model.get_input_embeddings().weight[0].normal_(std=0.2)
    return model


@once
def shape_of(family: str) -> tuple[int, int]:
    backbone = RetentionCache(model_of(family), "random", RetentionPolicy(budget=8)).backbone
    return len(backbone.layers), backbone.num_kv_heads


@once
def scorer_of(name: str, family: str) -> Any:
    if name == HEADS:
        return RetainingHeads.for_model(model_of(family), hidden_dim=12, seed=1).double()
    return scorers.get(name)


def runs(
    families: tuple[str, ...] = FAMILIES, names: tuple[str, ...] = SCORERS, parts: tuple[str, ...] = tuple(PARTS)
) -> st.SearchStrategy[Run]:
    """Return runs that a seed determines: hypothesis would draw one much like the other."""

    def drawn(seed: int) -> Run:
        draw = random.Random(seed)
        budget = draw.randint(9, 40)
        numbers = (budget, draw.randint(5, 20), draw.randint(0, budget // 3), draw.randint(1, 8))
        chosen = tuple(sorted(draw.sample(parts, min(len(parts), draw.choice((0, 1, 1, 2, 2, 3))))))
        family = "llama" if "merger" in chosen else draw.choice(families)
        return Run(family, draw.choice(names), chosen, numbers, draw.randint(1, 90))

    return st.integers(0, 2**32).map(drawn)


def examples(count: int) -> Callable[[Any], Any]:
    """Let hypothesis draw so many runs, always the same ones; or with LOCRET_EXAMPLES others, so many times more."""
    many = "LOCRET_EXAMPLES" in os.environ
    phases = (Phase.explicit, Phase.generate)  # there is no smaller seed
    return settings(max_examples=count * (SLOW if many else 1), derandomize=not many, phases=phases)


# -- what is done with a cache, and what can be seen of it ------------------------------------------------------------


def seen_in(cache: RetentionCache) -> list[Tensor]:
    layers = cache.backbone.layers
    return [held(layer) for layer in layers for held in (cache.kept_positions, cache.kept_scores)]


def answered(cache: RetentionCache, tokens: int = 5) -> Tensor:
    """Return (B, tokens, vocabulary) logits of an answer."""
    return torch.stack(generate(cache.model, cache=cache, max_new_tokens=tokens, **ASKED).logits, dim=1)


def followed(cache: RetentionCache) -> list[Tensor]:
    """Answer, read a second text and answer again; return all that can be seen of it."""
    first = answered(cache)
    second = prefill(cache.model, prompt(23, seed=9).expand(cache.rows, -1), cache)
    return [first, second, *seen_in(cache), answered(cache, 2)]


def same(run: Run, one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether all bits are the same; learned sinks add up in the order that memory suggests."""
    equal = functools.partial(torch.allclose, atol=1e-5) if run.family == "gpt-oss" else torch.equal
    return len(one) == len(other) and all(map(equal, one, other))


def text_of(run: Run, batch: int = 1) -> Tensor:
    """Return (batch, N) ids."""
    return torch.cat([ids_of(run.tokens, seed) for seed in range(batch)])


def ids_of(length: int, seed: int) -> Tensor:
    """Return (1, N) ids, none twice: equal tokens have equal scores in the first layer, and rounding would decide."""
    return torch.randperm(196, generator=torch.Generator().manual_seed(seed))[None, :length] + 3


# -- bytes and units --------------------------------------------------------------------------------------------------


def no_more_than_planned(cache: RetentionCache) -> None:
    memory = cache.memory()
    assert memory.actual <= memory.peak <= memory.planned
    if cache.policy.decode_budget is None:  # an answer that may evict has room for that
        assert memory.host == memory.host_planned
    else:
        assert memory.host <= memory.host_planned


@examples(30)
@given(run=runs())
def test_no_moment_of_reads_and_answers_holds_more_than_is_planned(run: Run) -> None:
    cache = run.cache()
    prefill(cache.model, text_of(run), cache, new_tokens=6)
    no_more_than_planned(cache)
    if run.family not in MIXED and not {"moment", *GROWING} & set(run.parts) and run.tokens > 30:
        assert cache.memory().actual == cache.memory().planned
    answered(cache, 6)
    no_more_than_planned(cache)
    if cache.policy.decode_budget is not None and cache.policy.layer_budgets == "uniform":
        assert cache.memory().units <= cache.policy.decode_budget
    prefill(cache.model, prompt(37, seed=5), cache)
    no_more_than_planned(cache)


@examples(24)
@given(run=runs(parts=tuple(part for part in PARTS if part != "moment")))
def test_every_chunk_keeps_as_many_units_as_are_planned_in_the_order_of_the_text(run: Run) -> None:
    cache, seen = run.cache(), []
    layers, rules = cache.backbone.layers, cache.policy
    schedule = cache.limits.plan(run.tokens)
    prefill(cache.model, text_of(run), cache, on_chunk=lambda c: seen.append([c.kept_positions(n) for n in layers]))
    seen.append([cache.kept_positions(layer) for layer in layers])
    read = 0
    for number, held in enumerate(seen):
        local = number == len(seen) - 1
        step = schedule.last if local else schedule.steps[number]
        read += step.tokens
        for units, most, budget in zip(held, step.kept, step.budgets, strict=True):
            counts = (units >= 0).sum(2)
            if not schedule.shared and not local:
                assert counts.float().mean() == most
            guarded = 0 if schedule.shared or number == len(seen) - 2 else protected(rules, budget)
            newest = min(read, run.numbers[3] if local else guarded)
            assert counts.min() >= newest
            assert (units.diff(dim=2) > 0).logical_or(units[..., :-1] < 0).all()
            assert (units[..., units.shape[2] - newest :] == torch.arange(read - newest, read)).all()


# -- what is kept, and what is said -----------------------------------------------------------------------------------

OF_THE_ORACLE = ("positions", "pyramid", "linear", "square_sqrt", "decremental", "adaptive heads", "diverse")
TIERS = ("tier", "tier of everything")
INV_FREQ = 10000.0 ** -(torch.arange(0, 8, 2).double() / 8)


@examples(12)
@example(run=Run("llama", HEADS, ("adaptive heads",), (20, 11, 4, 5), 70))
@example(run=Run("llama", HEADS, ("diverse",), (20, 11, 4, 5), 70))
@given(run=runs(families=("llama", "llama-mqa", "qwen3", "llama-mha"), names=(HEADS,), parts=OF_THE_ORACLE))
@torch.no_grad()
def test_what_is_kept_and_said_is_what_the_slow_oracle_keeps_and_says(run: Run) -> None:
    cache, kept = run.cache(), []
    rules, layers, ids = cache.policy, cache.backbone.layers, text_of(run)
    planned = cache.limits.plan(run.tokens).steps
    guarded = [[step is not planned[-1] and protected(rules, units) for units in step.budgets] for step in planned]
    steps = [(step.tokens, list(step.budgets), newest) for step, newest in zip(planned, guarded, strict=True)]
    # Heads that say nothing of their training are compared by the softmax of their scores.
    split = (rules.head_floor, True) if rules.head_budgets == "adaptive" else None

    def record(cache: RetentionCache) -> None:
        held = [cache.kept_positions(layer)[0] for layer in layers]
        kept.append([[head[head >= 0].tolist() for head in layer] for layer in held])

    logits = prefill(cache.model, ids, cache, on_chunk=record)
    original = rules.positions == "original"
    slow = (cache.model, scorer_of(HEADS, run.family), ids[0], INV_FREQ, 1.0, run.numbers, original, steps, split)
    with double():
        history, expected = reference.read_prompt(*slow, rules.diversity)
    assert kept == history
    torch.testing.assert_close(logits[0].double(), expected, atol=2e-5, rtol=0)


@examples(12)
@example(run=Run("llama", HEADS, (), (20, 11, 4, 5), 70), tier="tier", second=20)
@example(run=Run("llama", HEADS, ("adaptive heads",), (20, 11, 4, 5), 70), tier="tier", second=20)
@example(run=Run("llama", HEADS, ("diverse", "head shares"), (20, 11, 0, 5), 90), tier="tier", second=30)
@example(
    run=Run("llama", HEADS, ("head shares", "positions"), (12, 11, 0, 5), 70), tier="tier of everything", second=20
)
@given(
    run=runs(
        families=("llama", "llama-mqa", "qwen3"), names=(HEADS,), parts=("positions", "adaptive heads", "diverse")
    ),
    tier=st.sampled_from(TIERS),
    second=st.integers(1, 40),
)
@torch.no_grad()
def test_both_tiers_hold_and_recall_what_the_slow_oracle_does(run: Run, tier: str, second: int) -> None:
    note(f"{tier}, {second} further tokens")
    cache, read = run.cache(**PARTS[tier]), []
    rules, tiers = cache.policy, cache.limits.tiers
    whole = ids_of(run.tokens + second, seed=0)
    used = whole[0].tolist()
    for ids in (whole[:, : run.tokens], whole[:, run.tokens :]):
        first = prefill(cache.model, ids, cache)
        asked = {"max_new_tokens": 4, "suppress_tokens": used, "no_repeat_ngram_size": 1}  # each token once
        out = generate(cache.model, cache=cache, **asked, **ASKED)
        read.append((ids[0], out.sequences[0, :-1]))
        used += out.sequences[0].tolist()
    split: Any = (rules.head_floor, True) if "adaptive heads" in run.parts else None
    if "head shares" in run.parts:  # of texts that every layer has a use for

        def split(layer: int, counts: list[int]) -> list[int]:
            own = cache.policy.head_shares[2 * layer : 2 * layer + 2]
            sums = [sum(cache.policy.head_shares[at : at + 2]) for at in (0, 2, 4)]
            layers = shared_budgets(rules.budget, sums, (2, 2, 2))
            return divided(2 * layers[layer], own, counts, least=1)

    with double():
        held, logits = reference.answer_with_recall(
            cache.model,
            scorer_of(HEADS, run.family),
            read,
            INV_FREQ,
            1.0,
            run.numbers,
            ([own if isinstance(rules.host_budget, int) else (None,) * len(own) for own in tiers], rules.recall),
            original_positions=rules.positions == "original",
            split=split,
            diversity=rules.diversity,
        )
    for layer, units in zip(cache.governed, held, strict=True):
        its = layer.host.store.held("positions")[0] if layer.host.fill else [torch.empty(0)] * len(units)
        assert [sorted(own[own >= 0].tolist()) for own in its] == units
    torch.testing.assert_close(first[0].double(), logits[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(torch.cat(out.logits).double(), logits, atol=2e-5, rtol=0)


@examples(16)
@given(
    run=runs(
        families=tuple(family for family in FAMILIES if family != "phi3-longrope"),
        parts=tuple(part for part in EXACT if part not in ("sparse", "bounded answer")),
    ),
    chunk_size=st.integers(7, 64),
)
@torch.no_grad()
def test_a_budget_of_the_texts_length_is_full_attention(run: Run, chunk_size: int) -> None:
    cache, ids = run.cache(budget=200, chunk_size=chunk_size), text_of(run)
    first = prefill(cache.model, ids, cache)
    out = generate(cache.model, cache=cache, max_new_tokens=5, **ASKED)
    whole = cache.model(torch.cat([ids, out.sequences[:, :-1]], dim=1)).logits[0, -5:].float()
    torch.testing.assert_close(first.float(), whole[:1], atol=2e-5, rtol=0)
    torch.testing.assert_close(torch.cat(out.logits), whole, atol=2e-5, rtol=0)


# -- the same bits ----------------------------------------------------------------------------------------------------


@examples(10)
@example(run=Run("llama", "expected_attention", (), (20, 11, 4, 5), 2), rows=(0,), turn=False)  # no token but sinks
@given(run=runs(), rows=st.sampled_from([(0,), (2, 0), (1, 1, 2)]), turn=st.booleans())
def test_a_copy_a_file_and_rows_answer_and_read_on_with_the_same_bits(
    run: Run, rows: tuple[int, ...], turn: bool
) -> None:
    cache, ids = run.cache(), text_of(run, batch=3)
    prefill(cache.model, ids, cache)
    if turn:
        answered(cache, 3)
        prefill(cache.model, prompt(11, batch=3, seed=4), cache)
    before = [held.clone() for held in seen_in(cache)]
    with tempfile.TemporaryDirectory() as folder:
        save_cache(cache, Path(folder) / "cache")
        loaded = load_cache(Path(folder) / "cache", cache.model, cache.scorer)
        assert [file.name for file in Path(folder).iterdir()] == ["cache"]
        own = followed(cache.copy())
        assert same(run, followed(loaded.copy()), own)
        assert same(run, followed(loaded), own)
    assert same(run, seen_in(cache), before), "what a copy reads changes nothing in what it was made of"
    chosen = torch.tensor(rows)
    taken = cache.take_rows(chosen)
    cache.select_rows(chosen)
    assert cache.memory().actual <= cache.memory().planned
    for layer in cache.governed:
        counts = getattr(layer.store, "counts", layer.fill * torch.ones(1, 1))
        assert layer.fill == math.ceil(counts.sum(-1).max() / counts.shape[-1])
    assert same(run, seen_in(taken), seen_in(cache))
    assert same(run, followed(taken), own := followed(cache.copy()))
    for row, alone in enumerate(cache.split(len(rows))):
        for part, whole in zip(followed(alone), own, strict=True):
            if part.shape[-1] == 199 and not set(ROUNDED) & set(run.parts):
                torch.testing.assert_close(part[0], whole[row], atol=2e-5, rtol=0)


@examples(12)
@given(run=runs(), cuts=st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_a_text_in_pieces_is_read_as_the_whole(run: Run, cuts: list[int]) -> None:
    whole, pieces, ids = run.cache(), run.cache(), text_of(run)
    assume(not whole.policy.needs_length)
    assume("pyramid" not in run.parts)
    first = prefill(whole.model, ids, whole)
    parts = torch.tensor_split(ids[0], torch.tensor(cuts).cumsum(0))
    second = prefill(whole.model, iter([part.tolist() for part in parts if len(part)]), pieces)
    torch.testing.assert_close(first, second)
    for one, other in zip(followed(whole), followed(pieces), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@examples(12)
@given(run=runs(parts=EXACT), lengths=st.lists(st.integers(1, 90), min_size=2, max_size=4))
def test_rows_of_different_lengths_are_read_as_each_alone(run: Run, lengths: list[int]) -> None:
    cache, width = run.cache(), max(lengths)
    texts = [ids_of(length, seed) for seed, length in enumerate(lengths)]
    ids = torch.cat([torch.nn.functional.pad(text, (width - text.shape[1], 0)) for text in texts])
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    logits, layers = prefill(cache.model, ids, cache, attention_mask=mask), cache.backbone.layers
    no_more_than_planned(cache)
    answer, after = answered(cache), [cache.kept_positions(layer) for layer in layers]
    for row, text in enumerate(texts):
        alone = run.cache()
        close = {"atol": 2e-5, "rtol": 0}
        torch.testing.assert_close(logits[row], prefill(cache.model, text, alone)[0], **close)
        torch.testing.assert_close(answer[row], answered(alone)[0], **close)
        for layer, held in zip(layers, after, strict=True):
            for one, other in zip(held[row], alone.kept_positions(layer)[0], strict=True):
                assert torch.equal(one[one >= 0], other[other >= 0])
