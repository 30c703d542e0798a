"""A plan says what will be measured: forward passes, bytes and settings, without a weight in memory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill, scorers, shipped
from locret.infer.speed import methods
from locret.infer.speed.bench_options import OPTION_CLASSES, BenchOptions, BenchOutput
from locret.infer.speed.command import command
from locret.infer.speed.cost import sizes_of
from locret.infer.speed.resolve import make_plan
from locret.infer.speed.shapes import CPU_512, PRESETS, SHAPES, random_model

SMALL = {"shape": "tiny", "lengths": "300", "budget": 64, "chunk_size": 32, "stabilizers": 16, "local_len": 8}

PAPER: dict[str, Any] = {"budget": None, "chunk_size": None, "stabilizers": None, "local_len": None}


def plan_of(**changes: Any) -> Any:
    given = {**SMALL, **changes}
    return make_plan(BenchOptions(**given), set(given))


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert command([*arguments, "--dry-run"]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def test_full_attention_reads_in_chunks_and_holds_everything() -> None:
    sizes, policy = (
        sizes_of(CPU_512, torch.float32),
        RetentionPolicy(budget=9, chunk_size=4, stabilizers=2, local_len=1),
    )
    passes = methods.get("full").reading(sizes, policy, 10)
    assert [(one.tokens, one.held, one.logits) for one in passes] == [
        (4, (0,) * 8, 0),
        (4, (4,) * 8, 0),
        (2, (8,) * 8, 1),
    ]


@pytest.mark.parametrize("name", ["floor", "locret", "streaming"])
def test_bounded_methods_hold_the_budget_between_chunks(name: str) -> None:
    sizes, policy = (
        sizes_of(CPU_512, torch.float32),
        RetentionPolicy(budget=5, chunk_size=4, stabilizers=2, local_len=3),
    )
    passes = methods.get(name).reading(sizes, policy, 14)
    assert [(one.tokens, one.held[0], one.logits) for one in passes] == [(4, 0, 0), (4, 4, 0), (3, 5, 0), (3, 5, 1)]
    assert [one.seen for one in passes] == [0, 4, 8, 11]


@pytest.mark.parametrize("name", ["locret", "snapkv+pyramid", "h2o", "streaming+adaptive_heads"])
def test_planned_cache_bytes_are_those_of_a_real_read(name: str) -> None:
    plan = plan_of(methods=name)
    method, model = plan.methods[0], random_model(SHAPES["tiny"])
    scorer = scorers.get("random") if method.has_heads else method.make_scorer(None)
    cache = RetentionCache(model, scorer, method.policy(plan.policy))
    prefill(model, torch.randint(3, 900, (1, 300)), cache, new_tokens=plan.new_tokens)
    assert plan.planned_bytes(method, 300).cache == cache.memory().peak


def test_shapes_are_those_of_the_published_backbones() -> None:
    counted = {name: plan_of(shape=name, methods="full").sizes.weight_bytes for name in SHAPES}
    billions = {name: round(counted[name] / 2e9, 2) for name in SHAPES if PRESETS[name].gpu}
    assert billions == {"llama-3.1-8b": 8.03, "phi-3-mini-128k": 3.82, "qwen3-8b": 8.19}
    assert set(PRESETS) == set(SHAPES)
    llama = plan_of(shape="llama-3.1-8b", methods="full", lengths="128K")
    # The paper's numbers stand where the budget is the paper's, however many of it they protect.
    assert plan_of(shape="phi-3-mini-128k", methods="full", lengths="1K", **PAPER).policy.stabilizers == 2500
    assert (
        plan_of(shape="phi-3-mini-128k", methods="full", lengths="1K", **{**PAPER, "budget": 4000}).policy.stabilizers
        == 1000
    )
    # 32 layers of 8 heads of 128 in two bytes, keys and values.
    assert llama.planned_bytes(llama.methods[0], 131072).cache == 32 * 8 * 128 * 2 * 2 * (131072 + 32)


def test_the_embedded_backbone_has_the_tiny_shape() -> None:
    stored = json.loads((Path(__file__).parents[2] / "checkpoints" / "tiny" / "config.json").read_text())
    shape = SHAPES["tiny"].to_dict()
    sizes = [name for name in stored if name.endswith("_size") or name.startswith("num_") or name == "head_dim"]
    assert len(sizes) >= 7
    assert {name: shape[name] for name in sizes} == {name: stored[name] for name in sizes}


def test_a_dry_run_prints_the_resolved_plan_and_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    record = dry_run(capsys, "--lengths", "2K,1000,2048", "--budget", "512", "--methods", "full,locret")
    assert record["config"]["lengths"] == [1000, 2048]
    assert record["config"]["policy"]["budget"] == 512
    assert record["config"]["policy"]["stabilizers"] == 128  # a quarter of the smaller budget
    assert [(row["method"], row["length"]) for row in record["plan"]] == [
        ("full", 1000),
        ("locret", 1000),
        ("full", 2048),
        ("locret", 2048),
    ]
    full, locret = record["plan"][2:]
    assert full["planned_bytes"]["cache"] == 8 * 2 * 64 * 2 * 4 * (2048 + 32)
    assert locret["planned_bytes"]["cache"] < full["planned_bytes"]["cache"]
    # Eight fresh heads: q, k and v of 12 heads of 64 into 64, and on to 2.
    heads = 8 * (12 * 64 * 64 + 64 * 2) * 4
    assert locret["planned_bytes"]["weights"] == full["planned_bytes"]["weights"] + heads
    assert locret["flops"]["prefill"] < full["flops"]["prefill"]


def test_yaml_gives_lists_and_flags_override_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "bench.yaml"
    recipe.write_text(yaml.safe_dump({"lengths": [1000, "2K"], "methods": ["floor"], "repeats": 3}))
    config = dry_run(capsys, "--config", str(recipe), "--repeats", "4", "--quiet")["config"]
    assert (config["lengths"], config["methods"], config["repeats"]) == ([1000, 2048], ["floor"], 4)
    assert len(OPTION_CLASSES) == 2


def test_the_record_has_the_width_of_the_heads_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    heads = RetainingHeads.from_pretrained(shipped.find("checkpoints/tiny-heads"))
    line = ("--model", "checkpoints/tiny", "--lengths", "100", "--budget", "32", "--methods")
    record = dry_run(capsys, *line, "locret", "--heads", "checkpoints/tiny-heads")
    assert record["config"]["hidden_dim"] == heads.config.hidden_dim
    assert dry_run(capsys, *line, "locret", "--hidden-dim", "16")["config"]["hidden_dim"] == 16


def test_a_folder_is_measured_in_place_of_a_shape(capsys: pytest.CaptureFixture[str], backbone: Path) -> None:
    record = dry_run(capsys, "--model", str(backbone), "--lengths", "100", "--budget", "32")
    assert record["config"]["shape"] is None
    assert record["config"]["model"] == str(backbone)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("arguments", [{"shape": "llama-3.1-8b"}, {"device": "cuda"}])
def test_without_a_gpu_its_rows_are_planned_but_have_no_device(arguments: dict[str, str]) -> None:
    plan = plan_of(**arguments)
    assert plan.device is None
    assert plan.planned_bytes(plan.methods[0], 300).weights > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": "lama"}, "--shape lama is unknown; choose one of cpu-512, cpu-deep, tiny, llama-3.1-8b"),
        ({"methods": "locrte"}, '--methods "locrte" is unknown; did you mean locret'),
        ({"methods": "oracle"}, '--methods "oracle" is unknown'),
        ({"methods": "full+pyramid"}, '--methods "full+pyramid": full evicts nothing, so +pyramid means nothing; drop'),
        ({"methods": "snapkv+pyrmid"}, '--methods "snapkv+pyrmid": +pyrmid is unknown; did you mean +pyramid'),
        ({"methods": "snapkv+decremental"}, "method snapkv\\+decremental: decremental=True .* choose memory"),
        (
            {"methods": "full,streaming", "hidden_dim": 16},
            "--hidden-dim 16 is the width of fresh heads, but --methods h",
        ),
        ({"methods": "locret", "min_chunk": 16}, "--min-chunk 16 changes nothing without --decremental; add that, or"),
        ({"methods": "full,nacl+adaptive_heads"}, "method nacl\\+adaptive_heads: head_budgets=.* selects equally many"),
        ({"methods": " , "}, "--methods is empty; name at least one"),
        ({"lengths": "8k,many"}, "--lengths 8k,many is not a list of prompt lengths; write it like 8192"),
        ({"lengths": "0"}, "--lengths 0 is not a list of prompt lengths"),
        ({"repeats": 0}, "--repeats 0 is too small; give 1 or more"),
        ({"new_tokens": 10**12}, "--new-tokens 1000000000000 is too large; give at most 262144"),
        ({"threads": 10**12}, "--threads 1000000000000 is too large; give at most 4096"),
        ({"hidden_dim": 10**11}, "--hidden-dim 100000000000 is too large; give at most 1048576"),
        (
            {"lengths": "9" * 30},
            "--lengths 9{30} is read in .* chunks of 32, but at most 262,144 are measured; give\\b",
        ),
        (
            {"lengths": "1K,10000000000"},
            "--lengths 10000000000 is read in 312,500,000 chunks of 32, but at most 262,144",
        ),
        ({"lengths": 10**12, "chunk_size": 10**12}, "--lengths 1000000000000: the ids alone take 8,000,000,000,000"),
        ({"budget": 10**15}, "--methods floor at 300 tokens needs .* or lower --lengths, --budget, \\-\\-chunk-size"),
        ({"new_tokens": 0}, "--new-tokens 0 is too small; give 1 or more"),
        ({"budget": 0}, "budget=0 is too small; it must be 1 or more"),
        ({"stabilizers": 64}, "stabilizers=64 leaves no room for scored units in budget=64"),
        ({"dtype": "int8"}, "--dtype int8 is unknown; choose one of auto, bfloat16"),
        ({"device": "tpu"}, "--device tpu is unknown; choose auto, cpu, cuda"),
        ({"device": "mps"}, "--device mps: its memory cannot be measured; use cpu or cuda"),
        ({"memory_cap": "24 parsecs"}, "--memory-cap: 24 parsecs is not an amount of memory; write it like 2GiB"),
        ({"memory_cap": "1GiB", "device": "cpu"}, "--memory-cap bounds device memory, but this runs on the CPU"),
        ({"model": "/nowhere"}, "--model /nowhere and --shape tiny exclude each other; drop one of them"),
        ({"heads": "/nowhere", "methods": "full"}, "--heads /nowhere: no method of --methods uses them; add locret"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message if "\\" in message else message.replace("+", r"\+")) as raised:
        plan_of(**changes)
    assert "\n" not in str(raised.value)


def test_what_this_machine_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * 2**20))
    plan_of(methods="full", lengths="1K")
    with pytest.raises(ValueError, match="--methods full at 32,768 tokens needs 0.2 GiB of weights and cache, but"):
        plan_of(methods="locret,full", lengths="32K")


def test_heads_of_another_backbone_are_refused(heads: Path) -> None:
    with pytest.raises(ValueError, match="--heads .*heads: "):
        plan_of(heads=str(heads))


def test_a_folder_without_permission_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # a test may run as root, whom nothing stops
    with pytest.raises(OSError, match=f"--output {tmp_path}/record: {tmp_path} cannot be written; choose another"):
        command(["--output", f"{tmp_path}/record"])


def test_help_says_what_every_option_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        command(["--help"])
    out = capsys.readouterr().out
    assert leaving.value.code == 0
    assert "Prompt tokens, such as 8192,16384 or 8K,16K" in " ".join(out.split())
    assert out.count("--") >= 20


def test_a_bad_output_is_refused_before_anything_is_planned(tmp_path: Path) -> None:
    for name, message in (
        (tmp_path, "is a folder; name the files in it"),
        (tmp_path / "a" / "b", "there is no folder"),
    ):
        with pytest.raises(ValueError, match=message):
            command(["--shape", "nowhere", "--output", str(name)])


def test_a_prompt_of_one_token_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--shape", "tiny", "--repeats", "1", "--new-tokens", "2", "--threads", "1", "--json"]
    assert command([*numbers, "--methods", "full,floor,locret", "--lengths", "1"]) == 0
    assert [row["error"] for row in json.loads(capsys.readouterr().out)["results"]] == [None] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="the plan is the CPU's")
def test_without_options_the_plan_is_shown_and_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="nothing has been measured yet; give --shape cpu-512 to measure this"):
        command([])
    out = capsys.readouterr().out
    assert "Shape cpu-512. Budget 1,024, chunks of 512" in out
    assert out.count("| locret |") == 2


def test_an_earlier_record_stays_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    base = str(tmp_path / "llama-3.1")
    (tmp_path / "llama-3.1.md").write_text("earlier")
    with pytest.raises(
        ValueError, match=r"--output .*: there is .*llama-3.1.md; choose another name, or give --overwr"
    ):
        command(["--shape", "llama-3.1-8b", "--output", base])
    assert command(["--shape", "llama-3.1-8b", "--output", base, "--dry-run", "--quiet"]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["llama-3.1.md"]
    with BenchOutput(output=base, overwrite=True).held() as paths:
        assert paths["json"].name == "llama-3.1.json"
        with pytest.raises(ValueError, match="--output .*llama-3.1 is being written by process"):
            command(["--shape", "llama-3.1-8b", "--output", base, "--overwrite"])
        assert command(["--shape", "llama-3.1-8b", "--output", str(tmp_path / "other"), "--quiet"]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["llama-3.1.md", "other.json", "other.md"]
    assert (tmp_path / "llama-3.1.md").read_text() == "earlier"
