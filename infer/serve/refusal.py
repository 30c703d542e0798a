"""What a request is refused with: a status and one sentence, in the shape that OpenAI's clients read."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_LONGEST = 500


def fault_of(error: OSError) -> int:
    """Return the HTTP status of what a disk refuses: 507 where it is full, and 503 for all else."""
    return 507 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 503


def one_line(error: object) -> str:
    """Return what an error says on one line, cut where it is long."""
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


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
        """Return what the response holds."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def way_out(error: OSError) -> str:
    """Return what can be done about what a disk refuses."""
    return "make room on the server's disk" if fault_of(error) == 507 else "look at the server's disk, and ask again"


def not_stored(error: OSError) -> Refusal:
    """Return what to say where the disk does not take a text."""
    status = fault_of(error)
    code = "no_space" if status == 507 else None
    return Refusal(status, f"the text cannot be stored ({error.strerror}); {way_out(error)}", code=code)
