"""The output folder of an evaluation: one configuration each, checked before anything is loaded or written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from locret.base.files import visible, write_text
from locret.base.warned import warn_user
from locret.environment import versions
from locret.infer.evaluation.records import RESULTS, SAMPLES, TABLE, SampleLog, parts

CONFIGURATION = "configuration.json"
METHODS = "methods"
"""The setting that may grow when a run goes on, as what a method answers does not depend on the others."""
VERSIONS = "versions"
"""What that file holds besides the settings: what the first process that wrote here ran on."""


def fingerprint(settings: dict[str, Any]) -> str:
    """Return the hash of the resolved configuration."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def check_output(output: str, settings: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that holds something else; nothing is written."""
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {output} is a file; name a folder")
    if not visible(folder):
        return
    if not (folder / CONFIGURATION).is_file():
        raise ValueError(f"--output {output} holds something else than an evaluation; choose another folder")
    if overwrite:
        return
    stored, here = _configuration(folder), json.loads(json.dumps(settings))
    different = [
        name
        for name, value in here.items()
        if stored.get(name, value) != value and not (resume and name == METHODS and set(stored[name]) <= set(value))
    ]
    if different:
        raise ValueError(
            f"--output {output} holds an evaluation of another configuration (other {', '.join(different)}); choose "
            "another folder, or --overwrite it"
        )
    if not resume:
        raise ValueError(f"--output {output} holds this evaluation already; --resume goes on, --overwrite starts again")


def open_output(output: str, settings: dict[str, Any], *, overwrite: bool) -> SampleLog:
    """Return the records of a folder that `check_output` has passed, making it if need be."""
    folder, here = Path(output), versions()
    log = SampleLog(folder)
    if (folder / CONFIGURATION).is_file() and not overwrite:
        log.load()
        before = _configuration(folder)
        if (recorded := before.get(VERSIONS, here)) != here:
            changed = [f"{n} {recorded.get(n)} is now {here[n]}" for n in here if recorded.get(n) != here[n]]
            warn_user(f"--resume mixes answers of different versions ({', '.join(changed)}); --overwrite starts again")
        here = recorded
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The configuration goes last: a folder without it is nobody's.
            parted = [path.name for path in parts(folder)]
            for name in (SAMPLES, *parted, RESULTS, TABLE, CONFIGURATION):
                (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise OSError(f"--output {output} cannot be written ({error.strerror}); choose another folder") from error
    write_text(folder / CONFIGURATION, json.dumps({**settings, VERSIONS: here}, indent=1) + "\n")
    return log


def _configuration(folder: Path) -> dict[str, Any]:
    """Return what a configuration file holds."""
    path = folder / CONFIGURATION
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise ValueError(f"{path} is broken; --overwrite starts again, or choose another folder") from None
