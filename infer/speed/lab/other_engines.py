"""Questions about long texts over HTTP: engines with full prompts, with and without a prefix cache, and with contexts.

All sides run one after the other on one machine, with the same weights, the same bytes of KV cache and the same
questions, all asked at once in one shuffled batch. What is compared is vLLM with contexts that Locret has read, vLLM
with full prompts, and `transformers serve` with full prompts. Reading is not part of a row with contexts: it is done
once, and stated beside.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from locret import shipped
from locret.cli.command import parse_options, print_json, run
from locret.conversation.document import open_document
from locret.conversation.long_context_model import LongContextModel
from locret.data import tasks
from locret.engines.prefix import Prefix
from locret.environment import versions
from locret.files import write_text
from locret.infer.demo import HEADS, MODEL
from locret.infer.speed.record import device_name
from locret.policy.policy import RetentionPolicy
from locret.tables import markdown

_MODEL = shipped.find(MODEL)
_BLOCK, _LOCAL, _ANSWER, _SHORT = 32, 32, 16, 512
_MANY, _LONG_ANSWER = 128, 64
"""Requests that are asked at once to see how many run, and tokens of their answers."""
_TOKEN = 5120
"""Bytes of a token's keys and values in the embedded backbone, in float32."""
_MODULE = "locret.infer.speed.lab.other_engines"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What is asked, of which engines, and in how much memory."""

    vllm_python: str = "python"
    """Python of the environment that vLLM is installed in."""
    contexts: list[int] = field(default_factory=lambda: [4, 16])
    """How many texts are asked about at once."""
    kv_mib: list[int] = field(default_factory=lambda: [96, 1024])
    """MiB of KV cache that every engine has, one run after the other."""
    tokens: int = 8192
    """Tokens of a text."""
    questions: int = 2
    """Questions about each text."""
    budget: int = 224
    """Units that Locret keeps per KV head, besides 32 local tokens."""
    transformers: bool = True
    """Whether `transformers serve` is measured too."""
    output: str | None = None
    """Write the record to this path, once as .json and once as .md."""

    def __post_init__(self) -> None:
        least = self.tokens + _SHORT
        for name in ("tokens", "questions", "budget", "contexts", "kv_mib"):
            values = getattr(self, name)
            if not values or min(values if isinstance(values, list) else [values]) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {values} is too small; give 1 or more")
        if min(self.kv_mib) * 2**20 < least * _TOKEN:
            raise ValueError(
                f"--kv-mib {min(self.kv_mib)} does not hold one full prompt of {least} tokens, {least * _TOKEN:,} bytes"
            )


@dataclass(frozen=True)
class Book:
    """A text that was read."""

    prefix: Prefix
    ids: list[int]
    """Of the text."""
    questions: list[tuple[list[int], str]]
    """Token ids of each question, and what a right answer contains."""
    seconds: float
    """That reading took."""


Prompts = Callable[[Book, int], list[int]]


def read_books(lm: LongContextModel, folder: Path, count: int, tokens: int, questions: int) -> list[Book]:
    """Read texts, and write their contexts to a folder."""
    books = []
    for seed in range(1, count + 1):
        sample = tasks.get("multikey").sample(lm.tokenizer, tokens=tokens, depth=0.3, seed=seed)
        text = sample.content.removesuffix(sample.question)
        about = re.findall(r"for (\w+) mentioned", sample.question)[0]
        start = time.perf_counter()
        context = lm.read(text, name=f"book{seed}", progress=False)
        seconds = time.perf_counter() - start
        context.save(folder / f"book{seed}-{tokens}.ctx")
        asked = [
            (context.question_ids(sample.question.replace(about, key))[0].tolist(), number)
            for key, number in re.findall(r"numbers for (\w+) is: (\d+)", text)[:questions]
        ]
        ids = [token for block in lm.tokens(open_document(text)) for token in block]
        books.append(Book(Prefix.of(context), ids, asked, seconds))
    return books


def from_context(book: Book, question: int) -> list[int]:
    """Return a prompt that begins with a context."""
    return [*book.prefix.placeholders, *book.questions[question][0]]


def in_full(book: Book, question: int) -> list[int]:
    """Return a prompt with all of a text."""
    return [*book.ids, *book.questions[question][0]]


class Server:
    """An engine that answers over HTTP.

    Args:
        url: Where.
        prompts: What it is asked with.
        more: Further fields of each request.
        decode: Makes text of a prompt, for an engine that takes no token ids.
    """

    def __init__(
        self, url: str, prompts: Prompts, more: Mapping[str, Any], decode: Callable[[list[int]], str] | None = None
    ) -> None:
        self.url, self.prompts, self.more, self.decode = url, prompts, more, decode

    def post(self, prompt: list[int], tokens: int, **more: Any) -> Any:
        """Ask for a completion and return the response, which is still to be read."""
        text: Any = self.decode(prompt) if self.decode else prompt
        body = {"model": "tiny", "prompt": text, "max_tokens": tokens, "temperature": 0, **self.more, **more}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=900)

    def ask(self, book: Book, question: int) -> bool:
        """Return whether a question is answered rightly."""
        with self.post(self.prompts(book, question), _ANSWER) as reply:
            return book.questions[question][1] in json.load(reply)["choices"][0]["text"]

    def first_token(self, book: Book) -> float:
        """Return the seconds to the first token of an answer."""
        start = time.perf_counter()
        with self.post(self.prompts(book, 0), _ANSWER, stream=True) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    return time.perf_counter() - start
        raise ValueError(f"{self.url} answers nothing")

    def reset(self) -> None:
        """Empty vLLM's prefix cache; transformers serve has no such call."""
        with suppress(urllib.error.HTTPError):
            urllib.request.urlopen(urllib.request.Request(f"{self.url}/reset_prefix_cache", b"", method="POST")).close()

    def running(self) -> int:
        """Return how many requests vLLM computes now; 0 where nothing tells."""
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            found = re.search(r"^vllm:num_requests_running\{[^}]*\} (\S+)", reply.read().decode(), re.M)
            return int(float(found[1])) if found else 0
        return 0


