"""The function that runs the checks."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill, scorers
from locret.backbone.adapters import compute_dtype, describe, input_device, unwrap
from locret.base.nearest import refuse_unknown
from locret.environment import versions
from locret.infer.verify.checks import CHECKS
from locret.infer.verify.report import FAILED, LEAST_TOKENS, SKIPPED, TOKENS, NotHere, Report, Row
from locret.infer.verify.subject import NEW_TOKENS, Subject, fitted
from locret.policy.policy import policy_of
from locret.scorers import FALLBACK, Scorer


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
        ids = _drawn_ids(model, tokens or text_tokens(model), seed)
    ids = ids.reshape(1, -1).cpu().long()
    if (wanted := policy_of(policy)) is None:
        recommended = scorer.config.policy if isinstance(scorer, RetainingHeads) else {"positions": scorer.positions}
        wanted = fitted(RetentionPolicy.from_dict(recommended or {}, "the heads' policy"), ids.shape[1])
    check_text(wanted, ids.shape[1])
    cache = RetentionCache(model, scorer, wanted)  # refuses what cannot work before anything is computed
    subject = Subject(model, scorer, cache.policy, ids, seed)
    if subject.unsound:
        chosen = ["backbone"]
    else:
        prefill(model, ids[:, :LEAST_TOKENS], cache)  # likewise
    rows: list[Row] = []
    with tqdm(chosen, desc="verifying", unit="check", disable=not progress or None) as bar:
        for name in bar:
            bar.set_postfix_str(name)
            rows += _rows_of(name, subject)
    return Report(rows, _facts(subject))


def chosen_checks(only: Collection[str]) -> Sequence[str]:
    """Return the checks of these names, in their own order; all if there are none. Refuses a name that is unknown."""
    for name in only:
        if name not in CHECKS:
            refuse_unknown("--only", name, CHECKS)
    return [name for name in CHECKS if not only or name in only]


def said_of(name: str) -> tuple[str, str]:
    """Return what a check compares, and what a failure means for the user, and the way out."""
    about, _, means = (inspect.getdoc(CHECKS[name]) or "").partition("\n\n")
    return " ".join(about.split()).rstrip("."), " ".join(means.split()).rstrip(".")


def check_text(policy: RetentionPolicy, tokens: int) -> None:
    """Refuse a text of which nothing would be evicted, and say how long it must be."""
    least = max(policy.budget + policy.chunk_size + policy.local_len, LEAST_TOKENS)
    if tokens < least:
        raise ValueError(
            f"--tokens {tokens} is too short to evict anything with --budget {policy.budget}, --chunk-size "
            f"{policy.chunk_size} and --local-len {policy.local_len}; give at least {least}, or lower those"
        )


def text_tokens(model_or_config: Any) -> int:
    """Return how long a text is: as usual, or as long as the backbone has positions for."""
    return min(TOKENS, describe(model_or_config).max_positions - 2 * NEW_TOKENS)


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


def _rows_of(name: str, subject: Subject) -> list[Row]:
    """Run one check; whatever it raises, but for missing memory and interrupts, is a failure of its own."""
    rows, (about, means) = list[Row](), said_of(name)
    try:
        for row in CHECKS[name](subject):
            rows.append(replace(row, check=name, means=(row.means or means) if row.status == FAILED else ""))
    except NotHere as reason:
        rows.append(Row(check=name, status=SKIPPED, compared=about, why=str(reason)))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # a backbone may break anything anywhere, which is what is to be found out
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        rows.append(Row(check=name, status=FAILED, compared=about, why=why, means=means))
    return rows


def _facts(subject: Subject) -> dict[str, Any]:
    device = input_device(subject.model)
    facts: dict[str, Any] = {"backbone": subject.backbone.model_type, "scorer": subject.scorer.name}
    facts |= {"policy": subject.policy.to_dict(), "tokens": subject.tokens, "seed": subject.seed}
    facts |= {"dtype": str(compute_dtype(subject.model)).removeprefix("torch."), "device": str(device)}
    facts["versions"] = versions()
    return facts | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})
