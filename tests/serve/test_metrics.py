"""What the server counts is what has happened, under names that clients cannot make up."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from locret.infer.serve.metrics import CountRequests, Metrics, Now, PartMemory

EMPTY = Now(waiting=0, running=0, contexts={}, memory={}, read_tokens=0, read_chunks=0)


def samples(metrics: Metrics, now: Now = EMPTY) -> dict[tuple[str, ...], float]:
    """Return the value of each sample by its name and labels, as a scraper would parse them."""
    families = text_string_to_metric_families(metrics.text(now).decode())
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def counted() -> tuple[Metrics, TestClient]:
    metrics, app = Metrics(), FastAPI()
    app.add_middleware(CountRequests, metrics=metrics)

    @app.get("/books/{name}")
    def book(name: str) -> str:
        if name == "broken":
            raise RuntimeError("broken")
        return name

    return metrics, TestClient(app, raise_server_exceptions=False)


def test_requests_are_counted_by_route_and_status_never_by_path() -> None:
    metrics, client = counted()
    for path in ("/books/one", "/books/two", "/books/broken", "/made/up", "/made/up/too"):
        client.get(path)
    client.post("/books/one")
    found = {key[1:]: value for key, value in samples(metrics).items() if key[0] == "locret_requests_total"}
    assert found == {
        ("/books/{name}", "200"): 2,
        ("/books/{name}", "500"): 1,
        ("/books/{name}", "405"): 1,
        ("none", "404"): 2,
    }


def test_a_client_that_leaves_before_the_response_is_counted_too() -> None:
    metrics = Metrics()

    async def leaves(scope: object, receive: object, send: object) -> None:
        raise asyncio.CancelledError

    async def call() -> None:
        with pytest.raises(asyncio.CancelledError):
            await CountRequests(leaves, metrics)({"type": "http"}, None, None)  # type: ignore[arg-type]

    asyncio.run(call())
    assert samples(metrics)["locret_requests_total", "none", "499"] == 1


def test_the_moment_is_told_beside_the_counters() -> None:
    metrics = Metrics()
    metrics.asked(17)
    metrics.wrote(1)
    metrics.wrote(2)
    metrics.began_answer(0.2)
    now = Now(
        waiting=3,
        running=2,
        read_tokens=1024,
        read_chunks=4,
        contexts={"disk": 5, "loaded": 2},
        memory={"pages": PartMemory(1 << 20, 4096), "readers": PartMemory(2 << 20, 0)},
    )
    found = samples(metrics, now)
    assert found["locret_read_tokens_total",] == 1024
    assert found["locret_read_chunks_total",] == 4
    assert found["locret_written_tokens_total",] == 3
    assert found["locret_first_token_seconds_bucket", "0.1"] == 0
    assert found["locret_first_token_seconds_bucket", "0.25"] == 1
    assert (found["locret_queue_length",], found["locret_running_answers",]) == (3, 2)
    assert found["locret_question_tokens_total",] == 17
    assert (found["locret_contexts", "disk"], found["locret_contexts", "loaded"]) == (5, 2)
    assert (found["locret_planned_bytes", "pages"], found["locret_used_bytes", "pages"]) == (1 << 20, 4096)
    assert found["process_resident_memory_bytes",] > 1 << 20


def test_two_servers_of_one_process_do_not_add_up() -> None:
    one, other = Metrics(), Metrics()
    one.wrote(7)
    assert samples(other)["locret_written_tokens_total",] == 0
