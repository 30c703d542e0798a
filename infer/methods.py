"""What a method is, for every command that compares methods or times them: what rates units, and what policy it has.

    full         every unit stays: the plain cache of transformers, or ours where a modifier needs it (full+minference)
    locret       trained retaining heads
    a scorer     of any name, with its options (locret.scorers)
    quest, ...   a lookup that is a whole method: all is kept, and each query attends to as many units as the budget

Options and modifiers are written as in `locret.base.method_spec`: `snapkv:kernel=7+prompt_end`, `locret+pyramid`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from locret import lookups, scorers
from locret.base import method_spec, plugins
from locret.base.method_spec import MethodSpec
from locret.base.nearest import refuse_unknown
from locret.base.warned import warn_user
from locret.cache.limits import check_pair
from locret.loading.options import FULL, LOCRET, WITHOUT_EVICTION
from locret.policy.policy import FOLLOWING, USUAL, RetentionPolicy
from locret.policy.resolve import check_effect, yielding
from locret.policy.sizes import EVERY_UNIT
from locret.scorers import Scorer

INFLLM = "infllm"
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(RetentionPolicy)}
_FIELDS = frozenset(_DEFAULTS)
_SIZES = frozenset({"budget", *FOLLOWING, "positions", "head_shares"})
"""What all methods take of what heads recommend; the rest, such as diversity, is for them alone, unless it is named."""
_ABOUT = {"random": "units drawn at random", "streaming": "first and most recent tokens (StreamingLLM)"}
"""Methods that have the positions of the policy, as heads do."""


@dataclass(frozen=True)
class Method:
    """A way of reading a prompt."""

    name: str
    description: str
    scorer: Scorer | None = field(default=None, compare=False)
    """What rates the units, where it needs neither heads nor a prompt to be known."""
    needs_heads: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What the method changes in every policy."""
    adapt: Callable[[RetentionPolicy], Mapping[str, Any]] | None = field(default=None, compare=False)
    """Numbers that it makes of those that a user gave, where it reads a budget in a way of its own."""
    sets: frozenset[str] = frozenset()
    """Fields that are then not as the user gave them: what `adapt` returns, else the default."""
    positions: str | None = None
    """Position mode of the method's paper, taken unless the user chose one."""
    plain: bool = False
    """Whether transformers' own cache is used, to which no policy applies."""
    keeps_all: bool = False
    """Whether every unit stays, whatever the budget."""

    def policy(self, policy: RetentionPolicy, chosen: Collection[str] = ()) -> RetentionPolicy:
        """Return the policy with the method's own changes; `chosen` are the names of the numbers that the user set."""
        compact = "positions" in chosen or not {"diversity", "spacing"}.isdisjoint(self.changes)
        usual = {} if self.positions is None or compact else {"positions": self.positions}
        shares = {"head_budgets": policy.head_budgets if "head_budgets" in chosen else "uniform", **self.changes}
        theirs = _SIZES if shares["head_budgets"] == "shares" else _SIZES - {"head_shares"}
        try:
            if not self.needs_heads:
                policy = replace(policy, **{name: _DEFAULTS[name] for name in _FIELDS - theirs - {*chosen}})
            if self.adapt is not None:
                heard = {name: getattr(policy, name) for name in _FIELDS - self.sets}
                policy = RetentionPolicy(**{**heard, **self.adapt(policy)})
            own = {*chosen, *self.changes}
            made, said = yielding(lambda less: replace(policy, **{**less, **usual, **self.changes}), vars(policy), own)
            for one in said:
                warn_user(f"method {self.name}: {one}")
            if self.scorer is not None:
                check_pair(self.scorer, made)
            check_effect(self.changes, made, chosen)
            return made
        except ValueError as error:
            raise ValueError(f"method {self.name}: {error}") from error

    def ignores(self, name: str, value: Any) -> bool:
        """Return whether a number of the policy means nothing to the method, or is one that it sets itself."""
        return self.plain or name in self.sets or (name in self.changes and self.changes[name] != value)

    def recent(self, budget: int) -> int:
        """Return how many of the newest units the method keeps whatever their scores, out of a budget."""
        return 0 if self.scorer is None else self.scorer.recent(budget)


def names() -> list[str]:
    """Return the names that `find` knows: the best known first, then in alphabetical order."""
    first = (FULL, LOCRET, "random", "streaming")
    own = [name for name in lookups.names() if name == INFLLM or lookups.get(name).as_method() is not None]
    return [*first, *own, *(name for name in scorers.names() if name not in (*first, "retaining_heads", "oracle"))]


