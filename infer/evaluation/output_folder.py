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
from locret.policy.policy import without_retired

CONFIGURATION = "configuration.json"
METHODS = "methods"
"""The setting that may grow when a run goes on: what a method answers does not depend on the others."""
GATES = "gates"
"""What tells the gates of others that methods name from those that lay there before; it grows with the methods."""
_FORMER = {"questions": None, "batch_size": 1, "protocols": ["aware"], "protect": []}
"""Settings that folders of an older toolkit name only where they are not these."""
VERSIONS = "versions"
"""What that file holds besides the settings: the versions that each process that wrote here ran on."""


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """Return what tells a tokenizer and its chat template from others."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    template = tokenizer.chat_template
    text = json.dumps(template, sort_keys=True) if isinstance(template, dict) else template
    return {
        "class": type(tokenizer).__name__,
        "vocabulary_sha256": hashlib.sha256(vocabulary).hexdigest(),
        "template_sha256": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
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
    state = folder / CONFIGURATION
    if not state.is_file():
        raise ValueError(f"--output {output} holds something else than an evaluation; choose another folder")
    if overwrite:
        return
    different = [name for name in _different(state, settings) if not (resume and _grows(state, settings, name))]
    if different:
        raise ValueError(
            f"--output {output} holds an evaluation of another configuration (other {', '.join(different)}); choose "
            "another folder, or --overwrite it"
        )
    if not resume:
        raise ValueError(f"--output {output} holds this evaluation already; --resume goes on, --overwrite starts again")


def _different(state: Path, settings: dict[str, Any]) -> list[str]:
    """Return the settings that are not those of the folder, without any that an older toolkit did not know.

    What retired fields of a policy say there makes no difference where it is what everybody has today.
    """
    stored, here = _configuration(state), json.loads(json.dumps(settings))
    if isinstance(policies := stored.get("policies"), list):
        stored["policies"] = [without_retired(one, keep_used=True) for one in policies]
    return [name for name, value in here.items() if stored.get(name, _FORMER.get(name, value)) != value]


def _grows(state: Path, settings: dict[str, Any], name: str) -> bool:
    """Return whether a setting has all that the folder's has, and may have more."""
    stored = _configuration(state).get(name)
    if name == GATES:
        here = json.loads(json.dumps(settings[name]))  # as the folder has it: keys are texts, tuples lists
        return isinstance(stored, dict) and all(here.get(one) == value for one, value in stored.items())
    return name == METHODS and isinstance(stored, list) and all(one in settings[name] for one in stored)


def open_output(output: str, settings: dict[str, Any], *, overwrite: bool) -> SampleLog:
    """Return the records of a folder that `check_output` has passed, making it if need be; its versions go on record.

    Raises:
        ValueError: If its records are broken.
        OSError: If it cannot be written.
    """
    folder = Path(output)
    log = SampleLog(folder)
    if (folder / CONFIGURATION).is_file() and not overwrite:
        log.load()
        _add_methods(folder, settings)
        _add_versions(folder, log)
        return log
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The configuration goes last: a folder without it is nobody's.
        parted = [path.name for path in parts(folder)]
        for name in (SAMPLES, *parted, RESULTS, TABLE, *_pictures(folder), CONFIGURATION):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"--output {output} cannot be written ({error.strerror}); choose another folder") from error
    write_text(folder / CONFIGURATION, json.dumps({**settings, VERSIONS: [versions()]}, indent=1) + "\n")
    return log


def versions_of(folder: Path) -> list[dict[str, str]]:
    """Return the versions that the processes of a folder ran on, the newest last; equal ones in a row are one.

    Empty for a folder of an older toolkit, which did not record them.

    Raises:
        ValueError: If they are damaged.
    """
    stored = _configuration(folder / CONFIGURATION).get(VERSIONS, [])
    if not isinstance(stored, list) or not all(isinstance(found, dict) for found in stored):
        raise _broken(folder / CONFIGURATION)
    return [{str(name): str(value) for name, value in found.items()} for found in stored]


def _configuration(path: Path) -> dict[str, Any]:
    """Return what a configuration file holds.

    Raises:
        ValueError: If it is damaged.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise _broken(path) from None
    if not isinstance(stored, dict):
        raise _broken(path)
    return stored


def _broken(path: Path) -> ValueError:
    return ValueError(f"{path} is broken; --overwrite starts again, or choose another folder")


def _add_methods(folder: Path, settings: dict[str, Any]) -> None:
    """Put methods on record that are asked from now on, and what was nowhere without them, as gates."""
    state = folder / CONFIGURATION
    stored = _configuration(state)
    if METHODS in settings and stored.get(METHODS) != settings[METHODS]:
        grown = {name: settings[name] for name in (METHODS, GATES) if name in settings}
        write_text(state, json.dumps({**settings, **stored, **grown}, indent=1) + "\n")


def _add_versions(folder: Path, log: SampleLog) -> None:
    """Put this process's versions on record, and say what has changed since the answers that are there."""
    here, recorded = versions(), versions_of(folder)
    if recorded and recorded[-1] == here:
        return
    before = recorded or ([_versions_of_results(folder)] if log.records else [])
    if before and before[-1] == here:
        before = []  # an older toolkit has them in results.json alone: they go on record now
    if before:
        last = before[-1]
        names = [name for name in {**last, **here} if last.get(name) != here.get(name)]
        changed = ", ".join(f"{name} {last.get(name, 'unknown')} is now {here.get(name, 'unknown')}" for name in names)
        warnings.warn(
            f"--resume mixes answers of different versions ({changed}); results.json names all of them, --overwrite "
            "starts again",
            stacklevel=2,
        )
    state = folder / CONFIGURATION
    write_text(state, json.dumps({**_configuration(state), VERSIONS: [*before, here]}, indent=1) + "\n")


def _versions_of_results(folder: Path) -> dict[str, str]:
    """Return the versions that the results of an older toolkit name."""
    try:
        return dict(json.loads((folder / RESULTS).read_text(encoding="utf-8"))["versions"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {"commit": "unknown"}


def _pictures(folder: Path) -> list[str]:
    """Return the files that an earlier evaluation says it has drawn here."""
    try:
        named = json.loads((folder / RESULTS).read_text(encoding="utf-8"))["figures"]
        return [Path(str(name)).name for name in named if str(name).endswith((".png", ".json"))]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
