"""`/metrics`, `/v1/memory` and `/healthz` of a real server tell what it has done and what it holds."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from many_clients import main
from prometheus_client.parser import text_string_to_metric_families
from running import load, running, text_with


def samples(url: str) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_a_server_tells_what_it_has_done_and_what_it_holds(tmp_path: Path) -> None:
    lm, text = load(), text_with(43600, 40)
    with running(lm, tmp_path / "contexts", kv_memory="32MiB") as server:
        url = server.url
        before = httpx.get(f"{url}/v1/memory").json()
        assert (
            httpx.post(f"{url}/v1/contexts?name=book&wait=true", content=text.encode(), timeout=60).status_code == 201
        )
        question = [{"role": "user", "content": "What is the pass key?"}]
        body = {"context": "book", "messages": question, "max_tokens": 6}
        usage = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
        assert httpx.post(f"{url}/v1/chat/completions", json={**body, "context": "no"}).status_code == 404
        entry = httpx.get(f"{url}/v1/contexts/book").json()
        found, after = samples(url), httpx.get(f"{url}/v1/memory").json()
        assert found["locret_requests_total", "/v1/chat/completions", "200"] == 1
        assert found["locret_requests_total", "/v1/chat/completions", "404"] == 1
        assert found["locret_written_tokens_total",] == usage["completion_tokens"]
        assert found["locret_question_tokens_total",] == usage["prompt_tokens"] - entry["tokens"]
        assert found["locret_first_token_seconds_count",] == 1
        assert found["locret_read_tokens_total",] >= entry["tokens"]
        assert found["locret_read_chunks_total",] >= entry["tokens"] // 128
        assert (found["locret_contexts", "disk"], found["locret_contexts", "loaded"]) == (1, 1)
        assert (found["locret_queue_length",], found["locret_running_answers",]) == (0, 0)
        for name, part in after["parts"].items():
            assert part["planned"] == before["parts"][name]["planned"]
            assert 0 <= part["used"] <= part["planned"]
            assert found["locret_planned_bytes", name] == part["planned"]
        assert after["parts"]["loaded"]["used"] > 0
        weights = sum(weight.nbytes for weight in lm.model.parameters())
        assert weights <= after["parts"]["weights"]["planned"] < 2 * weights
        promised = sum(part["planned"] for name, part in after["parts"].items() if name != "weights")
        assert promised <= 32 << 20
        assert httpx.get(f"{url}/healthz").json() == {"status": "ready"}
        elsewhere = {"sec-fetch-site": "cross-site", "content-type": "text/plain"}
        assert httpx.post(f"{url}/v1/contexts?name=theirs", content=b"text", headers=elsewhere).status_code == 403
        assert httpx.get(f"{url}/v1/contexts/theirs").status_code == 404
        server.state.draining = True
        assert httpx.get(f"{url}/healthz").status_code == 503


@pytest.mark.slow
def test_many_clients_lose_nothing_and_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--clients", "8", "--requests", "60", "--contexts", "2", "--shortest", "700", "--longest", "1200"]
    code = main([*size, "--kv-memory", "32MiB"])
    assert code == 0, capsys.readouterr().out
