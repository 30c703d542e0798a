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


_FILES = {
    "/": ("index.html", "html"),
    "/page/page.css": ("page.css", "css"),
    "/page/page.js": ("page.js", "javascript"),
}


def _route(path: str, name: str, kind: str) -> None:
    @router.get(path)
    def send() -> Response:
        return Response((_FOLDER / name).read_bytes(), media_type=f"text/{kind}", headers=HEADERS)


for _path, _file in _FILES.items():
    _route(_path, *_file)