@contextmanager
def process(command: Sequence[str], log: Path, url: str, **environment: str) -> Iterator[None]:
    """Run a server until the block ends.

    Raises:
        ValueError: If it does not come up.
    """
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment})
        try:
            until = time.monotonic() + 300
            while True:
                with suppress(OSError):
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                if server.poll() is not None or time.monotonic() > until:
                    raise ValueError(f"{command[0]} did not start: {log.read_text()[-800:]}")
                time.sleep(0.5)
            yield
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def vllm(options: EngineOptions, folder: Path, mib: int, side: str) -> Iterator[Server]:
    """Run vLLM; `side` is contexts, prefix cache or no cache."""
    port = free_port()
    url, blocks = f"http://127.0.0.1:{port}", mib * 2**20 // (_BLOCK * _TOKEN)
    command = [options.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", _MODEL]
    command += ["--served-model-name", "tiny", "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
    command += ["--enforce-eager", "--block-size", str(_BLOCK), "--num-gpu-blocks-override", str(blocks + 1)]
    command += ["--max-model-len", str(options.tokens + 512), "--max-num-seqs", "512"]
    command += ["--no-enable-prefix-caching"] if side == "no cache" else []
    if side == "contexts":
        transfer = {"kv_connector": "LocretConnector", "kv_role": "kv_consumer"}
        extra = {"contexts": str(folder), "contexts_in_memory": max(options.contexts)}
        transfer |= {"kv_connector_module_path": "locret.engines.vllm", "kv_connector_extra_config": extra}  # type: ignore[dict-item]
        command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    environment["PYTHONPATH"] = str(Path(shipped.__file__).parents[1])
    more = {"kv_transfer_params": {"locret": True}} if side == "contexts" else {}
    with process(command, folder.parent / "vllm.log", url, **environment):
        yield Server(url, from_context if side == "contexts" else in_full, more)


@contextmanager
def transformers_serve(folder: Path, mib: int, tokenizer: Any) -> Iterator[Server]:
    """Run `transformers serve` with continuous batching and its block sharing."""
    port = free_port()
    url, blocks = f"http://127.0.0.1:{port}", mib * 2**20 // (_BLOCK * _TOKEN)
    command = [str(Path(sys.executable).with_name("transformers")), "serve", _MODEL, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32", "--continuous-batching"]
    command += ["--cb-block-size", str(_BLOCK), "--cb-num-blocks", str(blocks), "--attn-implementation", "sdpa"]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with process(command, folder.parent / "transformers.log", url, **environment):
        yield Server(url, in_full, {"model": _MODEL}, tokenizer.decode)


def batch(server: Server, jobs: Sequence[tuple[Book, int]]) -> dict[str, Any]:
    """Ask all questions at once; return how long they took, how many were right and how many ran at once."""
    most, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            most[0] = max(most[0], server.running())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    try:
        with ThreadPoolExecutor(len(jobs)) as pool:
            right = sum(pool.map(lambda job: server.ask(*job), jobs))
        seconds = time.perf_counter() - start
    finally:
        over.set()
        watcher.join()
    asked = len(jobs)
    return {"asked": asked, "right": right, "seconds": seconds, "per_second": asked / seconds, "running": most[0]}


def at_once(server: Server, books: Sequence[Book]) -> int:
    """Return the most requests that ran at once of many with longer answers."""
    most = 0

    def write(nth: int) -> None:
        book = books[nth % len(books)]
        prompt = server.prompts(book, nth // len(books) % len(book.questions))
        server.post(prompt, _LONG_ANSWER, ignore_eos=True).read()

    with ThreadPoolExecutor(_MANY) as pool:
        answers = [pool.submit(write, nth) for nth in range(_MANY)]
        while not all(answer.done() for answer in answers):
            most = max(most, server.running())
            time.sleep(0.05)
        for answer in answers:
            answer.result()
    return most


def measure(server: Server, books: Sequence[Book], short: Book, options: EngineOptions, again: bool) -> dict[str, Any]:
    """Return what one running server does; `again` asks everything twice, where that can be faster."""
    server.first_token(books[-1])  # warms up
    server.reset()
    first = [server.first_token(book) for book in books[:3]]
    measured: dict[str, Any] = {"first_token": statistics.median(first), "short_first_token": server.first_token(short)}
    if again:
        measured["first_token_again"] = statistics.median(server.first_token(book) for book in books[:3])
    for count in options.contexts:
        jobs = [(book, nth) for book in books[:count] for nth in range(options.questions)]
        random.Random(0).shuffle(jobs)
        server.reset()
        measured[f"{count} contexts"] = batch(server, jobs)
        if again:
            measured[f"{count} contexts, again"] = batch(server, jobs)
    return measured


def compare(options: EngineOptions) -> Iterator[dict[str, Any]]:
    """Run every side, one after the other, and yield the record after each, since all of them take long."""
    torch.set_num_threads(1)
    policy = RetentionPolicy(budget=options.budget, chunk_size=512, stabilizers=64, local_len=_LOCAL)
    lm = LongContextModel.from_pretrained(_MODEL, heads=shipped.find(HEADS), policy=policy, dtype="float32")
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "contexts"
        folder.mkdir()
        books = read_books(lm, folder, max(options.contexts), options.tokens, options.questions)
        (short,) = read_books(lm, folder, 1, _SHORT, 1)
        record: dict[str, Any] = {"options": asdict(options), "device": device_name(torch.device("cpu")), **versions()}
        record["units"] = books[0].prefix.units
        record["reading"] = {"text": statistics.median(book.seconds for book in books), "short": short.seconds}
        record["sides"] = sides = {}
        for mib in options.kv_mib:
            # Without a cache more memory only lets more requests wait for each other.
            for side in ("contexts", "prefix cache", *(["no cache"] if mib == options.kv_mib[0] else [])):
                with vllm(options, folder, mib, side) as server:
                    found = measure(server, books, short, options, again=side != "no cache")
                    if side == "contexts":
                        found["at_once"] = at_once(server, books)
                sides[f"vLLM, {side}, {mib} MiB"] = found
                yield record
            if options.transformers:
                try:
                    with transformers_serve(folder, mib, lm.tokenizer) as server:
                        sides[f"transformers serve, {mib} MiB"] = measure(server, books, short, options, again=True)
                except (ValueError, OSError) as error:
                    sides[f"transformers serve, {mib} MiB"] = {"failed": str(error)[-300:]}
                yield record


def page(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of a record's tables."""
    counts = record["options"]["contexts"]
    titles = [f"{count} texts{end}" for count in counts for end in ("", ", again")]
    rows = []
    for name, side in record["sides"].items():
        cells = [side.get(f"{count} contexts{end}") for count in counts for end in ("", ", again")]
        shown = [f"{cell['per_second']:.2f} ({cell['right']}/{cell['asked']})" if cell else "" for cell in cells]
        times = [f"{side[key]:.3f}" if key in side else "" for key in ("first_token", "first_token_again")]
        ran = max([side.get("at_once", 0), *(cell["running"] for cell in cells if cell)])
        rows.append([name, *shown, *times, str(ran or "")])
    header = ("side", *titles, "first token, s", "again, s", "most at once")
    shorts = {name: side["short_first_token"] for name, side in record["sides"].items() if "short_first_token" in side}
    reading = record["reading"]
    return [
        "Questions per second (right answers of those asked):",
        "",
        *markdown(header, rows),
        "",
        f"Reading a text once took Locret {reading['text']:.2f} s, one of {_SHORT} tokens {reading['short']:.2f} s. "
        f"First token about the short one: {', '.join(f'{name} {seconds:.3f} s' for name, seconds in shorts.items())}.",
        "",
    ]


def command(argv: Sequence[str] | None = None) -> int:
    """Compare engines, and print the record or write it."""
    (options,), _ = parse_options(_MODULE, "Compare engines over HTTP.", [EngineOptions], argv)
    record: dict[str, Any] = {}
    for record in compare(options):
        if options.output is not None:
            write_text(Path(options.output).with_suffix(".json"), json.dumps(record, indent=1) + "\n")
            write_text(Path(options.output).with_suffix(".md"), "\n".join(["# Engines over HTTP", "", *page(record)]))
    if options.output is None:
        print_json(record)
    return 0


if __name__ == "__main__":
    run(command)
