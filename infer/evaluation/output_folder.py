"""The output folder of an evaluation: one configuration each, checked before anything is loaded or written."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from locret.base.files import visible, write_text
from locret.environment import versions
from locret.infer.evaluation.records import RESULTS, SAMPLES, TABLE, SampleLog, parts

CONFIGURATION = "configuration.json"
METHODS, GATES = "methods", "gates"
"""Settings that may grow when a run goes on, as what a method answers does not depend on the others; and what tells the
gates of others that methods name from those that lay there before."""
VERSIONS = "versions"
"""What that file holds besides the settings: what the first process that wrote here ran on."""


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """Return what tells a tokenizer and its chat template from others."""
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    return {
        "class": type(tokenizer).__name__,
        "vocabulary_sha256": hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest(),
        "template_sha256": hashlib.sha256(template.encode()).hexdigest(),
    }


def fingerprint(settings: dict[str, Any]) -> str:
    """Return the hash of the resolved configuration."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def check_output(output: str, settings: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that holds something else; nothing is written.

    Args:
        output: What the user gave.
        settings: The resolved configuration, as far as it is known.
        resume: Whether the same configuration is to go on; it may have more methods then.
        overwrite: Whether an evaluation may be replaced.

    Raises:
        ValueError: If it holds another configuration, the same one without `resume`, or no evaluation.
        OSError: If it cannot be read.
    """
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
        if stored.get(name, value) != value and not (resume and _grows(name, stored[name], value))
    ]
    if different:
        raise ValueError(
            f"--output {output} holds an evaluation of another configuration (other {', '.join(different)}); choose "
            "another folder, or --overwrite it"
        )
    if not resume:
        raise ValueError(f"--output {output} holds this evaluation already; --resume goes on, --overwrite starts again")


def _grows(name: str, stored: Any, here: Any) -> bool:
    """Return whether a setting has all that the folder's has, and may have more."""
    if name == GATES:
        return isinstance(stored, dict) and stored.items() <= here.items()
    return name == METHODS and isinstance(stored, list) and set(stored) <= set(here)


def open_output(output: str, settings: dict[str, Any], *, overwrite: bool) -> SampleLog:
    """Return the records of a folder that `check_output` has passed, making it if need be.

    Raises:
        ValueError: If its records are broken.
        OSError: If it cannot be written.
    """
    folder, here = Path(output), versions()
    log = SampleLog(folder)
    if (folder / CONFIGURATION).is_file() and not overwrite:
        log.load()
        before = _configuration(folder)
        if (recorded := before.get(VERSIONS, here)) != here:
            changed = [f"{n} {recorded.get(n)} is now {here[n]}" for n in here if recorded.get(n) != here[n]]
            warnings.warn(
                f"--resume mixes answers of different versions ({', '.join(changed)}); --overwrite starts again",
                stacklevel=2,
            )
        here = recorded
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The configuration goes last: a folder without it is nobody's.
            pictures = [path.name for path in folder.glob("*.png")]
            parted = [path.name for path in parts(folder)]
            for name in (SAMPLES, *parted, RESULTS, TABLE, *pictures, CONFIGURATION):
                (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise OSError(f"--output {output} cannot be written ({error.strerror}); choose another folder") from error
    write_text(folder / CONFIGURATION, json.dumps({**settings, VERSIONS: here}, indent=1) + "\n")
    return log


def first_versions(folder: Path) -> dict[str, str]:
    """Return what the first process that wrote to a folder ran on."""
    return dict(_configuration(folder)[VERSIONS])


def _configuration(folder: Path) -> dict[str, Any]:
    """Return what a configuration file holds.

    Raises:
        ValueError: If it is damaged.
    """
    path = folder / CONFIGURATION
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or not isinstance(stored.get(VERSIONS, {}), dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is broken; --overwrite starts again, or choose another folder") from None
    return stored
