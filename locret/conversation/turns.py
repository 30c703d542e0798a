"""Where the turns of a text are among its tokens, which of them are protected, and what of each has stayed."""

# K KV heads, C kept units

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from locret.base.fields import shown
from locret.conversation.rules import ASSISTANT, EACH, QUESTION, ROLES, USER, Rule
from locret.conversation.templates import encode
from locret.conversation.text_stream import TokenStream
from locret.policy.protection import MOST_SPANS, Guarantee, Span, checked_rows

if TYPE_CHECKING:
    from locret.cache.cache import RetentionCache


class Turn(NamedTuple):
    """A turn of a conversation, with what the template writes around it."""

    role: str
    """One of `ROLES`: a document is what a user's first turn begins with, tools are the definitions of them."""
    start: int
    """Its first token."""
    end: int | None
    """The token after its last one; None while it goes on."""


def spans_of(
    rules: Sequence[Rule], turns: Sequence[Turn], characters: Iterable[Span] = (), fixed: int = 0
) -> list[Span]:
    """Return what rules come to, as far as the turns are known.

    Args:
        rules: What is to be protected. Of several shares that a turn is given, the one for the fewest turns counts.
        turns: The turns so far.
        characters: What the rules about characters come to.
        fixed: First turns of which only rules by number or token say something; see `Protection`.
    """
    last = max((nth for nth, turn in enumerate(turns) if turn.role == USER), default=None)
    spans, shared = list(characters), dict[int, int]()
    for rule in sorted(rules, key=_reach):
        if rule.what == "tokens":
            assert rule.start is not None
            spans.append(Span(rule.start, rule.end, rule.share, str(rule)))
        for nth, turn in enumerate(turns):
            named = {"message": rule.start == nth}
            if nth >= fixed:
                named |= {QUESTION: nth == last, EACH: True, turn.role: True}
                named["message"] |= rule.start == nth - len(turns)
            if not named.get(rule.what) or turn.end == turn.start:
                continue
            if rule.share is None or shared.setdefault(nth, _reach(rule)) == _reach(rule):
                spans.append(Span(turn.start, turn.end, rule.share, f"message {nth}, {turn.role}"))
    return list(dict.fromkeys(spans))


def _reach(rule: Rule) -> int:
    """Return how many turns a rule is about: one, those of a role, or all."""
    return 2 if rule.what == EACH else 1 if rule.what in ROLES else 0


class Layout:
    """Where the turns of a text are while it is tokenised, and what of it is protected.

    Args:
        rules: What is to be protected.
        stream: Makes the tokens.
        before: Tokens in front of those of the stream.
        turns: Turns before the text, which end where it begins.
    """

    def __init__(self, rules: Sequence[Rule], stream: TokenStream, before: int = 0, turns: Sequence[Turn] = ()) -> None:
        self.rules, self.stream, self.before, self._earlier = rules, stream, before, tuple(turns)
        self._starts: list[tuple[str, int | None]] = []
        self._document = 0
        self._document_end: int | None = None

    def turn(self, role: str, character: int | None = None) -> None:
        """Say that a turn begins with a character of the stream; None: with its first token, or those before."""
        self._starts.append((role, character))
        if character is not None:
            self.stream.locate(character)

    def document(self, character: int) -> None:
        """Say at which character of the stream the document begins, of which rules may name characters."""
        self._document = character
        for rule in self.rules:
            for one in (rule.start, rule.end) if rule.what == "chars" else ():
                if one is not None:
                    self.stream.locate(max(0, character + one))

    def document_ends(self, character: int) -> None:
        """Say which character of the stream follows the document; else all of the stream is the document's."""
        self._document_end = character
        self.stream.locate(character)

    def turns(self, end: int | None) -> list[Turn]:
        """Return the turns whose beginning has tokens; the last one goes on to `end`."""
        begun = [(turn.role, turn.start) for turn in self._earlier]
        for role, character in self._starts:
            if character is None:
                begun.append((role, 0))
            elif (place := self.stream.found.get(character)) is not None:
                begun.append((role, self.before + place.first))
        ends = [*(start for _, start in begun[1:]), end]
        return [Turn(role, start, after) for (role, start), after in zip(begun, ends, strict=True)]

    def spans(self, end: int | None = None) -> list[Span]:
        """Return what is protected of what has tokens."""
        characters = []
        for rule in self.rules:
            start = self._at(rule.start)
            if rule.what == "chars" and start is not None:
                after = self._after(rule)
                last = end if after is None else self.before + after.after
                if last is None or last > self.before + start.first:
                    characters.append(Span(self.before + start.first, last, rule.share, str(rule)))
        return spans_of(self.rules, self.turns(end), characters)

    def _at(self, character: int | None) -> Any:
        return None if character is None else self.stream.found.get(max(0, self._document + character))

    def _after(self, rule: Rule) -> Any:
        """Return where the character is that follows a rule's; one without an end goes on to the document's."""
        if rule.end is not None:
            return self._at(rule.end)
        return None if self._document_end is None else self.stream.found.get(self._document_end)

    def watched(self, blocks: Iterable[list[int]], cache: RetentionCache) -> Iterator[list[int]]:
        """Pass tokens on; what is protected of them is told to the cache that reads them before it does."""
        known: list[Span] = []
        for block in blocks:
            if self.rules and (found := self.spans()) != known:
                cache.protect(found)
                known = found
            yield block

    def fixed(self, end: int) -> tuple[Rule, ...]:
        """Return the rules for what follows: those about characters have become tokens, all before `end`.

        Raises:
            ValueError: If characters are beyond the text.
        """
        rules = list[Rule]()
        taken = self.stream.taken + len(self.stream.pending) if self._document_end is None else self._document_end
        for rule in self.rules:
            if rule.what == "chars":
                assert rule.start is not None
                if self._document + (rule.start + 1 if rule.end is None else rule.end) > taken:
                    raise ValueError(f"protect={rule} is outside of the document; give characters within it")
                span = next((one for one in self.spans(end) if one.name == str(rule)), None)
                last = end + len(encode(self.stream.tokenizer, self.stream.pending))  # with the words that wait
                whole = span is not None and self._at(rule.end) is not None
                rule = Rule("tokens", span.start if span else end, span.end if span and whole else last, rule.share)
            rules.append(rule)
        return tuple(rules)


