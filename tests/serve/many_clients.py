"""Many clients at once against a real `locret-serve`: nothing lost, each answer the one asked alone, memory as planned.

Starts a server on the embedded backbone, uploads contexts, asks every question once alone, and then again from many
clients in a shuffled order, mixed with uploads, answers that are broken off, bodies that are cut short, too large or
malformed. Fails, with a list, if an answer is missing or another one, if a refusal is not the one expected, if the
server's memory went above what was promised, or if a file descriptor or a thread is left.

Run by hand it takes more of all, and prints a record:

    python tests/serve/many_clients.py --questions 2 --output load.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from locret import shipped
from locret.base.files import write_text
from locret.environment import versions
from locret.infer.serve.state import LONG_WORK, SHORT_WORK

WAIT = 600.0
"""Seconds after which a request counts as lost."""
SLACK = 32 << 20
"""Bytes beside weights and promised memory: stacks of threads, buffers of sockets, what Python needs for requests."""
POOLS = SHORT_WORK + LONG_WORK
"""Threads that a server may still have to start before its pools are full."""
_FILLER = "They say that Delhi is short. The map moves then, but the garden is dark. "
_REFUSED = {"oversized": {413}, "malformed": {400}, "unknown": {404}}
MIX = {
    "chat": 22,
    "chat_stream": 26,
    "completion": 12,
    "drawn": 10,
    "come_and_go": 3,
    "broken_off": 7,
    "left": 4,
    "half_body": 4,
    "half_upload": 2,
    "oversized": 3,
    "malformed": 4,
    "unknown": 3,
}
"""Kinds of requests, in parts of a hundred."""


@dataclass(frozen=True)
class Question:
    """A question about one context."""

    context: str
    text: str
    truth: str


@dataclass(frozen=True)
class Book:
    """A text with facts, and the questions about them."""

    name: str
    text: str
    questions: tuple[Question, ...]


def make_books(count: int, shortest: int, longest: int) -> list[Book]:
    """Return texts of lengths between the two, in tokens, each with eight facts."""
    from transformers import AutoTokenizer

    from locret.data import tasks

    tokenizer, books = AutoTokenizer.from_pretrained(shipped.find("checkpoints/tiny")), []
    for nth in range(count):
        tokens = shortest + (longest - shortest) * nth // max(1, count - 1)
        sample = tasks.get("multikey").sample(tokenizer, tokens=tokens, depth=0.3, seed=nth + 1)
        question, name = str(sample.question), f"book{nth}"
        (asked,) = re.findall(r"for (\w+) mentioned", question)
        facts = re.findall(r"for (\w+) is: (\d+)", sample.content)
        questions = tuple(Question(name, question.replace(asked, key), truth) for key, truth in facts)
        books.append(Book(name, sample.content.removesuffix(question), questions))
    return books


# -- the server ---------------------------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, options: Sequence[str]) -> Iterator[tuple[str, psutil.Process]]:
    """Run a server on a free port within the block; yield its address and its process."""
    arguments = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads", "--port", "0", "--json"]
    command = [sys.executable, "-m", "locret.infer.serve.command", *arguments, "--contexts", str(folder), *options]
    with open(folder.parent / "server.log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            if not (line := process.stdout.readline()):
                process.wait(60)
                log.seek(0)
                raise OSError(f"the server ended with exit code {process.returncode}: {log.read()[-2000:]}")
            yield json.loads(line)["url"].removesuffix("/v1"), psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


class Watch:
    """Looks at the resident memory of a process again and again, from a thread."""

    def __init__(self, process: psutil.Process) -> None:
        self.peak, self._process, self._ended = 0, process, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            self.peak = max(self.peak, self._process.memory_info().rss)


# -- requests -----------------------------------------------------------------------------------------------------


def chat(question: Question) -> dict[str, Any]:
    return {"context": question.context, "messages": [{"role": "user", "content": question.text}]}


@dataclass
class Load:
    """Asks one server, and takes down what came of it."""

    url: str
    client: httpx.AsyncClient
    max_body: int
    alone: dict[tuple[str, Question], str] = field(default_factory=dict)
    """What each kind of request was answered for each question, asked alone."""
    wrong: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    right: int = 0
    asked: int = 0

    async def ask(self, kind: str, question: Question) -> str:
        """Return the answer to a question, asked in one of four ways, waiting wherever the server says so."""
        body: dict[str, Any] = {"context": question.context, "max_tokens": 16, **chat(question)}
        if kind == "completion":
            body = {**body, "prompt": question.text}
            del body["messages"]
            return str((await self.post("/v1/completions", json=body)).json()["choices"][0]["text"])
        if kind == "drawn":
            body |= {"temperature": 1.0, "seed": len(question.text)}
        if kind != "chat_stream":
            answer = await self.post("/v1/chat/completions", json=body)
            return str(answer.json()["choices"][0]["message"]["content"])
        parts, start = list[str](), time.monotonic()
        async for event in self.stream(body):
            delta = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if delta and not any(parts):
                self.first_token.append(time.monotonic() - start)
            parts.append(delta or "")
        return "".join(parts)

    async def post(self, path: str, **options: Any) -> httpx.Response:
        """Return what a POST gives; 429 is waited out, as the server says how long."""
        while True:
            response = await self.client.post(path, **options)
            self.statuses[str(response.status_code)] += 1
            if response.status_code != 429:
                return response.raise_for_status()
            await asyncio.sleep(float(response.headers["retry-after"]))

    async def stream(self, body: Any) -> AsyncIterator[Any]:
        """Yield the events of a streamed chat."""
        while True:
            async with self.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
                self.statuses[str(response.status_code)] += 1
                if response.status_code == 429:
                    await asyncio.sleep(float(response.headers["retry-after"]))
                    continue
                response.raise_for_status()
                last = ""
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        yield json.loads(line[6:])
                    last = line or last
                if last != "data: [DONE]":
                    raise ValueError(f"a stream ended with {last!r}")
                return

    async def upload(self, name: str, text: str) -> None:
        """Upload a text and wait until it has been read."""
        await self.post("/v1/contexts", params={"name": name}, content=text.encode())
        while (entry := (await self.client.get(f"/v1/contexts/{name}")).json())["state"] in ("waiting", "reading"):
            await asyncio.sleep(0.1)
        if entry["state"] != "ready":
            raise ValueError(f"{name} was not read: {entry}")

    async def one(self, kind: str, question: Question, number: int) -> None:
        """Make one request of a kind, and take down what is wrong with its outcome."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(WAIT):
                if kind in ("chat", "chat_stream", "completion", "drawn"):
                    answer, self.asked = await self.ask(kind, question), self.asked + 1
                    self.right += question.truth in answer
                    if answer != self.alone[kind, question]:
                        self.wrong.append(f"{number} {kind}: {answer!r} instead of {self.alone[kind, question]!r}")
                    self.seconds.append(time.monotonic() - start)
                elif kind in _REFUSED:
                    await self.refused(kind, question)
                else:
                    await getattr(self, kind)(question, number)
        except Exception as error:
            self.wrong.append(f"{number} {kind}: {type(error).__name__}: {error}")

    async def refused(self, kind: str, question: Question) -> None:
        """Send what has to be refused, and check that it is, in one sentence."""
        content = {
            "oversized": json.dumps({**chat(question), "user": "x" * self.max_body}),
            "malformed": json.dumps(chat(question))[:-9],
            "unknown": json.dumps({**chat(question), "context": "no-such-book"}),
        }[kind]
        headers = {"content-type": "application/json"}
        response = await self.client.post("/v1/chat/completions", content=content, headers=headers)
        self.statuses[str(response.status_code)] += 1
        if response.status_code not in _REFUSED[kind] or not response.json()["error"]["message"]:
            raise ValueError(f"status {response.status_code}: {response.text[:200]}")

    async def come_and_go(self, question: Question, number: int) -> None:
        """Upload a text, ask it, and delete it again."""
        name, key = f"short{number}", 10000 + number
        await self.upload(name, f"{_FILLER * 40}The special magic number for Oslo is: {key}. {_FILLER * 20}")
        words = "What is the special magic number for Oslo mentioned in the provided text?"
        answer = await self.ask("chat", Question(name, words, str(key)))
        (await self.client.delete(f"/v1/contexts/{name}")).raise_for_status()
        if not answer.strip():
            raise ValueError(f"{name} was answered with nothing")

    async def broken_off(self, question: Question, number: int) -> None:
        """Leave a stream after some of its tokens."""
        events = self.stream({**chat(question), "max_tokens": 200})
        for _ in range(1 + number % 5):
            await anext(events, None)
        await events.aclose()  # type: ignore[attr-defined]

    async def left(self, question: Question, number: int) -> None:
        """Send a whole request, and leave before there is an answer."""
        content = json.dumps(chat(question)).encode()
        await self.sent("/v1/chat/completions", content, len(content), 0.01 * (number % 4))

    async def half_body(self, question: Question, number: int) -> None:
        """Send a part of a request, and leave."""
        await self.sent("/v1/chat/completions", b'{"messages": [{"role"', 1000, 0.01 * (number % 4))

    async def half_upload(self, question: Question, number: int) -> None:
        """Send a part of a text, and leave; the context may not stay."""
        name = f"half{number}"
        await self.sent(f"/v1/contexts?name={name}", b"They say that Delhi is short. " * 1000, 1 << 20, 0.05)
        for _ in range(100):
            found = await self.client.get(f"/v1/contexts/{name}")
            if found.status_code == 404 or found.json()["state"] == "failed":
                break
            await asyncio.sleep(0.1)
        else:
            raise ValueError(f"{name} is there: {found.text}")
        await self.client.delete(f"/v1/contexts/{name}")

    async def sent(self, path: str, content: bytes, length: int, wait: float) -> None:
        """Send a request, or a part of it, on a connection that is cut a moment later."""
        address = httpx.URL(self.url)
        _, writer = await asyncio.open_connection(address.host, address.port)
        kind = "text/plain" if path.startswith("/v1/contexts") else "application/json"
        head = f"POST {path} HTTP/1.1\r\nHost: {address.host}\r\nContent-Type: {kind}\r\n"
        try:
            writer.write(f"{head}Content-Length: {length}\r\n\r\n".encode() + content)
            await writer.drain()
            await asyncio.sleep(wait)
        finally:
            writer.transport.abort()


