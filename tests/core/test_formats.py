"""Documents as people have them, read as text with their chapters; and files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import save_file

from locret.base.files import locked, read_json, visible, write_text, written_whole
from locret.conversation.document import open_document
from locret.infer import fetch
from locret.infer.reading import open_all

HTML = "<html><body><h1>Tea</h1><p>Green tea takes <b>70</b> degrees.</p><script>no()</script></body></html>"
EPUB = {
    "META-INF/container.xml": '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>',
    "book.opf": '<package xmlns="http://www.idpf.org/2007/opf"><metadata/><manifest>'
    '<item id="a" href="a.xhtml" media-type="application/xhtml+xml"/></manifest>'
    '<spine><itemref idref="a"/></spine></package>',
    "a.xhtml": HTML,
}
WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
OFFICE = "http://schemas.openxmlformats.org"
DOCX = {
    "[Content_Types].xml": f'<Types xmlns="{OFFICE}/package/2006/content-types"><Default Extension="rels" '
    'ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Override PartName="/word/document.xml" '
    'ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>',
    "_rels/.rels": f'<Relationships xmlns="{OFFICE}/package/2006/relationships"><Relationship Id="a" '
    f'Type="{OFFICE}/officeDocument/2006/relationships/officeDocument" Target="word/document.xml"/></Relationships>',
    "word/document.xml": f'<w:document {WORD}><w:body><w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>Tea'
    "</w:t></w:r></w:p><w:p><w:r><w:t>Green tea takes 70 degrees.</w:t></w:r></w:p></w:body></w:document>",
}


def pdf(path: Path, pages: list[str]) -> None:
    """Write pages as an office would, with matplotlib."""
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    from matplotlib.backends.backend_pdf import PdfPages

    with PdfPages(path) as written:
        for page in pages:
            figure = pyplot.figure()
            figure.text(0.1, 0.5, page)
            written.savefig(figure)
            pyplot.close(figure)


def packed(path: Path, parts: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in parts.items():
            archive.writestr(name, text)


def read(path: Path | str) -> str:
    pieces = open_document(path).pieces
    assert pieces is not None
    return "".join(pieces)


@pytest.mark.parametrize("ending", ["epub", "docx", "html"])
def test_chapters_and_their_names_become_markdown(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("markitdown", reason="the extra documents is not installed")
    path = tmp_path / f"tea.{ending}"
    if ending == "html":
        path.write_text(HTML)
    else:
        packed(path, EPUB if ending == "epub" else DOCX)
    text = read(str(path))
    assert "# Tea" in text
    assert "Green tea takes" in text
    assert "70" in text
    assert "no()" not in text


def test_pages_of_a_pdf_keep_their_numbers(tmp_path: Path) -> None:
    pytest.importorskip("markitdown", reason="the extra documents is not installed")
    pdf(tmp_path / "two.pdf", ["Green tea takes 70 degrees.", "Black tea takes 95."])
    first, second = read(tmp_path / "two.pdf").split("[page 2]")
    assert first.startswith("[page 1]")
    assert "70 degrees" in first
    assert "Black tea takes 95." in second


def test_a_folder_is_read_below_the_names_of_its_files_as_git_would_add_them_or_without_hidden_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    for name, text in {"b.txt": "last", "a.md": "first", "src/c.py": "x = 1", "no.log": "secret"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "image.bin").write_bytes(b"\x89\0\xff")
    (tmp_path / "link.md").symlink_to("/etc/passwd")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    with (tmp_path / ".git" / "config").open("a") as config:  # of a stranger, who has git start something
        config.write(f"[core]\n\tfsmonitor = touch {tmp_path}/started\n")
    with pytest.warns(UserWarning, match=r"no text, so left out: image\.bin$"):
        text = read(tmp_path)
    assert not (tmp_path / "started").exists()
    assert text == "# .gitignore\n\n*.log\n\n\n# a.md\n\nfirst\n\n# b.txt\n\nlast\n\n# src/c.py\n\nx = 1\n\n"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "b\udcff.log").write_text("asked for by name")
    assert read(tmp_path / "out") == "# b?.log\n\nasked for by name\n\n", "although git ignores it"
    (tmp_path / "plain" / ".hidden").mkdir(parents=True)
    (tmp_path / "plain" / ".hidden" / "key").write_text("secret")
    (tmp_path / "plain" / "one.txt").write_text("one")
    assert read(tmp_path / "plain") == "# .hidden/key\n\nsecret\n\n# one.txt\n\none\n\n", "git would add it"
    monkeypatch.setenv("PATH", "")  # no git at all
    assert read(tmp_path / "plain") == "# one.txt\n\none\n\n"


def test_what_cannot_be_read_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("markitdown", reason="the extra documents is not installed")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.docx").write_bytes(b"PK\x03\x04 no archive")
    pdf(tmp_path / "blank.pdf", [" "])
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "a.bin").write_bytes(b"\0\0")
    for name, sentence in {
        "empty": "is a folder without files to read; give another, or a file",
        "broken.docx": r"cannot be read as DOCX \(.+\); convert it to plain text",
        "blank.pdf": r"holds no text, pictures of pages perhaps; recognise its letters first \(OCR\)",
        "only": r"holds no text; its files are a\.bin; give another",
    }.items():
        with pytest.raises(ValueError, match=sentence) as found:
            read(tmp_path / name)
        assert "\n" not in str(found.value)
    monkeypatch.setitem(sys.modules, "markitdown", None)
    with pytest.raises(ValueError, match=r"format PDF, which the extra documents reads; run pip install 'locret\[doc"):
        read(tmp_path / "blank.pdf")


PAGES = {
    "/tea": ("text/html; charset=utf-8", HTML.encode()),
    "/raw/tea.md": ("text/plain", b"Green tea."),
    "/cut": ("text/plain", None),
    "/old": ("text/html; charset=iso-8859-13", "<p>Žalioji</p>".encode("iso-8859-13")),
    "/packed": ("text/plain; packed", b"\x1f\x8b"),
    "/moved": ("/tea", b""),
    "/out": ("ftp://localhost/tea", b""),
    "/in": ("http://[::1]/tea", b""),
    "/quoted": ("http://%6c%6fcalhost/tea", b""),
    "/loop": ("/loop", b""),
}


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        kind, body = PAGES.get(self.path, ("", b""))
        self.send_response(200 if kind.startswith("text") else 302 if kind else 404)
        self.send_header("Location", kind)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Encoding", "gzip" if "packed" in kind else "")
        self.send_header("Content-Length", "9" if body is None else str(len(body)))
        self.end_headers()
        self.wfile.write(body or b"half")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_pages_and_several_files_are_one_text_below_their_names(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("markitdown", reason="the extra documents is not installed")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "empty.txt").write_text(" ")
    several = open_all([str(tmp_path / "a.txt"), f"{site}/raw/tea.md"], "--prompt-file ")
    assert "".join(several.pieces or ()) == "# a.txt\n\nfirst\n\n# tea.md\n\nGreen tea.\n\n"
    page = open_all([f"{site}/moved"], "--prompt-file ")
    assert page.name == "tea"
    assert "".join(page.pieces or ()).startswith("# Tea")
    assert "".join(open_all([f"{site}/old"], "").pieces or ()) == "Žalioji"
    with pytest.raises(ValueError, match="^the address of a page holds a user's name or password; take it out"):
        open_all([f"{site.replace('//', '//me:secret@')}/tea"], "")
    monkeypatch.setattr(fetch, "_is_private", lambda host, own=fetch._is_private: host not in site and own(host))
    wrong = {"/none": "Not Found", "/cut": "ended early", "/packed": "comes packed as gzip", "/loop": "infinite loop"}
    inner = {"/in": r"to http://\[::1]", "/quoted": "to http://localhost", "/out": "to ftp://localhost"}
    for name, why in {**wrong, **inner}.items():
        with pytest.raises(ValueError, match=rf"^--prompt-file .* cannot be fetched \(.*{why}.*\); check the addr"):
            open_all([site + name], "--prompt-file ")
    with pytest.raises(ValueError, match="^--prompt-file /dev/zero: that is a device, which may have no end; give a f"):
        open_all(["/dev/zero"], "--prompt-file ")
    with pytest.raises(ValueError, match="^--prompt-file '' names no file; give its path, or [.] for the folder"):
        open_all([""], "--prompt-file ")
    with pytest.raises(ValueError, match=r"--prompt-file empty\.txt is empty"):
        list(open_all([str(tmp_path / "a.txt"), str(tmp_path / "empty.txt")], "--prompt-file ").pieces or ())


def test_a_file_too_large_for_what_it_should_be_is_refused_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 1 << 40)  # sparse
    with pytest.raises(ValueError, match=r"has 1,099,511,627,776 bytes, more than any JSON .*; give heads$"):
        read_json(tmp_path / "config.json", "heads")


def held(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("there", [False, True])
def test_what_ends_the_writing_early_leaves_all_as_it_was(tmp_path: Path, there: bool) -> None:
    file, folder = tmp_path / "file.txt", tmp_path / "folder"
    if there:
        write_text(file, "old")
        write_text(folder / "file.txt", "old", parents=True)

    def interrupted(target: Path, inside: str) -> None:
        with written_whole(target) as fresh:
            (fresh / inside).parent.mkdir(exist_ok=True)
            (fresh / inside).write_text("half")
            raise KeyboardInterrupt

    for target, inside in ((file, ""), (folder, "file.txt")):
        with pytest.raises(KeyboardInterrupt):
            interrupted(target, inside)
    assert held(tmp_path) == (["file.txt", "folder"] if there else [])
    if there:
        assert held(folder) == ["file.txt"]
        assert file.read_text() == (folder / "file.txt").read_text() == "old"


def test_a_folder_that_is_there_keeps_its_other_files_and_changes_the_last_one_last(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    for name in ("notes", "a", "z"):
        (tmp_path / "folder" / name).write_text("old")
    moved, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (moved.append(paths[1].name), replace(*paths)))
    with written_whole(tmp_path / "folder", last="a") as fresh:
        fresh.mkdir()
        for name in ("a", "z"):
            (fresh / name).write_text("new")
    assert moved == ["z", "a"]
    texts = {path.name: path.read_text() for path in (tmp_path / "folder").iterdir()}
    assert texts == {"notes": "old", "a": "new", "z": "new"}


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with written_whole(tmp_path / "a") as fresh:
            save_file({"a": torch.zeros(2)}, fresh)  # writes for the owner alone
        (tmp_path / "b").write_text("")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_what_the_system_refuses_is_one_sentence_of_the_same_kind(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PermissionError, match="a: Permission denied; choose"):
        write_text(tmp_path / "a", "")
    assert held(tmp_path) == []


def test_a_folder_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    again = "import sys; from locret.base.files import locked\nwith locked(sys.argv[1], '--output x'): pass"
    with locked(out, "--output out"):
        other = subprocess.run([sys.executable, "-c", again, str(out)], capture_output=True, text=True, check=False)
        assert f"--output x is being written by process {os.getpid()} on" in other.stderr
        assert visible(out) == []
    assert held(tmp_path) == []  # what the lock had made is gone with it
    with locked(out, "--output out"):
        (out / "kept").write_text("")
    assert held(out) == ["kept"]
    with pytest.raises(ValueError, match="--output kept is a file"), locked(out / "kept", "--output kept"):
        pass


def test_what_a_killed_process_was_about_to_write_goes_when_the_folder_is_locked(tmp_path: Path) -> None:
    for name in (".checkpoint-6.0a1b2c3d.partial", ".heads.00000000.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pt").write_bytes(b"half")
    (tmp_path / "log.jsonl").write_text("kept")
    with locked(tmp_path, "--output"):
        assert held(tmp_path) == [".locret.lock", "log.jsonl"]
    assert held(tmp_path) == ["log.jsonl"]
