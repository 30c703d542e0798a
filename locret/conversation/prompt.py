"""A conversation as token ids, with the place of each of its messages, from the chat template's own turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from locret.conversation.rules import EACH, SYSTEM, TOOL, TOOLS, Rule, check_named, rules_of
from locret.conversation.templates import Message, leading_special_ids, render
from locret.conversation.templates import beginning as plain_beginning
from locret.conversation.text_stream import TokenStream
from locret.conversation.turns import KeptTurn, Layout, Turn, kept_of, spans_of
from locret.policy.protection import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from locret.cache.cache import RetentionCache

MOST_MESSAGES = 512
"""Messages whose places can be found: the template is asked once for each."""
_ROLES = {"developer": SYSTEM, "function": TOOL}


@dataclass(frozen=True)
class Prompt:
    """Token ids, and where the messages are."""

    ids: list[int]
    turns: tuple[Turn, ...]
    """One for each message, in their order; what the template writes between two belongs to one of them."""
    tools: Turn | None = None
    """Where the definitions of tools are, inside of the turn that the template writes them in."""

    def spans(self, *protect: str | Span | Rule) -> list[Span]:
        """Return what is to be protected, for `RetentionCache.protect`; see `LongContextModel.read`.

        Raises:
            ValueError: If one of them names nothing that is there.
        """
        rules = rules_of(protect)
        for rule in rules:
            if rule.what == "chars":
                raise ValueError(f"protect={rule} names characters of a document; name message:N, or tokens:A-B")
            if rule.what == "tokens" and max(rule.start or 0, (rule.end or 1) - 1) >= len(self.ids):
                raise ValueError(f"protect={rule} is outside of the prompt, which has {len(self.ids):,} tokens")
        check_named(rules, [turn.role for turn in self.turns], [TOOLS] if self.tools else ())
        for rule in rules:
            named = spans_of([rule], [turn._replace(end=None) for turn in self.turns])
            if rule.what not in (TOOLS, EACH) and named and not spans_of([rule], self.turns):
                raise ValueError(f"protect={rule} names a message of which the template writes nothing; leave it out")
        own = [] if self.tools is None else [one for one in rules if one.what == TOOLS]
        definitions = [Span(self.tools.start, self.tools.end, one.share, TOOLS) for one in own if self.tools]
        return spans_of(rules, self.turns, definitions)

    def kept(self, cache: RetentionCache) -> list[KeptTurn]:
        """Return what a cache that has read the prompt, and no other text, holds of each message."""
        return kept_of(cache, [*self.turns, *([] if self.tools is None else [self.tools])])


def written(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    places: bool = True,
) -> Prompt:
    """Return a conversation as a template writes it, up to where the assistant answers.

    Args:
        tokenizer: The backbone's.
        template: One of `locret.conversation.templates.TEMPLATES`.
        messages: As transformers' chat templates take them.
        tools: Definitions of tools, likewise.
        places: Find where the messages are; without it any messages do, and there are no turns.

    Raises:
        ValueError: If the template refuses them, does not write tools, or rewrites messages so that they are not found.
    """
    if not messages or not all(isinstance(one, Mapping) and "role" in one for one in messages):
        raise ValueError("messages are no conversation; give a list of {'role': ..., 'content': ...}")
    special = leading_special_ids(tokenizer) if template != "chat" else []
    plain = None
    if template != "chat":
        if tools:
            raise ValueError(f"tools have no effect with template={template}; leave them out, or use the chat template")
        turns = [Message(_ROLES.get(one["role"], one["role"]), str(one.get("content") or "")) for one in messages]
        whole = render(tokenizer, turns, template)
    else:
        try:
            whole = _text(tokenizer, messages, tools, answers=True)
            plain = _text(tokenizer, messages, None, answers=True) if tools else None
        except Exception as error:  # whatever a stranger's template does
            raise ValueError(f"the tokenizer's chat template refuses these messages ({error}); change them") from error
        if whole == plain:
            raise ValueError(
                "tools have no effect, for this tokenizer's chat template does not write them; leave them out"
            )
    if not places:
        return Prompt([*special, *TokenStream(tokenizer).rest(whole)], ())

    def beginning(count: int) -> str | None:
        if template != "chat":
            return plain_beginning(turns[:count], template)
        with suppress(Exception):  # likewise
            return _text(tokenizer, messages[:count], tools)
        return None

    return prompt_of(tokenizer, whole, messages, beginning, special=special, without_tools=plain)


def _text(tokenizer: PreTrainedTokenizerBase, messages: Any, tools: Any, *, answers: bool = False) -> str:
    made = tokenizer.apply_chat_template(
        list(messages), tools=tools or None, tokenize=False, add_generation_prompt=answers
    )
    return str(made)


def prompt_of(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    messages: Sequence[Mapping[str, Any]],
    beginning: Callable[[int], str | None],
    *,
    special: Sequence[int] = (),
    without_tools: str | None = None,
) -> Prompt:
    """Tokenise a conversation that a template has written, and find its messages.

    Args:
        tokenizer: The backbone's.
        text: The conversation, up to where the assistant answers.
        messages: Its messages, with role and content.
        beginning: Returns what the template writes of so many first messages; None where it refuses them.
        special: Token ids before those of the text.
        without_tools: The text without the definitions of tools; None where there are none.

    Raises:
        ValueError: If there are too many messages, or the template rewrites them so that they are not found.
    """
    stream = TokenStream(tokenizer)
    layout = Layout((), stream, len(special))
    for message, start in zip(messages, _starts(text, messages, beginning), strict=True):
        role = str(message["role"])
        layout.turn(_ROLES.get(role, role), start or None)
    place = None if without_tools is None else _difference(without_tools, text)
    for character in place or ():
        stream.locate(character)
    ids = [*special, *stream.rest(text)]
    turns, tools = tuple(layout.turns(len(ids))), None
    if place is not None:
        first, last = (stream.found[character] for character in place)
        tools = Turn(TOOLS, len(special) + first.first, len(special) + last.after)
    return Prompt(ids, turns, tools)


def _starts(text: str, messages: Sequence[Mapping[str, Any]], beginning: Callable[[int], str | None]) -> list[int]:
    """Return at which character each message begins: where the template would end the ones before it."""
    if len(messages) > MOST_MESSAGES:
        raise ValueError(
            f"{len(messages):,} messages are more than the {MOST_MESSAGES} whose places can be found; give fewer, or "
            "neither protect nor kept"
        )
    starts = [0]
    for nth in range(1, len(messages)):
        before = beginning(nth)
        if before is not None and text.startswith(before) and len(before) >= starts[-1]:
            starts.append(len(before))
            continue
        said = str(messages[nth - 1].get("content") or "").strip()
        found = text.find(said, starts[-1])
        if not said or found < 0:
            raise ValueError(
                f"the chat template rewrites message {nth - 1}, or it is empty, so its place is not known; give "
                "neither protect nor kept"
            )
        starts.append(found + len(said))
    for nth, (message, start, end) in enumerate(zip(messages, starts, [*starts[1:], len(text)], strict=True)):
        said = str(message.get("content") or "").strip()
        if said not in text[start:end] and said in text:
            raise ValueError(
                f"the template moves message {nth}, {message['role']}, to another place, so which tokens are whose is "
                "not known; put it where the template writes it, or give neither protect nor kept"
            )
    return starts


def _difference(text: str, longer: str) -> tuple[int, int] | None:
    """Return between which characters of the longer text it says more than the other one."""
    first = next((nth for nth, (one, other) in enumerate(zip(text, longer, strict=False)) if one != other), len(text))
    most = min(len(text), len(longer)) - first
    same = next((nth for nth in range(most) if text[-1 - nth] != longer[-1 - nth]), most)
    return (first, len(longer) - same) if len(longer) - same > first else None
