"""Answers from a running vLLM over HTTP: contexts are read here and asked there, in a folder that both see.

vLLM runs with `locret.engines.vllm:LocretConnector` on the folder of contexts. It holds what it was asked about in its
own memory, decides itself which answers run at once, and lets the others wait.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from locret.engines.prefix import Prefix
from locret.field_values import shown
from locret.infer.serve.engine import Asked, NotRunning, Step

_CONNECT, _REPLY, _SILENCE = 5.0, 30.0, 600.0
"""Seconds until a connection stands, until a small question is answered, and between two tokens of an answer."""
_LOOK = 2.0
"""Seconds between two looks at vLLM's memory."""
_WHY = "its log says why, such as a context that is not in the folder of its connector"
_START = (
    'start it with --kv-transfer-config \'{"kv_connector": "LocretConnector", "kv_role": "kv_consumer", '
    '"kv_connector_module_path": "locret.engines.vllm", "kv_connector_extra_config": {"contexts": "FOLDER"}}\''
)

OnStep = Callable[[Step], None]


class _Writing:
    """An answer under way: nothing is told after its end."""

    def __init__(self, on_step: OnStep) -> None:
        self.on_step, self.ended = on_step, False

    def tell(self, step: Step) -> None:
        if not self.ended:
            self.ended = step.finish is not None
            self.on_step(step)

    def fail(self, why: str) -> None:
        self.tell(Step(token=None, finish="error", message=why))


