"""From options to what decides which units stay: trained heads, or a scorer by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import safe_open

from locret import backbone_names, loading, scorers, shipped
from locret.base import method_spec
from locret.base.warned import note_user, warn_user
from locret.heads.checkpoint import read_config
from locret.heads.config import HeadsConfig
from locret.heads.fingerprint import NORM, digest_of_norms
from locret.heads.heads import RetainingHeads
from locret.loading import gguf
from locret.loading.options import FULL, LOCRET, BackboneSource, ScorerOptions
from locret.policy.policy import RetentionPolicy
from locret.policy.resolve import check_effect
from locret.policy.sizes import EVERY_UNIT
from locret.scorers.base import Scorer

AUTO_HEADS = "auto"
MEASURED = {"head_budgets": "shares", "spacing": 16}
"""What `+head_shares+spaced` changes."""


def chosen_heads(
    heads: str | None, source: BackboneSource | None, tell: Callable[[str], None] = note_user, *, usual: bool = False
) -> str | None:
    """Return the heads that `--heads` means: `auto` takes those that are shipped, and tells which.

    So does naming none, where heads are `usual`; then a backbone may have none.
    """
    if heads != AUTO_HEADS and not (usual and heads is None and source is not None):
        return heads
    if source is None:
        raise ValueError("--heads auto looks for heads of a backbone; give it with --model")
    if (found := shipped_heads(source)) is not None:
        named = shipped.embedded_heads(source.model) is not None
        whose = "this backbone" if named else "a backbone with the same norms (merged adapters leave those as they are)"
        whose += f" without --adapter {source.adapter}" if source.adapter else ""
        tell(f"the heads {found} are shipped with this toolkit for {whose}, and decide what stays")
    elif heads is not None:
        raise ValueError(
            f"--heads auto: no heads are shipped for {source.model}; name some ({shipped.named_heads()}, if that is "
            "their backbone under another name), train them with locret-train, or leave --heads out for a "
            f"training-free scorer{backbone_names.hint(source.model)}"
        )
    return found


def shipped_heads(source: BackboneSource) -> str | None:
    """Return where shipped heads of a backbone are, found by its name, or by the norms in a folder or a GGUF file."""
    if (found := shipped.embedded_heads(source.model)) is not None:
        return found
    norms = _norms(source)
    for heads in map(shipped.find, map(str, shipped.REAL.values())) if norms else ():
        config: HeadsConfig = read_config(Path(heads))
        if config.base_weights == norms:  # merged or repeated KV heads leave them as they are
            return heads if not config.differences(loading.load_config(source), allow_other_base=True) else None
    return None


def _norms(source: BackboneSource) -> str | None:
    """Return the fingerprint of the norms in files; None where none can be read, which loading weights says better."""
    try:
        if source.gguf_path is not None:
            return digest_of_norms(gguf.norms(source.gguf_path))
        weights = []
        folder = Path(source.place).expanduser()
        whole = folder / "model.safetensors"
        for file in filter(Path.is_file, [whole] if whole.exists() else folder.glob("model-*.safetensors")):  # no pipe
            with safe_open(file, "pt") as held:
                weights += [held.get_tensor(name) for name in held.keys() if name.endswith(NORM)]  # noqa: SIM118
        return digest_of_norms(weights)
    except Exception:  # whatever a stranger's file does
        loading.load_config(source)  # says what is wrong with most, before a fallback is told of
        return None


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
                f"without trained heads the scorer {spec} decides which units stay; give heads for this backbone, "
                "or another scorer"
            )
        if options.keeps_all:
            return keeping_all()[0], {**keeping_all()[1], **spec.changes}
        _check_is_scorer(spec, flag)
        return scorers.make(spec), dict(spec.changes)
    if options.heads is None:
        raise ValueError(f"{flag} {spec} takes trained heads, and none are shipped here; give --heads")
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
    if budget is not None and str(scorer).partition("+")[0] == FULL:
        raise ValueError(f"budget={budget} means nothing to scorer full, which keeps every unit; leave it out")
    return budget


def modified(policy: RetentionPolicy, changes: Mapping[str, Any]) -> RetentionPolicy:
    """Return a policy with what the modifiers of a scorer change, unless it says something else itself."""
    for one in fields(policy):
        own, wanted = getattr(policy, one.name), changes.get(one.name, one.default)
        if own not in (wanted, one.default) and one.name in changes:
            raise ValueError(f"the scorer sets {one.name}={wanted}, and the policy {one.name}={own}; drop one of them")
    policy = policy.changed(**changes)
    check_effect(changes, policy, ())
    return policy


def keeping_all() -> tuple[Scorer, dict[str, Any]]:
    """Return what keeps every unit: the newest ones, of a budget that no text fills, where rank is position."""
    return scorers.get("streaming"), {"budget": EVERY_UNIT, "positions": "original"}


def told(scorer: Scorer, policy: RetentionPolicy) -> str:
    """Return what stays, and by what, as people read it."""
    return "everything kept" if policy.budget == EVERY_UNIT else f"scorer {scorer.name}, budget {policy.budget:,}"


def _check_is_scorer(spec: method_spec.MethodSpec, flag: str) -> None:
    """Refuse a method of `locret-eval` that is no scorer, and say how it is written here."""
    own = method_spec.MethodSpec(spec.name, spec.options)
    instead = {
        **dict.fromkeys((LOCRET, "retaining_heads"), "means trained heads; give --heads FOLDER"),
        FULL: "keeps every unit, and takes only what says how they are held or read, such as full+4bit",
        "infllm": f"is a lookup; give {flag} streaming --recall-by {own}",
        **dict.fromkeys(("omnikv", "quest"), f"is a lookup; give --host-budget all --recall N --recall-by {own}"),
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
