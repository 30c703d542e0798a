"""All checks in their order, and the function that runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill, scorers
from locret.backbone.adapters import compute_dtype, describe, input_device, unwrap
from locret.environment import versions
from locret.infer.verify import FAILED, OK, REFUSED, SKIPPED, Finding, NotHere, Refused, Report, Row, checks
from locret.infer.verify.command import LEAST_TOKENS, TOKENS
from locret.infer.verify.subject import NEW_TOKENS, Subject, fitted, turns_by_distance
from locret.nearest import nearest
from locret.policy.policy import policy_of
from locret.scorers import FALLBACK, Scorer


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    about: str
    """What it compares, for people."""
    means: str
    """What a failure means for the user, and the way out."""
    run: Callable[[Subject], Iterator[Finding]]


_REPORT = "report it with this table"
CHECKS = (
    Check(
        "backbone",
        "the backbone by itself: finite, and how much rounding alone changes",
        "the backbone computes NaN or infinity by itself, so nothing read with it means anything; check its weights "
        "and --dtype",
        checks.backbone,
    ),
    Check(
        "full-budget",
        "hidden states of all tokens with nothing evicted, against the backbone's own, in both position modes",
        "even a cache with room for everything does not compute what the backbone computes, so do not use this "
        f"backbone here; {_REPORT}",
        checks.full_budget,
    ),
    Check(
        "answer",
        "greedy answer with nothing evicted, against the backbone's own generate",
        f"answers differ from the backbone's although nothing was evicted, so do not use this backbone here; {_REPORT}",
        checks.answer,
    ),
    Check(
        "chunks",
        "one text in chunks of several sizes, with nothing evicted",
        "where the text is cut changes what is computed, so results depend on --chunk-size; do not use this backbone "
        f"here; {_REPORT}",
        checks.chunks,
    ),
    Check(
        "batch",
        "rows of different length in one batch, left-padded, and each row alone",
        f"a row depends on the rows beside it, so read and answer one text at a time; {_REPORT}",
        checks.batch,
    ),
    Check(
        "budget",
        "units that each KV head holds after every chunk, against the policy; and that something is evicted",
        f"the budget is not what is kept, so memory is not what was promised; {_REPORT}",
        checks.budget,
    ),
    Check(
        "protected",
        "units that stay whatever their score: stabilizers, first tokens where the scorer keeps them, local tokens",
        "what is to stay is evicted, and without its first or newest tokens a backbone loses the thread; do not use "
        f"this policy; {_REPORT}",
        checks.protected,
    ),
    Check(
        "scores",
        "scores that units are held with, and what the scorer said; and that the best stay",
        f"units are kept by other scores than their own, so what stays is arbitrary; {_REPORT}",
        checks.scores,
    ),
    Check(
        "units",
        "keys and values that are kept, and those the backbone computed for their tokens, heads and positions",
        f"kept units are not what the backbone computed, so answers are made of something else; {_REPORT}",
        checks.units,
    ),
    Check(
        "eviction",
        "reading and answering with eviction, and a plain pass in which every token sees the units kept for it",
        "what is computed from a bounded cache is not what its units give, so answers are wrong whatever is kept; do "
        f"not use this backbone with these options; {_REPORT}",
        checks.eviction,
    ),
    Check(
        "second-tier",
        "what evicted units become in a second tier; and all of them recalled",
        f"units that leave the fast tier are lost or doubled; leave --host-budget out, and {_REPORT}",
        checks.second_tier,
    ),
    Check(
        "prefix",
        "an answer from the cache, and of the backbone alone from the same units as an ordinary prefix",
        f"other engines would answer differently from the same context, so export none; {_REPORT}",
        checks.prefix,
    ),
    Check(
        "bytes",
        "planned bytes, counted bytes and their peak, for two lengths",
        f"memory is not what --dry-run says, so a run may end without memory; {_REPORT}",
        checks.planned_bytes_are_counted,
    ),
    Check(
        "decode-budget",
        "units and bytes while an answer is written within --decode-budget",
        f"a long answer takes more memory than was promised; leave --decode-budget out, and {_REPORT}",
        checks.decode_budget,
    ),
    Check(
        "save",
        "a file of what was read, against the cache it was written from, bit for bit",
        f"a saved context does not answer like the one in memory, so keep none on disk; {_REPORT}",
        checks.save,
    ),
    Check(
        "fork",
        "a context before and after its copies were asked and read on, bit for bit",
        f"asking a copy changes the context, so ask each context once only; {_REPORT}",
        checks.fork,
    ),
    Check(
        "training-scores",
        "scores of the heads in the pass that trains them, and while a text is read",
        "heads see other features in use than in training, so what they learned means little; train them with this "
        f"version, or {_REPORT}",
        checks.training_scores,
    ),
    Check(
        "layers",
        "what trained heads find important, and the labels of their own layers: against chance, and heads of others",
        "the heads do not belong to the layers they are on, so what stays is arbitrary; train or convert them again",
        checks.layers,
    ),
    Check(
        "determinism",
        "the same read and answer twice, bit for bit",
        "the same text gives different answers; the backbone's kernels may not be deterministic: see "
        f"torch.use_deterministic_algorithms, else {_REPORT}",
        checks.determinism,
    ),
)
"""In the order in which they run, and make sense to read."""


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
    """Check what a user must be able to rely on before trusting a backbone.

    Args:
        model: The backbone, in evaluation mode, however it was loaded.
        heads: Retaining heads for it; or what decides in their place, a scorer or its name; None: the scorer that
            commands take without heads.
        policy: How texts are read; None: what the heads recommend, or the defaults. Numbers of a policy that is not
            given are scaled down to the text.
        ids: (N,) or (1, N) token ids of a text; None: drawn ones.
        tokens: How many are drawn; None: 1,024, and no more than the backbone's positions.
        seed: Seed of drawn ids and of rounding noise.
        only: Names of checks; empty: all.
        progress: Show a progress bar on standard error.

    Returns:
        The report, whose `ok` says whether all went well, and whose text is a table.

    Raises:
        ValueError: If the backbone, the heads or the policy are refused, or there is no such check.

    Examples:
        >>> report = verify(model, heads)
        >>> report.ok
        True
    """
    chosen = chosen_checks(only)
    subject = make_subject(model, heads, policy, ids, tokens, seed)
    rows: list[Row] = []
    with tqdm(chosen, desc="verifying", unit="check", disable=not progress or None) as bar:
        for check in bar:
            bar.set_postfix_str(check.name)
            rows += rows_of(check, subject)
    return Report(rows, facts(subject))


def chosen_checks(only: Collection[str]) -> Sequence[Check]:
    """Return the checks of these names, in their own order; all if there are none.

    Raises:
        ValueError: For a name that is unknown.
    """
    known = {check.name: check for check in CHECKS}
    for name in only:
        if name not in known:
            near = nearest(name, known) or list(known)
            raise ValueError(f"--only {name}: there is no such check; did you mean {' or '.join(near)}?")
    return [check for check in CHECKS if not only or check.name in only]


def make_subject(
    model: nn.Module,
    heads: RetainingHeads | Scorer | str | None,
    policy: RetentionPolicy | None,
    ids: Tensor | None,
    tokens: int | None,
    seed: int,
) -> Subject:
    """Return what is looked at, with a policy that evicts something of the text.

    Raises:
        ValueError: If anything is refused.
    """
    scorer = scorers.get(FALLBACK if heads is None else heads) if heads is None or isinstance(heads, str) else heads
    if ids is None:
        ids = drawn_ids(model, tokens or text_tokens(model, TOKENS), seed)
    ids = (ids[None] if ids.ndim == 1 else ids).cpu().long()
    recommended = scorer.config.policy if isinstance(scorer, RetainingHeads) else {"positions": scorer.positions}
    wanted = policy_of(policy)
    if wanted is None:
        wanted = fitted(RetentionPolicy.from_dict(recommended or {}, "the heads' policy"), ids.shape[1])
    check_text(wanted, ids.shape[1])
    subject = Subject(model, scorer, wanted, ids, seed)
    cache = RetentionCache(model, scorer, wanted)  # refuses what cannot work before anything is computed
    try:
        prefill(model, ids[:, :LEAST_TOKENS], cache)
    except ValueError:
        if wanted.positions == "compact" and not turns_by_distance(subject):
            raise
        # Refused without reason: for the checks to say.
    return subject


def check_text(policy: RetentionPolicy, tokens: int) -> None:
    """Refuse a text of which nothing would be evicted.

    Raises:
        ValueError: Saying how long it must be.
    """
    least = policy.budget + policy.chunk_size + policy.local_len
    if tokens < max(least, LEAST_TOKENS):
        raise ValueError(
            f"--tokens {tokens} is too short to evict anything with --budget {policy.budget}, --chunk-size "
            f"{policy.chunk_size} and --local-len {policy.local_len}; give at least {max(least, LEAST_TOKENS)}, or "
            "lower those"
        )


def text_tokens(model_or_config: Any, wanted: int) -> int:
    """Return how long a text may be: as wanted, or as long as the backbone has positions for."""
    return min(wanted, describe(model_or_config).max_positions - 2 * NEW_TOKENS)


def drawn_ids(model: nn.Module, tokens: int, seed: int) -> Tensor:
    """Return (1, tokens) ids drawn from the backbone's vocabulary, without those that mean something special."""
    base: Any = unwrap(model)
    special: set[int] = set()
    for config in (base.config, base.config.get_text_config(), getattr(base, "generation_config", None)):
        for name, value in vars(config).items() if config is not None else ():
            if name.endswith(("token_id", "token_index")):
                special |= {int(one) for one in (value if isinstance(value, list) else [value]) if one is not None}
    allowed = torch.ones(base.get_input_embeddings().num_embeddings, dtype=torch.bool)
    allowed[[one for one in special if 0 <= one < len(allowed)]] = False
    known = allowed.nonzero()[:, 0]
    return known[torch.randint(len(known), (1, tokens), generator=torch.Generator().manual_seed(seed))]


