"""The server's engine that asks vLLM over HTTP, against what 0.32.0 sends; `test_vllm_engine.py` asks a real one."""

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest
import torch

from locret.engines.prefix import Prefix
from locret.infer.serve.engine import Asked
from locret.infer.serve.serve_options import ServeOptions
from locret.infer.serve.vllm_engine import VllmEngine

METRICS = """\
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="100"} 1.0
"""
PREFIX = Prefix((torch.ones(3, 1, 2),), (torch.ones(3, 1, 2),), vocab_size=50, tokens=9)
FAILED = {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}


class Vllm:
    """Speaks as vLLM does: three tokens, the last of which ends the answer."""

    def __init__(self):
        self.bodies, self.connector, self.finish, self.metrics = [], True, "stop", METRICS
        self.models = [{"id": "tiny", "parent": None, "max_model_len": 64}, {"id": "lora", "parent": "tiny"}]
        self.broken = self.gone = None
        self.waits, self.closed = threading.Event(), threading.Event()
        self.waits.set()

    async def __call__(self, request):
        if self.gone:
            raise httpx.ConnectError("refused")
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": self.models})
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self.metrics)
        body = json.loads(request.content)
        if not body.get("stream"):
            answered = {"choices": [{"finish_reason": "length", "token_ids": [1]}]}
            return httpx.Response(500, json=FAILED) if self.connector else httpx.Response(200, json=answered)
        self.bodies.append(body)
        if self.broken == "refused":
            return httpx.Response(400, json={"error": {"message": "too long", "code": 400}})
        return httpx.Response(200, stream=Stream(self, body))


class Stream(httpx.AsyncByteStream):
    def __init__(self, vllm, body):
        self.vllm, self.body = vllm, body

    async def __aiter__(self):
        if self.vllm.broken == "fails":
            yield self.line(FAILED)
        elif self.vllm.broken == "nonsense":
            yield self.line({"choices": [{"token_ids": [1], "logprobs": {}}]})
        elif self.vllm.broken == "cut":
            yield self.chunk([4], None)
            raise httpx.ReadError("cut")
        elif self.vllm.broken != "empty":
            yield b": comment\n\n"
            yield self.chunk([], None)
            yield self.chunk([4, 5], None)
            while not self.vllm.waits.is_set():
                await asyncio.sleep(0.01)
            yield self.chunk([2], self.vllm.finish)
        yield b"data: [DONE]\n\n"

    async def aclose(self):
        self.vllm.closed.set()

    def chunk(self, ids, finish):
        choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": finish, "logprobs": None}
        if self.body.get("logprobs") is not None:
            top = [{f"token_id:{i}": -0.5, "token_id:7": -3.0, "token_id:8": -0.1} for i in ids]
            choice["logprobs"] = {"token_logprobs": [-0.5] * len(ids), "top_logprobs": top}
        return self.line({"choices": [choice]})

    @staticmethod
    def line(value):
        return f"data: {json.dumps(value)}\n\n".encode()


@pytest.mark.parametrize(
    "body", ["<html>", "[]", "{}", '{"data": null}', '{"data": "tiny"}', '{"data": [{"id": "tiny"}]}']
)
def test_what_is_no_vllm_is_refused_in_a_sentence(body):
    made = VllmEngine("http://v", unit_bytes=1, transport=httpx.MockTransport(lambda _: httpx.Response(200, text=body)))
    with pytest.raises(ValueError, match=r"vLLM at http://v answers in another form than 0.32 .*correct --engine-url"):
        made.start()


def test_a_server_that_points_elsewhere_is_not_followed():
    elsewhere = httpx.MockTransport(lambda _: httpx.Response(307, headers={"location": "http://w/"}))
    with pytest.raises(ValueError, match="vLLM at http://v refuses: HTTP 307"):
        VllmEngine("http://v", unit_bytes=1, transport=elsewhere).start()


