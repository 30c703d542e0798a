"""The checks: each says what it compares, and in a second paragraph what a failure means and the way out."""

# N tokens, T tokens of an answer, E hidden size, K KV heads, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from locret import RetentionCache, RetentionPolicy, load_cache, prefill, save_cache, scorers
from locret.backbone.adapters import attention_modules, compute_dtype
from locret.backbone.chunk import PROJECTIONS, Attended
from locret.backbone.passes import run_decoder
from locret.cache.limits import planned_bytes
from locret.infer.verify.replay import Block, recorded, replay
from locret.infer.verify.report import FAILED, OK, REFUSED, NotHere, Row
from locret.infer.verify.subject import FACTOR, NEW_TOKENS, Answer, Apart, Subject, apart, kept_by_head, scores_by_head
from locret.labels.labels import observe
from locret.lookups.base import Ask, logits_of
from locret.scorers import RetainingHeadScorer


def row(
    compared: str, ok: bool, measured: float | str, tolerance: float | str, why: str = "exact", means: str = ""
) -> Row:
    status = OK if ok else FAILED
    return Row(status=status, compared=compared, measured=measured, tolerance=tolerance, why=why, means=means)


def close(compared: str, found: Apart, noise: str = "rounding alone changes in this backbone") -> Row:
    """Return the row of a comparison in which rounding may differ."""
    limit = FACTOR * found.noise
    why = f"{FACTOR:.0f} times what {noise} ({found.noise:.1e})"
    return row(compared, found.relative <= limit, found.relative, limit, why)  # False for NaN


def close_answers(subject: Subject, compared: str, ours: Answer, own: Answer, nth: int = 0) -> Row:
    """Compare two answers up to the first token that differs, before which both saw the same."""
    other = (ours.ids[nth] != own.ids[0]).nonzero()
    steps = slice(0, int(other[0]) + 1 if len(other) else None)
    noise = subject.noise_of(NEW_TOKENS, first=subject.tokens)
    return close(compared, apart(ours.states[nth, steps], own.states[0, steps], noise))


def most(compared: str, number: float, limit: float = 0, why: str = "exact") -> Row:
    return row(compared, number <= limit, f"{number:,.0f}", f"at most {limit:,.0f}" if limit else "0", why)


