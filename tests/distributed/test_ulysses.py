"""Two processes that share a row by its tokens learn what one learns from the whole row, in half of the memory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from launches import ROOT, done
from safetensors.torch import load_file

from locret.distributed.ulysses import RowRanks, RowShare
from locret.train.command import command

sys.path.insert(0, str(ROOT / "tests" / "train"))
from training_cases import refused, train, train_arguments, write_backbone, write_rows  # noqa: E402

STEPS = (
    "llama",
    "no groups",
    "q and k norms",
    "windows and softcap",
    "fused projections, long factors",
    "learned sinks",
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
)


def launch(processes: int, *program: str) -> None:
    """Start a program in several processes, and wait for them."""
    folders = os.pathsep.join(map(str, [ROOT / "tests" / "core", ROOT / "tests" / "train"]))
    done(*program, processes=processes, PYTHONPATH=os.pathsep.join([str(ROOT), folders]))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes found, started once for all tests here."""
    path = tmp_path_factory.mktemp("ulysses") / "found.json"
    launch(2, str(Path(__file__).with_name("ulysses_worker.py")), str(path))
    read: dict[str, Any] = json.loads(path.read_text())
    return read


@pytest.mark.parametrize("case", STEPS)
def test_losses_and_gradients_are_those_of_the_whole_row(found: dict[str, Any], case: str) -> None:
    assert set(found["steps"]) == set(STEPS)
    check(found["steps"][case])


def check(differences: dict[str, float]) -> None:
    """Check a row of numbers that the worker found."""
    assert differences["gradients"] <= 2e-6  # of the largest, in float32; 1e-6 and less here
    assert max(differences["total"], differences["fit"]) <= 1e-6
    assert differences["smoothness"] <= 1e-5  # of numbers around 10
    assert differences["overlap"] <= 1e-6


def test_weights_may_be_shared_too(found: dict[str, Any]) -> None:
    for differences in found["sharded"]["steps"].values():
        check(differences)


def test_planned_weights_are_those_of_a_process(found: dict[str, Any]) -> None:
    """What the plan for given cards counts on the meta device is what two processes hold."""
    for shard in ("fsdp", "tp"):
        counted = found["sharded"][shard]
        assert counted["counted"] == counted["planned"] < 0.51 * counted["whole"]


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
    said = found["refusals"]
    assert said["three"].startswith("--sp-size 3 does not divide the 2 processes that were started; start a multiple")
    assert "rows of more than 64 tokens, so one of 70 cannot be shared; give --max-tokens 64" in said["dynamic NTK"]
    assert "carry a state from token to token, so its rows cannot be shared by their tokens" in said["states"]
    assert said["one KV head"] == "--sp-size 2 does not divide the 1 KV heads of llama; drop it"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the folder of heads that one process has trained, and the command line but for --output."""
    folder = tmp_path_factory.mktemp("training")
    paths = write_backbone(folder / "model"), write_rows(folder / "rows.json", 12)
    arguments = train_arguments(paths, folder / "whole", "--eval-rows=3", "--report-to=none")
    assert train(paths, folder / "whole", *arguments[3:], "--gradient-accumulation=2") == 0
    return folder / "whole", [one for one in arguments if not one.startswith("--output")]


WAYS = [(2, ["--gradient-accumulation=2", "--shard=fsdp"]), (4, [])]


@pytest.mark.parametrize(("processes", "more"), [WAYS[0], pytest.param(*WAYS[1], marks=pytest.mark.slow)])
def test_the_command_trains_the_same_heads(
    whole: tuple[Path, list[str]], tmp_path: Path, processes: int, more: list[str]
) -> None:
    """Two processes that share rows and weights; and two times two, which read two rows at once."""
    expected, arguments = whole
    launch(processes, "-m", "locret.train.command", *arguments, *more, "--sp-size=2", f"--output={tmp_path / 'heads'}")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "heads", expected))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= 1e-6
    ours, theirs = (
        [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "heads", expected)
    )
    assert len(ours) == len(theirs)
    for name in ("total", "overlap", "rows", "tokens", "eval_total", "eval_overlap", "gradient_norm"):
        assert ours[-1][name] == pytest.approx(theirs[-1][name], rel=1e-5)


REFUSED = [
    (["--sp-size=2"], "--sp-size 2 shares rows among processes, but this is the only one; start them with torchrun"),
    (["--sp-size=3"], "--sp-size 3 does not divide the 2 KV heads of llama; choose 2"),
    (["--sp-size=0"], "--sp-size 0 is too small; it must be more than 0"),
    (["--sp-size=2", "--shard=tp"], "--sp-size 2 and --shard tp both divide the attention heads"),
]


@pytest.mark.parametrize(("more", "expected"), REFUSED, ids=[" ".join(more) for more, _ in REFUSED])
def test_what_cannot_be_shared_is_refused_early(
    whole: tuple[Path, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    expected: str,
) -> None:
    if "--shard=tp" in more:
        monkeypatch.setenv("WORLD_SIZE", "2")
    code, message = refused(capsys, [*whole[1], f"--output={tmp_path / 'run'}", *more])
    assert (code, expected in message) == (2, True), message
    assert not (tmp_path / "run").exists()


def test_a_plan_needs_no_processes(whole: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for more in ([], ["--sp-size=2"]):
        AcceleratorState._reset_state(reset_partial_state=True)
        assert command([*whole[1], "--output=nowhere", "--dry-run", "--json", *more]) == 0
        plans.append(json.loads(capsys.readouterr().out)["memory_bytes"])
    assert plans[1]["one_layer"] < 0.7 * plans[0]["one_layer"]
    assert plans[1]["backbone"] == plans[0]["backbone"]


@pytest.mark.parametrize("tokens", [1, 7, 8, 1001])
def test_slices_cover_a_row_evenly(tokens: int) -> None:
    shares = [RowShare(RowRanks(rank, 4), tokens) for rank in range(4)]
    assert [token for share in shares for token in range(share.start, share.end)] == list(range(tokens))
    sizes = [share.end - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1
    for first in (0, 1, tokens // 2, tokens):
        assert sum(share.own(first) for share in shares) == first
