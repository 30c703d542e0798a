"""From options to what decides which units stay: trained heads, or a scorer by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from locret import backbone_names, scorers, shipped
from locret.base import method_spec
from locret.base.warned import warn_user
from locret.heads.heads import RetainingHeads
from locret.loading.options import LOCRET, ScorerOptions
from locret.policy.policy import RetentionPolicy
from locret.policy.sizes import EVERY_UNIT
from locret.scorers.base import Scorer

AUTO_HEADS, FULL = "auto", "full"
MEASURED = {"head_budgets": "shares", "spacing": 16}
"""What `+head_shares+spaced` changes."""
WITHOUT_EVICTION = ("prefill_attention", "key_bits", "value_bits", "rounding", "exact_recent", "exact_layers")
"""Fields of a policy that mean something where every unit stays."""


def chosen_heads(heads: str | None, model: str | None, tell: Callable[[str], None] = warn_user) -> str | None:
    """Return the heads that `--heads` means: `auto` takes those that are shipped, and tells which."""
    if heads != AUTO_HEADS:
        return heads
    if model is None:
        raise ValueError("--heads auto looks for heads of a backbone; give it with --model")
    if (found := shipped.embedded_heads(model)) is None:
        raise ValueError(
            f"--heads auto: no heads are shipped for {model}; name some ({shipped.named_heads()}, if that is their "
            "backbone under another name), train them with locret-train, or leave --heads out for a training-free "
            f"scorer{backbone_names.hint(model)}"
        )
    tell(f"auto takes the heads {found}, which are shipped with this toolkit")
    return found


def load_scorer(options: ScorerOptions, *, sharing: bool = False) -> tuple[RetainingHeads | Scorer, dict[str, Any]]:
    """Load the heads, or make the scorer; return it with the policy that it and the method recommend.

    Where nobody names either, the fallback decides. Where nobody recommends anything, KV heads have measured sizes, if
    the reader can have them (`sharing`): they do more than any scorer.
    """
    spec, flag = options.spec, "--scorer" if options.method is None else "--method"
    trained = options.method is not None and spec is not None and spec.name == LOCRET
    if options.heads is None and not trained:
        if spec is None:
            spec = method_spec.parse(scorers.FALLBACK + ("+head_shares+spaced" if sharing else ""))  # `MEASURED`
            warn_user(
                f"without trained heads the scorer {spec} decides which units stay; give heads for this backbone "
                f"({AUTO_HEADS} looks for shipped ones), or another scorer"
            )
        if options.label == FULL:
            return keeping_all()
        _check_is_scorer(spec, flag)
        return scorers.make(spec), dict(spec.changes)
    if options.heads is None:
        raise ValueError(f"{flag} {spec} takes trained heads; give --heads, or let --heads auto look for some")
    if spec is not None and spec.options:
        raise ValueError(f"{flag} {spec}: {LOCRET} has no options; drop {next(iter(spec.options))}")
    try:
        heads = RetainingHeads.from_pretrained(options.heads, allow_other_base=options.allow_other_base)
    except ValueError as error:
        raise ValueError(f"--heads {options.heads}: {error}") from error
    recommended = heads.config.policy or (MEASURED if sharing else {})
    return heads, {**recommended, **options.changes}


def checked_budget(scorer: Any, budget: int | None) -> int | None:
    """Return a budget, unless every unit is kept."""
    if budget is not None and scorer == FULL:
        raise ValueError(f"budget={budget} means nothing to scorer full, which keeps every unit; leave it out")
    return budget


def keeping_all() -> tuple[Scorer, dict[str, Any]]:
    """Return what keeps every unit: the newest ones, of a budget that no text fills, where rank is position."""
    return scorers.get("streaming"), {"budget": EVERY_UNIT, "positions": "original"}


def told(scorer: Scorer, policy: RetentionPolicy) -> str:
    """Return what stays, and by what, as people read it."""
    return "everything kept" if policy.budget == EVERY_UNIT else f"scorer {scorer.name}, budget {policy.budget:,}"


def _check_is_scorer(spec: method_spec.MethodSpec, flag: str) -> None:
    """Refuse a method of `locret-eval` that is no scorer, and say how it is written here."""
    instead = {
        LOCRET: "means trained heads; give --heads and --method",
        FULL: "keeps every unit, and has no options; write it alone",
        "infllm": f"is a lookup; give {flag} streaming --recall-by infllm",
        **dict.fromkeys(("omnikv", "quest"), f"is a lookup; give --host-budget all --recall N --recall-by {spec.name}"),
    }
    if spec.name in instead:
        raise ValueError(f'{flag} "{spec}": {spec.name} {instead[spec.name]}')


def check_matches(options: ScorerOptions, scorer: RetainingHeads | Scorer, config: Any) -> None:
    """Refuse heads of another backbone, from its config alone."""
    if isinstance(scorer, Scorer):
        scorer.check_backbone(config)
        return
    try:
        scorer.check_matches(config)
    except ValueError as error:
        raise ValueError(f"--heads {options.heads}: {error}") from error
