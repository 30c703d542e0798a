"""What of a conversation is protected: rules by name, where its turns are, and what of each has stayed."""

# C kept units, H KV heads of all layers, T turns

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from locret.base.fields import Refusal, read, shown
from locret.policy.protection import MOST_SPANS, Guarantee, Span, checked_rows

if TYPE_CHECKING:
    from locret.cache.cache import RetentionCache
    from locret.pictures import Retention

SYSTEM, DOCUMENT, USER, ASSISTANT = "system", "document", "user", "assistant"
ROLES = (SYSTEM, DOCUMENT, USER, ASSISTANT)
QUESTION, EACH = "question", "each"
TEMPLATES = ("chat", "original", "none")
"""How turns become text; see `locret.conversation.turns`."""
_RULE = re.compile(
    rf"(?P<what>{'|'.join((*ROLES, QUESTION, EACH))}|message:(?P<nth>-?\d{{1,9}})|"
    r"tokens:(?P<start>\d{1,15})-(?P<end>\d{0,15}))(=(?P<share>[\d.eE+-]{1,24}))?"
)
_FORMS = (
    f"{', '.join(ROLES)}, {QUESTION}, {EACH}=SHARE, message:N or tokens:A-B, each of them with =SHARE for a least "
    "share of the budget"
)


@dataclass(frozen=True)
class Rule:
    """What is to be protected, by name.

    Examples:
        >>> Rule.of("system")
        Rule(what='system', start=None, end=None, share=None)
        >>> str(Rule.of("message:3=0.1"))
        'message:3=0.1'
    """

    what: str
    """A role, "question" (the last turn of the user), "each" (every turn), "message" or "tokens"."""
    start: int | None = None
    """Number of the message; or the first token."""
    end: int | None = None
    """The token after the last; None: to the end."""
    share: float | None = None
    """The least share of the budget; None: all its units stay."""

    @classmethod
    def of(cls, given: Any) -> Rule:
        """Return the rule that a text or a span means."""
        if isinstance(given, Rule):
            return given
        if isinstance(given, Span):
            return cls("tokens", given.start, given.end, given.share)
        found = _RULE.fullmatch(given) if isinstance(given, str) else None
        if found is None:
            raise Refusal("protect", shown(given), f"names nothing to protect; give {_FORMS}")
        try:
            share = None if found["share"] is None else float(found["share"])
            Span(0, 1, share)
        except ValueError:
            why = "has no share of the budget; give more than 0 and at most 1, such as =0.1"
            raise Refusal("protect", shown(given), why) from None
        if found["what"] == EACH and share is None:
            why = "would keep all units of every message, so none could go; give a share, as each=0.05"
            raise Refusal("protect", EACH, why)
        if found["nth"] is not None:
            return cls("message", int(found["nth"]), None, share)
        if found["start"] is None:
            return cls(found["what"], None, None, share)
        rule = cls("tokens", int(found["start"]), int(found["end"]) if found["end"] else None, share)
        if rule.end is not None and rule.end <= int(found["start"]):
            raise Refusal("protect", shown(given), "is empty; its end has to be larger than its start")
        return rule

    def __str__(self) -> str:
        place = f":{self.start}" if self.start is not None else ""
        if self.what == "tokens":
            place += f"-{'' if self.end is None else self.end}"
        return f"{self.what}{place}{'' if self.share is None else f'={self.share!r}'}"

    @property
    def reach(self) -> int:
        """How many turns it is about: 0 one, 1 those of a role, 2 all."""
        return 2 if self.what == EACH else 1 if self.what in ROLES else 0


def rules_of(protect: Any) -> tuple[Rule, ...]:
    """Return the rules that an argument means: texts and spans, or one."""
    if protect is None:
        return ()
    if isinstance(protect, Mapping):
        raise Refusal("protect", shown(protect), "is a mapping; give a list of rules, as ['system=0.1', 'each=0.05']")
    one = isinstance(protect, (str, Span, Rule)) or not isinstance(protect, Iterable)
    given = [protect] if one else list(protect)
    # Spans may be what several rules came to: a system message that stays whole has its share of each message, too.
    named = [Rule.of(rule) for rule in given if not isinstance(rule, Span)]
    for rule in named:
        whole = replace(rule, share=None)
        if rule.share is not None and whole in named:
            raise Refusal("protect", rule, f"adds nothing to {whole}, which keeps all units; drop one of them")
    return tuple(dict.fromkeys(map(Rule.of, given)))


