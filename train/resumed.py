"""What `--resume` goes on with: the folder of a run, and the options that it was started with. Imports no torch."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from locret.base.nearest import check_retired
from locret.distributed.ranks import launched
from locret.policy import policy

RECORD = "run.json"
STATE = "state.pt"
AUTO = "auto"
"""The newest checkpoint of --output, or a new run if there is none."""
_RESUME = ("resume", "resume_from_checkpoint")
ONCE = ("resume", "overwrite", "output", "dry_run", "json")
"""Options of one call of the command, which the next one does not inherit."""
SPREAD = ("shard", "shard_offload", "shard_offload_dir")
"""How a run is spread over processes, which one that goes on alone does not inherit."""


_RETIRED = {
    "data_dir": None,
    "label_floor": None,
    "evict_while_training": False,
    "sp_size": 1,
    "devices": None,
    "host_memory": None,
    "gate": "locret",
    "push_to_hub": None,
    "private": False,
    "streaming": False,
    "shuffle_buffer": 1000,
    "max_row_bytes": 4_900_000,
    "neighbours": 0,
    "temperature": 1.0,
    "label_source": "answer",
}
"""Options that runs of earlier versions have, and the values that changed nothing."""


def without_retired(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run less those that have been retired."""
    for name, usual in _RETIRED.items():
        if config.get(name, usual) != usual:
            check_retired("option", f"--{name.replace('_', '-')}")
    # Whether bad rows stop a run decides nothing about one that they have not stopped.
    kept = {name: value for name, value in config.items() if name not in (*_RETIRED, "skip_bad_rows")}
    return {**kept, "policy": policy.without_retired(kept["policy"])} if "policy" in kept else kept


def run_of(resume: str | None) -> Path | None:
    """Return the folder of the run whose options are taken over; None where they are all given anew."""
    if resume is None or resume == AUTO:
        return None
    if not resume:
        raise ValueError("--resume is empty; give the folder of a run, or auto")
    path = Path(os.path.expanduser(resume))
    if not (path / RECORD).is_file():
        why = f"it has no {RECORD}" if path.is_dir() else "there is no such folder"
        raise ValueError(f"--resume {resume} is not a run ({why}); give the folder that holds {RECORD}")
    return path


@contextmanager
def recorded(arguments: Sequence[str], option_classes: Sequence[type]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Read the options of the run that `--resume` names, as arguments that those given may follow and override.

    Yields:
        The arguments, and what `run.json` holds; both empty if there is no such run.
    """
    if (folder := run_of(_value(arguments, _RESUME))) is None:
        yield [], {}
        return
    import yaml

    record = read_record(folder, {field.name for cls in option_classes for field in fields(cls)})
    with tempfile.TemporaryDirectory() as place:
        recipe = Path(place) / "run.yaml"
        recipe.write_text(yaml.safe_dump(record["config"]), encoding="utf-8")
        yield [f"--config={recipe}"], record


def read_record(folder: Path, known: set[str]) -> dict[str, Any]:
    """Return what `run.json` holds, with the options under `config` and the names of those chosen under `chosen`."""
    way_out = f"give all options of that run with --output {folder} --resume auto"
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except OSError as error:
        raise OSError(f"--resume {folder}: {RECORD} cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, RecursionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"--resume {folder}: {RECORD} is damaged ({reason}); {way_out}") from None
    config = record.get("config") if isinstance(record, Mapping) else None
    chosen = record.get("chosen", []) if isinstance(record, Mapping) else []
    if not isinstance(config, Mapping) or not isinstance(chosen, list) or not all(isinstance(n, str) for n in chosen):
        raise ValueError(f"--resume {folder}: {RECORD} is damaged (it holds no options); {way_out}")
    config = without_retired(config)
    for name in config:
        if name not in known:
            raise ValueError(f"--resume {folder}: {RECORD} has an unknown option {name!r}; {way_out}")
    dropped = ONCE if launched()[1] > 1 else (*ONCE, *SPREAD)
    # Before there was validation, no rows were held out.
    options = {"eval_rows": 0, **{name: value for name, value in config.items() if name not in dropped}}
    return {"config": options, "chosen": chosen}


def _value(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the last value that an option was given on the command line."""
    found = None
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.startswith("--") and name[2:].replace("-", "_") in names:
            found = value if equals else arguments[index + 1] if index + 1 < len(arguments) else None
    return found
