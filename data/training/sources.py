"""Where training rows come from: a published data set by name, a Hub id, or local files.

LongAlpaca, LongAlign and Anti-Haystack are those of the paper's Section 4.1 and its data ablation; LongAlpaca-16k is
the part of LongAlpaca that fits into 16K tokens. Each is pinned to the newest commit of its repository that was known
when this was written; `--dataset-revision` overrides it. They are read by `datasets`, which keeps tables on the disk; a
local JSON file is read row by row, so that a bad row stops only itself.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from locret.base.nearest import nearest

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Rows = Union["Dataset", Sequence[Mapping[str, Any]]]
_SCHEMA_ROWS = 100
"""Rows whose keys together are the columns of a data set that does not list them."""


class BadRow(ValueError):
    """A row that cannot be trained on.

    Args:
        reason: A few words that rows left out are counted under.
        detail: What is wrong, after "the row": "has no answer".
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class PublishedSet(NamedTuple):
    """A data set on the Hub."""

    repo: str
    revision: str


ALIASES = {
    "LongAlpaca": PublishedSet("Yukang/LongAlpaca-12k", "46dce924ed8786979556018e191c0f557d8f4aa2"),
    "LongAlpaca-16k": PublishedSet("Yukang/LongAlpaca-16k-length", "c31057635e6d558bc4e6318118825aeddcead52f"),
    "LongAlign": PublishedSet("THUDM/LongAlign-10k", "12f17c4baff1001f0d44c4f8feab09ee2ee8c6dc"),
    "Anti-Haystack": PublishedSet("wenbopan/anti-haystack", "49ebf84261893b13ee423acd9b36f38e1ac16d88"),
}
ENDINGS = (".json", ".jsonl", ".parquet")
"""Those of files that are read."""


def load_rows(dataset: str, *, split: str = "train", revision: str | None = None) -> Rows:
    """Find the rows of a training set.

    Args:
        dataset: A name in `ALIASES`; a Hub id `owner/name`; a `.json` (list of objects), `.jsonl` or `.parquet` file;
            or a folder of such files.
        split: Split to read, in the syntax of `datasets` (`train[:100]`). A single file is all `train`.
        revision: Commit, branch or tag on the Hub. A named set is pinned to the commit in `ALIASES` if None.

    Returns:
        The rows as published, at least one. `locret.data.training.rows` reads their schema.

    Raises:
        ValueError: Unknown name (the nearest are listed), no such file, split or Hub data set, a file that is empty or
            cannot be parsed.
        OSError: If the Hub cannot be reached, or a file cannot be read.
    """
    local = find_local(dataset)
    if local is None:
        rows = _load_hub(dataset, split, revision)
    else:
        if revision is not None:
            logger.warning("--dataset-revision %s is ignored: --dataset %s is read from %s", revision, dataset, local)
        rows = _load_local(local, dataset, split)
    if not len(rows):
        raise ValueError(f"--dataset {dataset}: split {split!r} has no rows; choose another split or another data set")
    return rows


def columns_of(rows: Rows) -> list[str]:
    """Return the names of the columns: those of a table, or the keys of the first rows together."""
    if (listed := getattr(rows, "column_names", None)) is not None:
        return list(listed)
    found, problem = dict[str, None](), None
    for index in range(min(len(rows), _SCHEMA_ROWS)):
        try:
            found.update(dict.fromkeys(record_of(rows, index)))
        except BadRow as error:
            problem = problem or error
    if problem is not None and not found:
        raise problem
    return list(found)


def record_of(rows: Rows, index: int) -> Mapping[str, Any]:
    try:
        row: Any = rows[index]
    except UnicodeDecodeError as error:  # Arrow stores text without checking it
        raise BadRow("invalid UTF-8", f"holds text that is not UTF-8 ({error.reason})") from None
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, Mapping):
        raise BadRow("wrong type", f"is of type {type(row).__name__} where an object is needed")
    return row