def rows_of(check: Check, subject: Subject) -> list[Row]:
    """Run one check; whatever it raises, but for missing memory and interrupts, is a failure of its own."""
    rows: list[Row] = []

    def row(status: str, compared: str, why: str) -> Row:
        return Row(check=check.name, status=status, compared=compared, why=why, means=check.means)

    try:
        for found in check.run(subject):
            status = OK if found.ok else FAILED
            if found.refused:
                status = REFUSED
            rows.append(
                Row(
                    check=check.name,
                    status=status,
                    compared=found.compared,
                    measured=found.measured,
                    tolerance=found.tolerance,
                    why=found.why,
                    means=found.means or check.means if status == FAILED else "",
                )
            )
    except NotHere as reason:
        rows.append(row(SKIPPED, check.about, str(reason)))
    except Refused as reason:
        rows.append(row(REFUSED, check.about, str(reason)))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # a backbone may break anything anywhere, which is what is to be found out
        said = " ".join(str(error).split())[:300]
        rows.append(row(FAILED, check.about, f"{type(error).__name__}: {said}"))
    return rows


def facts(subject: Subject) -> dict[str, Any]:
    """Return what the numbers of a report depend on."""
    found: dict[str, Any] = {
        "backbone": subject.backbone.model_type,
        "scorer": subject.rates.name,
        "policy": subject.policy.to_dict(),
        "tokens": subject.tokens,
        "seed": subject.seed,
        "dtype": str(compute_dtype(subject.model)).removeprefix("torch."),
        "device": str(input_device(subject.model)),
        "versions": versions(),
    }
    if (device := input_device(subject.model)).type == "cuda":
        with suppress(RuntimeError):
            found["gpu"] = torch.cuda.get_device_name(device)
    return found
