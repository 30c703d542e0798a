"""The checks themselves; `suite.CHECKS` says what each compares, and what a failure means."""

# N tokens, T tokens of an answer, E hidden size, K KV heads, V vocabulary

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from locret import RetainingHeads, RetentionCache, RetentionPolicy, load_cache, prefill, save_cache, scorers
from locret.backbone.adapters import attention_modules, compute_dtype
from locret.backbone.chunk import PROJECTIONS, Attended, Chunk
from locret.cache.limits import planned_bytes, planned_host_bytes
from locret.infer.verify import FAILED, OK, REFUSED, NotHere, Row
from locret.infer.verify.replay import Block, recorded, replay, run_backbone
from locret.infer.verify.subject import FACTOR, NEW_TOKENS, Answer, Apart, Subject, apart, kept_by_head, scores_by_head
from locret.labels import kinds
from locret.labels.labels import layer_labels, observe
from locret.lookups import Ask
from locret.policy.policy import EVERYTHING
from locret.policy.schedule import lookahead
from locret.scorers import Rated, RetainingHeadScorer, Scorer

SHARE = 0.1
"""What part of the units counts as the best."""


def row(
    compared: str, ok: bool, measured: float | str, tolerance: float | str, why: str = "exact", means: str = ""
) -> Row:
    """Return the row of a comparison."""
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
    """Return the row of a number that has a limit."""
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
    unsound = subject.unsound
    yield row("its hidden states and logits are numbers", not unsound, unsound or "finite", "finite")
    if not unsound:
        what = "equal runs of its own: more rounding, its own cache in pieces"
        why = "the noise that tolerances below are multiples of; above this nothing could be told from rounding"
        means = "rounding changes most of what it computes, so nothing can be compared; give --dtype float32"
        yield row(what, subject.typical <= 0.3, subject.typical, 0.3, why, means)


