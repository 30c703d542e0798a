"""Where training rows come from: a published data set by name, a Hub id, or local files.

LongAlpaca, LongAlign and Anti-Haystack are those of the paper's Section 4.1 and its data ablation; LongAlpaca-16k is
the part of LongAlpaca that fits into 16K tokens. Each is pinned to the newest commit of its repository that was known
when this was written; `--dataset-revision` overrides it. JSON files are read by `json_rows`, row by row;
all else goes through `datasets`.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.data.training.json_rows import MAX_ROW_BYTES, SUFFIXES, TABLE_ERRORS, Entry, JsonRows, stream_entries
from locret.data.training.row_order import Rows, StreamedRows, numbered

if TYPE_CHECKING:
    from datasets import IterableDataset

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishedSet:
    """A data set on the Hub, and where its file lies in the published layout."""

    repo: str
    revision: str
    files: tuple[str, ...]  # the first that exists in a local copy is read


ALIASES = {
    "LongAlpaca": PublishedSet(
        "Yukang/LongAlpaca-12k", "46dce924ed8786979556018e191c0f557d8f4aa2", ("LongAlpaca-12k.json",)
    ),
    "LongAlpaca-16k": PublishedSet(
        "Yukang/LongAlpaca-16k-length", "c31057635e6d558bc4e6318118825aeddcead52f", ("LongAlpaca-16k-length.json",)
    ),
    "LongAlign": PublishedSet("THUDM/LongAlign-10k", "12f17c4baff1001f0d44c4f8feab09ee2ee8c6dc", ("long.jsonl",)),
    "Anti-Haystack": PublishedSet(
        "wenbopan/anti-haystack",
        "49ebf84261893b13ee423acd9b36f38e1ac16d88",
        ("data/train-00000-of-00001.parquet", "data/train-00000-of-00001.jsonl"),
    ),
}
BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def load_rows(
    dataset: str,
    *,
    data_dir: str | None = None,
    split: str = "train",
    revision: str | None = None,
    streaming: bool = False,
    max_row_bytes: int = MAX_ROW_BYTES,
) -> Rows:
    """Find the rows of a training set.

    Args:
        dataset: A name in `ALIASES`; a Hub id `owner/name`; a `.json` (list of objects), `.jsonl` or `.parquet` file;
            or a folder of such files or written by `Dataset.save_to_disk`.
        data_dir: Folder with a local copy: of a named set in its published layout, else of the file `dataset`.
        split: Split to read, in the syntax of `datasets` (`train[:100]`). A single file is all `train`.
        revision: Commit, branch or tag on the Hub. A named set is pinned to the commit in `ALIASES` if None.
        streaming: Read rows as they come, in bounded memory and without a copy on disk.
        max_row_bytes: Longer rows of local JSON files cannot be read.

    Returns:
        The rows as published, at least one unless they are streamed. `locret.data.training.rows` reads their schema.

    Raises:
        ValueError: Unknown name (the nearest are listed), no such file, split or Hub data set, a file that is empty or
            cannot be parsed.
        OSError: If the Hub cannot be reached, or a file cannot be read.
    """
    local = find_local(dataset, data_dir=data_dir, split=split, streaming=streaming)
    alias = _alias(dataset)
    if local is not None:
        if revision is not None:
            logger.warning("--dataset-revision %s is ignored: --dataset %s is read from %s", revision, dataset, local)
        rows = _load_local(local, dataset, split, streaming, max_row_bytes)
    elif alias is not None:
        published = ALIASES[alias]
        rows = _load_hub(published.repo, dataset, split, revision or published.revision, streaming)
    else:
        rows = _load_hub(dataset, dataset, split, revision, streaming)
    if not isinstance(rows, StreamedRows) and not len(rows):
        raise ValueError(f"--dataset {dataset}: split {split!r} has no rows; choose another split or another data set")
    return rows


def find_local(
    dataset: str, *, data_dir: str | None = None, split: str = "train", streaming: bool = False
) -> Path | None:
    """Return the local file or folder that `load_rows` will read, or None for the Hub; nothing is read or fetched.

    Raises:
        ValueError: For a name that is unknown, a file that is missing, or rows that cannot be selected.
    """
    if not dataset.strip():
        raise ValueError(f"--dataset is empty; give {', '.join(ALIASES)}, a Hub id or a file")
    if streaming and "[" in split:
        raise ValueError(f"--split {split} selects rows, which --streaming cannot; drop one of them")
    return _local_path(dataset, _alias(dataset), data_dir)


def _alias(dataset: str) -> str | None:
    """The alias meant by a name: its own, in any case, or the Hub id behind it."""
    for alias, published in ALIASES.items():
        if dataset.lower() in (alias.lower(), published.repo.lower()):
            return alias
    return None


def _local_path(dataset: str, alias: str | None, data_dir: str | None) -> Path | None:
    """The local file or folder to read, or None for the Hub."""
    if data_dir is not None:
        return _in_data_dir(dataset, alias, Path(os.path.expanduser(data_dir)))
    path = Path(os.path.expanduser(dataset))
    if alias is None and path.exists():
        return path
    if alias is not None or _is_hub_id(dataset):
        return None
    if path.suffix in BUILDERS or len(path.parts) > 1:
        raise ValueError(f"--dataset {dataset}: no such file or folder; check the path")
    nearest = difflib.get_close_matches(dataset.lower(), [alias.lower() for alias in ALIASES], n=2, cutoff=0.5)
    meant = [alias for alias in ALIASES if alias.lower() in nearest]
    hint = f"did you mean {' or '.join(meant)}? Known names: " if meant else "known names: "
    raise ValueError(
        f"--dataset {dataset}: no data set of that name; {hint}{', '.join(ALIASES)}, a Hub id (owner/name), "
        f"or a path ending in {', '.join(BUILDERS)}"
    )


def _is_hub_id(dataset: str) -> bool:
    """Whether `owner/name` can only be a Hub id, not a path with a known ending."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", dataset) is not None and Path(dataset).suffix not in BUILDERS