class VllmEngine:
    """An `Engine` that asks vLLM.

    Args:
        url: Where vLLM answers, such as http://127.0.0.1:8000.
        unit_bytes: Bytes of one token's keys and values in the backbone's dtype, all layers together.
        model: Its name there; if None, the only one.
        api_key: What vLLM was started with as --api-key.
        transport: Carries the requests; if None, the network.
    """

    def __init__(
        self,
        url: str,
        *,
        unit_bytes: int,
        model: str | None = None,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url, self.model, self._unit_bytes = url.rstrip("/").removesuffix("/v1"), model, unit_bytes
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._transport = transport
        self.longest = 0
        """Positions that vLLM's --max-model-len allows; known once it has started."""
        self._planned = 0
        self._used = 0.0
        self._reached = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._running: set[Future[None]] = set()

    @property
    def planned_bytes(self) -> int:
        """Bytes of keys and values that vLLM has set aside, if it says so; they are its own, not this process's."""
        return self._planned

    @property
    def running(self) -> bool:
        """Whether it has started, and vLLM could be reached when it was asked last."""
        return self._loop is not None and self._reached

    @property
    def used_bytes(self) -> int:
        """Bytes of them that running answers and what they share took when vLLM was asked last."""
        return int(self._planned * self._used)

    def start(self) -> None:
        """Find out what vLLM serves, and whether it finds contexts.

        Raises:
            ValueError: If it serves another model, or has no connector of ours.
            OSError: If it cannot be reached.
        """
        if self._loop is not None:
            return
        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="locret-vllm", daemon=True)
        self._thread.start()
        self._loop = loop
        try:
            self._submit(self._connect()).result()
        except BaseException as error:
            self.stop()
            if isinstance(error, httpx.HTTPError):
                raise OSError(self._lost(error)) from error
            raise
        self._keep(self._submit(self._watch()))

    def stop(self) -> None:
        """End all answers, each with an error, and the thread; idempotent."""
        loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()

    def hold(self, prefix: Prefix) -> None:
        """Do nothing: vLLM takes a context from the folder when it is asked, and drops what was not asked for long."""

    def ask(self, asked: Asked, on_step: OnStep) -> Callable[[], None]:
        """Write an answer; see `Engine.ask`. What vLLM has no room for waits there.

        Raises:
            NotRunning: If it has not been started, or was stopped.
            ValueError: If it could never be answered.
        """
        if not asked.ids:
            raise ValueError("an answer needs at least one token after the context; give a question")
        if asked.length > self.longest:
            raise ValueError(
                f"{asked.length} positions are more than vLLM's --max-model-len {self.longest}; shorten the question, "
                "ask for fewer tokens, or start vLLM with more"
            )
        writing = _Writing(on_step)
        answer = self._submit(self._answer(asked, writing))
        # Also of what is cancelled before it has begun.
        answer.add_done_callback(lambda _: writing.fail("the server ends"))
        self._keep(answer)

        def cancel() -> None:
            writing.ended = True
            answer.cancel()

        return cancel

    # -- in the engine's thread ---------------------------------------------------------------------------------------

    def _submit(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        if self._loop is None:
            work.close()
            raise NotRunning("the engine has ended, or has not begun; start it first")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _keep(self, work: Future[None]) -> None:
        self._running.add(work)
        work.add_done_callback(self._running.discard)

    async def _connect(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=self._headers,
            timeout=httpx.Timeout(_REPLY, connect=_CONNECT),
            limits=limits,
            transport=self._transport,
        )
        models = await self._ok(await self._client.get("/v1/models"))
        with self._understood():
            served = {str(one["id"]): one for one in models.json()["data"] if one.get("parent") is None}
            if self.model is None and len(served) == 1:
                self.model = next(iter(served))
            if self.model not in served:
                raise ValueError(
                    f"vLLM at {self.url} serves {', '.join(served) or 'no model'}, not {self.model}; name one of them"
                )
            self.longest = int(served[self.model]["max_model_len"])
        await self._find_connector()
        await self._look()

    async def _find_connector(self) -> None:
        """Ask for a context that cannot be there, which only our connector refuses.

        Raises:
            ValueError: If it is answered.
        """
        body = {"model": self.model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {"locret": True}}
        reply = await self._client.post("/v1/completions", json=body)
        with self._understood():
            if reply.status_code == httpx.codes.OK and reply.json()["choices"][0]["finish_reason"] != "error":
                raise ValueError(f"vLLM at {self.url} does not look for contexts; {_START}")
        if not reply.is_server_error:
            await self._ok(reply)

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Say in one sentence that an answer is none of vLLM's."""
        try:
            yield
        except (json.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"vLLM at {self.url} answers in another form than 0.32 ({error!r}); correct --engine-url, or install "
                "that version"
            ) from error

    async def _ok(self, reply: httpx.Response) -> httpx.Response:
        if not reply.is_success:
            await reply.aread()
            raise ValueError(f"vLLM at {self.url} refuses: {_reason(reply)}")
        return reply

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            try:
                await self._look()
                self._reached = True
            except (httpx.HTTPError, ValueError):
                self._reached = False

    async def _look(self) -> None:
        text = (await self._ok(await self._client.get("/metrics"))).text
        with self._understood():
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == "vllm:cache_config_info":
                        tokens = int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
                        eighths = 8 if sample.labels.get("cache_dtype", "auto") == "auto" else 4
                        self._planned = tokens * self._unit_bytes * eighths // 8
                    elif sample.name == "vllm:kv_cache_usage_perc":
                        self._used = float(sample.value)

    async def _answer(self, asked: Asked, writing: _Writing) -> None:
        # Its ids stand for the prefix: the units themselves are not held while vLLM answers.
        body, asked = self._body(asked), replace(asked, prefix=None)
        try:
            async for step in self._steps(asked, body):
                writing.tell(step)
            writing.fail(f"vLLM at {self.url} ended the answer without saying why")
        except httpx.HTTPError as error:
            writing.fail(self._lost(error))
        except ValueError as error:
            writing.fail(str(error))

    async def _steps(self, asked: Asked, body: dict[str, Any]) -> AsyncIterator[Step]:
        silence = httpx.Timeout(_SILENCE, connect=_CONNECT)
        async with self._client.stream("POST", "/v1/completions", json=body, timeout=silence) as reply:
            await self._ok(reply)
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                with self._understood():
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise ValueError(f"vLLM at {self.url} fails ({_said(chunk)}); {_WHY}")
                    steps = [step for choice in chunk["choices"] for step in _steps_of(choice, asked)]
                for step in steps:
                    yield step

    def _body(self, asked: Asked) -> dict[str, Any]:
        prompt = [*(asked.prefix.placeholders if asked.prefix else ()), *asked.ids]
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "stream": True,
            "return_token_ids": True,
            "max_tokens": asked.max_new_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "seed": asked.seed,
            "ignore_eos": True,
            "stop_token_ids": sorted(asked.end_ids),
            # What vLLM would otherwise take from the backbone's generation_config.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        if asked.prefix is not None:
            body["kv_transfer_params"] = {"locret": True}
        if asked.top_logprobs is not None:
            body |= {"logprobs": asked.top_logprobs, "return_tokens_as_token_ids": True}
        return body

    async def _close(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if client := getattr(self, "_client", None):
            await client.aclose()

    def _lost(self, error: Exception) -> str:
        return (
            f"vLLM at {self.url} cannot be reached ({type(error).__name__}: {error}); start it, or correct --engine-url"
        )


def _steps_of(choice: dict[str, Any], asked: Asked) -> list[Step]:
    """Return the steps that a part of vLLM's answer holds.

    Raises:
        ValueError: If the answer failed.
    """
    finish, ids, named = choice.get("finish_reason"), choice.get("token_ids") or [], choice.get("logprobs")
    if finish not in (None, "stop", "length"):
        raise ValueError(f"vLLM ended the answer with {finish!r}; {_WHY}")
    steps = []
    for nth, token in enumerate(ids):
        if type(token) is not int or token < 0:
            raise TypeError(f"token id {shown(token)}")
        step = Step(token=token, finish=finish if nth == len(ids) - 1 else None)
        if named is not None:
            top = _likeliest(named["top_logprobs"][nth], asked.top_logprobs or 0)
            step = replace(step, logprob=named["token_logprobs"][nth], top=top)
        steps.append(step)
    return steps


def _likeliest(named: dict[str, float], count: int) -> tuple[tuple[int, float], ...]:
    tokens = sorted(
        ((int(name.removeprefix("token_id:")), value) for name, value in named.items()), key=lambda x: -x[1]
    )
    return tuple(tokens[:count])


def _reason(reply: httpx.Response) -> str:
    try:
        return _said(reply.json())
    except ValueError:
        return f"HTTP {reply.status_code}"


def _said(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