def test_a_server_that_says_nothing_does_not_hold_up_the_start(monkeypatch):
    monkeypatch.setattr("locret.infer.serve.vllm_engine._REPLY", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        made = VllmEngine(f"http://127.0.0.1:{silent.getsockname()[1]}", unit_bytes=1)
        with pytest.raises(OSError, match="ReadTimeout.*correct --engine-url"):
            made.start()


@pytest.fixture
def vllm():
    return Vllm()


@pytest.fixture
def engine(vllm):
    made = made_for(vllm)
    made.start()
    yield made
    made.stop()


def made_for(vllm, **more):
    return VllmEngine("http://vllm:8000/v1/", unit_bytes=10, transport=httpx.MockTransport(vllm), **more)


def answer(engine, **more):
    steps, ended = [], threading.Event()

    def on_step(step):
        steps.append(step)
        if step.finish:
            ended.set()

    engine.ask(Asked(**{"ids": (9, 8), "max_new_tokens": 5, "end_ids": frozenset([2]), **more}), on_step)
    assert ended.wait(10)
    return steps


def test_tokens_come_one_by_one(engine, vllm):
    engine.hold(PREFIX)
    steps = answer(engine, prefix=PREFIX, temperature=0.5, top_p=0.9, top_k=3, seed=7)
    assert [(step.token, step.finish) for step in steps] == [(4, None), (5, None), (2, "stop")]
    (body,) = vllm.bodies
    assert body["prompt"] == [*PREFIX.placeholders, 9, 8]
    assert body["kv_transfer_params"] == {"locret": True}  # fails where vLLM does not find it
    assert (body["stop_token_ids"], body["ignore_eos"], body["max_tokens"]) == ([2], True, 5)
    assert (body["temperature"], body["top_p"], body["top_k"], body["seed"]) == (0.5, 0.9, 3, 7)
    assert (body["repetition_penalty"], body["min_p"]) == (1.0, 0.0)  # not what generation_config recommends


def test_a_prompt_without_a_context(engine, vllm):
    assert answer(engine)[-1].finish == "stop"
    assert vllm.bodies[0]["prompt"] == [9, 8]
    assert "kv_transfer_params" not in vllm.bodies[0]


@pytest.mark.parametrize(("count", "top"), [(0, ()), (1, ((8, -0.1),)), (2, ((8, -0.1), (4, -0.5)))])
def test_log_probabilities(engine, count, top):
    first = answer(engine, top_logprobs=count)[0]
    assert (first.token, first.logprob, first.top) == (4, -0.5, top)


def test_what_vllm_says_of_itself(engine):
    assert engine.longest == 64
    assert (engine.planned_bytes, engine.used_bytes) == (32_000, 8_000)
    assert engine.model == "tiny"


def test_codes_of_eight_bits_take_a_byte_each(vllm):
    vllm.metrics = METRICS.replace("auto", "fp8")
    engine = made_for(vllm)
    engine.start()
    engine.stop()
    assert engine.planned_bytes == 16_000


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("refused", "vLLM at http://vllm:8000 refuses: too long"),
        ("fails", "fails (Internal server error); its log says why"),
        ("cut", "cannot be reached (ReadError: cut)"),
        ("empty", "ended the answer without saying why"),
        ("nonsense", "in another form than 0.32"),
    ],
)
def test_what_goes_wrong_ends_the_answer_with_a_sentence(engine, vllm, broken, message):
    vllm.broken = broken
    last = answer(engine)[-1]
    assert (last.token, last.finish) == (None, "error")
    assert message in last.message
    vllm.broken = None
    assert answer(engine)[-1].finish == "stop"


@pytest.mark.parametrize("finish", ["error", "abort"])
def test_an_answer_that_vllm_gives_up(engine, vllm, finish):
    vllm.finish = finish
    assert f"ended the answer with {finish!r}" in answer(engine)[-1].message


def test_vllm_that_goes_and_comes_back(vllm, monkeypatch):
    monkeypatch.setattr("locret.infer.serve.vllm_engine._LOOK", 0.01)
    engine = made_for(vllm)
    assert not engine.running
    engine.start()
    try:
        for gone in (False, True, False):
            vllm.gone = gone
            steps = answer(engine)
            assert "cannot be reached" in steps[-1].message if gone else steps[-1].finish == "stop"
            until = time.monotonic() + 10
            while engine.running is gone and time.monotonic() < until:
                time.sleep(0.01)
            assert engine.running is not gone
    finally:
        engine.stop()
    assert not engine.running


def test_a_cancelled_answer_says_nothing_more_and_ends_in_vllm(engine, vllm):
    vllm.waits.clear()
    steps, two = [], threading.Event()
    cancel = engine.ask(
        Asked(ids=(1,), max_new_tokens=5), lambda step: (steps.append(step), two.set() if len(steps) == 2 else None)
    )
    assert two.wait(10)
    cancel()
    cancel()
    assert vllm.closed.wait(10)
    assert [step.token for step in steps] == [4, 5]


def test_stop_ends_all_answers_and_the_thread(vllm):
    before = threading.active_count()
    vllm.waits.clear()
    engine = made_for(vllm)
    engine.start()
    engine.start()
    last = [[] for _ in range(20)]
    for steps in last:
        engine.ask(Asked(ids=(1,), max_new_tokens=5), steps.append)
    engine.stop()
    engine.stop()
    assert [(steps[-1].finish, steps[-1].message) for steps in last] == [("error", "the server ends")] * 20
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="has ended"):
        engine.ask(Asked(ids=(1,), max_new_tokens=5), print)


@pytest.mark.parametrize(("more", "message"), [({"ids": ()}, "at least one token"), ({"max_new_tokens": 63}, "65 pos")])
def test_what_could_never_be_answered_is_refused_at_once(engine, more, message):
    with pytest.raises(ValueError, match=message):
        engine.ask(Asked(**{"ids": (1, 2), "max_new_tokens": 5, **more}), print)


def test_vllm_without_the_connector_is_refused(vllm):
    vllm.connector = False
    engine = made_for(vllm)
    with pytest.raises(ValueError, match="does not look for contexts; start it with --kv-transfer-config"):
        engine.start()
    engine.stop()


def test_a_model_that_vllm_does_not_serve(vllm):
    with pytest.raises(ValueError, match="serves tiny, not other"):
        made_for(vllm, model="other").start()


def test_no_vllm_at_all(vllm):
    vllm.gone = True
    with pytest.raises(OSError, match="correct --engine-url"):
        made_for(vllm).start()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "vllm"}, "--engine vllm says not where vLLM answers; give --engine-url"),
        ({"engine": "vllm", "engine_url": "127.0.0.1:8001"}, "--engine-url 127.0.0.1:8001 says not where"),
        ({"engine_url": "http://127.0.0.1:8001"}, "--engine-url has no effect with --engine transformers"),
        ({"engine_model": "tiny"}, "--engine-model has no effect"),
        ({"engine_api_key": "secret"}, "--engine-api-key has no effect"),
    ],
)
def test_options_that_make_no_sense_together(options, message):
    with pytest.raises(ValueError, match=message):
        ServeOptions(**options)
