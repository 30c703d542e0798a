"""The page at `/`: three files that ask the server's own routes, without a build step and without other hosts."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response

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
_FOLDER = Path(__file__).parent


def _send(name: str, media_type: str) -> Response:
    return Response((_FOLDER / name).read_bytes(), media_type=media_type, headers=HEADERS)


@router.get("/")
def page() -> Response:
    """Return the page."""
    return _send("index.html", "text/html")


@router.get("/page/page.css")
def style() -> Response:
    """Return how the page looks."""
    return _send("page.css", "text/css")


@router.get("/page/page.js")
def script() -> Response:
    """Return what the page does."""
    return _send("page.js", "text/javascript")
