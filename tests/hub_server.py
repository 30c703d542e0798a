"""A Hugging Face Hub on the loopback interface, for the real huggingface_hub client.

It speaks what the client uses to publish and to load a model: creating repositories, the check of the card's YAML,
preupload, commits, repository info, and downloads.
All files are small ones. The files of a data set are those of the repository "datasets/org/name".
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

WRITE_TOKEN, READ_TOKEN = "hf_loopback_write", "hf_loopback_read"


@dataclass
class Repo:
    """One repository: each branch points at a commit, a commit is a dict of files."""

    private: bool = False
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    messages: list[str] = field(default_factory=list)

    def resolve(self, revision: str) -> str | None:
        """Return the commit of a branch, or the commit itself."""
        return self.branches.get(revision) or (revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Return the files at a revision."""
        return self.commits[self.resolve(revision) or ""]


class HubServer:
    """The server; use as a context manager. `repos` and `requests` are there to be looked at."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str]] = []
        self.broken_with: int | None = None
        """If set, every request is answered with this status."""
        handler = type("Handler", (_Handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        self.status, self.message, self.code = status, message, code


def git_oid(content: bytes) -> str:
    """Return the name that git gives a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    routes: tuple[tuple[str, str, str], ...] = (
        ("POST", r"/api/repos/create", "create_repo"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", "preupload"),
        ("POST", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", "commit"),
        ("GET", r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", "info"),
        ("GET", r"/api/models/([^/]+/[^/]+)", "info"),
        ("GET|HEAD", r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve"),
    )

    def do_GET(self) -> None:
        """Answer any request by the first route that fits."""
        url = urlsplit(self.path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append((self.command, url.path))
        try:
            if self.hub.broken_with:
                raise Refused(self.hub.broken_with, "the server is being repaired")
            for methods, pattern, action in self.routes:
                match = re.fullmatch(pattern, url.path)
                if match and self.command in methods.split("|"):
                    return getattr(self, action)(*map(unquote, match.groups()))
            raise Refused(404, f"no route for {self.command} {url.path}")
        except Refused as refused:
            headers = {"X-Error-Message": refused.message, **({"X-Error-Code": refused.code} if refused.code else {})}
            self.answer({"error": refused.message}, refused.status, headers)

    do_POST = do_PUT = do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""

    def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send JSON, or bytes as they are."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def json_body(self) -> Any:
        """Return the request's JSON."""
        return json.loads(self.body)

    def require(self, write: bool = True) -> None:
        """Refuse a request without a good token."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (WRITE_TOKEN, READ_TOKEN):
            raise Refused(401, "Invalid credentials in Authorization header")
        if write and token == READ_TOKEN:
            raise Refused(403, "You don't have the rights to write here")

    def find(self, name: str, revision: str = "main") -> tuple[Repo, str]:
        """Return a repository that the caller may read, and the commit of a revision."""
        repo = self.hub.repos.get(name)
        if repo is None or repo.private:
            # Without a token the Hub does not tell whether a repository is private or missing.
            if not self.headers.get("Authorization"):
                raise Refused(401, "Invalid username or password.")
            self.require(write=False)
        if repo is None:
            raise Refused(404, "Repository not found", "RepoNotFound")
        commit = repo.resolve(revision)
        if commit is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repo, commit

    def create_repo(self) -> None:
        self.require()
        wanted = self.json_body()
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.repos:
            # The client reads the address from this refusal too.
            return self.answer({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, 409)
        private = wanted.get("private") or wanted.get("visibility") == "private"
        self.hub.repos[name] = Repo(private=bool(private))
        return self.answer({"url": f"{self.hub.url}/{name}", "name": name})

    def validate_yaml(self) -> None:
        match = re.match(r"---\n(.*?)\n---\n", self.json_body()["content"], re.DOTALL)
        try:
            card = yaml.safe_load(match[1]) if match else None
        except yaml.YAMLError as error:
            return self.answer({"errors": [{"message": f"not YAML: {error}"}], "warnings": []}, 400)
        good = all(isinstance(item, str) for item in (card or {}).get("tags") or [])
        problems = [] if good else [{"message": '"tags" must be a list of strings'}]
        return self.answer({"errors": problems, "warnings": []}, 400 if problems else 200)

    def preupload(self, name: str, revision: str) -> None:
        self.require()
        repo, commit = self.find(name, revision)
        files = []
        for wanted in self.json_body()["files"]:
            old = repo.commits[commit].get(wanted["path"])
            oid = None if old is None else git_oid(old)
            files.append({"path": wanted["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": oid})
        self.answer({"files": files})

    def commit(self, name: str, revision: str) -> None:
        self.require()
        repo, parent = self.find(name, revision)
        files = dict(repo.commits[parent])
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repo.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
        oid = hashlib.sha1(repr((parent, sorted(files.items()), len(repo.commits))).encode()).hexdigest()
        repo.commits[oid] = files
        repo.branches[revision] = oid
        self.answer({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"})

    def info(self, name: str, revision: str = "main") -> None:
        repo, commit = self.find(name, revision)
        siblings = [{"rfilename": path} for path in repo.commits[commit]]
        self.answer(
            {"id": name, "modelId": name, "sha": commit, "private": repo.private, "siblings": siblings, "tags": []}
        )

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo, commit = self.find(name, revision)
        content = repo.commits[commit].get(path)
        if content is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes", "ETag": f'"{git_oid(content)}"'}
        self.answer(content, headers=headers)
