"""Peers do the same work from the same files, in processes that one stand-alone worker measures."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, Phi3Config

from locret.infer.speed import allocations, resident
from locret.infer.speed.bench_options import BenchOptions
from locret.infer.speed.peers import backbone_files, compare, comparison, find_pythons, lines, process
from locret.infer.speed.peers.process import METERS, SideFailed, SideProcess
from locret.infer.speed.peers.tasks import job
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.resolve import make_plan
from locret.infer.speed.shapes import random_model

PEERS = Path(backbone_files.__file__).parent
FOREIGN = {"torch", "transformers", "safetensors", "kvpress"}
KVPRESS = os.environ.get("LOCRET_KVPRESS_PYTHON")
NUMBERS: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 4096,
}
ROTARY: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 5000.0,
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 3.0, 4.0, 8.0],
        "original_max_position_embeddings": 64,
    },
}


def config_of(kind: str) -> Any:
    rotary = dict(ROTARY[kind])
    if kind == "longrope":
        return Phi3Config(**NUMBERS, original_max_position_embeddings=64, rope_parameters=rotary)
    return LlamaConfig(**NUMBERS, head_dim=8, rope_parameters=rotary)


def plan_for(folder: Path, peers: str, lengths: str, budget: int = 32, python: str | None = None) -> BenchPlan:
    options = BenchOptions(
        model=str(folder),
        lengths=lengths,
        methods="locret",
        hidden_dim=8,
        budget=budget,
        chunk_size=64,
        stabilizers=8,
        local_len=16,
        new_tokens=3,
        repeats=2,
        threads=1,
        dtype="float32",
        device="cpu",
        vs=peers,
        peer_python=python,
    )
    return make_plan(options, {"model"})


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    # Larger weights than usual: every token decides its answer clearly.
    model = random_model(config_of("default"))
    for parameter in model.requires_grad_(False).parameters():
        parameter.mul_(4 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def light_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The worker, alone in a folder with a side that prints while it is imported and needs no package."""
    shutil.copy(PEERS / "worker.py", tmp_path)
    (tmp_path / "beside.py").touch()
    (tmp_path / "side_light.py").write_text(
        "import importlib.util\nPACKAGES = ()\nprint('loud', importlib.util.find_spec('beside'))\n"
    )
    monkeypatch.setattr(process, "_WORKER", tmp_path / "worker.py")
    return tmp_path / "worker.py"


