"""Failures of the Hugging Face Hub as one sentence each: which repository, what the Hub said, what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, errors, get_token


@contextmanager
def one_sentence(action: str, repo: str) -> Iterator[None]:
    """Translate whatever huggingface_hub raises inside the block.

    Args:
        action: What is being done, to follow "cannot": "load", "push to".
        repo: The repository, as the user typed it.

    Raises:
        ValueError: If the name is not a repository's, or nothing is there to load.
        OSError: If the Hub refuses (PermissionError), cannot be reached (ConnectionError) or fails.
    """
    try:
        yield
    except errors.HFValidationError:
        raise ValueError(
            f"'{repo}' is not a repository name; use org/name with letters, digits, '-', '_' and '.'"
        ) from None
    except (errors.LocalTokenNotFoundError, errors.OfflineModeIsEnabled, errors.EntryNotFoundError) as error:
        raise _local_problem(error, action, repo) from error
    # httpx raises its own family for connections, and the upload threads wrap whatever they meet in a RuntimeError.
    except (errors.HTTPError, RuntimeError) as error:  # type: ignore[attr-defined]
        cause = error.__cause__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, errors.HTTPError):  # type: ignore[attr-defined]
            raise
        raise _refusal(cause, action, repo) from error
    except ValueError as error:  # such as a model card that the Hub refuses, with its reasons on several lines
        raise ValueError(f"cannot {action} {repo}: {' '.join(str(error).split())}") from error


def no_token(action: str, repo: str) -> PermissionError:
    """Return the error for a missing token."""
    return PermissionError(f"cannot {action} {repo} without a token; set HF_TOKEN or run `hf auth login`")


def _local_problem(error: Exception, action: str, repo: str) -> Exception:
    if isinstance(error, errors.LocalTokenNotFoundError):
        return no_token(action, repo)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ConnectionError(f"cannot {action} {repo} while HF_HUB_OFFLINE is set; unset it, or give a local folder")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return ConnectionError(
            f"cannot {action} {repo}: it is neither a folder here nor in the download cache, and the Hub at "
            f"{constants.ENDPOINT} was not reached; check the name and the connection"
        )
    return ValueError(
        f"{repo} on the Hub has no config.json or model.safetensors, so it does not hold retaining heads; "
        "give a repository that locret-push made"
    )


def _refusal(error: Exception, action: str, repo: str) -> Exception:
    response = getattr(error, "response", None)
    where = constants.ENDPOINT
    if response is None:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ConnectionError(
            f"cannot {action} {repo}: the Hub at {where} was not reached ({reason}); check the connection"
        )
    status = response.status_code
    if isinstance(error, errors.RevisionNotFoundError):
        return ValueError(f"cannot {action} {repo}: that revision does not exist on the Hub at {where}; check the name")
    # Without a token the Hub answers 401 for what is private and for what does not exist alike.
    unseen = isinstance(error, errors.RepositoryNotFoundError) or (status == 401 and get_token() is None)
    if status == 404 or (action == "load" and unseen):
        return ValueError(
            f"cannot {action} {repo}: it is neither a folder here nor a repository that you can see on the Hub "
            f"at {where} ({status}); check the name, or set HF_TOKEN if it is private"
        )
    if status == 401:
        return PermissionError(
            f"cannot {action} {repo}: the Hub at {where} does not accept the token (401); renew HF_TOKEN"
        )
    if status == 403:
        return PermissionError(
            f"cannot {action} {repo}: the token has no write access there (403); use a token with the 'write' role "
            "of an account that may write to it"
        )
    said = getattr(error, "server_message", None) or response.reason_phrase
    return OSError(f"cannot {action} {repo}: the Hub at {where} answered {status} ({said}); try again later")
