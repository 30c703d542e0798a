"""The file of an uploaded form as plain text, made by a process of its own that may take so much memory and time."""

from __future__ import annotations

import asyncio
import ctypes
import email
import email.policy
import json
import math
import os
import signal
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from pathlib import Path
from typing import Any

from locret.base.fields import shown
from locret.conversation.formats import CONVERTED, pieces_of
from locret.infer.serve.refusal import Refusal, one_line

MEMORY = 2 << 30
"""Bytes that the process may take, beside what the server holds."""
_PDEATHSIG = 1
"""Of prctl, as Linux has it: the signal that a process gets when what started it has ended."""
_TOO_LARGE = (
    f"the file takes more than {MEMORY >> 30} GiB to be read, as text above some 200 MB does; upload a long text "
    "as it is (POST /v1/contexts)"
)
PURPOSES = ("assistants", "user_data")
"""What files may be for; nothing is done here for the others of OpenAI."""


async def converted(form: Path, kind: str, seconds: float, turn: asyncio.Lock) -> dict[str, Any]:
    """Replace the body of a request, a form of Content-Type `kind`, by the text of its file, in `turn` and `seconds`.

    Returns the file's name, as `file`, its `bytes` and its `purpose`. To leave ends the process.
    """
    line = [sys.executable, "-m", __name__, str(form), kind, str(math.ceil(seconds))]
    where = {"PYTHONPATH": os.pathsep.join(sys.path)}  # what this process imports, and nothing from where it stands
    how: dict[str, Any] = {"cwd": form.parent, "env": {**os.environ, **where}, "stdout": PIPE, "stderr": PIPE}
    async with turn:
        process = await asyncio.create_subprocess_exec(*line, **how)
        try:
            told, why = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode:
        raise Refusal(400, why.decode(errors="replace").rstrip().rpartition("\n")[2] or _TOO_LARGE, param="file")
    return dict(json.loads(told.rpartition(b"\n")[2]))


def bound(seconds: int) -> None:
    """Give this process its memory and its time, and let it end with the server, however that ends."""
    with suppress(ImportError, AttributeError):  # Windows has none of these bounds, macOS not the last
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.nice(10)
        signal.alarm(seconds)  # which no handler takes: it ends the process, whatever that is doing
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def main(form: Path, kind: str) -> dict[str, Any]:
    head = f"Content-Type: {kind}\r\n\r\n".encode()
    parts, found = email.message_from_bytes(head + form.read_bytes(), policy=email.policy.HTTP), dict[str, Any]()
    for part in parts.iter_parts():
        name, filename = str(part.get_param("name", "", "content-disposition")), part.get_filename()
        content = part.get_payload(decode=True)
        if name in found or name not in ("file", "purpose") or (filename is None) == (name == "file"):
            raise ValueError(f"{shown(name)} has no effect here; send purpose and one file, as file")
        if not isinstance(content, bytes):
            raise ValueError(f"file is of type {part.get_content_type()}; call it application/octet-stream")
        if filename is None:
            found[name] = content.decode(errors="replace")
        else:
            found |= {name: filename.encode(errors="replace").decode()[:200], "bytes": len(content)}
            text = _text(content, form.with_suffix(Path(filename).suffix.lower()), filename)
    if parts.defects or "file" not in found:
        raise ValueError("there is no whole form with a file; send purpose and file as multipart/form-data")
    if (purpose := found.get("purpose")) not in PURPOSES:
        raise ValueError(f"purpose {shown(purpose)} has no effect here; give {' or '.join(PURPOSES)}")
    form.write_text(text, encoding="utf-8")
    return found


def _text(content: bytes, path: Path, name: str) -> str:
    """Return a file as plain text; the path, where it may be put, has the ending that says what it is."""
    if not content:
        raise ValueError(f"{name} is empty; give a file with words")
    try:
        if path.suffix not in CONVERTED:
            return content.decode()
        path.write_bytes(content)
        return "".join(pieces_of(path, "", str) or ())
    except UnicodeDecodeError as error:
        why = f"{name} is not text in UTF-8 ({error.reason}), nor of a format that is converted"
        raise ValueError(f"{why}; convert it to plain text") from None
    except ValueError as error:
        raise ValueError(str(error).replace(str(path), name)) from None


if __name__ == "__main__":
    bound(int(sys.argv[3]))
    try:
        sys.stdout.write(f"\n{json.dumps(main(Path(sys.argv[1]), sys.argv[2]))}")
    except Exception as error:
        sys.exit(one_line(error) or _TOO_LARGE)  # of a MemoryError, which says nothing
