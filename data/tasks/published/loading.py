"""Where a published task's rows come from: a local copy in the published layout, or the Hub at a pinned revision."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.data.tasks.task import NoSamples, Sample, SampleSet
from locret.data.training.json_rows import BadRow, stream_entries

if TYPE_CHECKING:
    from locret.data.tasks.published.base import PublishedTask


@dataclass
class TaskRows:
    """The rows of one task, found but not yet read."""

    task: PublishedTask
    path: str
    """The file to read; `archive.zip!member` for one inside an archive; the first of several parts, see `parts`."""
    origin: str
    """The file, or "owner/name/file" on the Hub."""
    revision: str | None
    """The commit on the Hub; None for a local file."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be asked, and keep them in `skipped`."""
    skipped: list[BadRow] = field(default_factory=list)

    def items(self) -> Iterator[Sample]:
        """Yield the samples, row by row; the file is never held whole."""
        self.skipped.clear()
        rows = stream_entries(parts(self.path), max_row_bytes=self.task.max_row_bytes)
        yield from self.task.items(rows, self.skipped.append if self.skip_bad_rows else None)

    def skipped_by_reason(self) -> dict[str, int]:
        """Return how many rows were left out, by reason."""
        return dict(Counter(bad.reason for bad in self.skipped))

    def sha256(self) -> str:
        """Return the SHA-256 of the file, of the whole archive for a member of one, of all parts in order."""
        digest = hashlib.sha256()
        for part in parts(self.path.partition("!")[0]):
            with open(part, "rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()


@dataclass
class FileSamples(SampleSet):
    """The samples of a file that are asked: all of them, or so many, evenly spread over the file."""

    rows: TaskRows
    samples: int | None
    count: int = field(init=False)
    """Samples that the file has."""
    prompts_sha256: str = field(init=False)
    """Of the asked samples' prompts before truncation and template."""
    skipped: dict[str, int] = field(init=False)
    """Bad rows that were left out, by reason."""
    _ahead: Iterator[tuple[int, Sample]] = field(init=False, repr=False)
    _last: tuple[int, Sample | None] = field(init=False, default=(-1, None), repr=False)

    def __post_init__(self) -> None:
        self.task = self.rows.task
        digests = [_digest(sample) for sample in self.rows.items()]
        self.count = len(digests)
        if not digests:
            raise NoSamples(
                f"{self.rows.origin} holds no row that {self.rows.task.name} could ask; check that it is the right "
                "file",
                "no rows to ask in its file",
            )
        self.prompts_sha256 = hashlib.sha256(b"".join(digests[row] for row in self.chosen)).hexdigest()
        self.skipped = self.rows.skipped_by_reason()
        if self.skipped:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in self.skipped.items())
            warnings.warn(
                f"{self.rows.task.name}: {len(self.rows.skipped)} bad rows are left out ({reasons}); the first is "
                f"{self.rows.skipped[0].where}",
                stacklevel=2,
            )
        self._rewind()

    @cached_property
    def chosen(self) -> Sequence[int]:  # type: ignore[override]
        """Positions of the asked samples, ascending."""
        asked = self.count if self.samples is None else min(self.samples, self.count)
        return [index * self.count // asked for index in range(asked)]

    def sample(self, number: int, tokenizer: Any) -> Sample:
        """Return the sample at a position; going forward reads the file once, going back starts again."""
        if number < self._last[0]:
            self._rewind()
        while self._last[0] < number:
            self._last = next(self._ahead)
        found = self._last[1]
        assert found is not None
        return found

    def _rewind(self) -> None:
        self._ahead, self._last = enumerate(self.rows.items()), (-1, None)

    @property
    def of(self) -> int | None:  # type: ignore[override]
        """Size of the whole set; some files have more than their papers count."""
        return None if self.task.size is None else max(self.task.size, self.count)

    def facts(self) -> dict[str, Any]:
        """Return what tells these data from others."""
        rows = self.rows
        return {
            "file": rows.origin if rows.revision else Path(rows.path).name,
            "revision": rows.revision,
            "sha256": rows.sha256(),
            "items": self.count,
            "skipped_rows": self.skipped,
            "prompts_sha256": self.prompts_sha256,
        }


def _digest(sample: Sample) -> bytes:
    return hashlib.sha256("\0".join((sample.system, sample.content, sample.lead)).encode()).digest()


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
        NoSamples: If no folder holds the file, or the task is not on the Hub.
        ValueError: If a folder is none, or the Hub has no such data set, revision or file.
        OSError: If the Hub cannot be reached.
    """
    if data_dir is None:
        path, commit = _fetched(task, revision)
        origin = f"{task.repo}/{task.hub_file or task.file}"
        return TaskRows(task, path, origin, commit, skip_bad_rows)
    if revision is not None:
        raise ValueError(f"--data-revision {revision} is of no use with --data-dir {data_dir}; leave one of them out")
    folders = [data_dir] if isinstance(data_dir, str | Path) else list(data_dir)
    path = _local(task, [Path(os.path.expanduser(folder)) for folder in folders])
    return TaskRows(task, path, path, None, skip_bad_rows)


def parts(name: str) -> list[str]:
    """Return the names of all parts of a file whose first is `a-00000-of-00002.parquet`; of others the name alone."""
    found = re.fullmatch(r"(.*-)00000(-of-(\d{5})\.\w+)", name)
    return [f"{found[1]}{part:05}{found[2]}" for part in range(int(found[3]))] if found else [name]


def candidates(task: PublishedTask) -> list[str]:
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
            raise ValueError(f"--data-dir {folder} is not a folder; give the folder of a local copy")
        for spot in candidates(task):
            found = [(folder / part).is_file() for part in parts(spot.partition("!")[0])]
            if all(found):
                return str(folder / spot)
            if found[0]:
                raise ValueError(
                    f"--data-dir {folder} has only {sum(found)} of the {len(found)} parts of {spot}; put all there"
                )
    raise NoSamples(
        f"--data-dir {', '.join(map(str, folders))} holds no rows of {task.name}; looked for "
        f"{', '.join(candidates(task)[:4])}; put the published file there, or leave out --data-dir to read the Hub",
        "no rows found",
    )


def _fetched(task: PublishedTask, revision: str | None) -> tuple[str, str]:
    """The local path of a file on the Hub, fetched unless it is in the cache, and its commit."""
    from huggingface_hub import constants, errors, hf_hub_download

    if not task.repo:
        missing = f"task {task.name} is not on the Hub; give --data-dir with a local copy of {task.file}"
        raise NoSamples(missing, "no rows found")
    revision = revision or task.revision
    name, _, member = (task.hub_file or task.file).partition("!")
    where = f"{task.name}: {task.repo}/{name} at {revision}"
    try:
        path, *_ = [hf_hub_download(task.repo, one, repo_type="dataset", revision=revision) for one in parts(name)]
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise OSError(
            f"{where} is not in the download cache and the Hub at {constants.ENDPOINT} was not reached; "
            "check the connection, or give --data-dir with a local copy"
        ) from None
    except errors.GatedRepoError:
        raise ValueError(f"{where} is gated; accept its terms on the Hub and log in with `hf auth login`") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        what = {"Entry": "file", "Remot": "file", "Revis": "revision"}.get(type(error).__name__[:5], "data set")
        raise ValueError(
            f"{where}: the Hub has no such {what} that you may read; check --data-revision, or give --data-dir"
        ) from None
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # the client's own family, connections included
        raise OSError(f"{where} could not be fetched ({_first_line(error)}); try again, or give --data-dir") from error
    # .../snapshots/<commit>/<file>
    commit = Path(path).parents[len(Path(name).parts) - 1].name
    return (f"{path}!{member}" if member else path), commit


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
