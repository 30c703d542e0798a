"""`locret-serve` as a process: it says where it is, drains on a signal, and refuses what cannot be in one sentence."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from running import MODEL, started, text_with

from locret import RetainingHeads, RetentionPolicy
from locret.infer.serve.command import command

SMALL = ["--budget", "64", "--chunk-size", "128", "--kv-memory", "64MiB"]
TINY = [*SMALL, "--name", "tiny"]


def test_a_server_answers_drains_and_ends_as_it_is_told(tmp_path: Path) -> None:
    messages: list[Any] = [{"role": "user", "content": f"{text_with(43600)}\n\nWhat is the pass key?"}]
    endless: dict[str, Any] = {"model": "tiny", "prompt": "Paris " * 24, "stream": True}
    with started(tmp_path / "contexts", *TINY, "--drain", "4", LOCRET_API_KEY="sesame") as (process, ready):
        client = openai.OpenAI(base_url=ready["url"], api_key="sesame", max_retries=0)
        health = ready["url"].replace("/v1", "/healthz")
        answer = client.chat.completions.create(model="tiny", messages=messages)
        assert answer.choices[0].message.content == "The pass key is 43600."
        assert httpx.get(f"{ready['url']}/models").status_code == 401
        assert httpx.get(health).json() == {"status": "ready"}
        stream, longer = (client.completions.create(max_tokens=tokens, **endless) for tokens in (100, 8000))
        first = next(iter(stream))
        next(iter(longer))
        whole = ThreadPoolExecutor(1).submit(client.completions.create, max_tokens=8000, **{**endless, "stream": False})
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 1.0
        while time.monotonic() < until:  # long after the signal has come, each time on a new connection
            last = httpx.get(health, timeout=30)
            time.sleep(0.05)
        assert (last.status_code, last.json()) == (503, {"status": "draining"})
        with pytest.raises(openai.InternalServerError, match="the server is about to end") as refused:
            client.models.list()
        assert (refused.value.status_code, refused.value.code) == (503, "ending")
        rest = list(stream)  # which ends before the server does
        assert rest[-1].choices[0].finish_reason == "length"
        assert (first.choices[0].text + "".join(chunk.choices[0].text for chunk in rest)).count("Paris") == 100
        with pytest.raises(openai.APIError, match="the server is about to end"):  # what does not end in time is cut off
            list(longer)
        with pytest.raises(openai.InternalServerError, match="503 .*the server is about to end"):
            whole.result()
        _, said = process.communicate(timeout=90)
        assert process.returncode == 143
        assert (said.strip().endswith("locret-serve: interrupted"), "Traceback" in said) == (True, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-memory", "1MiB"], r"--kv-memory 1MiB is too small: "),
        (["--port", "70000"], r"port=70000 is too large; it must be 65,535 or less, and 0 takes a free port"),
        (["--readers", "0"], r"readers=0 is too small; it must be 1 or more"),
        (["--host", "0.0.0.0"], r"--host 0.0.0.0 lets other machines ask, and there is no key; set LOCRET_API_KEY or"),
        (["--host", "203.0.113.9", "--port", "0", "--api-key", "k"], r"--port 0 at --host 203.0.113.9 cannot be had"),
        (["--api-key", "é"], r"--api-key is empty or has characters that no header carries"),
        (["--turns", "text"], r"--turns text is not what engines do with a question"),
        (["--device", "auto", "--device-map", "disk"], r"leaves all weights on disk, where no engine answers"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        command([*MODEL, *SMALL[:4], "--contexts", str(tmp_path), "--port", "0", *options])
    assert "\n" not in str(refused.value)


def test_a_dry_run_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [*SMALL, "--contexts", str(tmp_path / "contexts"), "--dry-run"]
    assert command(["checkpoints/tiny", *MODEL[4:], *line, "--scorer", "snapkv"]) == 0
    said = capsys.readouterr()
    assert said.err == "", "every method reads in compact positions here"
    assert "in all (--kv-memory)" in said.out
    assert command([*MODEL, *line, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["kv_memory"], plan["weights"]) == (64 << 20, {"cpu": 8_072_448})
    assert not (tmp_path / "contexts").exists()


def test_shares_that_heads_recommend_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RetainingHeads.from_pretrained("checkpoints/tiny-heads").save_pretrained(tmp_path / "heads")
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    shares = [0.5, 1.5] * 10
    config["policy"] = {"budget": 64, "local_len": 8, "head_budgets": "shares", "head_shares": shares}
    (tmp_path / "heads" / "config.json").write_text(json.dumps(config))
    served = list[RetentionPolicy]()
    monkeypatch.setattr("locret.infer.serve.command._serve", lambda state, *_: served.append(state.lm.policy))
    line = ["--model", "checkpoints/tiny", "--heads", str(tmp_path / "heads"), "--contexts", str(tmp_path)]
    for given in ([], ["--head-budgets", "uniform"]):
        command([*line, "--port", "0", "--kv-memory", "64MiB", *given])
    assert [policy.head_budgets for policy in served] == ["shares", "uniform"]
    assert served[0].head_shares == tuple(shares)
