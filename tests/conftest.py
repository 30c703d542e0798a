"""What all tests share: one thread, no network, reference data, a small random backbone, a Hub on the loopback."""

from __future__ import annotations

import gc
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Set before huggingface_hub is imported: a test that forgets its stand-in must fail, not download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start: both cores are busy with tests
os.environ.setdefault("HF_DATASETS_CACHE", os.path.join(tempfile.gettempdir(), "locret-tests-datasets"))

import pytest
import torch
from hub_server import WRITE_TOKEN, HubServer
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).resolve().parent

torch.set_num_threads(1)

# Property tests: the same draws in every run; `--hypothesis-profile many` draws others, and more.
_CALM = settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("default", _CALM, max_examples=120, derandomize=True)
settings.register_profile("many", _CALM, max_examples=2000, print_blob=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """Take back what a command that runs in this process does with signals, which would end the tests."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def shared() -> Path:
    """Return the folder of larger reference data beside the repository; skip where there is none."""
    folder = TESTS.parent.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the folder 'shared' with reference data is not beside the repository")
    return folder


@pytest.fixture
def tiny_llama() -> Any:
    """Return a random Llama: 2 layers, 4 query and 2 KV heads of 8, vocabulary 64."""
    from embedded import SIZES
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)).eval()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """Start a Hub on the loopback and point the huggingface_hub of this process at it."""
    from huggingface_hub import constants

    with HubServer() as server:
        # The client builds these when it is imported, so the environment alone would come too late.
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        # It asks a server that fails six times, and waits 23 seconds in between.
        monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None), raising=False)
        monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        yield server


_SLOW = re.compile(
    "(distributed|engines|serve)/|test_(bench|chat_command|chat_templates|compose|context_command|damaged_files|"
    "eval_command|eval_protocols|formats|infer_command|lookup_methods|mergers|mutated_options|protected|protected_turns|"
    "publishing|ragged|real_suite|requirements|resume|scores|sizing|start|stores|text_stream|train_command|trainer|"
    "verify|whole_cache).py"
)
"""Files that take some seconds each."""


def pytest_collection_finish() -> None:
    """Take what all tests share out of garbage collection, which would look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow files and a test's second case as slow, and further cases as long: every claim is checked, by fewer."""
    cases: dict[str, int] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases[test] = cases.get(test, 0) + 1
        if cases[test] > 2:
            item.add_marker(pytest.mark.long)
        if _SLOW.search(test.partition("::")[0]) or cases[test] > 1 or item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