def moved_turns(turns: Sequence[Turn], distance: int, first: int, seen: int) -> list[Turn]:
    """Return turns of a text of `seen` tokens, but for its `first` ones, that begins so many tokens later."""
    spans = [(one.role, max(one.start, first), seen if one.end is None else one.end) for one in turns]
    return [Turn(role, start + distance, end + distance) for role, start, end in spans if end > start]


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
    most: int
    """Units of the KV head that holds the most."""
    share: float
    """The part of all units held that are its own, 0 to 1."""
    protected: str | None
    """all where it is pinned, part where some of it is, or its least share of the budget; None: nothing."""


def kept_turns(heads: Iterable[Tensor], turns: Sequence[Turn], seen: int, spans: Sequence[Span] = ()) -> list[KeptTurn]:
    """Count what has stayed of each turn.

    Args:
        heads: (C,) positions that each KV head of each layer holds, ascending.
        turns: The turns, in their order.
        seen: Tokens that have been read.
        spans: What is protected.
    """
    starts = torch.tensor([min(turn.start, seen) for turn in turns])
    ends = torch.tensor([seen if turn.end is None else min(turn.end, seen) for turn in turns])
    held, counts = 0, []
    for head in heads:
        own = head[head >= 0].long().cpu().contiguous()
        held += len(own)
        counts.append(torch.searchsorted(own, ends) - torch.searchsorted(own, starts))
    counts_HT = torch.stack(counts)
    found = []
    for nth, turn in enumerate(turns):
        mine = counts_HT[:, nth]
        found.append(
            KeptTurn(
                turn.role,
                turn.start,
                int(ends[nth] - starts[nth]),
                round(float(mine.double().mean()), 3),
                int(mine.min()),
                int(mine.max()),
                round(int(mine.sum()) / max(held, 1), 4),
                _protection(range(int(starts[nth]), int(ends[nth])), spans, seen),
            )
        )
    return found


def kept_of(cache: RetentionCache, turns: Sequence[Turn]) -> list[KeptTurn]:
    """Count what a cache of one row holds of each turn; called in all processes alike."""
    heads = (head for layer in cache.backbone.layers for head in cache.kept_everywhere(layer)[0])
    return kept_turns(heads, turns, cache.seen, cache.protected[0] if cache.protected else ())


def _protection(tokens: range, spans: Sequence[Span], seen: int) -> str | None:
    pinned = Guarantee.of([span for span in spans if span.share is None], 0)
    count = pinned.needed(tokens.stop) - pinned.needed(tokens.start)
    shares = [span for span in spans if span.share is not None and span.within(seen) == tokens]
    if tokens and count == len(tokens):
        return "all"
    return f"{shares[0].share:g}" if shares else "part" if count else None


