"""What a server tells of its memory is what it has planned and what it holds."""

from __future__ import annotations

from pathlib import Path

import httpx
from running import QUESTION, running, text_with

from locret import LongContextModel


def test_a_server_tells_what_it_has_planned_and_what_it_holds(serving: LongContextModel, tmp_path: Path) -> None:
    with running((serving, tmp_path / "contexts"), kv_memory="32MiB") as server:
        url, text = server.url, text_with(43600, 40)
        before = httpx.get(f"{url}/v1/memory").json()
        assert before["parts"]["answers"]["used"] == before["parts"]["reading"]["used"] == 0
        made = httpx.post(f"{url}/v1/contexts?name=book&wait=true", content=text, timeout=60)
        assert made.status_code == 201
        body = {"context": "book", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        after = httpx.get(f"{url}/v1/memory").json()
        for name, part in after["parts"].items():
            assert part["planned"] == before["parts"][name]["planned"]
            assert 0 <= part["used"] <= part["planned"]
        assert after["parts"]["answers"]["used"] > 0
        assert after["answers"] == {"waiting": 0, "running": 0}
        weights = sum(weight.nbytes for weight in serving.model.parameters())
        assert weights <= after["parts"]["weights"]["planned"] < 2 * weights
        assert sum(part["planned"] for name, part in after["parts"].items() if name != "weights") <= 32 << 20
        assert after["resident"] > 1 << 20
        assert httpx.get(f"{url}/healthz").json() == {"status": "ready"}
