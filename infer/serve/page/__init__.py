"""The page at `/`: three files that ask the server's own routes, without a build step and without other hosts."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import FileResponse

router = APIRouter(include_in_schema=False)

# Scripts, styles and requests only from here, nothing inside the text, no frames: text of a file that found its way
# into the page as HTML could still do nothing.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/")
@router.get("/page/{name}")
def send(name: str = "index.html") -> Response:
    """Return a file of the page."""
    if name not in ("index.html", "page.css", "page.js"):
        raise HTTPException(404)
    return FileResponse(Path(__file__).parent / name, headers=HEADERS)
