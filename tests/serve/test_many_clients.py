"""Many clients at once against a real `locret-serve`: no answer lost or another one, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from running import QUESTION, text_with, until

from locret.infer.serve.state import LONG_WORK, SHORT_WORK

SLACK = 32 << 20
"""Bytes beside weights and promised memory: stacks of threads, buffers of sockets, what Python needs for requests."""
CLIENTS, ROUNDS = 16, 12
KEYS = {f"book{nth}": 10_000 + 7919 * nth for nth in range(4)}


@pytest.mark.long
def test_many_clients_lose_nothing_and_leave_nothing(process: tuple[str, Path, psutil.Process]) -> None:
    url, _, child = process
    client = httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(max_connections=CLIENTS))

    def body(name: str, **more: Any) -> dict[str, Any]:
        return {"context": name, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16, **more}

    def chat(name: str, **more: Any) -> str:
        return str(client.post("/v1/chat/completions", json=body(name, **more)).json()["choices"][0])

    def streamed(name: str) -> str:
        events = client.post("/v1/chat/completions", json=body(name, stream=True)).text.split("\n\n")
        assert events[-2] == "data: [DONE]"
        return str(len(events))

    def come_and_go(name: str) -> str:
        own = f"short{random.random()}"
        made = client.post("/v1/contexts", params={"name": own, "wait": "true"}, content=text_with(KEYS[name], 4))
        assert made.status_code == 201, made.text
        answer = chat(own)
        assert client.delete(f"/v1/contexts/{own}").status_code == 200
        return answer

    def broken_off(name: str) -> str:
        with client.stream("POST", "/v1/chat/completions", json=body(name, stream=True, max_tokens=200)) as answer:
            return next(answer.iter_lines())[:5]

    def refused(_name: str) -> int:
        return client.post("/v1/chat/completions", content=b"x" * (1 << 17)).status_code

    def held() -> tuple[int, int]:
        return child.num_fds(), child.num_threads()

    kinds: list[Callable[[str], object]] = [chat, streamed, come_and_go, broken_off, refused]
    kinds.append(lambda name: chat(name, temperature=1.0, seed=5))
    for name, key in KEYS.items():
        made = client.post("/v1/contexts", params={"name": name, "wait": "true"}, content=text_with(key, 40))
        assert made.status_code == 201, made.text
    alone = {(nth, name): kind(name) for nth, kind in enumerate(kinds) for name in KEYS}
    assert all(str(key) in str(alone[0, name]) for name, key in KEYS.items())
    assert alone[kinds.index(refused), "book0"] == 413
    (files, threads), idle = held(), child.memory_info().rss
    asked = list(alone) * ROUNDS
    random.Random(0).shuffle(asked)
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda one: kinds[one[0]](one[1]), asked))
    assert [one for one, answer in zip(asked, answers, strict=True) if answer != alone[one]] == []
    memory = client.get("/v1/memory").json()
    promised = sum(part["planned"] for name, part in memory["parts"].items() if name != "weights")
    assert child.memory_info().rss <= idle + promised + SLACK
    assert {one["name"] for one in client.get("/v1/contexts").json()["data"]} >= set(KEYS)
    client.close()
    until(lambda: held()[0] <= files and held()[1] <= threads + SHORT_WORK + LONG_WORK)