def find_local(dataset: str) -> Path | None:
    """Return the local file or folder that `load_rows` will read, or None for the Hub; nothing is read or fetched."""
    if not dataset.strip():
        raise ValueError(f"--dataset is empty; give {', '.join(ALIASES)}, a Hub id or a file")
    alias = _alias(dataset)
    path = Path(os.path.expanduser(dataset))
    if alias is None and path.exists():
        return path
    if alias is not None or (re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", dataset) and path.suffix not in ENDINGS):
        return None
    if path.suffix in ENDINGS or len(path.parts) > 1:
        raise ValueError(f"--dataset {dataset}: no such file or folder; check the path")
    near = nearest(dataset, ALIASES)
    hint = f"did you mean {' or '.join(near)}? Known names: " if near else "known names: "
    raise ValueError(
        f"--dataset {dataset}: no data set of that name; {hint}{', '.join(ALIASES)}, a Hub id (owner/name), "
        f"or a path ending in {', '.join(ENDINGS)}"
    )


def _alias(dataset: str) -> str | None:
    """The alias meant by a name: its own, in any case, or the Hub id behind it."""
    meant = (one for one, known in ALIASES.items() if dataset.lower() in (one.lower(), known.repo.lower()))
    return next(meant, None)


def _load_local(path: Path, dataset: str, split: str) -> Rows:
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what else it would say stands in what it raises
    with _one_sentence(f"--dataset {dataset}: {path}", "check the file and the split"):
        if path.is_dir():  # splits come from file names (test.jsonl) or the README, else all is train
            return datasets.load_dataset(str(path), split=split)
        if path.suffix not in ENDINGS:
            raise ValueError(f"its ending is not known; convert it to {', '.join(ENDINGS)}")
        if path.suffix == ".parquet":
            return datasets.load_dataset("parquet", data_files=escape(str(path)), split=split)
        content = path.read_bytes()
        # The elements of the one list of a file, else what its lines hold.
        is_list = path.suffix == ".json" and content.removeprefix(BOM_UTF8).lstrip()[:1] == b"["
        rows = json.loads(content) if is_list else [_parsed(one) for one in content.splitlines() if one.strip()]
        if not rows:
            raise ValueError("it is empty; it needs at least one row")
        first, *others = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
        if others:
            raise ValueError(f"--split {split} joins parts; name one, such as train[:100]")
        return rows[first.from_ : first.to]


def _parsed(line: bytes) -> Any:
    """Return what a line holds; a bad one as the error that `record_of` raises."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRow("invalid UTF-8", f"holds text that is not UTF-8 ({error.reason})")
    except (ValueError, RecursionError) as error:
        return BadRow("not JSON", f"is not a JSON object ({error})")


@contextmanager
def _one_sentence(named: str, way_out: str) -> Iterator[None]:
    """Turn whatever a reader of tables raises, which has no end, into one sentence."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        # A damaged offset is an invalid argument; the errors of Arrow, and of datasets, have no number.
        if getattr(cause, "errno", None) not in (None, errno.EINVAL):
            raise OSError(f"{named} cannot be read ({cause}); check its path and permissions") from None
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        raise ValueError(f"{named} cannot be read ({reason}); {way_out}") from None


def _load_hub(dataset: str, split: str, revision: str | None) -> Rows:
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()  # of every try that failed, before the sentence below
    alias = _alias(dataset)
    repo = dataset if alias is None else ALIASES[alias].repo
    revision = revision or (None if alias is None else ALIASES[alias].revision)
    try:
        return datasets.load_dataset(repo, split=split, revision=revision)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ValueError(
            f"--dataset {dataset}: the Hub has no data set {repo} at revision {revision or 'main'} that you may read "
            f"({error}); check the name and --dataset-revision, log in with `hf auth login`, or give a file"
        ) from None
    except (ValueError, OSError) as error:
        kind = ValueError if isinstance(error, ValueError) else OSError
        raise kind(
            f"--dataset {dataset}: {repo} could not be fetched from the Hub ({' '.join(str(error).split())}); "
            "try again, or give a local copy of its file"
        ) from error
