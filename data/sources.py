"""Where training rows come from: a published data set by name, a Hub id, or local files; always through `datasets`.

The three named sets are those of the paper's Section 4.1 and its data ablation. Each is pinned to the newest commit of
its repository that was known when this was written; `--dataset-revision` overrides it.
"""

from __future__ import annotations

import difflib
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

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
    "LongAlign": PublishedSet("THUDM/LongAlign-10k", "12f17c4baff1001f0d44c4f8feab09ee2ee8c6dc", ("long.jsonl",)),
    "Anti-Haystack": PublishedSet(
        "wenbopan/anti-haystack",
        "49ebf84261893b13ee423acd9b36f38e1ac16d88",
        ("data/train-00000-of-00001.parquet", "data/train-00000-of-00001.jsonl"),
    ),
}
BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def load_rows(
    dataset: str, *, data_dir: str | None = None, split: str = "train", revision: str | None = None
) -> Dataset:
    """Load the rows of a training set.

    Args:
        dataset: `LongAlpaca`, `LongAlign` or `Anti-Haystack`; a Hub id `owner/name`; a `.json` (list of objects),
            `.jsonl` or `.parquet` file; or a folder of such files or written by `Dataset.save_to_disk`.
        data_dir: Folder with a local copy: of a named set in its published layout, else of the file `dataset`.
        split: Split to read, in the syntax of `datasets` (`train[:100]`). A single file is all `train`.
        revision: Commit, branch or tag on the Hub. A named set is pinned to the commit in `ALIASES` if None.

    Returns:
        The rows as published, at least one. `locret.data.rows` reads their schema.

    Raises:
        ValueError: Unknown name (the nearest are listed), no such file, split or Hub data set, a file that is empty or
            cannot be parsed.
        OSError: If the Hub cannot be reached, or a file cannot be read.
    """
    if not dataset.strip():
        raise ValueError("--dataset is empty; give LongAlpaca, LongAlign, Anti-Haystack, a Hub id or a file")
    alias = _alias(dataset)
    local = _local_path(dataset, alias, data_dir)
    if local is not None:
        if revision is not None:
            logger.warning("--dataset-revision %s is ignored: --dataset %s is read from %s", revision, dataset, local)
        rows = _load_local(local, dataset, split)
    elif alias is not None:
        published = ALIASES[alias]
        rows = _load_hub(published.repo, dataset, split, revision or published.revision)
    else:
        rows = _load_hub(dataset, dataset, split, revision)
    if not len(rows):
        raise ValueError(f"--dataset {dataset}: split {split!r} has no rows; choose another split or another data set")
    return rows


def _alias(dataset: str) -> str | None:
    """The alias meant by a name: its own, in any case, or the Hub id behind it."""
    for alias, published in ALIASES.items():
        if dataset.lower() in (alias.lower(), published.repo.lower()):
            return alias
    return None


def _local_path(dataset: str, alias: str | None, data_dir: str | None) -> Path | None:
    """The local file or folder to read, or None for the Hub."""
    if data_dir is not None:
        return _in_data_dir(dataset, alias, Path(data_dir).expanduser())
    path = Path(dataset).expanduser()
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


def _load_local(path: Path, dataset: str, split: str) -> Dataset:
    import datasets

    if path.is_dir() and (path / "state.json").exists():
        return datasets.load_from_disk(str(path))
    files = sorted(file for file in path.rglob("*") if file.suffix in BUILDERS) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"--dataset {dataset}: folder {path} holds no {', '.join(BUILDERS)} file; check the path")
    for file in files:
        _check_readable(file, dataset)
    # One block as long as the longest file, should the default of 10 MB not do.
    whole = {"chunksize": max(file.stat().st_size for file in files) + 1}
    if path.is_dir():
        retry = whole if all(BUILDERS[file.suffix] == "json" for file in files) else None
        return _generate(dataset, retry, path=str(path), split=split)
    if path.suffix not in BUILDERS:
        raise ValueError(
            f"--dataset {dataset}: the ending {path.suffix!r} is not known; convert the file to {', '.join(BUILDERS)}"
        )
    builder = BUILDERS[path.suffix]
    return _generate(dataset, whole if builder == "json" else None, path=builder, data_files=str(path), split=split)


def _check_readable(file: Path, dataset: str) -> None:
    try:
        with file.open("rb") as stream:
            content = stream.read(4096).strip()
    except OSError as error:
        raise OSError(f"--dataset {dataset}: {file} cannot be read ({error.strerror}); check its permissions") from None
    if content in (b"", b"[]"):
        raise ValueError(f"--dataset {dataset}: {file} is empty; it needs at least one row")


def _generate(dataset: str, retry: dict[str, Any] | None, **arguments: Any) -> Dataset:
    """`load_dataset` on local files, its many exceptions turned into one sentence."""
    import datasets

    try:
        try:
            return datasets.load_dataset(**arguments)
        except datasets.exceptions.DatasetGenerationError as error:
            # Column types are inferred from the first block; a column that is null or absent there and text later, as
            # LongAlpaca's `input` may be, needs the whole file read as one block.
            if retry is None or not isinstance(error.__cause__, TypeError | datasets.table.CastError):
                raise
            return datasets.load_dataset(**arguments, **retry)
    except datasets.exceptions.DatasetGenerationError as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"--dataset {dataset}: the file cannot be parsed ({cause}); mend or re-export it") from None
    except ValueError as error:  # a split that does not exist, or a Parquet file that is none
        reason = " ".join(str(error).split())
        raise ValueError(f"--dataset {dataset}: cannot be read ({reason}); check the file and the split") from None


def _load_hub(repo: str, dataset: str, split: str, revision: str | None) -> Dataset:
    import datasets

    try:
        return datasets.load_dataset(repo, split=split, revision=revision)
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
