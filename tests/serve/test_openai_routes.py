"""OpenAI's official client against a real server: answers are those of `locret`, and mistakes are one sentence."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from running import FILLER, Running, load, running, text_with

from locret import Context, LongContextModel, generate
from locret.conversation.templates import decode
from locret.infer.serve import app
from locret.infer.serve.state import LONG_WORK

QUESTION = "What is the pass key?"
KEYS = {"book": 43600, "other": 71432}
LOOPING = "Paris " * 24
"""What the embedded backbone goes on with until its length ends it."""


@pytest.fixture(scope="module")
def lm() -> LongContextModel:
    return load()


@pytest.fixture(scope="module")
def server(lm: LongContextModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(lm, tmp_path_factory.mktemp("contexts")) as server:
        for name, key in KEYS.items():
            server.read(name, text_with(key))
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def book(server: Running) -> Context:
    return server.state.lm.load(server.state.library.folder / "book.ctx")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(client: openai.OpenAI, *messages: Any, context: str | None = "book", **options: Any) -> Any:
    """Return the response to a conversation, by default about the context "book"."""
    given = [user(one) if isinstance(one, str) else one for one in messages]
    extra = {} if context is None else {"context": context}
    extra |= {name: options.pop(name) for name in ("budget", "top_k") if name in options}
    return client.chat.completions.create(model="tiny", messages=given, extra_body=extra, **options)


def ours(context: Context, ids: list[int], count: int) -> list[int]:
    """Return the tokens that `locret.generate` writes after ids that follow a context."""
    lm = context.lm
    answer = generate(lm.model, iter([ids]), cache=context.cache.copy(), max_new_tokens=count, do_sample=False)
    new: list[int] = answer[0, -count:].tolist() if answer.shape[1] > count else answer[0].tolist()
    return new


def tokens(response: Any) -> list[str]:
    return [one.token for one in response.choices[0].logprobs.content]


# -- answers are ours -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [QUESTION, "Is the sky green, and what is the sun", "value value key pass 12"])
def test_a_question_about_a_context_is_answered_token_by_token_as_by_ask(
    client: openai.OpenAI, book: Context, question: str
) -> None:
    answer = ask(client, question, logprobs=True, max_completion_tokens=24)
    chat = book.chat()
    expected = chat.say(question, max_new_tokens=24)
    assert answer.choices[0].message.content.strip() == expected
    ids = ours(book, book.question_ids(question)[0].tolist(), 24)
    ends = set(book.lm.end_ids)
    assert tokens(answer) == [book.lm.tokenizer.decode([one]) for one in ids if one not in ends]
    assert answer.usage.completion_tokens == len(ids)
    assert answer.choices[0].finish_reason == ("stop" if ids[-1] in ends else "length")


def test_turns_go_on_as_in_a_chat(client: openai.OpenAI, book: Context) -> None:
    chat, said = book.chat(), []
    for question in (QUESTION, "Is the grass green?", QUESTION):
        said.append(user(question))
        answer = ask(client, *said).choices[0].message
        assert answer.content.strip() == chat.say(question)
        said.append(answer.to_dict())  # as users append what they got


def test_usage_counts_the_whole_prompt_and_what_of_it_was_read_before(client: openai.OpenAI, book: Context) -> None:
    usage = ask(client, QUESTION).usage
    question = book.question_ids(QUESTION).shape[1]
    assert usage.prompt_tokens == book.cache.seen + question
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.prompt_tokens_details
    assert (details.cached_tokens, details.read_tokens) == (book.cache.seen, 0)
    assert details.units == book.memory().units


def test_a_budget_asks_fewer_units(client: openai.OpenAI, book: Context) -> None:
    answer = ask(client, QUESTION, budget=40)
    assert answer.usage.prompt_tokens_details.units == 40
    assert answer.choices[0].message.content.strip() == book.shrink(40).ask(QUESTION)
    assert ask(client, QUESTION, budget=10_000).usage.prompt_tokens_details.units == book.memory().units


def test_a_system_message_opens_the_first_question_of_a_context_that_was_read_without(
    client: openai.OpenAI, book: Context
) -> None:
    answer = ask(client, {"role": "system", "content": "Be short."}, QUESTION)
    assert answer.usage.prompt_tokens == book.cache.seen + book.question_ids(f"Be short.\n\n{QUESTION}").shape[1]


def test_a_prompt_of_any_length_is_read_and_answered(client: openai.OpenAI, lm: LongContextModel) -> None:
    text = text_with(86420, repeats=30)
    answer = ask(client, f"{text}\n\n{QUESTION}", context=None)
    assert answer.choices[0].message.content == "The pass key is 86420."
    details = answer.usage.prompt_tokens_details
    assert (details.cached_tokens, details.units) == (0, lm.read(text, progress=False).memory().units)
    assert answer.usage.prompt_tokens - details.read_tokens == lm.policy.chunk_size // 2
    again = ask(client, f"{text}\n\nTell me: {QUESTION}", context=None).usage.prompt_tokens_details
    assert (again.read_tokens, again.cached_tokens) == (0, details.read_tokens)


def test_a_long_prompt_is_read_as_by_hand(client: openai.OpenAI, lm: LongContextModel) -> None:
    from locret import prefill

    ids = lm.tokenizer(text_with(13579), add_special_tokens=False)["input_ids"]
    end = len(ids) - lm.policy.chunk_size // 2
    cache = lm.new_cache()
    prefill(lm.model, torch.tensor([ids[:end]]), cache)
    expected = generate(lm.model, iter([ids[end:]]), cache=cache, max_new_tokens=20, do_sample=False)[0].tolist()
    answer = client.completions.create(model="tiny", prompt=ids, max_tokens=20, temperature=0)
    assert answer.choices[0].text == decode(lm.tokenizer, expected)


def test_a_conversation_that_goes_on_reads_only_what_is_new(client: openai.OpenAI) -> None:
    said: list[Any] = [user(f"{text_with(24680)}\n\n{QUESTION}")]
    first = ask(client, *said, context=None)
    for _ in range(3):
        said += [{"role": "assistant", "content": "Here: " + FILLER * 2}, user(FILLER * 2 + QUESTION)]
    second = ask(client, *said, context=None)
    before, after = first.usage.prompt_tokens_details, second.usage.prompt_tokens_details
    assert after.cached_tokens == before.read_tokens
    assert 0 < after.read_tokens < second.usage.prompt_tokens - before.read_tokens
    assert second.choices[0].message.content == "The pass key is 24680."


def test_what_follows_a_context_may_be_longer_than_a_chunk(client: openai.OpenAI, lm: LongContextModel) -> None:
    said = [user(FILLER * 8), {"role": "assistant", "content": "Yes."}, user(QUESTION)]
    answer = ask(client, *said)
    assert answer.usage.prompt_tokens_details.read_tokens > 0
    assert answer.choices[0].message.content == f"The pass key is {KEYS['book']}."


# -- OpenAI's options -------------------------------------------------------------------------------------------------


def test_a_stream_is_the_whole_answer_in_parts(client: openai.OpenAI) -> None:
    whole = ask(client, QUESTION, logprobs=True, top_logprobs=2)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = list(ask(client, QUESTION, logprobs=True, top_logprobs=2, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert len(chunks) > 4
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert streamed == whole.choices[0].logprobs.content
    assert (last.choices, last.usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stop", ["key is", [" 43", "zz"], "s 4", "600."])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_an_answer_across_tokens(client: openai.OpenAI, stop: str | list[str], stream: bool) -> None:
    first = stop if isinstance(stop, str) else stop[0]
    answer = ask(client, QUESTION, stop=stop, stream=stream)
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, finish) == ("The pass key is 43600.".partition(first)[0], "stop")


def test_special_tokens_named_as_stop_texts_end_an_answer(
    monkeypatch: pytest.MonkeyPatch, client: openai.OpenAI, server: Running
) -> None:
    monkeypatch.setattr(server.state.answers, "end_ids", frozenset())
    answers = {stop: ask(client, QUESTION, stop=stop, max_tokens=12) for stop in ("zz", "<eos>")}
    assert [answer.choices[0].finish_reason for answer in answers.values()] == ["length", "stop"]
    assert answers["<eos>"].choices[0].message.content == "The pass key is 43600."
    assert answers["zz"].usage.completion_tokens == 12 > answers["<eos>"].usage.completion_tokens


def test_log_probabilities_are_those_of_the_backbone(client: openai.OpenAI, book: Context) -> None:
    content = ask(client, QUESTION, logprobs=True, top_logprobs=5, max_tokens=2).choices[0].logprobs.content
    lm = book.lm
    prefix = book.to_dynamic_cache()
    ids = torch.cat([torch.zeros(1, prefix.get_seq_length(), dtype=torch.long), book.question_ids(QUESTION)], dim=1)
    with torch.no_grad():
        mask = torch.ones_like(ids)
        logits = lm.model(ids[:, prefix.get_seq_length() :], attention_mask=mask, past_key_values=prefix).logits[0, -1]
    best = logits.log_softmax(-1).topk(5)
    assert [one.token for one in content[0].top_logprobs] == [lm.tokenizer.decode([one]) for one in best.indices]
    assert [one.logprob for one in content[0].top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-3)
    assert content[0].logprob == content[0].top_logprobs[0].logprob


def test_seeds_draw_the_same_again_and_n_draws_several(client: openai.OpenAI) -> None:
    def drawn(**options: Any) -> list[str]:
        answer = ask(client, "value value key pass 12", temperature=1.5, max_tokens=12, n=3, **options)
        return [choice.message.content for choice in answer.choices]

    first = drawn(seed=5)
    assert first == drawn(seed=5) != drawn(seed=6)
    assert len(set(first)) > 1


def test_temperature_zero_and_none_take_the_likeliest_token(client: openai.OpenAI) -> None:
    answers = [ask(client, "12 grass", max_tokens=12, **options) for options in ({}, {"temperature": 0, "top_p": 0.5})]
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_completions_go_on_with_texts_and_ids(client: openai.OpenAI, lm: LongContextModel) -> None:
    texts = ["The grass is", "The sky is"]
    both = client.completions.create(model="tiny", prompt=texts, max_tokens=3, n=2, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text
    ids = [lm.tokenizer(text)["input_ids"] for text in texts]
    alone = [client.completions.create(model="tiny", prompt=one, max_tokens=3).choices[0].text for one in ids]
    assert [both.choices[0].text, both.choices[2].text] == alone
    expected = lm.model.generate(torch.tensor(ids[:1]), max_new_tokens=3, do_sample=False)[0, len(ids[0]) :].tolist()
    assert texts[0] + alone[0] == decode(lm.tokenizer, [*ids[0], *expected])
    assert texts[1] + alone[1] == f"{texts[1]} {alone[1].strip()}"  # the space before the first word is part of it


def test_a_completion_of_a_context_takes_ids_as_engines_do(client: openai.OpenAI, book: Context) -> None:
    ids = book.question_ids(QUESTION)[0].tolist()
    answer = client.completions.create(model="tiny", prompt=ids, extra_body={"context": "book"}, logprobs=1)
    assert answer.choices[0].text == "The pass key is 43600."
    table = answer.choices[0].logprobs
    assert len(table.tokens) == len(table.token_logprobs) == len(table.top_logprobs) == len(table.text_offset)


def test_the_async_client_streams_too(server: Running) -> None:
    async def parts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=[user(QUESTION)], stream=True, extra_body={"context": "other"}
            )
            return [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert "".join(asyncio.run(parts())) == "The pass key is 71432."


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "locret"
    with pytest.raises(openai.NotFoundError, match="the model 'gpt-4' is not served here; use 'tiny'"):
        client.models.retrieve("gpt-4")


# -- many at once -----------------------------------------------------------------------------------------------------


def test_many_clients_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    asked = [
        (name, question)
        for name in (*KEYS, None)
        for question in (QUESTION, "Is the sky green", "value key 12", "12 grass", LOOPING)
    ]
    alone = [ask(client, question, context=name, max_tokens=16).choices[0].message.content for name, question in asked]
    with ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            futures = [pool.submit(ask, client, one, context=name, max_tokens=16) for name, one in asked]
            assert [future.result().choices[0].message.content for future in futures] == alone


def test_answers_wait_where_pages_are_few(lm: LongContextModel, tmp_path: Path) -> None:
    """Room for one context and its question at a time: the others take turns, and none is lost."""
    with running(lm, tmp_path, kv_bytes=2 * 4 * 2 * 4 * 32 * 4 * 256) as server:
        for name, key in KEYS.items():
            server.read(name, text_with(key))
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        with ThreadPoolExecutor(12) as pool:
            names = list(KEYS) * 6
            futures = [pool.submit(ask, client, QUESTION, context=name, max_tokens=32) for name in names]
            answers = [future.result().choices[0].message.content for future in futures]
        assert answers == [f"The pass key is {KEYS[name]}." for name in names]
        assert server.state.engine.used_bytes <= server.state.engine.planned_bytes


def test_a_budget_that_was_asked_before_waits_for_no_long_prompt(server: Running, client: openai.OpenAI) -> None:
    first = ask(client, QUESTION, budget=30).choices[0].message.content
    go_on = threading.Event()
    waiting = [server.state.long_work.submit(go_on.wait, 60) for _ in range(LONG_WORK)]
    try:
        for budget in (30, 10_000):
            again = ask(client, QUESTION, budget=budget, timeout=20)
            assert budget != 30 or again.choices[0].message.content == first
        with pytest.raises(openai.APITimeoutError):  # what has to be made first waits in line
            ask(client, QUESTION, budget=31, timeout=0.5)
    finally:
        go_on.set()
    assert all(one.result(10) for one in waiting)


def idle(server: Running) -> bool:
    answers = server.state.answers
    return answers.waiting == answers.running == 0


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_a_full_queue_is_said_with_when_to_come_back(
    lm: LongContextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(lm, tmp_path, max_queue=2) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        hold = threading.Event()
        server.state.engine.submit, engine_ask = (
            (lambda *given, **more: hold.wait() and engine_ask(*given, **more)),
            server.state.engine.submit,
        )
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(ask, client, QUESTION, context=None) for _ in range(2)]
            assert eventually(lambda: server.state.answers.waiting == 2)
            with pytest.raises(openai.RateLimitError, match="2 answers are waiting and --max-queue is 2") as refused:
                ask(client, QUESTION, context=None)
            assert int(refused.value.response.headers["Retry-After"]) >= 1
            hold.set()
            assert all(future.result().choices for future in waiting)
        assert ask(client, QUESTION, context=None).choices
        with pytest.raises(openai.BadRequestError, match="3 answers at once are more than --max-queue 2"):
            ask(client, QUESTION, context=None, n=3)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_gives_everything_back(server: Running, stream: bool) -> None:
    assert eventually(lambda: idle(server))
    body = {"prompt": LOOPING, "max_tokens": 4000, "stream": stream}
    if stream:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert server.state.answers.running == 1
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    began = time.monotonic()
    assert eventually(lambda: idle(server))
    assert time.monotonic() - began < 5


def test_a_client_that_leaves_while_a_context_is_made_smaller_gives_its_thread_back(server: Running) -> None:
    library, body = server.state.library, {"messages": HI, "context": "book", "budget": 33}
    with library.prefixes.taken(library.plan.loaded, lambda: None):  # so that making it waits for memory
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=0.5)
        assert eventually(lambda: idle(server) and not any(one.job for one in library.automatic()))
        free = [server.state.long_work.submit(time.monotonic) for _ in range(LONG_WORK)]
        assert all(one.result(5) for one in free)
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code == 200


def test_a_request_has_a_time_limit(lm: LongContextModel, tmp_path: Path) -> None:
    with running(lm, tmp_path, timeout=0.3) as server:
        body = {"prompt": LOOPING, "max_tokens": 8000}
        whole = httpx.post(f"{server.url}/v1/completions", json=body)
        assert (whole.status_code, whole.json()["error"]["code"]) == (408, "timeout")
        assert "0.3 s, which is the most that --timeout allows" in whole.json()["error"]["message"]
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        with pytest.raises(openai.APIError, match="--timeout allows"):
            list(client.completions.create(model="tiny", stream=True, **body))
        assert eventually(lambda: idle(server))


# -- what is refused --------------------------------------------------------------------------------------------------

HI = [user("hi")]
MANY = 50_000
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "messages is missing; give it"),
    ({"messages": []}, 400, "messages [] is refused, as list should have at least 1 item after validation, not 0"),
    ({"messages": HI, "max_token": 1}, 400, "max_token is not a field here; did you mean max_tokens or "),
    ({"messages": HI, "extra_body": {}}, 400, "extra_body is not a field here; leave it out"),
    ({"messages": [{"role": "user", "contents": "x"}]}, 400, "messages[0].contents is not a field here; leave it out"),
    ({"messages": [{"role": "bot", "content": "x"}]}, 400, "messages[0].role 'bot' should be 'system', 'developer'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
        400,
        "messages[0].content[0].type 'image_url' should be 'text'; change it",
    ),
    ({"messages": [user("\ud800")]}, 400, "messages[0].content '\\ud800' is refused, as half characters"),
    ({"messages": HI, "temperature": 3}, 400, "temperature 3 should be less than or equal to 2; change it"),
    ({"messages": HI, "temperature": float("nan")}, 400, "temperature nan should be a finite number"),
    ({"messages": HI, "max_tokens": 0}, 400, "max_tokens 0 should be greater than or equal to 1"),
    ({"messages": HI, "max_tokens": True}, 400, "max_tokens True should be a valid integer"),
    ({"messages": HI, "max_tokens": 2, "max_completion_tokens": 3}, 400, "max_tokens 2 and max_completion_tokens 3 ex"),
    ({"messages": HI, "max_tokens": 2**30}, 400, "max_tokens 1073741824 do not fit: next to this prompt"),
    ({"messages": HI, "presence_penalty": 1}, 400, "presence_penalty 1 has no effect here; leave it out"),
    ({"messages": HI, "logit_bias": {"5": 1}}, 400, "logit_bias {'5': 1} has no effect here; leave it out"),
    (
        {"messages": HI, "response_format": {"type": "json_object"}},
        400,
        "response_format.type 'json_object' has no ",
    ),
    ({"messages": HI, "functions": [{}]}, 400, "functions [{}] has no effect here; leave it out"),
    ({"messages": HI, "top_logprobs": 2}, 400, "top_logprobs has no effect without logprobs"),
    ({"messages": HI, "stream_options": {"include_usage": True}}, 400, "stream_options has no effect without stream"),
    ({"messages": HI, "stop": [1]}, 400, "stop[0] 1 should be a valid string; change it"),
    ({"messages": HI, "stop": ""}, 400, "stop '' is refused, as string should have at least 1 character"),
    ({"messages": HI, "budget": 5}, 400, "budget 5 has no effect without a context; name one"),
    ({"messages": HI, "context": "bok"}, 404, "there is no context 'bok'; did you mean book?"),
    ({"messages": HI, "context": "../../etc/passwd"}, 404, "there is no context '../../etc/passwd'"),
    ({"messages": HI, "context": "book\x00"}, 404, "there is no context"),
    ({"messages": [*HI, *HI], "context": "book"}, 400, "messages about a context are an optional system message"),
    ({"messages": [user(" ")], "context": "book"}, 400, "messages has a user's turn without text; write a question"),
    (
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "tools have no effect, for this tokenizer's chat template does not write them; leave them out",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "the tokenizer's chat template refuses these messages ("),
    ({"messages": HI, "model": "gpt-4"}, 404, "the model 'gpt-4' is not served here; use 'tiny'"),
]


@pytest.mark.parametrize(("body", "status", "message"), REFUSED)
def test_what_cannot_be_is_one_sentence(server: Running, body: dict[str, Any], status: int, message: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{server.url}/v1/chat/completions", content=json.dumps(body), headers=headers)
    error = response.json()["error"]
    assert error["message"].startswith(message)
    assert response.status_code == status
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt [] is refused, as list should have at least 1 item"),
        ([5000], "prompt has the token id 5000, which is not among the"),
        ([-1], "prompt[0] -1 should be greater than or equal to 0"),
        ({"a": 1}, "prompt {'a': 1} should be a valid"),
        (["a", 1], "prompt[1] 1 should be a valid string"),
    ],
)
def test_what_is_no_prompt_is_one_sentence(server: Running, prompt: Any, message: str) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", "application/json", "the body is missing or no JSON object"),
        (b"{", "application/json", "the body is no JSON: Expecting property name"),
        (b"[1]", "application/json", "the body is missing or no JSON object"),
        (b"[" * 100_000, "application/json", "the body is no JSON that can be read"),
        (b'{"messages": "\xff"}', "application/json", "the body is no JSON that can be read"),
        (b'{"messages": []}', "text/plain", "the body is missing or no JSON object; send one with Content-Type"),
    ],
)
def test_a_body_that_is_no_json_is_one_sentence(server: Running, content: bytes, kind: str, message: str) -> None:
    headers = {"Content-Type": kind}
    response = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": [-1] * MANY}),
        ("completions", {"prompt": [[{}] * MANY]}),
        ("chat/completions", {"messages": [{}] * MANY}),
        ("chat/completions", {"messages": [{"role": "user", "content": [1] * MANY}]}),
        ("chat/completions", {"messages": HI, **{f"k{nth}": 1 for nth in range(MANY)}}),
        ("chat/completions", {"messages": HI, "metadata": {f"k{nth}": 1 for nth in range(MANY)}}),
        ("chat/completions", {"messages": HI, "logit_bias": {f"k{nth}": {} for nth in range(MANY)}}),
        ("contexts/compose", {"name": "x", "contexts": [1] * MANY}),
        ("contexts/compose", {"name": "x", "contexts": ["a", "b"], "shares": [{}] * MANY}),
    ],
)
def test_a_body_that_is_wrong_in_many_places_is_refused_for_the_first(
    server: Running, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    sentence = app._sentence

    def counted(errors: Any, model: Any) -> Any:
        counts.append(len(errors))
        return sentence(errors, model)

    monkeypatch.setattr(app, "_sentence", counted)
    response = httpx.post(f"{server.url}/v1/{path}", json=body)
    assert response.status_code == 400
    assert counts[0] < 8  # each takes a kilobyte


def test_paths_and_methods_that_are_none_are_one_sentence(server: Running) -> None:
    for method, path, status in (("GET", "/v2", 404), ("GET", "/v1/chat/completions", 405), ("PUT", "/v1/models", 405)):
        response = httpx.request(method, server.url + path)
        assert response.status_code == status
        assert f"{method} '{path}' is no route of this server" in response.json()["error"]["message"]


def test_our_mistakes_are_500_without_their_details(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.state.prompts, "of_chat", lambda *_: 1 // 0)
    response = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HI})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert response.json()["error"]["message"] == "the server has failed; its log says why"
    assert idle(server)


def test_an_engine_that_does_not_run_is_the_servers_fault(lm: LongContextModel, tmp_path: Path) -> None:
    with running(lm, tmp_path) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        server.state.engine.stop()
        with pytest.raises(openai.InternalServerError, match="the engine that writes answers does not run") as refused:
            ask(client, QUESTION, context=None)
        assert (refused.value.status_code, refused.value.code) == (503, "engine_stopped")
        health = httpx.get(f"{server.url}/healthz")
        assert (health.status_code, health.json()) == (503, {"status": "stopped"})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_prompt_whose_reading_breaks_is_the_servers_fault(server: Running, client: openai.OpenAI) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    broken = server.state.lm.model.model.layers[0].register_forward_pre_hook(full)
    try:
        with pytest.raises(
            openai.InternalServerError, match="failed .OutOfMemoryError.; see the server's log"
        ) as error:
            ask(client, f"{text_with(97531)}\n\n{QUESTION}", context=None)
        assert error.value.status_code == 500
    finally:
        broken.remove()
    assert ask(client, f"{text_with(97531)}\n\n{QUESTION}", context=None).choices


# -- the gate ---------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_everywhere_but_at_the_door(lm: LongContextModel, tmp_path: Path) -> None:
    with running(lm, tmp_path, api_key="sesame") as server:
        for path in ("/v1/models", "/v1/contexts", "/metrics", "/openapi.json", "/v1/memory"):
            for headers in ({}, {"Authorization": "Bearer sesam"}, {"Authorization": "Basic sesame"}):
                response = httpx.get(server.url + path, headers=headers)
                assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert httpx.get(server.url + path, headers={"Authorization": "Bearer sesame"}).status_code != 401
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        assert httpx.get(server.url).status_code == 200
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or another"):
            client.models.list()


def test_pages_of_strangers_cannot_address_a_server_on_this_machine(lm: LongContextModel, tmp_path: Path) -> None:
    with running(lm, tmp_path, host="127.0.0.1") as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
        response = httpx.get(f"{server.url}/v1/models", headers={"Host": "evil.example:80"})
        assert response.status_code == 403
        assert "the Host 'evil.example' is not this server" in response.json()["error"]["message"]


def test_a_body_is_bounded_while_it_arrives(lm: LongContextModel, tmp_path: Path) -> None:
    with running(lm, tmp_path, max_body="10000") as server, httpx.Client(base_url=f"{server.url}/v1") as client:
        sent, headers = 0, {"Content-Type": "application/json"}

        def endless() -> Iterator[bytes]:
            nonlocal sent
            while sent < 200 << 20:
                sent += 1 << 16
                yield b" " * (1 << 16)

        with suppress(httpx.WriteError):  # the connection is closed while we are sending
            assert client.post("/completions", content=endless(), headers=headers).status_code == 413
        assert sent < 100 << 20
        for size in (20_000, 8 << 20):  # what is far too large, too, is taken to its end before it is answered
            declared = client.post("/completions", content=b" " * size, headers=headers)
            assert (declared.status_code, declared.headers.get("connection")) == (413, None)
            message = f"the body has {size} bytes, but --max-body allows 10000; upload a long text as a context"
            assert message in declared.json()["error"]["message"]


def test_a_client_that_waits_to_be_told_is_refused_before_it_sends(server: Running) -> None:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), 10) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.host}\r\nExpect: 100-continue\r\n"
        connection.sendall(f"{head}Content-Length: 100000000\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_trickles_is_given_up(lm: LongContextModel, tmp_path: Path) -> None:
    with running(lm, tmp_path, timeout=1.0) as server:

        def trickle() -> Iterator[bytes]:
            for _ in range(100):
                yield b" "
                time.sleep(0.1)

        began = time.monotonic()
        with suppress(httpx.WriteError):  # the connection was closed while we were sending
            response = httpx.post(f"{server.url}/v1/completions", content=trickle())
            assert response.status_code == 408
            assert "the body took more than --timeout 1 s" in response.json()["error"]["message"]
        assert time.monotonic() - began < 8


def test_a_server_that_ends_takes_nothing_new(server: Running) -> None:
    server.state.draining = True
    try:
        response = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HI})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "ending")
        health = httpx.get(f"{server.url}/healthz")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
    finally:
        server.state.draining = False