def as_table(kept: Sequence[KeptTurn]) -> str:
    """Return a report for people: a line per turn."""
    lines = [f"{'':>4}{'message':<11}{'tokens':>10}{'units':>9}{'least':>7}{'most':>7}  {'of all':>6}  protected"]
    for nth, one in enumerate(kept):
        lines.append(
            f"{nth:>3} {one.role:<11}{one.tokens:>10,}{one.units:>9,.1f}{one.least:>7,}{one.most:>7,}"
            f"  {one.share:>6.1%}  {one.protected or '-'}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Protection:
    """What of a conversation is protected, and where its turns are."""

    rules: tuple[Rule, ...] = ()
    turns: tuple[Turn, ...] | None = None
    """In their order, each up to the next; None where a file of an earlier version does not say."""
    fixed: int = 0
    """First turns of which rules by role, or by number from the end, say nothing, as they are about those that follow:
    the turns of texts that were joined, whose own rules have become tokens."""

    def asked(self, stream: TokenStream, first: int) -> Layout | None:
        """Return where a user's turn is that is about to be tokenised.

        Args:
            stream: Makes its tokens; what waits there is still part of the turn before.
            first: Position of the next token that it makes.
        """
        if self.turns is None:
            return None
        layout = Layout(self.rules, stream, first - stream.made, self.turns)
        layout.turn(USER, stream.taken + len(stream.pending))
        return layout

    def began(self, role: str, start: int) -> Protection:
        """Return the conversation with a turn that begins there."""
        if self.turns is None:
            return self
        ended = (*self.turns[:-1], *(turn._replace(end=start) for turn in self.turns[-1:]))
        return replace(self, turns=(*ended, Turn(role, start, None)))

    def apply(self, cache: RetentionCache, seen: int | None = None) -> None:
        """Tell a cache what the rules protect, if there are some, of which so many tokens are known.

        Raises:
            ValueError: If there is no room for it, or it is gone.
        """
        if self.rules:
            turns = [turn if turn.end is not None else turn._replace(end=seen) for turn in self._known()]
            cache.protect(self._spans(turns))

    def check_answer(self, cache: RetentionCache, start: int, tokens: int) -> None:
        """Refuse an answer that would be protected itself and could outgrow what an answer may hold.

        Args:
            cache: Of the conversation.
            start: Position of the answer's first token.
            tokens: The most that it may have.

        Raises:
            ValueError: If there is no room for all of them.
        """
        if not self.rules or self.turns is None or cache.policy.decode_budget is None:
            return
        *before, answer = self.began(ASSISTANT, start).turns or ()
        cache.check_room(checked_rows([self._spans(before)]))
        try:
            cache.check_room(checked_rows([self._spans([*before, answer._replace(end=start + tokens)])]))
        except ValueError as error:
            raise ValueError(
                f"an answer of max_new_tokens={tokens} may find no room: {error}, or lower max_new_tokens"
            ) from None

    def kept(self, cache: RetentionCache) -> list[KeptTurn]:
        """Return what a cache holds of each turn.

        Raises:
            ValueError: If it is not known where they are.
        """
        return kept_of(cache, self._known())

    def data(self) -> dict[str, Any]:
        """Return plain data, for `protection_from`."""
        return {
            "protect": [str(rule) for rule in self.rules],
            "messages": None if self.turns is None else [list(turn) for turn in self.turns],
            "fixed": self.fixed,
        }

    def _spans(self, turns: Sequence[Turn]) -> list[Span]:
        return spans_of(self.rules, turns, fixed=self.fixed)

    def _known(self) -> tuple[Turn, ...]:
        if self.turns is None:
            raise ValueError(
                "where its messages are is not known, for it was saved by an earlier version, or is no conversation; "
                "read the text again"
            )
        return self.turns


NOTHING = Protection()


def protection_from(notes: Mapping[str, Any]) -> Protection:
    """Return what a file says of a conversation's turns and of what is protected of them.

    Raises:
        ValueError: If that makes no sense.
    """
    given, messages = notes.get("protect", []), notes.get("messages")
    if not isinstance(given, list) or len(given) > MOST_SPANS:
        raise ValueError(f"protect is {shown(given)}, which is no list of names")
    # Held against each other by who named them: what spans of a composed context came to may be whole and shared.
    rules = tuple(dict.fromkeys(map(Rule.of, given)))
    if messages is None:
        return Protection(rules)
    turns, at = list[Turn](), 0
    for one in messages if isinstance(messages, list) else [None]:
        whole: list[Any] = one if isinstance(one, list) and len(one) == 3 else [None] * 3
        role, start, end = whole
        goes_on = end is None and isinstance(messages, list) and one is messages[-1]
        if role not in ROLES or type(start) is not int or not (goes_on or type(end) is int):
            raise ValueError(f"messages are {shown(messages)}, which are none")
        if not at <= start <= (start if goes_on else end) < 1 << 62:
            raise ValueError(f"messages are {shown(messages)}, which are in no order")
        turns.append(Turn(role, start, end))
        at = start if goes_on else end
    fixed = notes.get("fixed", 0)  # files of earlier versions do not say
    if type(fixed) is not int or not 0 <= fixed <= len(turns):
        raise ValueError(f"fixed messages are {shown(fixed)}, which is no number of them")
    return Protection(rules, tuple(turns), fixed)