def full_budget(subject: Subject) -> Iterator[Row]:
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
    read, policy, scorer = subject.read(), subject.policy, subject.scorer
    gone, why = subject.tokens - mean_held(kept_by_head(read.cache)), "a text longer than the budget must lose units"
    yield row(f"units evicted of {subject.tokens:,} per KV head", gone > 0, f"{gone:,.0f}", "more than 0", why)
    if policy.when == "prompt_end" or policy.recalls_blocks:  # nothing is evicted before the end; or by other rules
        return
    yield most("units per KV head after a chunk", max(mean_held(kept) for _, kept in read.steps), policy.budget)
    if policy.memory == "fixed" and policy.layer_budgets == policy.head_budgets == "uniform":
        after = [(min(seen, policy.budget), head) for seen, kept in read.steps for heads in kept for head in heads]
        yield most("KV heads that hold other than the budget", sum(len(head) != units for units, head in after))
    newest = first = 0
    for number, (seen, kept) in enumerate(read.steps, start=1):
        for heads in kept:
            budget = sum(map(len, heads)) // len(heads)
            asked = policy.stabilizers if policy.memory == "fixed" else min(policy.stabilizers, budget // 2)
            if policy.head_budgets == "shares":  # small heads have less room
                asked = min(policy.stabilizers, min(map(len, heads)) // 4)
            asked = 0 if number == len(read.steps) else asked
            recent = min(max(asked, min(budget, scorer.recent(policy.budget))), seen)
            newest += missing(heads, range(seen - recent, seen))
            first += missing(heads, range(min(scorer.sink_tokens(budget, recent), seen)))
    yield most("stabilizers, the newest units after a chunk, that are lost", newest)
    yield most(f"first tokens of the text that {scorer.name} keeps, and that are lost", first)
    local = range(read.steps[-1][0], read.cache.seen)
    yield most("local tokens that are lost", sum(missing(heads, local) for heads in kept_by_head(read.cache)))


def scores(subject: Subject) -> Iterator[Row]:
    policy, scorer = subject.plain_policy, subject.scorer
    if policy.recalls_blocks or scorer.needs_hidden:
        raise NotHere(f"units are not rated layer by layer with recall_by={policy.recall_by}, scorer {scorer.name}")
    said: dict[int, Tensor] = {}
    before: list[list[Tensor]] = []
    count = stale = worse = seen = 0

    def look(cache: RetentionCache) -> None:
        """Compare what is held after a chunk with what was said."""
        nonlocal before, count, stale, worse, seen
        kept, held = kept_by_head(cache), scores_by_head(cache)
        for nth, index in enumerate(cache.backbone.layers):
            for head, (positions, own) in enumerate(zip(kept[nth], held[nth], strict=True)):
                table, old = said[index][head], before[nth][head] if before else positions[:0]
                count, stale = count + len(own), stale + int((table[positions] != own).sum())
                candidates = torch.cat([old, torch.arange(seen, cache.seen)])
                gone = candidates[~torch.isin(candidates, positions)]
                # What may be protected; a unit that is not, and stayed, must have earned it.
                recent = max(policy.stabilizers, min(len(positions), scorer.recent(policy.budget)))
                first = scorer.sink_tokens(len(positions), recent)
                free = positions[(positions >= first) & (positions < cache.seen - recent)]
                worse += int((table[gone] > table[free].min()).sum()) if len(free) else 0
        before, seen = kept, cache.seen

    subject.read(policy, scorer=_heard(subject, said), on_chunk=look)
    if scorer.causal:
        what = f"scores of {count:,} units held after a chunk that are not what {scorer.name} said of them"
        yield most(what, stale, why="exact: a unit is rated once")
    if policy.when == "chunk":
        why = "exact: the best by score stay, besides those that are protected"
        yield most("units that went although their head kept one with a lower score", worse, why=why)


def _heard(subject: Subject, said: dict[int, Tensor]) -> Scorer:
    """Return the same scorer, which also notes what it said of every unit last, (K, N) per layer."""
    scorer = subject.scorer

    def score(chunk: Chunk) -> Tensor | Rated:
        rated: Tensor | Rated = scorer.score(chunk)
        scores = (rated.scores if isinstance(rated, Rated) else rated)[0].detach().float().cpu()
        heads = subject.backbone.shape(chunk.layer_idx).num_kv_heads
        if len(scores) != heads:
            raise NotHere(f"scorer {scorer.name} rates one KV head after another here")
        table = said.setdefault(chunk.layer_idx, torch.full((heads, subject.tokens), torch.nan))
        table.scatter_(1, chunk.unit_positions[0, :, -scores.shape[1] :].expand(scores.shape).cpu().long(), scores)
        return rated

    twin = copy.copy(scorer)
    object.__setattr__(twin, "score", score)  # its options are frozen
    return twin


def eviction(subject: Subject) -> Iterator[Row]:
    policy = subject.plain_policy
    if policy.recalls_blocks:
        raise NotHere(f"recall_by={policy.recall_by} recalls blocks while it reads, which is not replayed")
    yield _replayed(subject, policy)
    other = policy.changed(positions="original" if policy.positions == "compact" else "compact")
    try:
        yield _replayed(subject, other)
    except ValueError as error:
        yield Row(status=REFUSED, compared=f"positions {other.positions}", why=f"refused: {error}")


def _replayed(subject: Subject, policy: RetentionPolicy, *, everything: bool = False) -> Row:
    """Compare an answered read with its replay; with `everything` the last tokens saw all that came before."""
    read = subject.read(policy, new_tokens=NEW_TOKENS)
    tokens, kept = subject.tokens, kept_by_head(read.cache)
    bounds = [0, *(seen for seen, _ in read.steps), tokens - 1, tokens + NEW_TOKENS - 1]
    saw = [[[torch.empty(0, dtype=torch.long)] * len(heads) for heads in kept], *(held for _, held in read.steps)]
    # The prompt's last token is fed again, with the answer.
    saw.append([[head[head < tokens - 1] for head in heads] for heads in kept])
    if everything:
        saw[-2:] = [[[torch.arange(end)] * len(heads) for heads in kept] for end in bounds[-3:-1]]
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


def second_tier(subject: Subject) -> Iterator[Row]:
    policy = subject.policy
    if policy.host_budget is None:
        raise NotHere("the policy has no second tier (--host-budget)")
    cache, short, doubled = subject.read(new_tokens=NEW_TOKENS).cache, 0, 0
    gains: list[Tensor] = []
    for near, layer in zip(kept_by_head(cache), cache.governed, strict=True):
        assert layer.host is not None
        far, evicted = layer.host.store.held("positions")[0].cpu(), subject.tokens - len(near[0])
        room = evicted if policy.host_budget == EVERYTHING else int(policy.host_budget)
        short += far.shape[1] != min(evicted, room)
        doubled += sum(len(set(one.tolist()) & set(other.tolist())) for one, other in zip(near, far, strict=True))
        layer.host.lookup = _watched(layer.host.lookup, gains)
    yield most("layers whose second tier holds other than it should", short)
    yield most("units that both tiers hold", doubled)
    subject.answer(cache)
    if gains:
        gain = float(torch.cat(gains).mean())
        what = "logits of units that are recalled, above those of all in the second tier, in deviations"
        yield row(what, gain > 0, gain, "more than 0", "a query recalls what it would attend to the most")
    whole = subject.plain_policy.changed(host_budget=EVERYTHING, recall=subject.tokens)
    yield _replayed(subject, whole, everything=True)


def _watched(lookup: Any, gains: list[Tensor]) -> Any:
    """Return the same lookup, which also notes how far the logits of what it chooses are above the mean."""

    def choose(ask: Ask) -> Tensor | None:
        ranks: Tensor | None = lookup.choose(ask)
        if ranks is not None and isinstance(ask.keys, Tensor) and ask.count < ask.keys.shape[2]:
            query, keys = ask.query[0].to(ask.keys), ask.keys[0]
            heads = len(query)
            logits = (query @ keys.repeat_interleave(heads // len(keys), 0).transpose(-1, -2)).float()
            chosen = ranks[0].repeat_interleave(heads // ranks.shape[1], 0).expand(-1, query.shape[1], -1)
            gain = logits.gather(-1, chosen.clamp_min(0)).mean(-1) - logits.mean(-1)
            gains.append((gain / logits.std(-1).clamp_min(1e-9)).flatten().cpu())
        return ranks

    return SimpleNamespace(index=lookup.index, choose=choose)


def prefix(subject: Subject) -> Iterator[Row]:
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
            run_backbone(subject.model, input_ids=token, past_key_values=exported, use_cache=True, position_ids=where)
    what = f"hidden states of {NEW_TOKENS - 1} answer tokens, and of the backbone alone on a DynamicCache of the units"
    theirs, noise = torch.cat([part[0] for part in own]), subject.noise_of(NEW_TOKENS, first=subject.tokens)
    yield close(what, apart(answer.states[0, 1:], theirs, noise))


def planned_bytes_are_counted(subject: Subject) -> Iterator[Row]:
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
        yield most("bytes of the second tier", memory.host, planned_host_bytes(*sizes))
    # The shortest text that fills the cache, in its largest head.
    shares = policy.head_shares if policy.head_shares and policy.head_budgets == "shares" else (1.0,)
    largest = math.ceil(policy.budget * max(shares) * len(shares) / sum(shares))
    least = max(largest + policy.chunk_size + policy.local_len, lookahead(policy))
    if not grows and least < subject.tokens:
        short = subject.read(ids=subject.ids[:, :least], new_tokens=NEW_TOKENS).cache.memory().peak
        what, why = f"peak for {least:,} and for {subject.tokens:,} tokens", "exact: it must not grow with the text"
        yield row(what, short == memory.peak, f"{memory.peak:,}", f"{short:,}", why)


def decode_budget(subject: Subject) -> Iterator[Row]:
    interval, scorer, plain = 4, subject.scorer, subject.plain_policy
    if not scorer.rates_answers or plain.recalls_blocks or plain.head_budgets == "shares":
        how = f"scorer {scorer.name}, recall_by={plain.recall_by}, head_budgets={plain.head_budgets}"
        raise NotHere(f"an answer is not bounded with {how}")
    bound = max(plain.decode_budget or 0, plain.budget + plain.local_len + interval)
    policy = plain.changed(decode_budget=bound, decode_interval=interval)
    cache = subject.read(policy, new_tokens=3 * interval).cache
    subject.answer(cache, 3 * interval)
    kept, memory = kept_by_head(cache), cache.memory()
    # Which layer holds how much is the pyramid's matter.
    held = mean_held(kept) if policy.layer_budgets != "uniform" else max(mean_held([heads]) for heads in kept)
    yield most(f"units per KV head after {3 * interval} answer tokens, and decode_budget", held, bound)
    newest = range(cache.seen - policy.local_len, cache.seen)
    yield most("newest units of the answer that are lost", sum(missing(heads, newest) for heads in kept))
    yield most("peak of the cache's bytes", memory.peak, memory.planned)


def save(subject: Subject) -> Iterator[Row]:
    if subject.policy.recalls_blocks:
        raise NotHere(f"recall_by={subject.policy.recall_by} holds blocks, which no file has a place for")
    cache = subject.read().cache
    before = contents(cache)
    with TemporaryDirectory() as folder:
        save_cache(cache, f"{folder}/verify.ctx")
        loaded = load_cache(f"{folder}/verify.ctx", subject.model, subject.scorer)
    yield equal("what the file holds, and the cache", before, contents(loaded))
    yield equal("the cache before and after it was saved", before, contents(cache))
    first, second = (subject.answer(one.copy())._asdict() for one in (cache, loaded))
    yield equal(f"{NEW_TOKENS} answer tokens from the cache, and from the loaded one", first, second)
    more = subject.ids[:, : max(8, subject.policy.chunk_size + subject.policy.local_len)]
    ours, theirs = ({"logits": prefill(subject.model, more, one), **contents(one)} for one in (cache, loaded))
    yield equal(f"{more.shape[1]} further tokens read into the cache, and into the loaded one", ours, theirs)


def fork(subject: Subject) -> Iterator[Row]:
    cache = subject.read().cache
    before, first = contents(cache), subject.answer(cache.copy())
    prefill(subject.model, subject.ids[:, : subject.policy.chunk_size], cache.copy())
    yield equal("the context before and after its copies were asked and read on", before, contents(cache))
    yield equal("the same question to two copies", first._asdict(), subject.answer(cache.copy())._asdict())


def interrupted(subject: Subject) -> Iterator[Row]:
    cache, done = RetentionCache(subject.model, subject.scorer, subject.policy), []

    def stop(_cache: RetentionCache) -> None:
        raise InterruptedError

    with suppress(InterruptedError):
        prefill(subject.model, subject.ids, cache, on_chunk=stop)
    for name, use in (("copied", cache.copy), ("read on", lambda: prefill(subject.model, subject.ids, cache))):
        with suppress(ValueError):
            use()
            done.append(name)
    yield row("a cache whose read was interrupted", not done, ", ".join(done) or "refused", "refused")


def determinism(subject: Subject) -> Iterator[Row]:
    (first, states, _), (second, others, _), own = subject.read(), subject.read(), subject.own_states()
    if torch.equal(own, subject.expected):
        why = "exact: the backbone's own runs are"
        yield equal("hidden states of two reads", {"states": states}, {"states": others}, why)
        yield equal("two greedy answers", subject.answer(first)._asdict(), subject.answer(second)._asdict(), why)
    else:
        noise = subject.noise_beside(own, subject.expected)
        yield close("hidden states of two reads; runs of the backbone alone differ too", apart(others, states, noise))


def contents(cache: RetentionCache) -> dict[str, Any]:
    """Return what a cache holds by name, as copies: counters, columns, units of every layer."""
    tensors, held = cache.state()
    held |= {name: getattr(cache, name) for name in ("seen", "next_position", "text_end", "rows")}
    for index in cache.backbone.layers:  # past what `state` says
        tensors[f"scores of layer {index}"] = cache.kept_scores(index)
        tensors[f"positions of layer {index}"] = cache.kept_positions(index)
    return {**held, **{name: tensor.clone() for name, tensor in tensors.items()}}


def _heads(subject: Subject) -> RetainingHeads:
    """Return the heads of this process, each on its layer's device."""
    if not isinstance(subject.scorer, RetainingHeadScorer):
        raise NotHere(f"no retaining heads were given; scorer {subject.scorer.name} decides")
    return subject.scorer.prepare(subject.model)


def training_scores(subject: Subject) -> Iterator[Row]:
    heads, training, noise = _heads(subject), dict[int, Tensor](), dict[int, Tensor]()
    outputs, modules, wrong = dict[nn.Module, Tensor](), attention_modules(subject.model), 0
    spread = 2 * subject.typical  # before the pass, for it takes passes of its own

    def learn(chunk: Attended) -> None:
        nonlocal wrong
        features, head = heads.features(chunk)[0], heads[chunk.layer_idx]
        wrong += _misread(features, modules[chunk.layer_idx], outputs) if heads.config.reads == PROJECTIONS else 0
        with torch.enable_grad():  # the arithmetic of training
            training[chunk.layer_idx] = head(features).detach().T.float().cpu()
        drawn = torch.rand(features.shape, generator=torch.Generator().manual_seed(subject.seed)) - 0.5
        moved = features.float() * (1 + spread * drawn.to(features.device))
        noise[chunk.layer_idx] = head(moved.to(features.dtype)).T.float().cpu()

    with ExitStack() as hooks:
        for part in (getattr(module, f"{name}_proj", None) for module in modules for name in "qkv"):
            if part is not None:
                hook = part.register_forward_hook(lambda proj, _args, out: outputs.update({proj: out[0]}))
                hooks.callback(hook.remove)
        observe(subject.model, subject.on_device(subject.ids), learn)
    yield most("features that are not what the backbone's own projections gave", wrong)
    reading, by_layer = scores_by_head(subject.read(subject.roomy()).cache), []
    for index, held in zip(subject.backbone.layers, reading, strict=True):
        right, scale = training[index], training[index].std(dim=1, keepdim=True)
        found, usual = (float(((one - right).abs() / scale).median()) for one in (torch.stack(held), noise[index]))
        by_layer.append(Apart(found, max(usual, 1e-12)))
    what = f"scores of {subject.tokens:,} tokens in the pass of training, and in reading, in deviations"
    yield close(what, max(by_layer, key=lambda one: one.noises), "noise in the features changes")


def _misread(features: Tensor, module: nn.Module, outputs: Mapping[nn.Module, Tensor]) -> int:
    """Return how many (N, F) features are not what plain projections of queries, keys and values put out."""
    given = [outputs.get(getattr(module, f"{name}_proj", module), features[:, :0]) for name in "qkv"]
    if sum(one.shape[-1] for one in given) != features.shape[-1] or hasattr(module, "key_multiplier"):
        return 0  # projections of another kind, fused ones, or latents
    parts = zip("qkv", given, features.split([one.shape[-1] for one in given], dim=-1), strict=True)
    normed = ("norm", "layernorm")
    plain = ((a, b) for name, a, b in parts if not any(hasattr(module, f"{name}_{norm}") for norm in normed))
    return sum(int((a != b).any(0).sum()) for a, b in plain)


def overlap(one: Tensor, other: Tensor, share: float = SHARE) -> float:
    """Return the share of the best units that two (..., N) scores of the same units agree on, averaged over heads."""
    count = math.ceil(share * one.shape[-1])
    first, second = (torch.zeros_like(x).scatter(-1, x.topk(count).indices, 1) for x in (one, other))
    return float((first * second).sum(-1).double().mean() / count)


def layers(subject: Subject) -> Iterator[Row]:
    heads = _heads(subject)
    if heads.config.training is None and heads.config.label is None:
        raise NotHere("these heads are untrained, or say nothing of a training, so they may be at chance")
    indices, count, prompt = heads.layers, len(heads.layers), subject.tokens - subject.tokens // 4
    label = heads.config.label or {}
    kind, last = kinds.get(str(label.get("kind", "logit"))), bool(label.get("include_last_prompt_token", False))
    offsets = {0, 1, 2, count // 2, count - 2, count - 1} & set(range(count))
    overlaps = {offset: torch.full((count,), torch.nan) for offset in sorted(offsets)}

    def compare(chunk: Attended) -> None:
        nth, labels = indices.index(chunk.layer_idx), layer_labels(chunk, prompt, kind, last)[None].cpu()
        features = heads.features(chunk, prompt)[0]
        for offset, into in overlaps.items():
            other = indices[(nth + offset) % count]
            if heads.config.width(other) == features.shape[1]:
                scores = heads[other](features.to(next(heads[other].parameters()).device)).T[None].float().cpu()
                into[nth] = overlap(scores, labels) if scores.shape == labels.shape else torch.nan

    observe(subject.model, subject.on_device(subject.ids), compare)
    own = overlaps.pop(0)
    gains = [float((own - other).nanmean()) for other in overlaps.values() if not (own - other).isnan().all()]
    if not gains:
        raise NotHere("there is one layer with a head, so there is no other one to compare with")
    error = (2 * SHARE * (1 - SHARE) ** 2 / math.ceil(SHARE * prompt) / count) ** 0.5
    what = f"best {SHARE:.0%} of tokens by labels, found by heads of their layers ({own.mean():.0%}), above others"
    why = f"4 sampling errors of a difference ({error:.2g}); heads of another backbone are as bad on all layers"
    yield row(what, min(gains) >= 4 * error, min(gains), f"at least {4 * error:.3g}", why)
