"""Training rows are found by name, Hub id or path, and what cannot be loaded says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from locret.data.training.sources import ALIASES, load_rows

ROWS = [{"prompt": f"question {index}", "answer": f"answer {index}"} for index in range(7)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    else:
        path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.parquet"])
def test_local_files_of_every_kind_give_their_rows(tmp_path, name):
    path = write(tmp_path / name, ROWS)
    assert list(load_rows(str(path))) == ROWS
    assert list(load_rows(name, data_dir=str(tmp_path))) == ROWS
    assert list(load_rows(str(path), split="train[:2]")) == ROWS[:2]


def test_a_folder_gives_the_rows_of_its_files(tmp_path):
    write(tmp_path / "more" / "a.jsonl", ROWS[:3])
    write(tmp_path / "more" / "b.jsonl", ROWS[3:])
    assert list(load_rows(str(tmp_path / "more"))) == ROWS


def test_a_data_set_saved_to_disk_is_read(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert list(load_rows(str(tmp_path / "saved"))) == ROWS


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("absent", [{"input": None}, {}])
def test_a_column_that_is_null_or_absent_for_megabytes_may_hold_text_later(tmp_path, absent, folder):
    long_rows = [{"instruction": "x" * 100_000, "output": "y", **absent} for _ in range(110)]
    path = write(tmp_path / "rows" / "rows.jsonl", [*long_rows, {"instruction": "a", "output": "b", "input": "c"}])
    rows = load_rows(str(path.parent if folder else path))
    assert rows[-1]["input"] == "c"
    assert rows[0].get("input") is None


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (
            "LongAlpca",
            r"no data set of that name; did you mean LongAlpaca or LongAlpaca-16k\? Known names: LongAlpaca, ",
        ),
        (
            "squad",
            r"no data set of that name; known names: LongAlpaca, LongAlpaca-16k, LongAlign, Anti-Haystack, a Hub id",
        ),
        ("no/such.json", "no such file or folder; check the path"),
        ("./no/such", "no such file or folder; check the path"),
    ],
)
def test_an_unknown_data_set_is_named_with_the_way_out(dataset, sentence):
    with pytest.raises(ValueError, match=f"^--dataset {dataset}: {sentence}"):
        load_rows(dataset)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("rows.json", b"", "rows.json is empty; it needs at least one row"),
        ("rows.json", b" [] \n", "rows.json is empty; it needs at least one row"),
        ("rows.parquet", b"not parquet", r"cannot be read \(.*\); check the file and the split"),
        ("rows.csv", b"a,b", r"the ending '.csv' is not known; convert the file to .json, .jsonl, .parquet"),
    ],
)
def test_a_file_that_cannot_be_used_says_why_in_one_line(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^--dataset .*{sentence}$") as caught:
        load_rows(str(path))
    assert "\n" not in str(caught.value)


def test_a_folder_without_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no .json, .jsonl, .parquet file; check the path$"):
        load_rows(str(tmp_path))


def test_a_split_that_does_not_exist_is_refused(tmp_path):
    path = write(tmp_path / "rows.json", ROWS)
    with pytest.raises(
        ValueError, match=r"^--dataset .*rows.json: cannot be read \(Unknown split \"test\".*the split$"
    ):
        load_rows(str(path), split="test")


def test_a_data_dir_without_a_copy_lists_what_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"holds no copy of --dataset LongAlign; looked for long.jsonl, .*; put the"):
        load_rows("LongAlign", data_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"^--data-dir .*nowhere is not a folder; give the folder"):
        load_rows("LongAlign", data_dir=str(tmp_path / "nowhere"))


def test_a_revision_that_does_nothing_is_warned_about(tmp_path, caplog):
    path = write(tmp_path / "rows.json", ROWS)
    load_rows(str(path), revision="abc")
    assert "--dataset-revision abc is ignored" in caplog.text


def test_named_sets_are_pinned_to_full_commits():
    assert all(len(published.revision) == 40 for published in ALIASES.values())


class Hub(BaseHTTPRequestHandler):
    """Just enough of the Hub for `load_dataset`: one data set with one JSON file, at any revision asked for."""

    content = json.dumps(ROWS).encode()
    file = {"type": "file", "path": "LongAlpaca-12k.json", "size": len(content), "oid": "0" * 40}

    def do_GET(self):
        self.server.asked.append(self.path)
        *_, repo, rest = self.path.partition("Yukang/LongAlpaca-12k")
        if not repo:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        parts = rest.partition("?")[0].split("/")
        commit = parts[2] if len(parts) > 2 else "main"
        if parts[-1] == "LongAlpaca-12k.json":
            return self.answer(200, self.content, {"ETag": '"etag"', "X-Repo-Commit": commit})
        if parts[1:2] == ["tree"]:
            return self.answer(200, json.dumps([self.file]).encode())
        if parts[1:2] in ([], ["revision"]):
            siblings = [{"rfilename": "LongAlpaca-12k.json"}]
            info = {"id": "Yukang/LongAlpaca-12k", "sha": commit, "siblings": siblings, "tags": [], "private": False}
            return self.answer(200, json.dumps(info).encode())
        return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})

    do_HEAD = do_GET

    def do_POST(self):
        wanted = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.answer(200, json.dumps([self.file] if self.file["path"] in wanted else []).encode())

    def answer(self, code, body, headers=None):
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def load_in_fresh_process(hub, home, call):
    """The Hub's address is read when huggingface_hub is imported, hence a process of its own."""
    code = f"import json\nfrom locret.data.training.sources import load_rows\ntry:\n print(json.dumps(list({call})))\n"
    code += "except (ValueError, OSError) as error: print(type(error).__name__, error)"
    environment = {
        k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_TOKEN")
    }
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "commit"), [("", ALIASES["LongAlpaca"].revision), (", revision='abc'", "abc")])
def test_a_named_set_is_fetched_from_the_hub_at_its_revision(hub, tmp_path, argument, commit):
    printed = load_in_fresh_process(hub, tmp_path, f"load_rows('LongAlpaca'{argument})")
    assert json.loads(printed) == ROWS
    assert any(f"/resolve/{commit}/LongAlpaca-12k.json" in path for path in hub.asked), hub.asked


@pytest.mark.slow
def test_a_named_set_is_streamed_from_the_hub(hub, tmp_path):
    call = "entry.load() for entry in load_rows('LongAlpaca', streaming=True).begin()"
    assert json.loads(load_in_fresh_process(hub, tmp_path, f"({call})")) == ROWS
    assert not list((tmp_path / "datasets").rglob("*.arrow"))


@pytest.mark.slow
def test_a_data_set_the_hub_does_not_have_is_named(hub, tmp_path):
    printed = load_in_fresh_process(hub, tmp_path, "load_rows('some/other')")
    assert printed.startswith("ValueError --dataset some/other: the Hub has no data set some/other at revision main")


def test_an_empty_name_is_refused_instead_of_reading_the_current_folder() -> None:
    with pytest.raises(ValueError, match="--dataset is empty; give LongAlpaca"):
        load_rows(" ")
