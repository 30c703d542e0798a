"""What is published where on the Hub: the options that its commands share. Light, so that help comes at once."""

from __future__ import annotations

import re
from dataclasses import dataclass

from locret.base.fields import check_license

_PART = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"


@dataclass(frozen=True, kw_only=True)
class RepositoryOptions:
    """The repository, and how it is changed."""

    repo: str
    """Repository on the Hub, org/name; made if it does not exist."""
    license: str | None = None
    """Licence as the Hub spells it, such as mit or apache-2.0."""
    private: bool = False
    """Make a new repository private; one that exists keeps its visibility."""
    revision: str | None = None
    """Branch to push to, made if it does not exist; main by default."""
    commit_message: str = "Upload with locret"
    """Message of the commit."""
    create_pr: bool = False
    """Open a pull request instead of committing."""
    dry_run: bool = False
    """Check everything and list what would be sent, without any call to the Hub."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        check_repository(self.repo)
        check_license(self.license)
        if self.create_pr and self.revision not in (None, "main"):
            raise ValueError(
                f"--create-pr opens a pull request against main, not --revision {self.revision}; drop one of them"
            )
        if not self.commit_message.strip():
            raise ValueError("--commit-message is empty; leave it out for the default, or write one")


def check_repository(repo: str) -> None:
    """Refuse what cannot be a repository's name.

    Raises:
        ValueError: Naming the rule.
    """
    # The Hub refuses the same: '--' and '..' inside, '-' and '.' at the end, a name that looks like a clone URL.
    if not re.fullmatch(f"{_PART}/{_PART}", repo) or re.search(r"--|\.\.|[-.]$|[-.]/|\.git$", repo):
        raise ValueError(f"--repo {repo} is not a repository name; use org/name with letters, digits, '-', '_', '.'")