# -- the program --------------------------------------------------------------------------------------------------


def schedule(books: Sequence[Book], requests: int, seed: int) -> list[tuple[str, Question]]:
    """Return what is asked in which order: every kind in its share, every question about as often as the others."""
    kinds = [kind for kind, parts in MIX.items() for _ in range(max(1, round(requests * parts / 100)))]
    questions = [question for book in books for question in book.questions]
    drawn = random.Random(seed)
    kinds = (kinds + ["chat_stream"] * requests)[:requests]
    drawn.shuffle(kinds)
    drawn.shuffle(questions)
    return [(kind, questions[nth % len(questions)]) for nth, kind in enumerate(kinds)]


def held(process: psutil.Process) -> dict[str, int]:
    """Return what a process holds now."""
    return {"resident": process.memory_info().rss, "descriptors": process.num_fds(), "threads": process.num_threads()}


async def run(url: str, process: psutil.Process, options: argparse.Namespace, books: Sequence[Book]) -> dict[str, Any]:
    """Ask alone, ask under load, and return the record."""
    limits = httpx.Limits(max_connections=options.clients, max_keepalive_connections=options.clients)
    idle = held(process)
    with Watch(process) as watch:
        async with httpx.AsyncClient(base_url=url, timeout=WAIT, limits=limits) as client:
            load = Load(url, client, options.max_body)
            start = time.monotonic()
            for book in books:
                await load.upload(book.name, book.text)
            uploaded = time.monotonic() - start
            planned = schedule(books, options.requests, options.seed)
            asks = ("chat", "chat_stream", "completion", "drawn")
            for kind, question in sorted(set(planned), key=repr):
                if kind in asks:
                    load.alone[kind, question] = await load.ask(kind, question)
            before, load.first_token = held(process), []
            waiting, start = iter(enumerate(planned)), time.monotonic()

            async def one_client() -> None:
                for number, (kind, question) in waiting:
                    await load.one(kind, question, number)

            await asyncio.gather(*(one_client() for _ in range(options.clients)))
            took = time.monotonic() - start
            memory = (await client.get("/v1/memory")).json()
            contexts = [one["name"] for one in (await client.get("/v1/contexts")).json()["data"]]
    record = {
        "requests": len(planned),
        "clients": options.clients,
        "kinds": dict(Counter(kind for kind, _ in planned)),
        "statuses": dict(load.statuses),
        "answers": load.asked,
        "answers_right": load.right,
        "wrong": load.wrong,
        "seconds": round(took, 1),
        "requests_per_second": round(len(planned) / took, 1),
        "answer_seconds_p50_p95": spread(load.seconds),
        "first_token_seconds_p50_p95": spread(load.first_token),
        "upload_seconds": round(uploaded, 1),
        "promised_bytes": sum(part["planned"] for name, part in memory["parts"].items() if name != "weights"),
        "resident_idle": idle["resident"],
        "resident_peak": watch.peak,
        "before": before,
        "after": await settled(process, before),
    }
    check(load, idle, record, sorted(contexts), sorted(book.name for book in books))
    return record


