"""Calls of tools in the text of an answer, as Qwen, Hermes and their like write them: JSON between tags."""

from __future__ import annotations

import json
import secrets
from typing import Any

from locret.conversation.document import is_text

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"


class CallText:
    """Parts the text of an answer, as it is written, into words and whole calls; what is no call stays in the words."""

    def __init__(self) -> None:
        self.made = 0
        """Calls so far."""
        self._held = ""

    def add(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Take more of the text, and return what is certain now; at the end of the answer a call needs no end."""
        self._held += text
        words, calls = "", list[dict[str, Any]]()
        while (at := self._held.find(_OPENS)) >= 0 and (last or _CLOSES in self._held[at:]):
            inside, _, after = self._held[at + len(_OPENS) :].partition(_CLOSES)
            found = _called(inside)
            words += self._held[:at].rstrip() if found else self._held[: len(self._held) - len(after)]
            calls, self._held = calls + found, after
        self.made += len(calls)
        if at < 0:
            size = next(size for size in range(len(_OPENS), -1, -1) if self._held.endswith(_OPENS[:size]))
            at = len(self._held) - size
        certain = self._held if last else self._held[:at].rstrip()  # white space before a call goes with it
        self._held = self._held[len(certain) :]
        return words + (certain if certain.strip() or not self.made else ""), calls


def _called(text: str) -> list[dict[str, Any]]:
    """Return the calls that a text between tags makes, one object or a list of them; none if it is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = list[dict[str, Any]]()
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, dict) or not is_text(name := one.get("name")):
            return []
        given = one.get("arguments") or {}
        function = {"name": name, "arguments": given if is_text(given) else json.dumps(given)}
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return calls
