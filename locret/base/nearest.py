"""Which of the known names is meant by one that is unknown: what messages suggest."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NoReturn


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the name that differs from `name` in upper case only; else up to three that are spelt most like it.

    A name without a slash is also compared with what follows the slash in names that have one: "qasper" means
    "longbench/qasper". If nothing is spelt alike, names that contain it will do.
    """
    wanted, forms = name.lower(), dict[str, list[str]]()
    for one in known:
        whole = one.lower()
        if whole == wanted:
            return [one]
        for form in dict.fromkeys((whole, whole if "/" in name else whole.rpartition("/")[2])):
            forms.setdefault(form, []).append(one)
    alike = [wanted] if wanted in forms else get_close_matches(wanted, forms, n=3)
    close = alike or [form for form in forms if wanted in form]
    return list(dict.fromkeys(one for form in close for one in forms[form]))[:3]


_LAST = "release 0.1.0 (git tag lab-frozen)"


@cache
def _retired() -> dict[str, Any]:
    """Return what could be chosen until then, as kind and name.

    What is `gone` (a name that ends with a slash stands for all that begin so), and what is needed no more, with what
    does the same `instead`, or what happens without it.
    """
    return dict(json.loads(Path(__file__).with_name("retired.json").read_text(encoding="utf-8")))


def check_retired(kind: str, name: str) -> None:
    """Refuse a name that an earlier release had; `kind` is what messages call such a choice, as "--suite"."""
    asked, retired = f"{kind} {name}", _retired()
    instead = f": {retired['instead'][asked]}" if asked in retired["instead"] else ""
    if instead or any(asked == one or (one.endswith("/") and asked.startswith(one)) for one in retired["gone"]):
        raise ValueError(f'{kind} "{name}" was retired{instead}; {_LAST} is the last that has it')


def refuse_unknown(kind: str, name: str, known: Iterable[str], where: str = "") -> NoReturn:
    """Refuse a name that is none of those known, with the nearest of them, or all; messages say `where`, or `kind`."""
    check_retired(kind, name)
    near = nearest(name, known := list(known))
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(known)}"
    raise ValueError(f'{where or kind} "{name}" is unknown; {hint}')