def check_rules(
    rules: Iterable[Rule], roles: Iterable[str], way_out: str = "name another one", system: str | None = None
) -> None:
    """Refuse rules about turns that there never are."""
    for rule in rules:
        if rule.what in ROLES and rule.what not in roles:
            instead = system or way_out if rule.what == SYSTEM else way_out
            raise Refusal("protect", rule, f"finds no turn of that role here; {instead}, or leave it out")


def check_named(rules: Iterable[Rule], roles: Sequence[str]) -> None:
    """Refuse rules about turns that a conversation does not have, where the roles of all its turns are known."""
    rules = tuple(rules)
    for rule in rules:
        if rule.what == "message" and not -len(roles) <= (rule.start or 0) < len(roles):
            raise Refusal("protect", rule, f"is none of {len(roles)} messages; they are counted from 0")
        if rule.what == QUESTION and USER not in roles:
            raise Refusal("protect", rule, "finds no question of the user here; ask one, or leave it out")
    there = ", ".join(role for role in ROLES if role in roles)
    check_rules(rules, roles, f"there are {there}; name one of those")


class Turn(NamedTuple):
    """A turn of a conversation, with what the template writes around it."""

    role: str
    """One of `ROLES`: a document is what a user's first turn begins with."""
    start: int
    """Its first token."""
    end: int | None
    """The token after its last one; None while it goes on."""


def spans_of(rules: Sequence[Rule], turns: Sequence[Turn]) -> list[Span]:
    """Return what rules come to, as far as turns are known; of a turn's shares, that for the fewest turns counts."""
    last = max((nth for nth, turn in enumerate(turns) if turn.role == USER), default=None)
    spans, shared = list[Span](), dict[int, int]()
    for rule in sorted(rules, key=lambda rule: rule.reach):
        if rule.what == "tokens":
            assert rule.start is not None
            spans.append(Span(rule.start, rule.end, rule.share, str(rule)))
        for nth, turn in enumerate(turns):
            named = {QUESTION: nth == last, EACH: True, turn.role: True}
            named["message"] = rule.start in (nth, nth - len(turns))
            if not named.get(rule.what) or turn.end == turn.start:
                continue
            if rule.share is None or shared.setdefault(nth, rule.reach) == rule.reach:
                spans.append(Span(turn.start, turn.end, rule.share, f"message {nth}, {turn.role}"))
    return list(dict.fromkeys(spans))


@dataclass(frozen=True)
class KeptTurn:
    """What of a turn has stayed."""

    role: str
    start: int
    """Its first token."""
    tokens: int
    """Tokens that have been read of it."""
    units: float
    """Units that stayed, the mean over all layers with scored units and their KV heads."""
    least: int
    """Units of the KV head that holds the fewest."""
    protected: str | None
    """all where it is pinned, part where some of it is, or its least share of the budget; None: nothing."""


def kept_turns(retention: Retention, turns: Sequence[Turn], spans: Sequence[Span] = ()) -> list[KeptTurn]:
    """Count what has stayed of each turn."""
    import torch  # help should not wait for it

    seen = retention.prompt_tokens
    starts = torch.tensor([min(turn.start, seen) for turn in turns])
    ends = torch.tensor([seen if turn.end is None else min(turn.end, seen) for turn in turns])
    held = [head.contiguous() for heads in retention.kept.values() for head in heads]
    counts_HT = torch.stack([torch.searchsorted(own, ends) - torch.searchsorted(own, starts) for own in held])
    found = []
    for turn, start, end, counts_H in zip(turns, starts.tolist(), ends.tolist(), counts_HT.T, strict=True):
        mean, protected = round(float(counts_H.double().mean()), 3), _protection(range(start, end), spans, seen)
        found.append(KeptTurn(turn.role, turn.start, end - start, mean, int(counts_H.min()), protected))
    return found