def equal(compared: str, one: Mapping[str, Any], other: Mapping[str, Any], why: str = "exact") -> Row:
    """Return the row of contents that must be equal, bit for bit."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape):
            return bool(((a == b) | (a != a) & (b != b)).all())
        return not isinstance(a, Tensor) and bool(a == b)

    names = [name for name in sorted(one.keys() | other.keys()) if not same(one.get(name), other.get(name))]
    return row(compared, not names, f"{names[0]} differs" if names else "bit-equal", "bit-equal", why)


def backbone(subject: Subject) -> Iterator[Row]:
    """The backbone by itself: finite numbers, and how much rounding alone changes.

    It computes NaN or infinity itself, so nothing else was checked; give --dtype float32 or bfloat16, or mend it.
    """
    unsound = subject.unsound
    yield row("its hidden states and logits are numbers", not unsound, unsound or "finite", "finite")
    if not unsound:
        what = "equal runs of its own: more rounding, its own cache in pieces"
        why = "the noise that tolerances below are multiples of; above this nothing could be told from rounding"
        means = "rounding changes most of what it computes, so nothing can be compared; give --dtype float32"
        yield row(what, subject.typical <= 0.3, subject.typical, 0.3, why, means)


def full_budget(subject: Subject) -> Iterator[Row]:
    """Nothing evicted: all tokens in both position modes and uneven chunks, and an answer, and the backbone's own.

    Even a cache with room for everything computes something else, so do not use this backbone here.
    """
    size, uneven, wrong = subject.policy.chunk_size, subject.tokens // 3 + 1, 0
    for positions, chunk in (("compact", size), ("original", size), (subject.policy.positions, uneven)):
        policy = subject.roomy(positions=positions, chunk_size=chunk)
        try:
            read = subject.read(policy)
        except ValueError as error:
            yield Row(status=REFUSED, compared=f"positions {positions}", why=f"refused: {error}")
            continue
        what = f"hidden states of {subject.tokens:,} tokens in chunks of {chunk:,}, positions {positions}"
        yield close(what, apart(read.states, subject.expected, subject.noise))
        heads = [head.tolist() for heads in kept_by_head(read.cache) for head in heads]
        wrong += sum(head != list(range(subject.tokens)) for head in heads)
    yield most("KV heads that miss or repeat tokens", wrong)
    ours = subject.answer(subject.read(subject.roomy(), new_tokens=NEW_TOKENS).cache)
    what = f"hidden states of {NEW_TOKENS} greedy tokens, and of the backbone's own generate"
    yield close_answers(subject, what, ours, subject.answer(None))


def batch(subject: Subject) -> Iterator[Row]:
    """Rows of different length in one batch, left-padded, and each row alone.

    A row depends on the rows beside it, so read and answer one text at a time.
    """
    tokens, by_place = subject.tokens, scorers.get("streaming", sinks=2)
    texts = [subject.ids[0], subject.ids[0].roll(tokens // 2)[: tokens - tokens // 5]]
    small = subject.roomy().changed(budget=subject.policy.budget, stabilizers=subject.policy.stabilizers)

    def answered(policy: RetentionPolicy, *texts: Tensor) -> tuple[RetentionCache, Answer]:
        cache, width = RetentionCache(subject.model, by_place, policy), max(map(len, texts))
        ids = torch.stack([torch.cat([text[:1].expand(width - len(text)), text]) for text in texts])
        mask = torch.stack([torch.arange(width) >= width - len(text) for text in texts]).long()
        prefill(subject.model, ids, cache, mask if len(texts) > 1 else None, new_tokens=NEW_TOKENS)
        return cache, subject.answer(cache)

    for what, policy in (("nothing evicted", subject.roomy()), ("first and newest kept", small)):
        (together, ours), wrong = answered(policy, *texts), 0
        for nth, text in enumerate(texts):
            alone, own = answered(policy, text)
            both = zip(kept_by_head(together, nth), kept_by_head(alone), strict=True)
            wrong += sum(not all(map(torch.equal, *heads)) for heads in both)
            name = "left-padded" if nth else "longest"
            yield close_answers(subject, f"{what}: an answer of the {name} row in a batch, and alone", ours, own, nth)
        yield most(f"{what}: layers whose rows hold other tokens than alone", wrong, why="exact: by place")


def mean_held(kept: Sequence[Sequence[Tensor]]) -> float:
    """Return how many units a KV head holds on average."""
    return sum(len(head) for heads in kept for head in heads) / sum(map(len, kept))


def missing(heads: Sequence[Tensor], wanted: range) -> int:
    """Return how many of these positions heads do not hold, all heads together."""
    return sum(len(set(wanted) - set(head.tolist())) for head in heads)


def budget(subject: Subject) -> Iterator[Row]:
    """After every chunk: as many units as the budget, and those that stay whatever their score.

    What is kept is not what the policy says, so memory may grow, or the first or newest tokens go; do not use it.
    """
    read, policy, scorer = subject.read(), subject.policy, subject.scorer
    gone, why = subject.tokens - mean_held(kept_by_head(read.cache)), "a text longer than the budget must lose units"
    yield row(f"units evicted of {subject.tokens:,} per KV head", gone > 0, f"{gone:,.0f}", "more than 0", why)
    if policy.when == "prompt_end" or policy.recalls_blocks:  # nothing is evicted before the end; or by other rules
        return
    yield most("units per KV head after a chunk", max(mean_held(kept) for _, kept in read.steps), policy.budget)
    plain = policy.memory == "fixed" and policy.layer_budgets == policy.head_budgets == "uniform"
    if plain:
        after = [(min(seen, policy.budget), head) for seen, kept in read.steps for heads in kept for head in heads]
        yield most("KV heads that hold other than the budget", sum(len(head) != units for units, head in after))
        recent = max(policy.stabilizers, min(policy.budget, scorer.recent(policy.budget)))
        first, newest = range(scorer.sink_tokens(policy.budget, recent)), 0
        for seen, kept in read.steps[:-1]:
            newest += sum(missing(heads, range(max(0, seen - recent), seen)) for heads in kept)
        yield most("stabilizers, the newest units after a chunk, that are lost", newest)
        lost = sum(missing(heads, first) for _, kept in read.steps for heads in kept)
        yield most(f"first tokens of the text that {scorer.name} keeps, and that are lost", lost)
    local = range(read.steps[-1][0], read.cache.seen)
    yield most("local tokens that are lost", sum(missing(heads, local) for heads in kept_by_head(read.cache)))


def eviction(subject: Subject) -> Iterator[Row]:
    """Reading and answering with eviction, and a plain pass in which every token sees the units kept for it.

    Answers are made of something else than the kept units; use the --positions whose row is ok, if one is.
    """
    policy = subject.plain_policy
    if policy.recalls_blocks:
        raise NotHere(f"recall_by={policy.recall_by} recalls blocks while it reads, which is not replayed")
    yield _replayed(subject, policy)
    other = "original" if policy.positions == "compact" else "compact"
    try:
        yield _replayed(subject, policy.changed(positions=other, diversity=0.0))
    except ValueError as error:
        yield Row(status=REFUSED, compared=f"positions {other}", why=f"refused: {error}")


def _replayed(subject: Subject, policy: RetentionPolicy) -> Row:
    read = subject.read(policy, new_tokens=NEW_TOKENS)
    tokens, kept = subject.tokens, kept_by_head(read.cache)
    bounds = [0, *(seen for seen, _ in read.steps), tokens - 1, tokens + NEW_TOKENS - 1]
    saw = [[[torch.empty(0, dtype=torch.long)] * len(heads) for heads in kept], *(held for _, held in read.steps)]
    # The prompt's last token is fed again, with the answer.
    saw.append([[head[head < tokens - 1] for head in heads] for heads in kept])
    answer = subject.answer(read.cache)
    ids = subject.on_device(torch.cat([subject.ids, answer.ids[:, :-1]], dim=1))
    blocks = [Block(*each) for each in zip(bounds[:-1], bounds[1:], saw, strict=True) if each[0] < each[1]]
    compact = policy.positions == "compact"
    with subject.alone():
        expected = replay(subject.model, ids, blocks, compact=compact)
        with subject.one_more_rounding():
            rounded = replay(subject.model, ids, blocks, compact=compact, detour=tokens)
    noise = subject.noise_beside(rounded, expected)
    what = f"hidden states of {len(expected):,} tokens, each seeing the units kept for it, positions {policy.positions}"
    return close(what, apart(torch.cat([read.states[: tokens - 1], answer.states[0]]), expected, noise))


def prefix(subject: Subject) -> Iterator[Row]:
    """An answer from the cache, and of the backbone alone from the same units as an ordinary prefix.

    Other engines would answer differently from the same context, so export none.
    """
    if subject.policy.when == "prompt_end":
        raise NotHere("with --when prompt_end an answer reads the last token again, which a prefix holds as it was")
    cache = subject.read(subject.plain_policy, new_tokens=NEW_TOKENS).cache
    try:
        exported = cache.to_dynamic_cache()
    except ValueError as error:
        raise NotHere(f"what this policy keeps is no ordinary prefix: {error}") from error
    first, answer = cache.next_position, subject.answer(cache)
    with subject.alone(), recorded(subject.decoder) as own:
        # One by one, since some states start anew where they are given several; and numbered, as by generate.
        for number, token in enumerate(subject.on_device(answer.ids[:, :-1]).split(1, dim=1), start=first):
            where = torch.full_like(token, number)
            run_decoder(subject.model, token, exported, position_ids=where)
    what = f"hidden states of {NEW_TOKENS - 1} answer tokens, and of the backbone alone on a DynamicCache of the units"
    theirs, noise = torch.cat([part[0] for part in own]), subject.noise_of(NEW_TOKENS, first=subject.tokens)
    yield close(what, apart(answer.states[0, 1:], theirs, noise))


def counted_bytes(subject: Subject) -> Iterator[Row]:
    """Planned bytes, counted bytes and their peak.

    Memory is not what --dry-run says, so a run may end without memory; leave some free.
    """
    memory, policy = subject.read(new_tokens=NEW_TOKENS).cache.memory(), subject.policy
    size = compute_dtype(subject.model).itemsize
    sizes = (subject.backbone, subject.scorer, policy, size, subject.tokens, NEW_TOKENS)
    planned, grows = planned_bytes(*sizes), policy.when == "prompt_end"
    # A layer with a window plans for one token more than it holds.
    right = memory.actual <= planned if grows or not subject.backbone.uniform else memory.actual == planned
    why = "exact: it is what --dry-run prints"
    yield row("bytes planned before reading, and counted", right, f"{memory.actual:,}", f"{planned:,}", why)
    yield most("peak of the cache's bytes", memory.peak, planned)
    if policy.has_host:
        yield most("bytes of the second tier", memory.host, planned_bytes(*sizes, host=True))


def second_tier(subject: Subject) -> Iterator[Row]:
    """What queries of an answer recall from the second tier, beside all that it holds.

    Answers look at the wrong evicted units, so read without --host-budget here.
    """
    if subject.policy.host_budget is None:
        raise NotHere("the policy has no second tier (--host-budget)")
    cache, gains = subject.read(new_tokens=NEW_TOKENS).cache, list[Tensor]()

    def watched(lookup: Any) -> Any:
        def choose(ask: Ask) -> Tensor | None:
            ranks: Tensor | None = lookup.choose(ask)
            if ranks is not None and ask.count < ask.keys.shape[2]:
                queries = ask.query.unflatten(1, (ask.keys.shape[1], -1)).to(ask.keys.device)  # by KV head and group
                logits = logits_of(queries.flatten(2, 3), ask.keys).float().unflatten(2, queries.shape[2:4]).amax(2)
                chosen = logits.gather(-1, ranks.clamp_min(0).expand(-1, -1, logits.shape[2], -1))
                gains.append((chosen.mean(-1) - logits.mean(-1)).flatten().cpu())
            return ranks

        return SimpleNamespace(index=lookup.index, choose=choose)

    for layer in cache.governed:
        assert layer.host is not None
        layer.host.lookup = watched(layer.host.lookup)
    subject.answer(cache)
    if not gains:
        raise NotHere("queries recall all that the second tier holds")
    gain = float(torch.cat(gains).mean())
    what = "logits of units that are recalled, above those of all in the second tier"
    yield row(what, gain > 0, gain, "more than 0", "a query recalls what it would attend to the most")


def save(subject: Subject) -> Iterator[Row]:
    """Half a read, which no file may hold, and a file of a whole one, bit for bit.

    A saved context does not answer like the one in memory, or lacks the text's end, so keep none on disk.
    """
    half, found = RetentionCache(subject.model, subject.scorer, subject.policy), "saved"

    def stop(_cache: RetentionCache) -> None:
        raise InterruptedError

    with TemporaryDirectory() as folder:
        with suppress(InterruptedError):
            prefill(subject.model, subject.ids, half, on_chunk=stop)
        try:
            save_cache(half, f"{folder}/half.ctx")
        except ValueError:
            found = "refused"
        yield row("a cache whose read was interrupted", found == "refused", found, "refused")
        if subject.policy.recalls_blocks:  # no file has a place for them
            return
        cache = subject.read(new_tokens=NEW_TOKENS).cache
        save_cache(cache, f"{folder}/whole.ctx")
        loaded = load_cache(f"{folder}/whole.ctx", subject.model, subject.scorer)
    first, second = (subject.answer(one)._asdict() for one in (cache, loaded))
    yield equal(f"{NEW_TOKENS} answer tokens from the cache, and from the loaded one", first, second)


def determinism(subject: Subject) -> Iterator[Row]:
    """The same read and answer twice, bit for bit.

    The same text gives different answers; see torch.use_deterministic_algorithms for kernels that are not.
    """
    (first, states, _), (second, others, _), own = subject.read(), subject.read(), subject.own_states()
    if torch.equal(own, subject.expected):
        why = "exact: the backbone's own runs are"
        yield equal("hidden states of two reads", {"states": states}, {"states": others}, why)
        yield equal("two greedy answers", subject.answer(first)._asdict(), subject.answer(second)._asdict(), why)
    else:
        noise = subject.noise_beside(own, subject.expected)
        yield close("hidden states of two reads; runs of the backbone alone differ too", apart(others, states, noise))


def training_scores(subject: Subject) -> Iterator[Row]:
    """The scores of heads in training, and while a text is read.

    Heads see other features in use than in training, so what they learned means little; train with this version.
    """
    if not isinstance(subject.scorer, RetainingHeadScorer):
        raise NotHere(f"no retaining heads were given; scorer {subject.scorer.name} decides")
    heads, training, noise = subject.scorer.prepare(subject.model), dict[int, Tensor](), dict[int, Tensor]()
    outputs, modules, wrong = dict[nn.Module, Tensor](), attention_modules(subject.model), 0
    spread = 2 * subject.typical  # before the pass, for it takes passes of its own

    def learn(chunk: Attended) -> None:
        nonlocal wrong
        features, head = heads.features(chunk)[0], heads[chunk.layer_idx]
        wrong += misread(features, modules[chunk.layer_idx], outputs) if heads.config.reads == PROJECTIONS else 0
        with torch.enable_grad():  # the arithmetic of training
            training[chunk.layer_idx] = head(features).detach().T.float().cpu()
        drawn = torch.rand(features.shape, generator=torch.Generator().manual_seed(subject.seed)) - 0.5
        moved = features.float() * (1 + spread * drawn.to(features.device))
        noise[chunk.layer_idx] = head(moved.to(features.dtype)).T.float().cpu()

    with ExitStack() as hooks:
        for part in (getattr(module, f"{name}_proj", None) for module in modules for name in "qkv"):
            if part is not None:
                hooks.callback(part.register_forward_hook(lambda own, _, out: outputs.update({own: out[0]})).remove)
        observe(subject.model, subject.on_device(subject.ids), learn)
    yield most("features that are not what the backbone's own projections gave", wrong)
    reading, by_layer = scores_by_head(subject.read(subject.roomy()).cache), []
    for index, held in zip(subject.backbone.layers, reading, strict=True):
        right, scale = training[index], training[index].std(dim=1, keepdim=True)
        found, usual = (float(((one - right).abs() / scale).median()) for one in (torch.stack(held), noise[index]))
        by_layer.append(Apart(found, max(usual, 1e-12)))
    what = f"scores of {subject.tokens:,} tokens in the pass of training, and in reading, in deviations"
    yield close(what, max(by_layer, key=lambda one: one.noises), "noise in the features changes")


def misread(features: Tensor, module: nn.Module, outputs: Mapping[nn.Module, Tensor]) -> int:
    """Return how many (N, F) features are not what plain projections of queries, keys and values put out."""
    given = [outputs.get(getattr(module, f"{name}_proj", module), features[:, :0]) for name in "qkv"]
    if sum(one.shape[-1] for one in given) != features.shape[-1] or hasattr(module, "key_multiplier"):
        return 0  # projections of another kind, fused ones, or latents
    parts = zip("qkv", given, features.split([one.shape[-1] for one in given], dim=-1), strict=True)
    normed = [name for name in "qkv" if any(hasattr(module, f"{name}_{norm}") for norm in ("norm", "layernorm"))]
    return sum(int((a != b).any(0).sum()) for name, a, b in parts if name not in normed)


CHECKS: dict[str, Callable[[Subject], Iterator[Row]]] = {
    "backbone": backbone,
    "full-budget": full_budget,
    "batch": batch,
    "budget": budget,
    "eviction": eviction,
    "prefix": prefix,
    "bytes": counted_bytes,
    "second-tier": second_tier,
    "save": save,
    "training-scores": training_scores,
    "determinism": determinism,
}
"""In the order in which they run, and make sense to read; the first one says whether the others mean anything."""
