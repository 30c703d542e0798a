"""Every field of every route, with values that fit the schema and values that do not: one sentence, never a failure.

More examples: FUZZ_EXAMPLES=500 python -m pytest tests/serve/test_fuzz.py
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "4"))
BOOK = Path(__file__).parents[2] / "recipes/infer/pass_key.txt"
LONGEST_QUERY = 10_000
"""Characters; where percent signs make 64 KiB of them, it is uvicorn that refuses a request, and not we."""
TURN = itertools.count()


@pytest.fixture(scope="module")
def api(process: tuple[str, Path, Any]) -> Iterator[Any]:
    """Return the schema of a server that has read a text."""
    url, log, _ = process
    text = BOOK.read_bytes()[:3000]
    assert httpx.post(f"{url}/v1/contexts?name=known&wait=true", content=text, timeout=60).status_code == 201
    yield schemathesis.openapi.from_url(f"{url}/openapi.json")
    assert httpx.get(f"{url}/healthz").json() == {"status": "ready"}
    asked = {"context": "known", "messages": [{"role": "user", "content": "What is the pass key?"}], "max_tokens": 4}
    assert httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).status_code == 200
    assert "Traceback" not in log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_what_is_refused_is_refused_in_one_sentence(api: Any, mode: GenerationMode) -> None:
    for found in api.get_all_operations():

        @settings(
            max_examples=EXAMPLES, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck)
        )
        @given(case=found.ok().as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            assume(len(str(case.query)) < LONGEST_QUERY)
            aim(case)
            response = case.call(timeout=60)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert 10 < len(error["message"]) < 600, error
                assert "\n" not in error["message"], error
                assert "Traceback" not in error["message"], error

        with suppress(Unsatisfiable):  # a route that takes nothing cannot be asked for anything wrong
            check()


def aim(case: Any) -> None:
    """Let every other request name the context that there is, and none ask for long answers."""
    hit = next(TURN) % 2 == 0
    if hit and case.method != "DELETE" and "name" in (case.path_parameters or {}):
        case.path_parameters["name"] = "known"
    if isinstance(case.body, dict):
        if hit and "context" in case.body:
            case.body["context"] = "known"
        if case.path.endswith("completions"):
            for field, most in (("max_tokens", 4), ("max_completion_tokens", 4), ("n", 2)):
                if isinstance(given := case.body.get(field, most), int):
                    case.body[field] = min(given, most)
            if not case.path.endswith("chat/completions"):
                case.body.pop("max_completion_tokens")
