"""What a request is refused with: a status and one sentence, in the shape that OpenAI's clients read."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_LONGEST = 500


def one_line(error: object) -> str:
    """Return what an error says on one line, cut where it is long."""
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def fault_of(error: Exception) -> int:
    """Return the HTTP status of a failure: 507 for a full disk, 503 for its other troubles, and 400 for all else."""
    if isinstance(error, OSError):
        return 507 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 503
    return 400


class Refusal(Exception):
    """A request that is refused, with an HTTP status and one sentence: the setting, its value, and the way out.

    `param` is the field of the request that has to change, `code` a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