def worker_module() -> Any:
    spec = importlib.util.spec_from_file_location("bench_worker", PEERS / "worker.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- whole comparisons ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_transformers_answers_beside_ours_and_all_is_in_one_table(backbone: Path) -> None:
    plan = plan_for(backbone, "transformers", "700")
    record = json.loads(json.dumps(compare(plan)))
    rows = {(row["side"], row["method"]): row for row in record["rows"]}
    held = {key: row["held"] for key, row in rows.items()}
    assert held == {
        ("locret", "locret"): 32 + 16 + 2,
        ("transformers", "full"): 700 + 2,
        ("transformers", "full_chunked"): 700 + 2,
    }
    for row in rows.values():
        assert row["error"] is None
        assert 0 < row["seconds"]["first_token"]["p50"] < row["seconds"]["total"]["p50"]
        assert len(row["rounds"]) == 2
        assert row["peak_bytes"]["allocated"] > 0
    assert rows["locret", "locret"]["ratios"]["total"] == {"p20": 1, "p50": 1, "p80": 1}
    # At once, the MLP alone holds 700 x 48 floats where ours holds 64 x 48.
    assert rows["transformers", "full"]["ratios"]["allocated"] > 2
    assert record["versions"]["transformers"]["torch"] == torch.__version__
    page = "\n".join(lines(record))
    assert "| transformers | full_chunked | 700 | 702 |" in page
    assert "What forgets keeps 32 units, the last 16 prompt tokens" in page


@pytest.mark.slow
@pytest.mark.skipif(KVPRESS is None, reason="LOCRET_KVPRESS_PYTHON names no python that has kvpress")
def test_kvpress_holds_as_many_units_as_ours_and_a_press_that_refuses_stops_nothing(backbone: Path) -> None:
    assert KVPRESS is not None
    # 66 tokens: a context of 50, which is less than SnapKV's window.
    plan = plan_for(backbone, "kvpress", "66,500", python=f"kvpress={KVPRESS}")
    record = compare(plan, {"kvpress": KVPRESS})
    rows = {(row["side"], row["method"], row["tokens"]): row for row in record["rows"]}
    presses = {method for side, method, _ in rows if side == "kvpress"}
    assert presses == {"snapkv", "expected_attention", "keydiff"}
    for key, row in rows.items():
        if key == ("kvpress", "snapkv", 66):
            assert "window size 64" in row["error"]
            continue
        assert row["error"] is None
        assert row["held"] == 32 + 16 + 2
        assert row["ratios"]["total"]["p50"] > 0
    assert rows["kvpress", "keydiff", 500]["ratios"]["allocated"] > 2
    page = "\n".join(lines(record))
    assert "* kvpress snapkv, 66 tokens: AssertionError" in page
    assert "| kvpress | snapkv | 66 | unknown | unknown | unknown | failed |" in page


@pytest.mark.slow
def test_with_room_for_all_units_ours_writes_what_transformers_writes(backbone: Path, tmp_path: Path) -> None:
    plan, answers = plan_for(backbone, "transformers", "200", budget=256), {}
    folder = backbone_files.write_files(tmp_path, plan)
    for name, methods in (("locret", ["locret"]), ("transformers", ["full", "full_chunked"])):
        with SideProcess(name, sys.executable, threads=1) as side:
            side.ask("load", backbone=folder, prompt=str(tmp_path / backbone_files.PROMPT), job=job(plan))
            for method in methods:
                answers[method] = side.ask("time", method=method, tokens=200)["tokens"]
    assert len(answers["full"]) == 3
    assert answers["locret"] == answers["full"] == answers["full_chunked"]


# -- one backbone for all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_embeddings_are_spelt_for_older_versions_and_mean_the_same_here(tmp_path: Path, kind: str) -> None:
    config = config_of(kind)
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    both = backbone_files.in_both_spellings(json.loads(path.read_text()))
    assert both["rope_theta"] == 5000.0
    older = {
        "default": None,
        "llama3": {name: value for name, value in ROTARY["llama3"].items() if name != "rope_theta"},
        "longrope": {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 8.0]},
    }
    assert both.get("rope_scaling") == older[kind]
    path.write_text(json.dumps(both))
    ids = torch.randint(3, 99, (1, 100))
    there, here = (random_model(one)(ids).logits for one in (AutoConfig.from_pretrained(tmp_path), config))
    assert torch.equal(there, here)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_side_that_rotates_otherwise_is_refused(dtype: str) -> None:
    config, ids = config_of("default"), torch.randint(3, 99, (1, 300), generator=torch.Generator().manual_seed(0))

    def logits() -> torch.Tensor:
        model = random_model(config, dtype=getattr(torch, dtype)).requires_grad_(False)
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
        return model(ids).logits[0, -1].float()

    right = logits()
    comparison.check_same({"locret": right, "kvpress": logits()}, dtype, 300)
    config.rope_parameters["rope_theta"] = 50.0
    with pytest.raises(
        ValueError, match="--vs kvpress computes another model from the same files: its logits after 300"
    ):
        comparison.check_same({"locret": right, "kvpress": logits()}, dtype, 300)