def spread(seconds: Sequence[float]) -> list[float]:
    """Return the median and the 95th percentile of some times, if there are any."""
    ordered = sorted(seconds)
    return [round(ordered[len(ordered) * part // 100], 3) for part in (50, 95) if ordered]


async def settled(process: psutil.Process, before: dict[str, int]) -> dict[str, int]:
    """Return what a process holds when its clients have left; waits a while for what ends by itself."""
    for _ in range(150):
        after = held(process)
        if after["descriptors"] <= before["descriptors"] and after["threads"] <= before["threads"]:
            break
        await asyncio.sleep(0.1)
    return after


def check(load: Load, idle: dict[str, int], record: dict[str, Any], contexts: list[str], expected: list[str]) -> None:
    """Take down what a server holds that it may not."""
    before, after = record["before"], record["after"]
    peak, promised = record["resident_peak"], record["promised_bytes"]
    if peak > idle["resident"] + promised + SLACK:
        said = f"resident memory went from {idle['resident']:,} to {peak:,}, promised were {promised:,} more"
        load.wrong.append(said)
    for what, more in (("descriptors", 0), ("threads", POOLS)):
        if after[what] > before[what] + more:
            load.wrong.append(f"{what}: {before[what]} before the load, {after[what]} after it")
    if contexts != expected:
        load.wrong.append(f"contexts after the load: {contexts}")


def publish(record: dict[str, Any], options: argparse.Namespace) -> None:
    """Write a record where the options say, with what it ran on."""
    about = {"options": vars(options), "cores": os.cpu_count(), **versions(), "date": time.strftime("%Y-%m-%d")}
    text = json.dumps({**record, **about}, indent=1)
    if options.output is None:
        sys.stdout.write(f"{text}\n")
    else:
        write_text(Path(options.output), f"{text}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit code is 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--contexts", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=8192, help="tokens of the shortest context")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the longest context")
    parser.add_argument("--questions", type=int, default=8, help="questions about each context, at most 8")
    parser.add_argument("--max-body", type=int, default=1 << 20, help="bytes of a request that the server takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-memory", default="64MiB")
    parser.add_argument("--output", help="file for the record")
    parser.add_argument("server", nargs="*", help="further options of locret-serve, after --")
    options = parser.parse_args(argv)
    books = make_books(options.contexts, options.shortest, options.longest)
    books = [replace(book, questions=book.questions[: options.questions]) for book in books]
    with tempfile.TemporaryDirectory() as folder:
        more = ["--kv-memory", options.kv_memory, "--max-body", str(options.max_body), *options.server]
        with serving(Path(folder) / "contexts", more) as (url, process):
            record = asyncio.run(run(url, process, options, books))
    publish(record, options)
    return 1 if record["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
