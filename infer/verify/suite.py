"""All checks in their order, and the function that runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill, scorers
from locret.backbone.adapters import compute_dtype, describe, input_device, unwrap
from locret.base.nearest import nearest
from locret.environment import versions
from locret.infer.verify import FAILED, SKIPPED, NotHere, Report, Row, checks
from locret.infer.verify.command import LEAST_TOKENS, TOKENS
from locret.infer.verify.subject import NEW_TOKENS, Subject, fitted
from locret.policy.policy import policy_of
from locret.scorers import FALLBACK, Scorer


class Check(NamedTuple):
    """One check: what it compares, for people; and what a failure means for the user, and the way out."""

    name: str
    about: str
    means: str
    run: Callable[[Subject], Iterator[Row]]


CHECKS = (
    Check(
        "backbone",
        "the backbone by itself: finite numbers, and how much rounding alone changes",
        "it computes NaN or infinity itself, so nothing else was checked; give --dtype float32 or bfloat16, or mend it",
        checks.backbone,
    ),
    Check(
        "full-budget",
        "nothing evicted: all tokens in both position modes and uneven chunks, and an answer, and the backbone's own",
        "even a cache with room for everything computes something else, so do not use this backbone here",
        checks.full_budget,
    ),
    Check(
        "batch",
        "rows of different length in one batch, left-padded, and each row alone",
        "a row depends on the rows beside it, so read and answer one text at a time",
        checks.batch,
    ),
    Check(
        "budget",
        "after every chunk: as many units as the budget, and those that stay whatever their score",
        "what is kept is not what the policy says, so memory may grow, or the first or newest tokens go; do not use it",
        checks.budget,
    ),
    Check(
        "scores",
        "scores that units are held with, and what the scorer said; and that the best stay",
        "units are kept by other scores than their own, so what stays is arbitrary; use another scorer",
        checks.scores,
    ),
    Check(
        "eviction",
        "reading and answering with eviction, and a plain pass in which every token sees the units kept for it",
        "answers are made of something else than the kept units; use the --positions whose row is ok, if one is",
        checks.eviction,
    ),
    Check(
        "second-tier",
        "what evicted units become in a second tier, and which of them are recalled; and all of them recalled",
        "units that left the fast tier are lost, doubled, or not those a query looks for; leave --host-budget out",
        checks.second_tier,
    ),
    Check(
        "prefix",
        "an answer from the cache, and of the backbone alone from the same units as an ordinary prefix",
        "other engines would answer differently from the same context, so export none",
        checks.prefix,
    ),
    Check(
        "bytes",
        "planned bytes, counted bytes and their peak, for two lengths",
        "memory is not what --dry-run says, so a run may end without memory; leave some free",
        checks.planned_bytes_are_counted,
    ),
    Check(
        "decode-budget",
        "units and bytes while an answer is written within --decode-budget",
        "a long answer takes more memory than was promised; leave --decode-budget out",
        checks.decode_budget,
    ),
    Check(
        "save",
        "a file of what was read, against the cache it was written from, bit for bit",
        "a saved context does not answer like the one in memory, so keep none on disk",
        checks.save,
    ),
    Check(
        "fork",
        "a context before and after its copies were asked and read on, bit for bit",
        "asking a copy changes the context, so ask each context once only",
        checks.fork,
    ),
    Check(
        "interrupted",
        "a read that was interrupted, and whether what it left is refused",
        "half a text is taken for a whole one, so start with a new cache after every interrupt",
        checks.interrupted,
    ),
    Check(
        "training-scores",
        "what heads are given, and the backbone's own projections; their scores in training, and while a text is read",
        "heads see other features in use than in training, so what they learned means little; train with this version",
        checks.training_scores,
    ),
    Check(
        "layers",
        "what trained heads find important, and labels: those of their own layers, and those of others",
        "the heads are not those of their layers, or of this backbone, so noise chooses; train or convert them again",
        checks.layers,
    ),
    Check(
        "determinism",
        "the same read and answer twice, bit for bit",
        "the same text gives different answers; see torch.use_deterministic_algorithms for kernels that are not",
        checks.determinism,
    ),
)
"""In the order in which they run, and make sense to read; the first one says whether the others mean anything."""
_NOW = {"answer": "full-budget", "chunks": "full-budget", "units": "eviction", "protected": "budget"}
"""Checks of earlier releases, and those that find what they found."""


def verify(
    model: nn.Module,
    heads: RetainingHeads | Scorer | str | None = None,
    policy: RetentionPolicy | None = None,
    *,
    ids: Tensor | None = None,
    tokens: int | None = None,
    seed: int = 0,
    only: Collection[str] = (),
    progress: bool = False,
) -> Report:
    """Check what a user must be able to rely on before trusting a backbone; the report's text is a table.

    Args:
        model: The backbone, in evaluation mode, however it was loaded.
        heads: Retaining heads for it, or a scorer or its name; None: the scorer that commands take without heads.
        policy: How texts are read; None: what the heads recommend, or the defaults, scaled down to the text.
        ids: (N,) or (1, N) token ids of a text; None: drawn ones.
        tokens: How many are drawn; None: 1,024, and no more than the backbone's positions.
        seed: Seed of drawn ids and of rounding noise.
        only: Names of checks; empty: all.
        progress: Show a progress bar on standard error.

    Raises:
        ValueError: If the backbone, the heads or the policy are refused, or there is no such check.

    Examples:
        >>> verify(model, heads).ok
        True
    """
    chosen = chosen_checks(only)
    scorer = scorers.get(heads or FALLBACK) if isinstance(heads, str | None) else heads
    if ids is None:
        ids = _drawn_ids(model, tokens or text_tokens(model, TOKENS), seed)
    ids = ids.reshape(1, -1).cpu().long()
    wanted = policy_of(policy)
    if wanted is None:
        recommended = scorer.config.policy if isinstance(scorer, RetainingHeads) else {"positions": scorer.positions}
        wanted = fitted(RetentionPolicy.from_dict(recommended or {}, "the heads' policy"), ids.shape[1])
    check_text(wanted, ids.shape[1])
    cache = RetentionCache(model, scorer, wanted)  # refuses what cannot work before anything is computed
    subject = Subject(model, scorer, cache.policy, ids, seed)
    if subject.unsound:
        chosen = CHECKS[:1]
    else:
        prefill(model, ids[:, :LEAST_TOKENS], cache)  # likewise
    rows: list[Row] = []
    with tqdm(chosen, desc="verifying", unit="check", disable=not progress or None) as bar:
        for check in bar:
            bar.set_postfix_str(check.name)
            rows += _rows_of(check, subject)
    return Report(rows, _facts(subject))


def chosen_checks(only: Collection[str]) -> Sequence[Check]:
    """Return the checks of these names, in their own order; all if there are none. Refuses a name that is unknown."""
    known = [check.name for check in CHECKS]
    for name in only:
        if name in _NOW:
            raise ValueError(f"--only {name}: {_NOW[name]} finds what this check found; give that")
        if name not in known:
            near = nearest(name, known) or known
            raise ValueError(f"--only {name}: there is no such check; did you mean {' or '.join(near)}?")
    return [check for check in CHECKS if not only or check.name in only]


def check_text(policy: RetentionPolicy, tokens: int) -> None:
    """Refuse a text of which nothing would be evicted, and say how long it must be."""
    least = max(policy.budget + policy.chunk_size + policy.local_len, LEAST_TOKENS)
    if tokens < least:
        raise ValueError(
            f"--tokens {tokens} is too short to evict anything with --budget {policy.budget}, --chunk-size "
            f"{policy.chunk_size} and --local-len {policy.local_len}; give at least {least}, or lower those"
        )


def text_tokens(model_or_config: Any, wanted: int) -> int:
    """Return how long a text may be: as wanted, or as long as the backbone has positions for."""
    return min(wanted, describe(model_or_config).max_positions - 2 * NEW_TOKENS)


def _drawn_ids(model: nn.Module, tokens: int, seed: int) -> Tensor:
    """Return (tokens,) ids drawn from the backbone's vocabulary, without those that mean something special."""
    base: Any = unwrap(model)
    allowed = torch.ones(base.get_input_embeddings().num_embeddings, dtype=torch.bool)
    for config in filter(None, (base.config, base.config.get_text_config(), getattr(base, "generation_config", None))):
        for name, value in vars(config).items():
            if name.endswith(("token_id", "token_index")) and value is not None:
                special = [int(one) for one in (value if isinstance(value, list) else [value])]
                allowed[[one for one in special if 0 <= one < len(allowed)]] = False
    known = allowed.nonzero()[:, 0]
    return known[torch.randint(len(known), (tokens,), generator=torch.Generator().manual_seed(seed))]


def _rows_of(check: Check, subject: Subject) -> list[Row]:
    """Run one check; whatever it raises, but for missing memory and interrupts, is a failure of its own."""
    rows: list[Row] = []
    try:
        for row in check.run(subject):
            rows.append(
                replace(row, check=check.name, means=(row.means or check.means) if row.status == FAILED else "")
            )
    except NotHere as reason:
        rows.append(Row(check=check.name, status=SKIPPED, compared=check.about, why=str(reason)))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # a backbone may break anything anywhere, which is what is to be found out
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        rows.append(Row(check=check.name, status=FAILED, compared=check.about, why=why, means=check.means))
    return rows


def _facts(subject: Subject) -> dict[str, Any]:
    """Return what the numbers of a report depend on."""
    device = input_device(subject.model)
    facts: dict[str, Any] = {
        "backbone": subject.backbone.model_type,
        "scorer": subject.scorer.name,
        "policy": subject.policy.to_dict(),
        "tokens": subject.tokens,
        "seed": subject.seed,
        "dtype": str(compute_dtype(subject.model)).removeprefix("torch."),
        "device": str(device),
        "versions": versions(),
    }
    return facts | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})
