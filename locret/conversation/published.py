"""Contexts on the Hugging Face Hub: a repository with the file, a card, and a picture of what was kept.

What comes from there is a safetensors file, checked as any other; nothing of a repository is run.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, hf_hub_download

from locret import hub, shipped
from locret._version import __version__
from locret.base.tables import markdown
from locret.conversation.saved_context import SavedContext
from locret.pictures import as_lines, can_draw, retention_map
from locret.publish_options import ContextPushOptions, check_repository

FILE, PICTURE, CARD = "context.safetensors", "kept.png", "README.md"
TAG = "locret-context"
_LACKS = f"has no {FILE}, so it does not hold a context; give a repository that locret-context push made"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TEMPLATE = """\
---
{{ card_data }}
---

# {{ title }}

What a language model keeps of a text of {{ tokens }} tokens, as [locret](https://github.com/locret/locret) has read it:
{{ units }} cache units per KV head, which answer questions about the text without reading it again. A cache unit is the
key and value of one token in one KV head of one layer. The file holds numbers for one backbone with the same weights,
and runs no code.

Whoever has the file can ask it about the text, and its header holds the text's last words.

## What was kept

{{ picture }}Each line is a layer, from the beginning of the text to its end; a higher bar: more was kept there.

```
{{ kept }}
```

{{ facts }}

## How to use

```python
from locret import LongContextModel

lm = LongContextModel.from_pretrained("{{ base }}", {{ scorer }})
context = lm.load("{{ repo }}")
print(context.ask("What is the text about?"))
```

```bash
locret-context pull {{ repo }} --output book.ctx
locret-context ask book.ctx --model {{ base }} {{ flags }} --question "What is the text about?"
```
{{ engines }}
Written by locret {{ version }}.
"""
_ENGINES = """
Other engines take it as the prefix of a prompt, {{ units }} tokens long:
[vLLM, transformers](https://github.com/locret/locret/blob/main/docs/engines.md), and llama.cpp:

```bash
locret-context export book.ctx --to llamacpp --output book.bin
```
"""


def find_context(name: str | Path, *, revision: str | None = None) -> Path:
    """Return the file of a context: the one named, or a download of the repository named.

    Args:
        name: A file, or org/name on the Hub.
        revision: Branch, tag or commit on the Hub.

    Raises:
        ValueError: If a revision of a file is asked for, or the Hub has no such context.
        OSError: If the Hub refuses or cannot be reached.
    """
    path, text = Path(name), str(name)
    on_hub = not path.exists() and bool(_REPOSITORY.fullmatch(text)) and not path.parent.exists()
    if on_hub:
        return download(text, revision=revision)
    if revision is not None:
        raise ValueError(f"revision={revision!r} is of a repository on the Hub, but {text} is a file; leave it out")
    return path


def download(repo: str, *, revision: str | None = None) -> Path:
    """Return the file of a context on the Hub, in the download cache; it is not checked yet.

    Raises:
        ValueError: If the repository does not exist, or holds no context.
        OSError: If the Hub refuses or cannot be reached.
    """
    check_repository(repo)
    with hub.one_sentence("load", repo, what="file", lacks=_LACKS):
        return Path(hf_hub_download(repo, FILE, revision=revision))


def publish(options: ContextPushOptions) -> dict[str, Any]:
    """Check and upload a saved context, with its card and picture; returns and raises as `locret.hub.upload`.

    Raises:
        ValueError: Also if the file is not that of a context.

    Warns:
        UserWarning: If others will see it.
    """
    saved = SavedContext.open(shipped.find(options.context))
    if not saved.conversation or saved.conversation.get("turns"):
        what = "a conversation, with what was said" if saved.conversation else "a cache without its conversation"
        raise ValueError(
            f"{options.context} holds {what}; push a context, as context.save or locret-context read write it"
        )
    if not options.private:
        warnings.warn(
            f"whoever can read {options.repo} can ask this context about its text, and sees the text's last words; a "
            "private repository (--private, or private=True) keeps them to those you choose",
            stacklevel=2,
        )
    drawn = _picture(saved)
    contents: dict[str, Path | bytes] = {
        CARD: card(saved, options, picture=drawn is not None).encode(),
        FILE: saved.path.resolve(),
        **({} if drawn is None else {PICTURE: drawn}),
    }
    return hub.upload(options, contents)


def card(saved: SavedContext, options: ContextPushOptions, *, picture: bool) -> str:
    """Return the card of a context, front matter included.

    Args:
        saved: The context.
        options: Where it goes, and what it was made with.
        picture: Whether there is one beside the card.
    """
    trained = saved.scorer == "retaining_heads"
    scorer = saved.scorer if re.fullmatch(r"[\w:.+-]+", saved.scorer) else "its-scorer"
    heads = options.heads or "path/to/its-heads"
    portable = not isinstance(saved.prefix, str)
    values: dict[str, Any] = {
        "title": saved.shown_name,
        "tokens": f"{saved.tokens:,}",
        "units": f"{max(saved.units):,}",
        "picture": f"![what was kept]({PICTURE})\n\n" if picture else "",
        "kept": "\n".join(as_lines(saved.retention(saved.shown_name))),
        "facts": "\n".join(markdown(("", ""), saved.lines(), numbers=False)),
        "base": options.base_model or "path/to/its-backbone",
        "scorer": f'heads="{heads}"' if trained else f'scorer="{scorer}"',
        "flags": f"--heads {heads}" if trained else f"--scorer {scorer}",
        "repo": options.repo,
        "engines": _ENGINES.replace("{{ units }}", f"{max(saved.units):,}") if portable else "",
        "version": __version__,
    }
    data = ModelCardData(
        library_name="locret",
        tags=[TAG, "long-context", "kv-cache"],
        base_model=options.base_model,
        license=options.license,
    )
    made: ModelCard = ModelCard.from_template(card_data=data, template_str=_TEMPLATE, **values)
    return str(made)


def _picture(saved: SavedContext) -> bytes | None:
    """Return the picture of a context; None without matplotlib, with a warning."""
    if not can_draw("a picture of what was kept"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, PICTURE)
        retention_map([saved.retention(saved.shown_name)], path)
        return path.read_bytes()
