"""The Hugging Face Hub: uploads in one commit, and its failures as one sentence each: which repository, what to do."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants, errors, get_token
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

CARD = "README.md"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_STAMP = re.compile(r"\n?<!-- locret wrote what is above \(([0-9a-f]{16})\); what stands below stays -->\n")
_NO_HEADS = (
    "has no config.json or model.safetensors, so it does not hold retaining heads; give a repository that locret-push "
    "made"
)


def check_repository(repo: str) -> None:
    """Refuse what cannot be a repository's name, or one without its owner."""
    with one_sentence("use", repo):
        validate_repo_id(repo)
        if "/" not in repo:
            raise errors.HFValidationError


def upload(
    repo: str,
    contents: Mapping[str, Path | bytes],
    *,
    commit_message: str = "Upload with locret",
    private: bool = False,
) -> tuple[str, str]:
    """Put files into a repository, in one commit; return where they are, and the commit.

    A card that is there keeps what somebody has written below ours; one that was edited otherwise is not replaced.
    Token and endpoint come from HF_TOKEN and HF_ENDPOINT, as for any Hub tool.

    Args:
        repo: Repository, org/name; made if it does not exist.
        contents: The files by their names in the repository.
        commit_message: Of the commit.
        private: Make a new repository private; one that exists keeps its visibility.

    Raises:
        ValueError: If the Hub refuses a name or a file, or its card has been edited.
        OSError: If the Hub refuses or cannot be reached.
    """
    check_repository(repo)
    if get_token() is None:
        raise no_token("push to", repo)
    api = HfApi()
    with one_sentence("push to", repo):
        # None leaves the default of the organisation, which may be private.
        api.create_repo(repo, private=private or None, exist_ok=True)
        # Whoever commits in between makes the Hub refuse this commit.
        parent = api.repo_info(repo).sha
        if CARD in contents:
            theirs = None
            if api.file_exists(repo, CARD, revision=parent):
                file = Path(api.hf_hub_download(repo, CARD, revision=parent))
                theirs = file.read_text(encoding="utf-8", errors="replace")
            ours = contents[CARD]
            text = ours.decode() if isinstance(ours, bytes) else ours.read_text(encoding="utf-8")
            contents = {**contents, CARD: merged_card(text, theirs, repo).encode()}
        commit = api.create_commit(
            repo,
            [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in contents.items()],
            commit_message=commit_message,
            parent_commit=parent,
        )
    return address(repo), commit.oid


def address(repo: str) -> str:
    """Return the page of a repository."""
    return f"{constants.ENDPOINT}/{repo}"


def merged_card(ours: str, theirs: str | None, repo: str) -> str:
    """Return a card with a stamp that tells whether it is as we wrote it, and below it what others have added.

    Raises:
        ValueError: If the card that is there was edited above its stamp, and is not this one.
    """
    above, _, below = _parted(ours)
    if theirs is not None:
        text, stamp, added = _parted(theirs)
        if stamp != _digest(text) and text != above:
            raise ValueError(
                f"the card of {repo} was edited on the Hub, or is of an earlier release; take it over as {CARD} of the "
                "folder, whose text is kept, or delete it on the Hub"
            )
        below = below or added
    return f"{above}\n<!-- locret wrote what is above ({_digest(above)}); what stands below stays -->\n{below}"


def _parted(card: str) -> tuple[str, str | None, str]:
    """Return what stands above the stamp of a card, the stamp, and what stands below."""
    found = _STAMP.search(card)
    return (card[: found.start()], found[1], card[found.end() :]) if found else (card, None, "")


def _digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]


@contextmanager
def one_sentence(action: str, repo: str, *, what: str = "folder", lacks: str = _NO_HEADS) -> Iterator[None]:
    """Translate whatever huggingface_hub raises inside the block.

    Raises:
        ValueError: If the name is not a repository's, or nothing is there to load.
        OSError: If the Hub refuses (PermissionError), cannot be reached (ConnectionError) or fails.
    """
    cannot = f"cannot {action} {repo}"
    try:
        yield
    except errors.HFValidationError:
        raise ValueError(
            f"'{repo}' is not a repository name; use org/name with letters, digits, '-', '_' and '.'"
        ) from None
    except errors.LocalTokenNotFoundError as error:
        raise no_token(action, repo) from error
    except errors.OfflineModeIsEnabled as error:
        raise ConnectionError(f"{cannot} while HF_HUB_OFFLINE is set; unset it, or give a local {what}") from error
    except errors.LocalEntryNotFoundError as error:
        raise ConnectionError(
            f"{cannot}: it is neither a {what} here nor in the download cache, and the Hub at {constants.ENDPOINT} was "
            "not reached; check the name and the connection"
        ) from error
    except errors.EntryNotFoundError as error:
        raise ValueError(f"{repo} on the Hub {lacks}") from error
    # httpx raises its own family for connections, and the upload threads wrap whatever they meet in a RuntimeError.
    except (errors.HTTPError, RuntimeError) as error:  # type: ignore[attr-defined]
        cause = error.__cause__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, errors.HTTPError):  # type: ignore[attr-defined]
            raise
        raise _refusal(cause, action, cannot, what) from error
    except ValueError as error:  # such as a model card that the Hub refuses, with its reasons on several lines
        raise ValueError(f"{cannot}: {' '.join(str(error).split())}") from error


def no_token(action: str, repo: str) -> PermissionError:
    """Return the error for a missing token."""
    return PermissionError(f"cannot {action} {repo} without a token; set HF_TOKEN or run `hf auth login`")


def _refusal(error: Exception, action: str, cannot: str, what: str) -> Exception:
    response, where = getattr(error, "response", None), f"the Hub at {constants.ENDPOINT}"
    if response is None:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ConnectionError(f"{cannot}: {where} was not reached ({reason}); check the connection")
    status = response.status_code
    if isinstance(error, errors.RevisionNotFoundError):
        return ValueError(f"{cannot}: that revision does not exist on {where}; check the name")
    # Without a token the Hub answers 401 for what is private and for what does not exist alike.
    unseen = isinstance(error, errors.RepositoryNotFoundError) or (status == 401 and get_token() is None)
    if status == 404 or (action == "load" and unseen):
        return ValueError(
            f"{cannot}: it is neither a {what} here nor a repository that you can see on {where} ({status}); check the "
            "name, or set HF_TOKEN if it is private"
        )
    if status == 401:
        return PermissionError(f"{cannot}: {where} does not accept the token (401); renew HF_TOKEN")
    if status == 403:
        return PermissionError(
            f"{cannot}: the token has no write access there (403); use a token with the 'write' role of an account "
            "that may write to it"
        )
    said = getattr(error, "server_message", None) or response.reason_phrase
    return OSError(f"{cannot}: {where} answered {status} ({said}); try again later")
