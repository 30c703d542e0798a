"""A policy that cannot work is refused when it is read, with the setting, the value and the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from locret import RetainingHeads, RetentionCache, RetentionPolicy, load_cache, prefill, save_cache


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"budget": 0}, "budget=0 is too small; it must be 1 or more"),
        ({"budget": 100, "stabilizers": 100}, "stabilizers=100 leaves no room for scored units in budget=100; "
         "raise budget or lower stabilizers to at most 99"),
        ({"chunk_size": 0}, "chunk_size=0 is too small"),
        ({"local_len": 0}, "local_len=0 is too small"),
        ({"stabilizers": -1}, "stabilizers=-1 is negative; use 0 to protect nothing"),
        ({"positions": "absolute"}, 'positions="absolute" is unknown; choose one of compact, original'),
        ({"head_budgets": "ragged"}, 'head_budgets="ragged" is unknown; choose one of uniform, adaptive'),
        ({"head_floor": 1.5}, "head_floor=1.5 is not a share of the budget; give 0 to 1, such as 0.2"),
        ({"decode_budget": 164}, "decode_budget=164 cannot hold local_len=100 protected units"),
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as error:
        RetentionPolicy(**numbers)
    assert message in str(error.value)


WHOLE = [name for name, value in RetentionPolicy().to_dict().items() if type(value) is int or name == "decode_budget"]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 7000.5, 7000.0, "7000", True, [7000], torch.tensor(7e3)])
def test_a_number_that_is_not_whole_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}=.* is not a whole number; give one"):
        RetentionPolicy(**{name: value})


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"budget": None}, "budget=None is not a whole number; give one such as 6000"),
        ({"decode_budget": 0.5}, "decode_budget=0.5 is not a whole number; give one, or leave it out"),
        ({"head_floor": float("nan")}, "head_floor=nan is not a finite number; give one such as 0.2"),
        ({"head_floor": float("inf")}, "head_floor=inf is not a finite number"),
        ({"head_floor": "0.2"}, "head_floor='0.2' is not a finite number"),
        ({"head_floor": True}, "head_floor=True is not a finite number"),
        ({"when": None}, "when=None is not a string; give one such as 'chunk'"),
        ({"decremental": 1}, "decremental=1 is not one of True and False; give one such as False"),
    ],
)
def test_a_value_of_another_type_is_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        RetentionPolicy(**numbers)
    assert message in str(error.value)


def test_whole_numbers_of_numpy_and_torch_become_plain_ones() -> None:
    policy = RetentionPolicy(budget=np.int64(70), stabilizers=torch.tensor(7), head_floor=np.float64(0.5))  # type: ignore[arg-type]
    assert json.loads(json.dumps(policy.to_dict())) == policy.to_dict()
    assert policy == RetentionPolicy(budget=70, stabilizers=7, head_floor=0.5)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"budget": float("inf")}, "policy.budget=inf is not a whole number; give one such as 6000"),
        ({"budget": None}, "policy.budget=None is not a whole number"),
        ({"local_len": "many"}, "policy.local_len='many' is not a whole number"),
        ({"budgt": 5}, "policy has an unknown key 'budgt'; the keys are those of RetentionPolicy: budget, "),
    ],
)
def test_no_heads_lift_the_bound_by_the_policy_they_recommend(
    tiny_llama: Any, tmp_path: Path, policy: dict[str, Any], message: str
) -> None:
    heads = RetainingHeads.for_model(tiny_llama, 4, seed=0)
    with pytest.raises(ValueError, match=message):
        heads.annotate(policy=policy)
    heads.save_pretrained(tmp_path / "heads")
    file = tmp_path / "heads" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "policy": policy}))
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        RetainingHeads.from_pretrained(tmp_path / "heads")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": float("nan")}, "policy.budget=nan is not a whole number"),
        ({"stabilizers": 10**6}, "policy: stabilizers=1000000 leaves no room for scored units"),
        ({"sinks": 4}, "policy has an unknown key 'sinks'; the keys are those of RetentionPolicy"),
    ],
)
def test_a_saved_cache_with_a_policy_that_cannot_be_is_refused(
    tiny_llama: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    from safetensors.torch import load_file, save_file

    cache = RetentionCache(tiny_llama, "streaming", RetentionPolicy(budget=8, chunk_size=8, stabilizers=2, local_len=2))
    prefill(tiny_llama, torch.arange(30)[None], cache)
    save_cache(cache, tmp_path / "whole")
    from safetensors import safe_open

    with safe_open(tmp_path / "whole", framework="pt") as file:
        state = json.loads(file.metadata()["state"])
    state["policy"] |= change
    save_file(load_file(tmp_path / "whole"), tmp_path / "broken", metadata={"state": json.dumps(state)})
    with pytest.raises(ValueError, match=f"broken: {message}"):
        load_cache(tmp_path / "broken", tiny_llama, "streaming")


def test_defaults_are_those_of_the_original_package() -> None:
    policy = RetentionPolicy()
    assert (policy.budget, policy.chunk_size, policy.stabilizers, policy.local_len) == (6000, 3072, 2500, 100)
    assert RetentionPolicy.from_dict(policy.to_dict(), "policy") == policy
