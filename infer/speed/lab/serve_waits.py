"""How long clients of a real `locret-serve` wait for the first token: after a stored context, a read, during a read.

Starts a server on the embedded backbone. First it asks about a stored context, and sends the same text with each
question instead. Then it asks short questions while a long text is uploaded and read, and compares the wait with the
time of one chunk, from a read of the same length that nothing disturbs.

Needs a clone, and the extra `dev`. The record is JSON, on standard output if no file is named:

    python -m locret.infer.speed.lab.serve_waits --upload 131072 --output infer/speed/records/serve_waits_cpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from locret.infer.speed.lab.serve_load import Book, make_books, publish, serving


def first_token(client: httpx.Client, body: dict[str, Any]) -> float:
    """Return the seconds from a request to the first words of its answer."""
    start, found = time.monotonic(), None
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True, "max_tokens": 16}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            if found is None and any(choice["delta"].get("content") for choice in event.get("choices", ())):
                found = time.monotonic() - start
    if found is None:
        raise ValueError("an answer had no words")
    return found


def chat(text: str, context: str | None = None) -> dict[str, Any]:
    """Return the body of a question."""
    return {"messages": [{"role": "user", "content": text}], **({"context": context} if context else {})}


def read(client: httpx.Client, name: str, text: str) -> float:
    """Upload a text, wait until it has been read, and return the seconds."""
    start = time.monotonic()
    client.post("/v1/contexts", params={"name": name}, content=text.encode()).raise_for_status()
    while (entry := client.get(f"/v1/contexts/{name}").json())["state"] in ("waiting", "reading"):
        time.sleep(0.05)
    if entry["state"] != "ready":
        raise ValueError(f"{name} was not read: {entry}")
    return time.monotonic() - start


def chunks(client: httpx.Client) -> int:
    """Return how many chunks the server has read."""
    lines = client.get("/metrics").text.splitlines()
    (count,) = [line.split()[1] for line in lines if line.startswith("locret_read_chunks_total ")]
    return int(float(count))


def stored_and_again(client: httpx.Client, book: Book, times: int) -> dict[str, Any]:
    """Ask about a context that is there, and send its text with the question."""
    read(client, "stored", book.text)
    questions = [question.text for question in book.questions]
    stored = [first_token(client, chat(questions[nth % 8], "stored")) for nth in range(times + 1)][1:]
    # Another beginning each time, as what the server has read once it does not read again.
    again = [first_token(client, chat(f"Copy {nth}. {book.text}{questions[nth % 8]}")) for nth in range(3)]
    return {"stored_context": spread(stored), "text_with_each_question": spread(again)}


def while_reading(client: httpx.Client, text: str, question: str) -> dict[str, Any]:
    """Ask short questions while a long text is read."""
    before = chunks(client)
    alone = read(client, "alone", text)
    count = chunks(client) - before
    idle = [first_token(client, chat(question, "stored")) for _ in range(20)]
    with httpx.Client(base_url=client.base_url, timeout=600) as other:
        took: list[float] = []
        reader = threading.Thread(target=lambda: took.append(read(other, "beside", f"Again. {text}")))
        reader.start()
        waits = []
        while reader.is_alive():
            waits.append(first_token(client, chat(question, "stored")))
        reader.join()
    chunk = alone / count
    return {
        "chunks": count,
        "read_alone_seconds": round(alone, 2),
        "read_beside_questions_seconds": round(took[0], 2),
        "chunk_seconds": round(chunk, 4),
        "idle": spread(idle),
        "while_reading": spread(waits[:-1]),
        "longest_wait_in_chunks": round(max(waits[:-1]) / chunk, 2),
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and longest of some waits, in seconds."""
    return {
        "count": len(seconds),
        "median": round(statistics.median(seconds), 4),
        "longest": round(max(seconds), 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the stored context")
    parser.add_argument("--upload", type=int, default=131072, help="tokens of the text that is read meanwhile")
    parser.add_argument("--times", type=int, default=20, help="questions about the stored context")
    parser.add_argument("--kv-memory", default="64MiB")
    parser.add_argument("--output", help="file for the record")
    parser.add_argument("server", nargs="*", help="further options of locret-serve, after --")
    options = parser.parse_args(argv)
    book, long = make_books(2, options.tokens, options.upload)
    more = ["--kv-memory", options.kv_memory, "--max-body", str(8 << 20), *options.server]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "contexts", more) as (url, _),
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        record = stored_and_again(client, book, options.times)
        record["short_question"] = while_reading(client, long.text, book.questions[0].text)
    publish(record, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
