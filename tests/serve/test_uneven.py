"""Contexts whose KV heads hold different numbers of units, served as by hand in the bytes that were planned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from running import FILLER, POLICY, QUESTION, Running, running, text_with

from locret import Context, LongContextModel

SIZES = {"head_budgets": "shares", "head_shares": (4.0, 0.2, 0.2, 0.2) * 2 + (1.0,) * 12, "spacing": 8}


@pytest.fixture(scope="module")
def server(serving: LongContextModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    lm = LongContextModel(serving.model, serving.tokenizer, serving.scorer, POLICY.changed(**SIZES))
    with running((lm, tmp_path_factory.mktemp("contexts"))) as server:
        server.read("book", text_with(43600))
        yield server


@pytest.fixture(scope="module")
def book(server: Running) -> Context:
    return server.state.lm.load(server.state.library.folder / "book.ctx")


def test_questions_and_turns_are_answered_as_by_hand(server: Running, book: Context) -> None:
    client, chat = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0), book.chat()
    said: list[Any] = []
    for question in (QUESTION, "Is the grass green?", "value value key pass 12"):
        said.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model="tiny:book", messages=said)
        assert answer.choices[0].message.content.strip() == chat.say(question)
        said.append(answer.choices[0].message.to_dict())
    details = answer.usage.prompt_tokens_details
    assert (details.units, details.cached_tokens) == (book.memory().units, book.cache.seen)


def test_long_prompts_and_uploads_are_read_within_the_plan(server: Running, book: Context, tmp_path: Path) -> None:
    library, lm = server.state.library, server.state.lm
    assert library.plan.units == -(-sum(layer.fill for layer in book.cache.governed) // 5)
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": f"{text_with(24680, 30)}\n\n{QUESTION}"}]},
        timeout=60,
    ).json()
    assert answer["choices"][0]["message"]["content"] == "The pass key is 24680."
    assert answer["usage"]["prompt_tokens_details"]["units"] == library.plan.units
    made = httpx.post(f"{server.url}/v1/contexts?name=new&wait=true", content=text_with(43600), timeout=60).json()
    assert made["summary"].endswith(f"{made['units']} of {made['tokens']} tokens per KV head on average")
    made = httpx.get(f"{server.url}/v1/contexts/new").json()
    assert sum(made["kept"]) * made["tokens"] / 50 == pytest.approx(made["units"], rel=0.02)
    assert library.find("new").size <= library.plan.moving // 2 + 20_000, (
        "what is moved was planned, but for the header"
    )
    assert lm.load(library.folder / "new.ctx").memory().actual <= library.plan.reader


def test_answers_have_their_place_where_units_reach_to_the_last_positions(
    serving: LongContextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.model.config, "max_position_embeddings", 360)
    lm = LongContextModel(serving.model, serving.tokenizer, serving.scorer, POLICY.changed(**SIZES))
    with running((lm, tmp_path)) as server:
        server.read("book", text_with(43600))
        end, most = server.state.library.find("book").end, 360 - POLICY.chunk_size
        assert most < end <= most + POLICY.local_len, "the largest head has less than the positions there are, or more"
        asked = {"context": "book", "messages": [{"role": "user", "content": f"{FILLER * 4}\n\n{QUESTION}"}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60).json()
        assert answer["choices"][0] == answer["choices"][0] | {"finish_reason": "stop"}, "it was cut off"
        refused = httpx.post(f"{server.url}/v1/chat/completions", json={**asked, "max_tokens": 300}, timeout=60)
        assert "in --kv-memory and the backbone's 360 positions; ask for fewer" in refused.json()["error"]["message"]
