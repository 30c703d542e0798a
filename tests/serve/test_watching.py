"""What a server tells of itself is what it has done and what it holds, under names that clients cannot make up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from many_clients import main
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from running import QUESTION, running, text_with

from locret import LongContextModel
from locret.infer.serve.metrics import CountRequests, Metrics


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the value of each sample by its name and labels, as a scraper would parse them."""
    families = text_string_to_metric_families(text)
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def counts(metrics: Metrics) -> dict[tuple[str, ...], float]:
    found = samples(generate_latest(metrics.registry).decode())
    return {key[1:]: value for key, value in found.items() if key[0] == "locret_requests_total"}


def test_requests_are_counted_by_route_and_status_never_by_path() -> None:
    metrics, other, app = Metrics(), Metrics(), FastAPI()
    app.add_middleware(CountRequests, metrics=metrics)

    @app.get("/books/{name}")
    def book(name: str) -> str:
        if name == "broken":
            raise RuntimeError("broken")
        return name

    async def leaves(scope: object, receive: object, send: object) -> None:
        raise asyncio.CancelledError

    async def call() -> None:
        with pytest.raises(asyncio.CancelledError):
            await CountRequests(leaves, metrics)({"type": "http"}, None, None)  # type: ignore[arg-type]

    client, route = TestClient(app, raise_server_exceptions=False), "/books/{name}"
    for path in ("/books/one", "/books/two", "/books/broken", "/made/up", "/made/up/too"):
        client.get(path)
    client.post("/books/one")
    asyncio.run(call())
    expected = {(route, "200"): 2, (route, "500"): 1, (route, "405"): 1, ("none", "404"): 2, ("none", "499"): 1}
    assert counts(metrics) == expected
    assert counts(other) == {}  # two servers of one process do not add up


def test_a_server_tells_what_it_has_done_and_what_it_holds(serving: LongContextModel, tmp_path: Path) -> None:
    with running((serving, tmp_path / "contexts"), kv_memory="32MiB") as server:
        url, text = server.url, text_with(43600, 40)
        before = httpx.get(f"{url}/v1/memory").json()
        made = httpx.post(f"{url}/v1/contexts?name=book&wait=true", content=text, timeout=60)
        assert made.status_code == 201
        body = {"context": "book", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6}
        usage = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
        assert httpx.post(f"{url}/v1/chat/completions", json={**body, "context": "no"}).status_code == 404
        tokens = httpx.get(f"{url}/v1/contexts/book").json()["tokens"]
        found, after = samples(httpx.get(f"{url}/metrics").text), httpx.get(f"{url}/v1/memory").json()
        assert found["locret_requests_total", "/v1/chat/completions", "200"] == 1
        assert found["locret_requests_total", "/v1/chat/completions", "404"] == 1
        assert found["locret_written_tokens_total",] == usage["completion_tokens"]
        assert found["locret_question_tokens_total",] == usage["prompt_tokens"] - tokens
        assert found["locret_first_token_seconds_count",] == 1
        assert found["locret_read_tokens_total",] >= tokens
        assert found["locret_read_chunks_total",] >= tokens // 128
        assert [found["locret_contexts", where] for where in ("disk", "loaded", "reading")] == [1, 1, 0]
        assert (found["locret_queue_length",], found["locret_running_answers",]) == (0, 0)
        assert found["process_resident_memory_bytes",] > 1 << 20
        for name, part in after["parts"].items():
            assert part["planned"] == before["parts"][name]["planned"] == found["locret_planned_bytes", name]
            assert 0 <= part["used"] <= part["planned"]
            assert found["locret_used_bytes", name] == part["used"]
        assert after["parts"]["loaded"]["used"] > 0
        weights = sum(weight.nbytes for weight in serving.model.parameters())
        assert weights <= after["parts"]["weights"]["planned"] < 2 * weights
        assert sum(part["planned"] for name, part in after["parts"].items() if name != "weights") <= 32 << 20
        assert httpx.get(f"{url}/healthz").json() == {"status": "ready"}


@pytest.mark.slow
def test_many_clients_lose_nothing_and_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--clients", "8", "--requests", "60", "--contexts", "2", "--shortest", "700", "--longest", "1200"]
    code = main([*size, "--kv-memory", "32MiB"])
    assert code == 0, capsys.readouterr().out