def _in_data_dir(dataset: str, alias: str | None, folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"--data-dir {folder} is not a folder; give the folder that holds the data set's files")
    if alias is None:
        candidates = [folder / dataset]
    else:
        published = ALIASES[alias]
        names = (".", published.repo, published.repo.split("/")[1], alias, alias.lower().replace("-", "_"))
        candidates = [folder / name / file for name in names for file in published.files]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    looked_for = ", ".join(dict.fromkeys(str(candidate.relative_to(folder)) for candidate in candidates))
    raise ValueError(
        f"--data-dir {folder} holds no copy of --dataset {dataset}; looked for {looked_for}; "
        "put the published file there or leave out --data-dir to read the Hub"
    )


def _load_local(path: Path, dataset: str, split: str, streaming: bool, max_row_bytes: int) -> Rows:

    if path.is_dir() and (path / "state.json").exists():
        saved = _load_saved(path, dataset)
        return _streamed(saved.to_iterable_dataset(), dataset) if streaming else saved
    files = sorted(file for file in path.rglob("*") if file.suffix in BUILDERS) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"--dataset {dataset}: folder {path} holds no {', '.join(BUILDERS)} file; check the path")
    for file in files:
        _check_readable(file, dataset)
    if path.suffix not in BUILDERS and not path.is_dir():
        raise ValueError(
            f"--dataset {dataset}: the ending {path.suffix!r} is not known; convert the file to {', '.join(BUILDERS)}"
        )
    if all(file.suffix in SUFFIXES for file in files):
        by_split = {"train": [str(path)]} if path.is_file() else _files_by_split(path, dataset)
        return _select_json(by_split, dataset, split, streaming, max_row_bytes)
    arguments = {"path": str(path)} if path.is_dir() else {"path": "parquet", "data_files": str(path)}
    return _generate(dataset, split=split, streaming=streaming, **arguments)


