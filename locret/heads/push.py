"""`locret-push`: publish a folder of retaining heads on the Hugging Face Hub, in one commit.

The folder is loaded strictly before the first byte leaves, so that nothing is published that nobody can load.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret import shipped
from locret.base.fields import check_license
from locret.cli.command import parse_options, print_json, run

if TYPE_CHECKING:
    from locret.heads.heads import RetainingHeads


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """What to publish, and where."""

    heads: str
    """Folder of retaining heads, as locret-train writes it."""
    repo: str
    """Repository on the Hub, org/name; made if it does not exist."""
    license: str | None = None
    """Licence of the heads as the Hub spells it, such as mit or apache-2.0; what the heads record by default."""
    private: bool = False
    """Make a new repository private; one that exists keeps its visibility."""
    commit_message: str = "Upload retaining heads with locret-push"
    """Message of the commit."""
    dry_run: bool = False
    """Check everything and list what would be sent, without any call to the Hub."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        check_license(self.license)


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


def main() -> None:
    """Entry point of `locret-push`."""
    run(command, prog="locret-push")


def _contents(options: PushOptions) -> dict[str, Path | bytes]:
    """Return what to upload under which name, after loading the heads as a user would."""
    from locret.heads import checkpoint
    from locret.heads.heads import RetainingHeads

    folder = Path(shipped.find(options.heads))
    if not folder.is_dir():
        raise ValueError(f"--heads {options.heads} is not a folder; give one that locret-train wrote")
    for name in (checkpoint.CARD, checkpoint.CONFIG, checkpoint.WEIGHTS):
        if (folder / name).exists() and (folder / name).resolve().parent != folder.resolve():
            raise ValueError(
                f"{folder / name} is a link to a file elsewhere, which is not sent; put the file itself there"
            )
    heads = RetainingHeads.from_pretrained(folder)
    before = str(heads.generate_model_card())
    if options.license:
        heads.annotate(license=options.license)
    config = json.dumps(heads.config.to_json(), indent=2, ensure_ascii=False).encode() + b"\n"
    return {
        checkpoint.CARD: _card(folder / checkpoint.CARD, heads, before, options.repo).encode(),
        checkpoint.CONFIG: config if options.license else folder / checkpoint.CONFIG,
        checkpoint.WEIGHTS: folder / checkpoint.WEIGHTS,
    }


def _card(file: Path, heads: RetainingHeads, before: str, repo: str) -> str:
    """Return the card with the repository in its place; one that somebody has edited keeps its text.

    Args:
        file: The card in the folder.
        heads: With what is to be published about them.
        before: The card that would have been made without it.
        repo: The repository.
    """
    from huggingface_hub import ModelCard

    from locret.heads import card as model_card

    made = str(heads.generate_model_card(repo_id=repo))
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else before
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text in UTF-8; write it again, or remove it for one that is made") from None
    if text in (before, made):
        return made
    edited = text.replace(model_card.PLACEHOLDER, repo)
    if str(heads.generate_model_card()) == before:
        return edited
    card = ModelCard(edited, ignore_metadata_errors=True)
    card.data["license"] = heads.config.license
    return str(card)


if __name__ == "__main__":
    main()