def find(spec: MethodSpec, where: str, known: Collection[str]) -> Method:
    """Return the method of a spec; messages call it `where`, and suggest one of those `known` to the command."""
    if spec.name in (FULL, LOCRET):
        about = "the plain cache of transformers: every unit stays" if spec.name == FULL else "trained retaining heads"
        method = Method(spec.name, about, plain=spec.name == FULL, needs_heads=spec.name == LOCRET)
        return modified(method, spec, where)
    if spec.name == "retaining_heads":
        raise ValueError(f'{where} "{spec}" is called {LOCRET} here; write {LOCRET}, and give --heads')
    if spec.name in lookups.names():
        return modified(_of_lookup(spec, where), spec, where)
    if not (spec.name in names() or plugins.is_reference(spec.name) or spec.name.endswith(".py")):
        if spec.name in method_spec.MODIFIERS:
            raise ValueError(
                f'{where} "{spec.name}" is a modifier; write it behind a method, such as {LOCRET}+{spec.name}'
            )
        refuse_unknown("method", spec.name, known, where)
    scorer = scorers.make(spec)
    about, positions = _ABOUT.get(spec.name) or _said_of(scorer), None if spec.name in _ABOUT else scorer.positions
    return modified(Method(spec.name, about, scorer, positions=positions), spec, where)


def check_heard(own: Mapping[str, Any], methods: Collection[Method]) -> None:
    """Refuse a number of the policy that the user chose, and that is not the default, where no method takes it."""
    for number in fields(RetentionPolicy):
        # Every recipe states the numbers that follow from a budget; the plain cache hears the size of a chunk alone.
        follows, value, flag = number.name in FOLLOWING, own.get(number.name), f"--{number.name.replace('_', '-')}"
        asked = [one for one in methods if not (follows and one.plain and number.name != "chunk_size")]
        if number.name == "budget" or value in (None, USUAL.get(number.name, number.default)) or not asked:
            continue
        if all(number.name in one.sets if follows else one.ignores(number.name, value) for one in asked):
            plain = asked[0].plain and not follows
            why = f"means nothing to {asked[0].name}" if plain else f"is set by {asked[0].name} itself"
            out = "say it as a modifier of a method, such as locret+recall:host_budget=512 or full+4bit"
            raise ValueError(
                f"{flag} {value} {why}, so it would change nothing; drop {flag}, or "
                f"{'add a method that takes it' if follows else out}"
            )


def modified(method: Method, spec: MethodSpec, where: str) -> Method:
    """Return a method with the modifiers and the spelling of a spec; a method without a scorer has no options."""
    if method.scorer is None and spec.options:
        raise ValueError(f'{where} "{spec}": {spec.name} has no options; drop {next(iter(spec.options))}')
    for modifier in spec.modifiers:
        if clash := modifier.changes.keys() & {*method.changes, *method.sets}:
            raise ValueError(f'{where} "{spec}": {spec.name} sets {min(clash)} itself; drop +{modifier.name}')
        if method.plain and not modifier.changes.keys() <= set(WITHOUT_EVICTION):
            raise ValueError(
                f'{where} "{spec}": {spec.name} evicts nothing, so +{modifier.name} means nothing; drop it'
            )
    named = replace(method, name=str(spec), changes={**method.changes, **spec.changes})
    if not (method.plain and spec.modifiers):
        return named
    # What every unit is read with is known to our engine alone.
    return replace(
        named,
        plain=False,
        keeps_all=True,
        scorer=scorers.get("streaming"),
        # Where nothing leaves, a unit's rank is its position, and original positions need no second rotation.
        adapt=lambda policy: {"budget": EVERY_UNIT, "positions": "original"},
        sets=_FIELDS - {*WITHOUT_EVICTION, "chunk_size"},
    )


def _of_lookup(spec: MethodSpec, where: str) -> Method:
    by = str(MethodSpec(spec.name, spec.options))
    if spec.name == INFLLM:  # a tier of its own; all its numbers follow from the budget
        RetentionPolicy(budget=EVERY_UNIT, recall_by=by)  # refuses options that are unfit
        about = "the best blocks of old tokens beside a window and the first tokens (InfLLM)"
        sets = _FIELDS - {"budget"}
        return Method(INFLLM, about, scorers.get("streaming"), adapt=lambda _: {"recall_by": by}, sets=sets)
    lookup = lookups.get(by)
    if lookup.as_method() is None:
        raise ValueError(
            f'{where} "{spec}": {spec.name} only says how units are recalled; write it as '
            f"{LOCRET}+recall:recall_by={spec.name}"
        )
    # What the lookup's own options leave open follows from the budget.
    open_ = getattr(lookup, "tokens", 0) is None

    def adapt(policy: RetentionPolicy) -> dict[str, Any]:
        filled = replace(lookup, tokens=policy.budget) if open_ else lookup  # type: ignore[type-var, call-arg]
        return {**(filled.as_method() or {}), "recall_by": by}

    sets = _FIELDS - {*WITHOUT_EVICTION, "chunk_size"}
    return Method(spec.name, _said_of(lookup), scorers.get("streaming", sinks=0), adapt=adapt, sets=sets)


def _said_of(one: Any) -> str:
    about = (type(one).__doc__ or type(one).__name__).strip().splitlines()[0].rstrip(".")
    return about[:1].lower() + about[1:]
