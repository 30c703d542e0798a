"""How people name what is to be protected: turns by role or number, ranges of tokens or characters. No tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from locret.base.fields import shown
from locret.policy.protection import Span

SYSTEM, TOOLS, DOCUMENT, USER, ASSISTANT, TOOL = "system", "tools", "document", "user", "assistant", "tool"
ROLES = (SYSTEM, TOOLS, DOCUMENT, USER, ASSISTANT, TOOL)
QUESTION, EACH = "question", "each"
_RULE = re.compile(
    rf"(?P<what>{'|'.join((*ROLES, QUESTION, EACH))}|message:(?P<nth>-?\d{{1,9}})|"
    r"(?P<unit>tokens|chars):(?P<start>\d{1,15})-(?P<end>\d{0,15}))(=(?P<share>[\d.eE+-]{1,24}))?"
)
_FORMS = (
    f"{', '.join(ROLES)}, {QUESTION}, {EACH}=SHARE, message:N, tokens:A-B or chars:A-B, each of them with =SHARE for a "
    "least share of the budget"
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
    """A role, "question" (the last turn of the user), "each" (every turn), "message", "tokens" or "chars"."""
    start: int | None = None
    """Number of the message; or the first token, or character of the document."""
    end: int | None = None
    """The one after the last; None: to the end."""
    share: float | None = None
    """The least share of the budget; None: all its units stay."""

    @classmethod
    def of(cls, given: Any) -> Rule:
        """Return the rule that a text or a span means.

        Raises:
            ValueError: If it means none.
        """
        if isinstance(given, Rule):
            return given
        if isinstance(given, Span):
            return cls("tokens", given.start, given.end, given.share)
        found = _RULE.fullmatch(given) if isinstance(given, str) else None
        if found is None:
            raise ValueError(f"protect={shown(given)} names nothing to protect; give {_FORMS}")
        try:
            share = None if found["share"] is None else float(found["share"])
            Span(0, 1, share)
        except ValueError:
            raise ValueError(
                f"protect={shown(given)} has no share of the budget; give more than 0 and at most 1, such as =0.1"
            ) from None
        if found["what"] == EACH and share is None:
            raise ValueError(
                f"protect={EACH} would keep all units of every message, so none could go; give a share, as {EACH}=0.05"
            )
        if found["nth"] is not None:
            return cls("message", int(found["nth"]), None, share)
        if found["unit"] is None:
            return cls(found["what"], None, None, share)
        rule = cls(found["unit"], int(found["start"]), int(found["end"]) if found["end"] else None, share)
        if rule.end is not None and rule.end <= int(found["start"]):
            raise ValueError(f"protect={shown(given)} is empty; its end has to be larger than its start")
        return rule

    def __str__(self) -> str:
        place = f":{self.start}" if self.start is not None else ""
        if self.what in ("tokens", "chars"):
            place += f"-{'' if self.end is None else self.end}"
        return f"{self.what}{place}{'' if self.share is None else f'={self.share!r}'}"


def rules_of(protect: Any) -> tuple[Rule, ...]:
    """Return the rules that an argument means: texts and spans, or one.

    Raises:
        ValueError: If one of them means none, or the same is protected as a whole and with a share.
    """
    if protect is None:
        return ()
    if isinstance(protect, Mapping):
        raise ValueError(
            f"protect={shown(protect)} is a mapping; give a list of rules, such as ['system=0.1', 'each=0.05']"
        )
    one = isinstance(protect, (str, Span, Rule)) or not isinstance(protect, Iterable)
    given = [protect] if one else list(protect)
    # Spans may be what several rules came to: a system message that stays whole has its share of each message, too.
    named = [Rule.of(rule) for rule in given if not isinstance(rule, Span)]
    for rule in named:
        whole = replace(rule, share=None)
        if rule.share is not None and whole in named:
            raise ValueError(f"protect={rule} adds nothing to protect={whole}, which keeps all units; drop one of them")
    return tuple(dict.fromkeys(map(Rule.of, given)))


def check_rules(
    rules: Iterable[Rule], roles: Iterable[str], way_out: str = "name another one", system: str | None = None
) -> None:
    """Refuse rules about turns that there never are.

    Args:
        rules: What is to be protected.
        roles: Of the turns that there may be.
        way_out: What to do instead.
        system: The same where a system message is meant, if it is another.

    Raises:
        ValueError: Naming the rule, and the way out.
    """
    for rule in rules:
        if rule.what in ROLES and rule.what not in roles:
            instead = system or way_out if rule.what == SYSTEM else way_out
            raise ValueError(f"protect={rule} finds no turn of that role here; {instead}, or leave it out")


def check_named(rules: Iterable[Rule], roles: Sequence[str], others: Iterable[str] = ()) -> None:
    """Refuse rules about turns that a conversation does not have, where all of its turns are known.

    Args:
        rules: What is to be protected.
        roles: Of its turns, in their order.
        others: Roles of what is inside of turns.

    Raises:
        ValueError: Naming the rule, and what there is.
    """
    rules, there = tuple(rules), {*roles, *others}
    for rule in rules:
        if rule.what == "message" and not -len(roles) <= (rule.start or 0) < len(roles):
            raise ValueError(f"protect={rule} is none of {len(roles)} messages; they are counted from 0")
        if rule.what == QUESTION and USER not in there:
            raise ValueError(f"protect={rule} finds no question of the user here; ask one, or leave it out")
    check_rules(rules, there, f"there are {', '.join(role for role in ROLES if role in there)}; name one of those")