def test_random_weights_that_do_not_fit_the_disk_are_not_begun(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(plan_for(backbone, "transformers", "200"), model=None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"the peers' backbone takes [\d,]+ bytes, but .* has 1,000 left; set TMPDIR"):
        backbone_files.write_files(tmp_path, plan)
    assert not (tmp_path / "backbone").exists()


# -- environments ---------------------------------------------------------------------------------------------------


def test_a_peer_without_an_environment_is_told_how_to_make_one() -> None:
    with pytest.raises(ValueError, match="--vs kvpress needs an environment of its own; make one with `python -m venv"):
        find_pythons(["transformers", "kvpress"], {})
    with pytest.raises(ValueError, match=r"--peer-python kvpress=/nowhere/python is not a program; make one .*kvpress"):
        find_pythons(["kvpress"], {"kvpress": "/nowhere/python"})
    assert find_pythons(["transformers"], {}) == {"transformers": sys.executable}


@pytest.mark.slow
def test_an_environment_without_the_peer_is_refused_before_weights_are_written(
    backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("kvpress"):
        pytest.skip("kvpress is in this environment")
    plan = plan_for(backbone, "kvpress", "200", python=f"kvpress={sys.executable}")
    monkeypatch.setattr(comparison, "write_files", lambda *_: pytest.fail("weights were written"))
    with pytest.raises(
        ValueError, match=r"cannot run kvpress \(ModuleNotFoundError: No module named 'kvpress'\); make"
    ):
        compare(plan, {"kvpress": sys.executable})


# -- processes and their meter --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["worker.py", "side_transformers.py", "side_kvpress.py", allocations.__file__, resident.__file__]
)
def test_what_runs_in_a_peers_environment_imports_nothing_of_ours(name: str) -> None:
    tree = ast.parse((PEERS / name).read_text())
    modules = [node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert modules
    assert {module.split(".")[0] for module in modules} <= {*sys.stdlib_module_names, *FOREIGN}


@pytest.mark.slow
def test_a_side_may_print_and_still_answers_line_by_line(light_worker: Path) -> None:
    requests = '{"do": "hello"}\n{"do": "nonsense"}\n{"do": "hello"}\n'
    command = [sys.executable, str(light_worker), "light", str(METERS)]
    out = subprocess.run(command, input=requests, capture_output=True, text=True, check=True)
    first, second, third = map(json.loads, out.stdout.splitlines())
    assert first == third
    assert first["torch"] == torch.__version__
    assert second["error"].startswith("AttributeError")
    # A file beside the worker hides no library of its name.
    assert "loud None" in out.stderr


@pytest.mark.slow
def test_a_side_that_dies_says_so_and_is_started_again(light_worker: Path) -> None:
    with SideProcess("light", sys.executable, threads=1) as side:
        versions = side.ask("hello")
        assert side._process is not None
        os.kill(side._process.pid, signal.SIGKILL)
        with pytest.raises(SideFailed, match="killed, as a system does that runs out of memory"):
            side.ask("hello")
        assert side.ask("hello") == versions
        light_worker.write_text("raise SystemExit('cannot go on')")
        side.stop()
        with pytest.raises(SideFailed, match="the process ended with code 1: cannot go on"):
            side.ask("hello")


@pytest.mark.slow
def test_peak_bytes_are_those_above_what_was_there() -> None:
    # Blocks that malloc always maps, and never takes from what others have left behind.
    module, size = worker_module(), 2**26
    worker = module.Worker("transformers", str(METERS))
    there_before = torch.ones(2**20)

    def hold(ids: torch.Tensor, streamer: Any) -> int:
        big = torch.ones(size // 4)
        del big
        half = torch.ones(size // 8)
        streamer.put(ids)
        streamer.put(half[:1])
        return 7

    worker.cuda, worker.ids, worker.methods = None, torch.ones(1, 8, dtype=torch.long), {"hold": hold}
    assert worker.time("hold", 8)["held"] == 7
    peaks = worker.memory("hold", 8, warm_up=4)
    assert size <= peaks["allocated"] < 1.01 * size
    if peaks["process"] is not None:
        assert 0.9 * size < peaks["process"] < 2 * size  # the system hands out more than was asked for
    assert there_before.sum() == 2**20