def _load_saved(path: Path, dataset: str) -> Any:
    """`load_from_disk`, its many exceptions turned into one sentence."""
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except (*TABLE_ERRORS, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--dataset {dataset}: {path} cannot be read ({reason}); save the data set again") from None


def _files_by_split(folder: Path, dataset: str) -> dict[str, list[str]]:
    """What `datasets` makes of a folder: splits come from file names (test.jsonl) or its README, else all is train."""
    import datasets

    try:
        found = datasets.load_dataset_builder(str(folder)).config.data_files
    except (ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--dataset {dataset}: cannot be read ({reason}); name one of its files") from None
    return {str(split): [str(file) for file in files] for split, files in (found or {}).items()}


def _select_json(
    files: dict[str, list[str]], dataset: str, split: str, streaming: bool, max_row_bytes: int
) -> JsonRows | StreamedRows:
    import datasets

    if streaming:
        if split not in files:
            raise ValueError(f"--dataset {dataset}: there is no split {split!r}; choose one of {', '.join(files)}")
        return StreamedRows(partial(stream_entries, files[split], max_row_bytes=max_row_bytes))
    rows = {name: JsonRows(paths, max_row_bytes=max_row_bytes) for name, paths in files.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(
            {name: len(found) for name, found in rows.items()}
        )
    except (ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--dataset {dataset}: cannot be read ({reason}); check the file and the split") from None
    if len(parts) > 1:
        raise ValueError(f"--split {split} joins {len(parts)} parts; name one, such as train[:100]")
    return rows[parts[0].splitname].select(range(parts[0].from_, parts[0].to))


def _check_readable(file: Path, dataset: str) -> None:
    try:
        with file.open("rb") as stream:
            content = stream.read(4096).strip()
    except OSError as error:
        raise OSError(f"--dataset {dataset}: {file} cannot be read ({error.strerror}); check its permissions") from None
    if content in (b"", b"[]"):
        raise ValueError(f"--dataset {dataset}: {file} is empty; it needs at least one row")


def _generate(dataset: str, *, streaming: bool, **arguments: Any) -> Rows:
    """`load_dataset` on local files, its many exceptions turned into one sentence."""
    import datasets

    try:
        rows = datasets.load_dataset(**arguments, streaming=streaming)
    except datasets.exceptions.DatasetGenerationError as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"--dataset {dataset}: the file cannot be parsed ({cause}); mend or re-export it") from None
    except TABLE_ERRORS as error:  # a split that does not exist, or a Parquet file that is none
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split())
        raise ValueError(f"--dataset {dataset}: cannot be read ({reason}); check the file and the split") from None
    return _streamed(rows, dataset) if streaming else rows


def _load_hub(repo: str, dataset: str, split: str, revision: str | None, streaming: bool) -> Rows:
    import datasets

    try:
        rows = datasets.load_dataset(repo, split=split, revision=revision, streaming=streaming)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ValueError(
            f"--dataset {dataset}: the Hub has no data set {repo} at revision {revision or 'main'} that you may read "
            f"({error}); check the name and --dataset-revision, log in with `hf auth login`, or pass --data-dir"
        ) from None
    except ValueError as error:
        raise ValueError(f"--dataset {dataset}: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise OSError(
            f"--dataset {dataset}: {repo} could not be fetched from the Hub ({' '.join(str(error).split())}); "
            "try again, or pass --data-dir with a local copy"
        ) from error
    return _streamed(rows, dataset) if streaming else rows


def _streamed(rows: IterableDataset, dataset: str) -> StreamedRows:
    return StreamedRows(partial(_entries, rows, dataset))


def _entries(rows: IterableDataset, dataset: str) -> Iterator[Entry]:
    """The rows of a streamed table. One that cannot be read ends the stream: there is no way to what follows it."""
    number = -1
    try:
        for number, row in enumerate(rows):
            yield Entry(number, numbered(number), partial(dict, row))
    except TABLE_ERRORS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--dataset {dataset}: cannot be read after {number + 1} rows ({reason}); leave out --streaming"
        ) from None
