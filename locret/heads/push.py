"""`locret-push`: publish a folder of retaining heads on the Hugging Face Hub, in one commit.

The folder is loaded strictly before the first byte leaves, so that nothing is published that nobody can load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locret import shipped
from locret.cli.command import parse_options, print_json, run


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """What to publish, and where."""

    heads: str
    """Folder of retaining heads, as locret-train writes it."""
    repo: str
    """Repository on the Hub, org/name; made if it does not exist."""
    private: bool = False
    """Make a new repository private; one that exists keeps its visibility."""
    commit_message: str = "Upload retaining heads with locret-push"
    """Message of the commit."""
    dry_run: bool = False
    """Check everything and list what would be sent, without any call to the Hub."""
    json: bool = False
    """Print one JSON object."""


def push(options: PushOptions) -> dict[str, Any]:
    """Check and upload a folder of heads, or for a dry run only list its files.

    Returns:
        A record with `repo`, `url`, `commit` (None for a dry run) and `files`, a list of `path` and `bytes`.

    Raises:
        ValueError: If the folder does not hold retaining heads that load, or as `locret.hub.upload`.
        OSError: As `locret.hub.upload`.
    """
    from locret import hub

    hub.check_repository(options.repo)
    contents, commit = _contents(options), None
    url = hub.address(options.repo)
    sizes = {name: len(one) if isinstance(one, bytes) else one.stat().st_size for name, one in contents.items()}
    if not options.dry_run:
        url, commit = hub.upload(options.repo, contents, commit_message=options.commit_message, private=options.private)
    files = [{"path": name, "bytes": size} for name, size in sizes.items()]
    return {"repo": options.repo, "url": url, "commit": commit, "files": files}


def command(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    (options,), _ = parse_options(
        "locret-push", "Publish retaining heads on the Hugging Face Hub.", [PushOptions], argv
    )
    record = push(options)
    if options.json:
        print_json(record)
        return 0
    if options.dry_run:
        print(f"would push to {record['url']}:")
    for file in record["files"]:
        print(f"{file['bytes']:>14,} bytes  {file['path']}")
    if not options.dry_run:
        print(record["url"])
    return 0


def _contents(options: PushOptions) -> dict[str, Path | bytes]:
    """Return what to upload under which name, after loading the heads as a user would."""
    from locret.heads import card, checkpoint
    from locret.heads.heads import RetainingHeads

    folder = Path(shipped.find(options.heads))
    if not folder.is_dir():
        raise ValueError(f"--heads {options.heads} is not a folder; give one that locret-train wrote")
    for name in (checkpoint.CARD, checkpoint.CONFIG, checkpoint.WEIGHTS):
        if (folder / name).exists() and (folder / name).resolve().parent != folder.resolve():
            raise ValueError(
                f"{folder / name} is a link to a file elsewhere, which is not sent; put the file itself there"
            )
    heads, file = RetainingHeads.from_pretrained(folder), folder / checkpoint.CARD
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else str(heads.generate_model_card())
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text in UTF-8; write it again, or remove it for one that is made") from None
    return {
        checkpoint.CARD: text.replace(card.PLACEHOLDER, options.repo).encode(),
        checkpoint.CONFIG: folder / checkpoint.CONFIG,
        checkpoint.WEIGHTS: folder / checkpoint.WEIGHTS,
    }


if __name__ == "__main__":
    run(command, prog="locret-push")
