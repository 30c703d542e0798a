"""What a server tells of itself is what it has done and what it holds, under names that clients cannot make up."""

from __future__ import annotations

from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from running import QUESTION, running, text_with

from locret import LongContextModel


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the value of each sample by its name and labels, as a scraper would parse them."""
    families = text_string_to_metric_families(text)
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_a_server_tells_what_it_has_done_and_what_it_holds(serving: LongContextModel, tmp_path: Path) -> None:
    with running((serving, tmp_path / "contexts"), kv_memory="32MiB") as server:
        url, text = server.url, text_with(43600, 40)
        before = httpx.get(f"{url}/v1/memory").json()
        made = httpx.post(f"{url}/v1/contexts?name=book&wait=true", content=text, timeout=60)
        assert made.status_code == 201
        body = {"context": "book", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6}
        usage = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
        assert httpx.post(f"{url}/v1/chat/completions", json={**body, "context": "no"}).status_code == 404
        assert [httpx.get(f"{url}{path}").status_code for path in ("/made/up", "/made/up/too")] == [404, 404]
        tokens = httpx.get(f"{url}/v1/contexts/book").json()["tokens"]
        found, after = samples(httpx.get(f"{url}/metrics").text), httpx.get(f"{url}/v1/memory").json()
        assert found["locret_requests_total", "/v1/chat/completions", "200"] == 1
        assert found["locret_requests_total", "/v1/chat/completions", "404"] == 1
        assert found["locret_requests_total", "none", "404"] == 2  # paths that clients make up are no labels
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
