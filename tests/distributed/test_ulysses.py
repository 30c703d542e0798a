"""Two processes that share a row by its tokens learn what one learns from the whole row, in half of the memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from locret.distributed.ulysses import RowRanks, RowShare

ROOT = Path(__file__).parents[2]
STEPS = (
    "llama",
    "no groups",
    "q and k norms",
    "windows and softcap",
    "fused projections, long factors",
    "a kind of one's own",
    "ranking",
    "smoothness alone counts",
    "a long answer",
    "last prompt token",
    "trained up to the border",
    "trained past the border",
    "trained before the border",
    "one token",
    "earlier answers",
    "evicting",
    "evicting, windows",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes found, started once for all tests here."""
    path = tmp_path_factory.mktemp("ulysses") / "found.json"
    worker = str(Path(__file__).with_name("ulysses_worker.py"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", worker, str(path)]
    paths = os.pathsep.join(map(str, [ROOT, ROOT / "tests" / "core", ROOT / "tests" / "train"]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    read: dict[str, Any] = json.loads(path.read_text())
    return read


@pytest.mark.parametrize("case", STEPS)
def test_losses_and_gradients_are_those_of_the_whole_row(found: dict[str, Any], case: str) -> None:
    differences = found["steps"][case]
    assert set(found["steps"]) == set(STEPS)
    assert differences["gradients"] <= 1e-6
    assert max(differences["total"], differences["fit"]) <= 1e-6
    assert differences["smoothness"] <= 1e-5  # of numbers around 10
    assert differences["overlap"] <= 1e-6


def test_half_precision_differs_by_its_roundings(found: dict[str, Any]) -> None:
    assert found["low_precision"]["gradients"] <= 2e-2  # bfloat16 has 8 bits
    assert found["low_precision"]["total"] <= 1e-3


def test_a_share_takes_its_share_of_the_memory(found: dict[str, Any]) -> None:
    """Counted byte by byte; the plan knows that queries, keys and values are held twice while they are exchanged."""
    for counted in found["memory"].values():
        for way in ("whole", "shared"):
            assert 0.75 * counted[f"planned {way}"] <= counted[way] <= 1.01 * counted[f"planned {way}"]
    usual = found["memory"]["as models are"]
    assert usual["shared"] <= 0.55 * usual["whole"]


def test_what_cannot_be_shared_is_said(found: dict[str, Any]) -> None:
    refused = found["refusals"]
    assert "--sp-size 3 does not divide the 2 processes that were started; start a multiple of it" in refused["three"]
    assert refused["one KV head"] == "--sp-size 2 does not divide the 1 KV heads of llama; drop it"


@pytest.mark.parametrize("tokens", [1, 7, 8, 1001])
def test_slices_cover_a_row_evenly(tokens: int) -> None:
    shares = [RowShare(RowRanks(rank, 4), tokens) for rank in range(4)]
    assert [token for share in shares for token in range(share.start, share.end)] == list(range(tokens))
    sizes = [share.end - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1
    for first in (0, 1, tokens // 2, tokens):
        assert sum(share.own(first) for share in shares) == first
