"""What the server counts is what has happened, under names that clients cannot make up."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from locret.infer.serve.metrics import CountRequests, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return the value of each sample by its name and labels, as a scraper would parse them."""
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
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


def test_two_servers_of_one_process_do_not_add_up() -> None:
    one, other = Metrics(), Metrics()
    one.written.inc(7)
    assert samples(other)["locret_written_tokens_total",] == 0
