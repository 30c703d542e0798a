"""What tests of the core share: a random backbone, and a whole model under the policy of the module that asks."""

from __future__ import annotations

from typing import Any

import pytest
from families import build

from locret import Context, LongContextModel


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def lm(request: pytest.FixtureRequest) -> LongContextModel:
    """Return checkpoints/tiny with its heads, and the module's POLICY."""
    pair: dict[str, Any] = {"model": "checkpoints/tiny", "heads": "checkpoints/tiny-heads"}
    return LongContextModel.from_pretrained(**pair, policy=request.module.POLICY, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def context(lm: LongContextModel, request: pytest.FixtureRequest) -> Context:
    """Return the module's TEXT, read."""
    return lm.read(request.module.TEXT, name="text")
