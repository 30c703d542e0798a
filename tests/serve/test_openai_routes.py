"""OpenAI's official client against a real server: answers are those of `locret`, and mistakes are one sentence."""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from running import FILLER, QUESTION, Running, refused, running, text_with, until

from locret import Context, LongContextModel, generate, prefill
from locret.conversation.document import decode
from locret.engines.transformers import Written
from locret.infer.serve.prompts import Prompts
from locret.infer.serve.responses import CallText
from locret.infer.serve.schemas import ChatRequest
from locret.infer.serve.serve_options import ServeOptions

KEYS = {"book": 43600, "other": 71432}
LOOPING = "Paris " * 24
"""What the embedded backbone goes on with until its length ends it."""


@pytest.fixture(scope="module")
def server(serving: LongContextModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running((serving, tmp_path_factory.mktemp("contexts"))) as server:
        for name, key in KEYS.items():
            server.read(name, text_with(key))
        yield server


def client_of(server: Running, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return client_of(server)


@pytest.fixture(scope="module")
def book(server: Running) -> Context:
    return server.state.lm.load(server.state.library.folder / "book.ctx")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(client: openai.OpenAI, *messages: Any, context: str | None = "book", **options: Any) -> Any:
    """Return the response to a conversation, by default about the context "book"."""
    given = [user(one) if isinstance(one, str) else one for one in messages]
    extra = {} if context is None else {"context": context}
    return client.chat.completions.create(model="tiny", messages=given, extra_body=extra, **options)


def text_of(response: Any) -> str:
    return str(response.choices[0].message.content)


def test_a_model_names_a_context_for_clients_that_can_name_nothing_else(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["tiny", "tiny:book", "tiny:other"]
    assert client.models.retrieve("tiny:book").id == "tiny:book"
    for name, key in KEYS.items():
        about: dict[str, Any] = {"model": f"tiny:{name}", "messages": [user(QUESTION)]}
        answer = client.chat.completions.create(**about)
        assert str(key) in text_of(answer)
        assert text_of(client.chat.completions.create(**about, extra_body={"context": name})) == text_of(answer)
    other = {"extra_body": {"context": "other"}, "messages": [user(QUESTION)]}
    with pytest.raises(openai.BadRequestError, match="names several contexts, "):
        client.chat.completions.create(model="tiny:book", **other)
    for bare in ("book", "smollm2:book"):
        with pytest.raises(openai.NotFoundError, match="is not served here; use 'tiny:book'"):
            client.chat.completions.create(model=bare, messages=[user(QUESTION)])
    for missing in (lambda: client.models.retrieve("tiny:none"), lambda: ask(client, QUESTION, context="none")):
        with pytest.raises(openai.NotFoundError):
            missing()


@pytest.mark.engine
def test_langchain_and_llamaindex_ask_about_a_context(server: Running) -> None:
    """In an environment of their own: pip install langchain-openai llama-index-llms-openai-like."""
    chat = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed").ChatOpenAI
    likes = pytest.importorskip("llama_index.llms.openai_like", reason="llama-index-llms-openai-like is not installed")
    how = {"model": "tiny:book", "api_key": "any", "max_tokens": 16, "temperature": 0}
    chain = chat(base_url=f"{server.url}/v1", **how)
    assert str(KEYS["book"]) in chain.invoke(QUESTION).content
    assert str(KEYS["book"]) in "".join(str(part.content) for part in chain.stream(QUESTION))
    index = likes.OpenAILike(api_base=f"{server.url}/v1", is_chat_model=True, context_window=8192, **how)
    assert str(KEYS["book"]) in index.complete(QUESTION).text


# -- answers are ours -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [QUESTION, "value value key pass 12"])
def test_a_question_about_a_context_is_answered_token_by_token_as_by_ask(
    client: openai.OpenAI, book: Context, question: str
) -> None:
    answer, lm = ask(client, question, logprobs=True, max_completion_tokens=24), book.lm
    assert text_of(answer).strip() == book.chat().say(question, max_new_tokens=24)
    asked = book.question_ids(question)
    new = generate(lm.model, iter([asked[0].tolist()]), cache=book.cache.copy(), max_new_tokens=24, do_sample=False)
    ids, ends = new[0, -24:].tolist(), set(lm.end_ids)
    written = [one.token for one in answer.choices[0].logprobs.content]
    texts = [decode(lm.tokenizer, ids[:count]) for count in range(len(ids) + 1)]
    added = [now[len(before) :] for before, now in itertools.pairwise(texts)]
    assert written == (added[:-1] if ids[-1] in ends else added)
    assert "".join(written) == text_of(answer)
    assert answer.choices[0].finish_reason == ("stop" if ids[-1] in ends else "length")
    usage, details = answer.usage, answer.usage.prompt_tokens_details
    assert (usage.completion_tokens, usage.prompt_tokens) == (len(ids), book.cache.seen + asked.shape[1])
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert (details.cached_tokens, details.read_tokens) == (book.cache.seen, 0)
    assert details.units == book.memory().units


def test_a_long_prompt_is_read_as_by_hand_and_only_where_it_is_new(
    client: openai.OpenAI, serving: LongContextModel
) -> None:
    lm, text = serving, text_with(13579)
    ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    end = len(ids) - lm.policy.chunk_size // 2
    cache = lm.new_cache()
    prefill(lm.model, torch.tensor([ids[:end]]), cache)
    expected = generate(lm.model, iter([ids[end:]]), cache=cache, max_new_tokens=20, do_sample=False)[0].tolist()
    answer = client.completions.create(model="tiny", prompt=ids, max_tokens=20, temperature=0)
    assert answer.choices[0].text == decode(lm.tokenizer, expected)
    said: list[Any] = [user(f"{text_with(24680, 30)}\n\n{QUESTION}")]
    first = ask(client, *said, context=None)
    assert text_of(first) == "The pass key is 24680."
    before = first.usage.prompt_tokens_details
    assert (before.cached_tokens, before.units) == (0, lm.policy.budget + lm.policy.local_len)
    assert first.usage.prompt_tokens - before.read_tokens == lm.policy.chunk_size // 2
    again = ask(client, said[0]["content"] + " Say it.", context=None).usage.prompt_tokens_details
    assert (again.read_tokens, again.cached_tokens) == (0, before.read_tokens)
    for _ in range(3):
        said += [{"role": "assistant", "content": "Here: " + FILLER * 2}, user(FILLER * 2 + QUESTION)]
    second = ask(client, *said, context=None)
    after = second.usage.prompt_tokens_details
    assert after.cached_tokens == before.read_tokens
    assert 0 < after.read_tokens < second.usage.prompt_tokens - before.read_tokens
    assert text_of(second) == "The pass key is 24680."


# -- OpenAI's options -------------------------------------------------------------------------------------------------


def test_a_stream_is_the_whole_answer_in_parts(client: openai.OpenAI) -> None:
    shown: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    whole = ask(client, QUESTION, **shown)
    *chunks, last = list(ask(client, QUESTION, **shown, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(whole)
    assert len(chunks) > 4
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert streamed == whole.choices[0].logprobs.content
    assert (last.choices, last.usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_go_on_with_texts_and_ids(client: openai.OpenAI, serving: LongContextModel, book: Context) -> None:
    lm, texts = serving, ["The grass is", "The sky is"]
    both = client.completions.create(model="tiny", prompt=texts, max_tokens=3, n=2, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text
    ids = [lm.tokenizer(text)["input_ids"] for text in texts]
    alone = [client.completions.create(model="tiny", prompt=one, max_tokens=3).choices[0].text for one in ids]
    assert [both.choices[0].text, both.choices[2].text] == alone
    expected = lm.model.generate(torch.tensor(ids[:1]), max_new_tokens=3, do_sample=False)[0, len(ids[0]) :].tolist()
    assert texts[0] + alone[0] == decode(lm.tokenizer, [*ids[0], *expected])
    assert texts[1] + alone[1] == f"{texts[1]} {alone[1].strip()}"  # the space before the first word is part of it
    asked = book.question_ids(QUESTION)[0].tolist()
    about = client.completions.create(model="tiny", prompt=asked, extra_body={"context": "book"}, logprobs=1)
    assert about.choices[0].text == "The pass key is 43600."
    table = about.choices[0].logprobs
    assert len(table.tokens) == len(table.token_logprobs) == len(table.top_logprobs) == len(table.text_offset)


def test_responses_are_the_answers_of_chats_whole_and_as_events(client: openai.OpenAI) -> None:
    about: Any = {"extra_body": {"context": "book"}}
    expected = ask(client, QUESTION)
    whole = client.responses.create(model="tiny", input=QUESTION, **about)
    assert (whole.output_text, whole.status) == (text_of(expected), "completed")
    assert whole.usage.input_tokens == expected.usage.prompt_tokens
    assert whole.usage.total_tokens == expected.usage.total_tokens
    turns = [user(QUESTION), *[one.to_dict() for one in whole.output], user("Is the grass green?")]
    again = client.responses.create(model="tiny:book", input=turns, instructions="Be kind.", max_output_tokens=3)  # type: ignore[arg-type]
    kind, said = {"role": "system", "content": "Be kind."}, {"role": "assistant", "content": whole.output_text}
    assert text_of(ask(client, kind, turns[0], said, turns[2])).startswith(again.output_text)
    assert (again.status, again.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    with client.responses.stream(model="tiny", input=QUESTION, **about) as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == whole.output_text
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds.count("output_text.delta") > 3
    assert [event.sequence_number for event in events] == list(range(len(events)))


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PARTED = [  # the text of an answer, its words, the names of its calls
    (f"I look.\n{CALL}\n{CALL}\n", "I look.", ["weather", "weather"]),
    (CALL.removesuffix("</tool_call>"), "", ["weather"]),
    ('<tool_call>[{"name": "a"}, {"name": "b", "arguments": "{}"}]</tool_call> done', " done", ["a", "b"]),
    ("a <tool_call>{no json}</tool_call> b <tool", "a <tool_call>{no json}</tool_call> b <tool", []),
    (f"1 < 2 <tool_call>[1]</tool_call> {CALL}", "1 < 2 <tool_call>[1]</tool_call>", ["weather"]),
    ('<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>', []),
]


def test_calls_are_parted_from_words_wherever_a_stream_cuts_them() -> None:
    for (text, words, names), size in itertools.product(PARTED, (1, 7, 1000)):
        parts, answer = [text[at : at + size] for at in range(0, len(text), size)], CallText()
        told = [answer.add(part, last=nth == len(parts)) for nth, part in enumerate(parts, 1)]
        assert "".join(said for said, _ in told) == words
        calls = [call for _, made in told for call in made]
        assert [call["function"]["name"] for call in calls] == names
        assert len({call["id"] for call in calls}) == len(names)
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)


def test_calls_of_tools_come_back_as_calls(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the model writes is put in its place: the embedded backbone calls nothing."""
    tokenizer = server.state.lm.tokenizer
    given = tokenizer(f"Look.\n{CALL}", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)

    def submit(ids: Any, prefix: Any, *, on_token: Any, end_ids: Any, **_: Any) -> Any:
        for token in given:
            on_token(Written(token, None))
        on_token(Written(min(end_ids), "stop"))
        return lambda: None

    monkeypatch.setattr(server.state.engine, "submit", submit)
    how: Any = {"context": None, "tools": [{"type": "function", "function": {"name": "weather"}}]}
    choice = ask(client, "Rain?", **how).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Look.")
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    chunks = [chunk.choices[0] for chunk in ask(client, "Rain?", **how, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Look."
    (streamed,) = [one for chunk in chunks for one in chunk.delta.tool_calls or []]
    assert (streamed.index, streamed.type) == (0, "function")
    assert streamed.function.to_dict() == call.function.to_dict()
    assert chunks[-1].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "dry"}
    assert ask(client, "Rain?", choice.message.to_dict(), result, **how).choices[0].message.tool_calls
    without = ask(client, "Rain?", **how, tool_choice="none").choices[0]
    assert (without.finish_reason, without.message.content) == ("stop", f"Look.\n{CALL}")


# -- many at once -----------------------------------------------------------------------------------------------------


def test_a_full_queue_is_said_with_when_to_come_back(serving: LongContextModel, tmp_path: Path) -> None:
    with running((serving, tmp_path), max_queue=2) as server, ThreadPoolExecutor(2) as pool:
        client, hold, submit = client_of(server), threading.Event(), server.state.engine.submit
        server.state.engine.submit = lambda *given, **more: hold.wait() and submit(*given, **more)  # type: ignore
        waiting = [pool.submit(ask, client, QUESTION, context=None) for _ in range(2)]
        until(lambda: server.state.answers.waiting == 2)
        with pytest.raises(openai.RateLimitError, match="2 answers are waiting and --max-queue is 2") as full:
            ask(client, QUESTION, context=None)
        assert int(full.value.response.headers["Retry-After"]) >= 1
        hold.set()
        assert all(future.result().choices for future in waiting)
        assert ask(client, QUESTION, context=None).choices
        with pytest.raises(openai.BadRequestError, match="3 answers at once are more than --max-queue 2"):
            ask(client, QUESTION, context=None, n=3)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_gives_everything_back(server: Running, stream: bool) -> None:
    until(server.idle)
    engine, used = server.state.engine, server.state.engine.used_bytes
    body, url = {"prompt": LOOPING, "max_tokens": 8000, "stream": stream}, f"{server.url}/v1/completions"
    if stream:
        with httpx.stream("POST", url, json=body) as response:
            lines = response.iter_lines()  # which closes the response when it is gone
            next(lines)
            assert server.state.answers.running == 1
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=0.3)
    until(lambda: server.idle() and engine.used_bytes == used, 5)  # long before so much is written


def test_a_request_has_a_time_limit(serving: LongContextModel, tmp_path: Path) -> None:
    with running((serving, tmp_path), timeout=0.3) as server:
        body = {"prompt": LOOPING, "max_tokens": 8000}
        whole = httpx.post(f"{server.url}/v1/completions", json=body)
        assert "0.3 s, which is the most that --timeout allows" in refused(whole, 408)
        assert whole.json()["error"]["code"] == "timeout"
        with pytest.raises(openai.APIError, match="--timeout allows"):
            list(client_of(server).completions.create(model="tiny", stream=True, **body))
        until(server.idle)


# -- what is refused --------------------------------------------------------------------------------------------------

HI = [user("hi")]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
IMAGE = [{"type": "image_url", "text": "x"}]
MANY = 10_000
"""Parts that are wrong, fewer than a request may have."""
FIELDS: list[tuple[dict[str, Any], int, str]] = [  # beside a message, status, sentence
    ({"messages": [{"role": "user", "contents": "x"}]}, 400, "messages.0: contents is not a field here; did you mean"),
    ({"messages": [{"role": "user", "content": IMAGE}]}, 400, "messages.0.content"),
    ({"messages": [user([{"type": "file", "file": {"file_id": "x"}}])]}, 404, "there is no context 'x'"),
    (
        {"messages": [user([{"type": "file", "file": {"file_data": "eA=="}}])]},
        400,
        "messages.0.content.0.file.file: file_data 'eA==",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "the tokenizer's chat template refuses these messages ("),
    ({f"k{nth}": 1 for nth in range(MANY)}, 400, "k0 is not a field here; "),
    ({"temperature": 3}, 400, "temperature 3: input should be less than or equal to 2; change it"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, 400, "max_tokens and max_completion_tokens exclude each other"),
    ({"max_tokens": 2**30}, 400, "max_tokens 1073741824 do not fit: next to this prompt"),
    ({"presence_penalty": 1}, 400, "presence_penalty 1 has no effect here; leave it out"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format {'type': 'json_schema'} has no effect here; "),
    ({"context": "bok"}, 404, "there is no context 'bok'; did you mean book?"),
    ({"messages": [*HI, *HI], "context": "book"}, 400, "messages about a context are an optional system message"),
    ({"messages": [user(" ")], "context": "book"}, 400, "messages has a user's turn without text; write a question"),
    ({"messages": [user("\ud800")]}, 400, "half characters (lone surrogates)"),
    ({"tools": [{**TOOLS[0], "x": [{"\udc00": 1}]}]}, 400, "half characters (lone surrogates)"),
    ({"tools": TOOLS}, 400, "tools have no effect, for this tokenizer's chat template does not write them; leave "),
]
SET: list[tuple[str, Any, str]] = [
    ("previous_response_id", "resp_1", "has no effect here; nothing is stored; send all turns so far as input"),
    ("tools", [{"type": "web_search"}], "has no effect here; ask /v1/chat/completions, which hands them"),
    ("max_output_tokens", 2**30, "do not fit: next to this prompt"),
    ("text", {"format": {"type": "json_object"}}, "has no effect here; leave it out, ask for JSON in a message"),
]
REFUSED = [
    ("chat/completions", {}, 400, "messages is missing; give it"),
    *(("chat/completions", {"messages": HI, **given}, status, said) for given, status, said in FIELDS),
    ("completions", {"prompt": [5000]}, 400, "prompt has the token id 5000, and this backbone has"),
    *(("responses", {"input": "hi", name: given}, 400, f"{name} {given!r} {said}") for name, given, said in SET),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_cannot_be_is_one_sentence(server: Running, path: str, body: Any, status: int, message: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{server.url}/v1/{path}", content=json.dumps(body), headers=headers)
    assert refused(response, status).startswith(message)


def test_a_body_that_is_no_json_is_one_sentence(server: Running) -> None:
    for content, kind, message in (
        (b"", "application/json", "the body is missing; give it, and a body as a JSON object"),
        (b"{", "application/json", "the body is no JSON object; send one"),
        (b"[" * 100_000, "application/json", "POST '/v1/chat/completions': the body cannot be read; send a JSON obj"),
        (b'{"messages": []}', "text/plain", "the body "),
    ):
        response = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers={"Content-Type": kind})
        assert refused(response, 400).startswith(message)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_breaks_in_the_server_is_its_fault_and_told_without_details(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as wrong:
        wrong.setattr(server.state.prompts, "of", lambda *_: 1 // 0)
        response = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HI})
        assert refused(response, 500) == "the server has failed; its log says why"
        assert response.json()["error"]["type"] == "server_error"
        assert server.idle()
    question = f"{text_with(97531)} Well?"
    failed = pytest.raises(openai.InternalServerError, match="failed .OutOfMemoryError.; see the server's log")
    with server.state.lm.model.model.layers[0].register_forward_pre_hook(full), failed:
        ask(client, question, context=None)
    assert ask(client, question, context=None).choices


# -- the gate ---------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_everywhere_but_at_the_door(serving: LongContextModel, tmp_path: Path) -> None:
    with running((serving, tmp_path), api_key="sesame") as server:
        for path in ("/v1/models", "/v1/contexts", "/openapi.json", "/v1/memory"):
            for headers in ({}, {"Authorization": "Bearer sesam"}, {"Authorization": "Basic sesame"}):
                response = httpx.get(server.url + path, headers=headers)
                assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer")
            for headers in ({"Authorization": "Bearer sesame"}, {"api-key": "sesame"}):
                assert httpx.get(server.url + path, headers=headers).status_code == 200
        assert [httpx.get(server.url + path).status_code for path in ("/healthz", "/")] == [200, 200]
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or another"):
            client_of(server, "wrong").models.list()


def test_pages_of_strangers_cannot_address_a_server_on_this_machine(server: Running) -> None:
    url = f"{server.url}/v1"
    stranger = httpx.get(f"{url}/models", headers={"Host": "evil.example:80"})
    assert "the Host 'evil.example' is not this server" in refused(stranger, 403)
    for elsewhere in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:3000"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "null"},
    ):
        response = httpx.post(f"{url}/contexts?name=theirs", content=b"x", headers=elsewhere)
        assert "another site" in refused(response, 403)
    assert httpx.get(f"{url}/contexts/theirs").status_code == 404
    for ours in ({"sec-fetch-site": "same-origin"}, {"origin": server.url}):
        assert httpx.delete(f"{url}/contexts/theirs", headers=ours).status_code == 404


@pytest.mark.parametrize(
    ("host", "api_key", "name", "status"),
    [
        ("0.0.0.0", "open", "evil.example", 403),
        ("0.0.0.0", "open", "192.0.2.7:8000", 200),
        ("0.0.0.0", "sesame", "evil.example", 403),
        ("books.example", "open", "books.example:80", 200),
        ("127.0.0.1", None, "192.0.2.7", 403),
    ],
)
def test_names_of_the_server_are_its_own_where_others_may_ask_too(
    server: Running, monkeypatch: pytest.MonkeyPatch, host: str, api_key: str | None, name: str, status: int
) -> None:
    options = ServeOptions(host=host, api_key=api_key)
    monkeypatch.setattr(server.state, "options", options)
    monkeypatch.setattr(server.state, "api_key", options.key)
    assert httpx.get(f"{server.url}/v1/models", headers={"Host": name}).status_code == status
    if api_key == "sesame":  # which no page of strangers has
        shown = {"Host": name, "Authorization": "Bearer sesame"}
        assert httpx.get(f"{server.url}/v1/models", headers=shown).status_code == 200


def test_a_body_is_bounded_while_it_arrives(serving: LongContextModel, tmp_path: Path) -> None:
    with running((serving, tmp_path), max_body="10000") as server, httpx.Client(base_url=f"{server.url}/v1") as client:
        sent, headers = 0, {"Content-Type": "application/json"}

        def endless() -> Iterator[bytes]:
            nonlocal sent
            while sent < 200 << 20:
                sent += 1 << 16
                yield b" " * (1 << 16)

        with suppress(httpx.WriteError):  # the connection is closed while we are sending
            assert client.post("/completions", content=endless(), headers=headers).status_code == 413
        assert sent < 100 << 20
        declared = client.post("/completions", content=b" " * 20_000, headers=headers)
        message = "the body has 20000 bytes or more, but --max-body allows 10000; upload a long text as a context"
        assert message in refused(declared, 413)


# -- what a chat template is handed ------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }}. {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "calls {{ call.function.name }} {{ call.function.arguments.items() | list if call.function.arguments is mapping "
    "else call.function.arguments }}{% endfor %} .\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_tools_calls_and_developers_are_handed_to_the_template(server: Running) -> None:
    tokenizer, lm = copy.deepcopy(server.state.lm.tokenizer), server.state.lm
    write, texts, tokenizer.chat_template = tokenizer.apply_chat_template, list[str](), TEMPLATE
    tokenizer.apply_chat_template = lambda *given, **more: texts.append(write(*given, **more)) or texts[-1]
    prompts = Prompts(LongContextModel(lm.model, tokenizer, lm.scorer, lm.policy), server.state.library)

    def rendered(*messages: Any, **fields: Any) -> str:
        texts.clear()
        assert prompts.of(ChatRequest.model_validate({"messages": [*messages], **fields}))[0].ids
        return texts[0]

    turns, tools = [{"role": "developer", "content": "be kind"}, user("hi")], {"tools": TOOLS}
    assert rendered(*turns, **tools).startswith("tool f. system: be kind .\nuser: hi")
    assert rendered(*turns, **tools, tool_choice="none").startswith("system: be kind")
    asked = {"role": "user", "content": [{"type": "text", "text": "how "}, {"type": "text", "text": "is it"}]}
    for given, expected in (('{"city": "Oslo"}', "[('city', 'Oslo')]"), ("no json", "no json"), ("[" * 9999, "[[[")):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
        called = {"role": "assistant", "content": None, "tool_calls": [call]}
        text = rendered(asked, called, {"role": "tool", "tool_call_id": "1", "content": "rain"})
        assert text.startswith("user: how is it")
        assert f"calls f {expected}" in text
        assert "tool: rain" in text