def _protection(tokens: range, spans: Sequence[Span], seen: int) -> str | None:
    pinned = Guarantee.of([span for span in spans if span.share is None], 0)
    count = pinned.needed(tokens.stop) - pinned.needed(tokens.start)
    shares = [span for span in spans if span.share is not None and span.within(seen) == tokens]
    if tokens and count == len(tokens):
        return "all"
    return f"{shares[0].share:g}" if shares else "part" if count else None


@dataclass(frozen=True)
class Protection:
    """What of a conversation is protected, and where its turns are."""

    rules: tuple[Rule, ...] = ()
    turns: tuple[Turn, ...] | None = None
    """In their order, each up to the next; None where a file of an earlier version does not say."""

    @classmethod
    def of_document(cls, rules: tuple[Rule, ...], told: int, way_out: str) -> Protection:
        """Return that of a document that is about to be read, after a system turn of so many tokens."""
        system = (Turn(SYSTEM, 0, told),) if told else ()
        check_rules(rules, [*(turn.role for turn in system), DOCUMENT, USER, ASSISTANT], system=way_out)
        return cls(rules, (*system, Turn(DOCUMENT, told, None)))

    def began(self, role: str, start: int) -> Protection:
        """Return the conversation with a turn that begins there."""
        if self.turns is None:
            return self
        ended = (*self.turns[:-1], *(turn._replace(end=start) for turn in self.turns[-1:]))
        return replace(self, turns=(*ended, Turn(role, start, None)))

    def apply(self, cache: RetentionCache, seen: int | None = None) -> None:
        """Tell a cache what the rules protect, if there are some, of which so many tokens are known."""
        if self.rules:
            turns = [turn if turn.end is not None else turn._replace(end=seen) for turn in self.known]
            cache.protect(spans_of(self.rules, turns))

    def check_answer(self, cache: RetentionCache, start: int, tokens: int) -> None:
        """Refuse an answer that begins there, is protected itself, and could outgrow what an answer may hold."""
        if not self.rules or self.turns is None or cache.policy.decode_budget is None:
            return
        from locret.cache.protected import check_room  # loads torch, which options do without

        *before, answer = self.began(ASSISTANT, start).known
        check_room(cache, checked_rows([spans_of(self.rules, before)]))
        try:
            whole = spans_of(self.rules, [*before, answer._replace(end=start + tokens)])
            check_room(cache, checked_rows([whole]))
        except ValueError as error:
            rule = f"may find no room: {error}, or lower max_new_tokens"
            raise Refusal("max_new_tokens", tokens, rule) from None

    @property
    def known(self) -> tuple[Turn, ...]:
        """The turns."""
        if self.turns is None:
            raise ValueError(
                "where its messages are is not known, for it was saved by an earlier version, or is no conversation; "
                "read the text again"
            )
        return self.turns

    def data(self) -> dict[str, Any]:
        """Return plain data, for `protection_from`."""
        turns = None if self.turns is None else [list(turn) for turn in self.turns]
        return {"protect": [str(rule) for rule in self.rules], "messages": turns}


def protection_from(notes: Mapping[str, Any]) -> Protection:
    """Return what a file says of a conversation's turns and of what is protected of them."""
    given, messages = notes.get("protect", []), notes.get("messages")
    if not isinstance(given, list) or len(given) > MOST_SPANS:
        raise ValueError(f"protect is {shown(given)}, which is no list of names")
    rules = tuple(dict.fromkeys(map(Rule.of, given)))
    if messages is None:
        return Protection(rules)
    if notes.get("fixed"):  # in files of earlier versions, rules by role were not about the turns of joined texts
        rules = tuple(rule for rule in rules if rule.what in ("message", "tokens"))
    try:
        turns = tuple(Turn(*one) for one in read(messages, list[tuple[str, int, int | None]]))
        places: list[Any] = [place for turn in turns for place in turn[1:]]
        if places[-1:] == [None]:  # the last turn goes on
            places.pop()
        if places != sorted(places) or any(place < 0 for place in places):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"messages are {shown(messages)}, which cannot be right") from None
    return Protection(rules, turns)
