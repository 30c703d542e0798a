"""Where a published task's rows come from: a local copy in the published layout, or the Hub at a pinned revision."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from locret.data.tasks.published.base import BadRow, Item, PublishedTask
from locret.data.tasks.published.records import read_records


@dataclass
class TaskRows:
    """The rows of one task, found but not yet read."""

    task: PublishedTask
    path: str
    """The file to read; `archive.zip!member` for one inside an archive."""
    origin: str
    """The file, or "owner/name/file" on the Hub."""
    revision: str | None
    """The commit on the Hub; None for a local file."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be asked, and keep them in `skipped`."""
    skipped: list[BadRow] = field(default_factory=list)

    def items(self) -> Iterator[Item]:
        """Yield the items, row by row; the file is never held whole.

        Raises:
            BadRow: For the first row that cannot be asked, unless bad rows are skipped.
            ValueError: If the file cannot be parsed or is empty.
            OSError: If it cannot be read.
        """
        self.skipped.clear()
        records = read_records(self.path, max_row_bytes=self.task.max_row_bytes)
        yield from self.task.items(records, self.skipped.append if self.skip_bad_rows else None)

    def skipped_by_reason(self) -> dict[str, int]:
        """Return how many rows were left out, by reason."""
        return dict(Counter(bad.reason for bad in self.skipped))

    def sha256(self) -> str:
        """Return the SHA-256 of the file, of the whole archive for a member of one."""
        digest = hashlib.sha256()
        with open(self.path.partition("!")[0], "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()


def open_task(
    task: PublishedTask,
    *,
    data_dir: str | Path | Sequence[str | Path] | None = None,
    revision: str | None = None,
    skip_bad_rows: bool = False,
) -> TaskRows:
    """Find a task's rows.

    Args:
        task: The task.
        data_dir: A local copy, or several to be searched in order: the benchmark's folder in its published layout, or
            a folder of such folders (`DIR/longbench/data/qasper.jsonl`); the Hub if None.
        revision: Commit, branch or tag on the Hub; the task's pinned commit if None.
        skip_bad_rows: Leave out rows that cannot be asked instead of raising.

    Raises:
        ValueError: If no folder holds the file, or the Hub has no such data set, revision or file.
        OSError: If the Hub cannot be reached.
    """
    if data_dir is None:
        path, commit = _fetched(task, revision)
        origin = f"{task.repo}/{task.hub_file or task.file}"
        return TaskRows(task, path, origin, commit, skip_bad_rows)
    if revision is not None:
        raise ValueError(f"--data-revision {revision} is of no use with --data-dir {data_dir}; leave one of them out")
    folders = [data_dir] if isinstance(data_dir, str | Path) else list(data_dir)
    path = _local(task, [Path(folder).expanduser() for folder in folders])
    return TaskRows(task, path, path, None, skip_bad_rows)


def places(task: PublishedTask) -> list[str]:
    """Return where a local copy may have a task's rows, relative to it, in the order they are looked for."""
    family = task.name.split("/")[0]
    spots = [task.file, task.hub_file or task.file, Path(task.file).name]
    ordered = [f"{family}/{spot}" for spot in spots] + spots
    # An export of another ending is as good: the rows are the same.
    others = [
        f"{spot.removesuffix('.jsonl')}{end}" for spot in ordered if "!" not in spot for end in (".json", ".parquet")
    ]
    return list(dict.fromkeys([*ordered, *others]))


def _local(task: PublishedTask, folders: list[Path]) -> str:
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"--data-dir {folder} is no folder; give the folder of a local copy")
        for spot in places(task):
            if (folder / spot.partition("!")[0]).is_file():
                return str(folder / spot)
    raise ValueError(
        f"--data-dir {', '.join(map(str, folders))} holds no rows of {task.name}; looked for "
        f"{', '.join(places(task)[:4])}; put the published file there, or leave out --data-dir to read the Hub"
    )


def _fetched(task: PublishedTask, revision: str | None) -> tuple[str, str]:
    """The local path of a file on the Hub, fetched unless it is in the cache, and its commit."""
    from huggingface_hub import constants, errors, hf_hub_download

    if not task.repo:
        raise ValueError(f"task {task.name} is not on the Hub; give --data-dir with a local copy of {task.file}")
    revision = revision or task.revision
    name, _, member = (task.hub_file or task.file).partition("!")
    where = f"{task.name}: {task.repo}/{name} at {revision}"
    try:
        path = hf_hub_download(task.repo, name, repo_type="dataset", revision=revision)
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise OSError(
            f"{where} is not in the download cache and the Hub at {constants.ENDPOINT} was not reached; "
            "check the connection, or give --data-dir with a local copy"
        ) from None
    except errors.GatedRepoError:
        raise ValueError(f"{where} is gated; accept its terms on the Hub and log in with `hf auth login`") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        missing = {"Entry": "file", "Remot": "file", "Revis": "revision"}.get(type(error).__name__[:5], "data set")
        raise ValueError(
            f"{where}: the Hub has no such {missing} that you may read; check --data-revision, or give --data-dir"
        ) from None
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # the client's own family, connections included
        raise OSError(f"{where} could not be fetched ({_first_line(error)}); try again, or give --data-dir") from error
    # .../snapshots/<commit>/<file>
    commit = Path(path).parents[len(Path(name).parts) - 1].name
    return (f"{path}!{member}" if member else path), commit


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
