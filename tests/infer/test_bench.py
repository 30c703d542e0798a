"""`locret-bench`: a plan without weights, runs that do what it says, seconds in rounds, records that never guess."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from locret.infer.speed import measure
from locret.infer.speed.bench_options import BenchOptions
from locret.infer.speed.command import command
from locret.infer.speed.measure import Bench, Measurements, Sample
from locret.infer.speed.plan import BenchPlan, make_plan
from locret.infer.speed.report import make_record, page
from locret.infer.speed.ways import Held
from tests.tiny_gguf import write_gguf

LENGTH, NEW = 150, 5
NUMBERS = {"budget": 32, "chunk_size": 24, "stabilizers": 8, "local_len": 7, "new_tokens": NEW}
FLAGS = [part for name, value in NUMBERS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")


def plan_of(methods: str, **changes: Any) -> BenchPlan:
    given = {"shape": "tiny", "lengths": str(LENGTH), "methods": methods, "device": "cpu", **NUMBERS, **changes}
    given = {name: value for name, value in given.items() if value is not None}
    return make_plan(BenchOptions(**given), set(given))


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.MATMUL_SIZE, "cpu", 32)
    monkeypatch.setitem(measure.COPY_BYTES, "cpu", 2**20)


@pytest.mark.parametrize("name", ["full", "floor", "locret", "streaming+pyramid", "snapkv+linear"])
def test_forward_passes_and_bytes_are_those_of_the_plan(name: str) -> None:
    plan = plan_of(name)
    bench, (method,) = Bench(plan), plan.methods
    passes: list[tuple[int, tuple[int, ...]]] = []

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        layers = getattr(kwargs["past_key_values"], "layers", [])
        held = tuple(getattr(layer, "fill", None) or layer.get_seq_length() for layer in layers)
        passes.append((kwargs["input_ids"].shape[1], held or (0,) * 5))

    bench.model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    cache, logits = method.read(bench, bench.prompt)
    *planned, after = method.passes(plan.backbone, plan.policy, LENGTH)
    assert passes == [(one.tokens, one.held) for one in planned if one.tokens]
    passes.clear()
    assert method.write(bench, cache, bench.prompt, logits.argmax(-1, keepdim=True)).shape == (1, NEW)
    # A cache of ours takes the prompt's last token back and feeds it again.
    again = name not in ("full", "floor")
    assert passes == [(1, tuple(units - again + step for units in after.held)) for step in range(NEW)]
    assert plan.planned_bytes(method, LENGTH)["cache"] == method.held(cache).cache


@pytest.mark.parametrize("name", ["quest:page=4", "omnikv", "infllm", "full+xattention:block=16", "locret+recall+2bit"])
def test_methods_of_other_papers_are_planned_and_counted_alike(name: str) -> None:
    own = dict.fromkeys(("stabilizers", "local_len"), None if name[0] in "qoif" else 8)
    plan = plan_of(name, **own, **({"chunk_size": None, "budget": 64} if name == "infllm" else {}))
    sample, planned = Bench(plan).run(plan.methods[0], LENGTH), plan.planned_bytes(plan.methods[0], LENGTH)
    assert sample.written[:2] == (planned["cache"], planned["host"])
    assert (planned["host"] > 0) == (sample.written.moved > 0) == (name[0] in "qoi" or "+recall" in name)


@pytest.mark.engine
def test_llamacpp_reads_and_writes_what_full_attention_does(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    write_gguf("checkpoints/tiny", tmp_path / "tiny.gguf")
    plan = plan_of("full,llamacpp", shape=None, model=str(tmp_path / "tiny.gguf"), dtype="float32")
    bench, written = Bench(plan), []
    for method in plan.methods:
        cache, logits = method.read(bench, bench.prompt)
        written.append(method.write(bench, cache, bench.prompt, logits.argmax(-1, keepdim=True)).tolist())
    assert written[0] == written[1]


def test_shapes_are_those_of_the_published_backbones() -> None:
    plans = {name: plan_of("full", shape=name, dtype="bfloat16") for name in ("llama-3.1-8b", "phi-3-mini-128k")}
    assert [round(plan.weight_bytes / 2e9, 2) for plan in plans.values()] == [8.03, 3.82]
    own = dict.fromkeys(("budget", "chunk_size", "stabilizers", "local_len", "device"))
    llama = plan_of("full", shape="llama-3.1-8b", lengths="128K", dtype="bfloat16", **own)
    assert (llama.policy.budget, llama.policy.stabilizers) == (16384, 2500)
    # 32 layers of 8 heads of 128 in two bytes, keys and values.
    assert llama.planned_bytes(llama.methods[0], 131072)["cache"] == 32 * 8 * 128 * 2 * 2 * (131072 + NEW)
    # Two operations per weight and token at the least.
    assert 1 < llama.work(llama.methods[0], 131072)["prefill"] / (2 * 7.5e9 * 131072) < 4


def test_a_dry_run_prints_the_resolved_plan_and_its_bytes(
    capsys: pytest.CaptureFixture[str], backbone: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "bench.yaml"
    recipe.write_text("{lengths: [1000, 2K], methods: [full, 'snapkv:window=8+pyramid', locret], repeats: 3}")
    assert command(["--config", str(recipe), "--repeats", "4", "--budget", "512", "--dry-run"]) == 0
    record = json.loads(capsys.readouterr().out)
    config = record["config"]
    assert (config["lengths"], config["repeats"], config["policy"]["budget"]) == ([1000, 2048], 4, 512)
    assert config["policy"]["stabilizers"] == 128  # a quarter of the smaller budget
    names = ["full", "snapkv:window=8+pyramid", "locret"]
    assert [(row["method"], row["length"]) for row in record["plan"]] == [
        (n, size) for size in (1000, 2048) for n in names
    ]
    full, _, locret = record["plan"][3:]
    assert full["planned_bytes"]["cache"] == 8 * 2 * 64 * 2 * 4 * (2048 + 32) > locret["planned_bytes"]["cache"]
    # Eight fresh heads: q, k and v of 12 heads of 64 into 64, and on to 2.
    heads = 8 * (12 * 64 * 64 + 64 * 2) * 4
    assert locret["planned_bytes"]["weights"] == full["planned_bytes"]["weights"] + heads
    assert command(["--model", str(backbone), "--lengths", "100", "--budget", "32", "--dry-run"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["shape"], config["model"]) == (None, str(backbone))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": "full+pyramid"}, '--methods "full+pyramid": full evicts nothing, so +pyramid means nothing; drop'),
        ({"methods": "locret", "min_chunk": 16}, "--min-chunk 16 changes nothing without --decremental; add that, or"),
        ({"lengths": "8k,many"}, "--lengths 8k,many is not possible (many is not a whole number of 1 to 134,217,728"),
        ({"repeats": 0}, "repeats=0 is too small; it must be 1 or more"),
        ({"lengths": "100000000"}, "is read in 4,166,667 chunks of 24, but at most 262,144 are measured; give"),
        ({"budget": 10**15, "methods": "floor"}, "--methods floor at 150 tokens needs"),
        ({"heads": "checkpoints/tiny-heads"}, "--heads checkpoints/tiny-heads: no method of --methods uses them"),
        ({"methods": "llamacpp"}, "--methods llamacpp reads a GGUF file on this machine, which --model is to name"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        plan_of(**{"methods": "full", **changes})
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("small_machine")
def test_the_command_measures_and_writes_a_whole_record(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, seen, real = tmp_path / "tiny-0.1", [], Bench.run
    monkeypatch.setattr(Bench, "run", lambda self, *run: (seen.append((run[0].name, run[1])), real(self, *run))[1])
    flags = ["--shape", "tiny", "--lengths", "1,60", "--repeats", "2", *FLAGS, "--output", str(base)]
    assert command([*flags, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "tiny-0.1.json").read_text())
    cases = [(name, length) for length in (1, 60) for name in ("full", "floor", "locret")]
    assert seen == cases * 3  # once to warm up
    assert [(row["method"], row["length"]) for row in record["results"]] == cases
    assert all(row["error"] is None and row["prefill"]["tokens_per_second"]["p50"] > 0 for row in record["results"])
    assert "`locret-bench --shape tiny" in (tmp_path / "tiny-0.1.md").read_text()
    for line, sentence in (
        (flags, "there is .*tiny-0.1.json; choose another name, or give --overwrite"),
        (["--shape", "tiny", "--output", str(tmp_path)], "names no files in a folder that can be written"),
        (["--shape", "tiny", "--model", "m"], "--shape tiny and --model m exclude each other; drop one of them"),
        ([], "a measurement takes minutes, so it is to be asked for; give --shape cpu-512"),
    ):
        with pytest.raises(ValueError, match=sentence):
            command(line)


def test_shares_and_ratios_are_taken_within_a_round_and_memory_that_ran_out_has_no_numbers() -> None:
    plan = plan_of("full,floor,locret", lengths="100")
    seconds = {"full": (6.0, 4.0), "locret": (3.0, 2.0)}
    samples = {
        (name, 100): [Sample(a * times, b * times, Held(20), Held(30), None) for times in (1, 2)]
        for name, (a, b) in seconds.items()
    }
    record = make_record(plan, Measurements([(4e9, 2e9), (8e9, 4e9)], samples))
    full, floor, locret = record["results"]
    assert locret["prefill"]["times_full"] == {"p20": 0.5, "p50": 0.5, "p80": 0.5}
    assert locret["prefill"]["times_floor"] is None
    work = plan.work(plan.methods[2], 100)
    shares = [work["prefill"] / 3.0 / 4e9, work["prefill"] / 6.0 / 8e9]
    assert locret["prefill"]["share"]["p50"] == pytest.approx(sum(shares) / 2, rel=1e-5)
    assert locret["bytes"]["cache"] == 30
    assert (floor["error"], floor["prefill"], floor["bytes"]) == ("out of memory", None, None)
    assert "* floor, 100 tokens: out of memory." in page(record, "locret-bench --shape tiny")


@pytest.mark.usefixtures("small_machine")
def test_a_method_that_runs_out_of_memory_is_left_out_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("floor,full", repeats=2)

    def full_up(*_args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(type(plan.methods[0]), "read", full_up)
    found = measure.measure(plan, quiet=True)
    assert set(found.samples) == {("full", LENGTH)}
    assert len(found.samples["full", LENGTH]) == len(found.rates) == 2
    monkeypatch.setattr(measure, "Bench", full_up)
    with pytest.raises(OSError, match="cpu is out of memory before a prompt is read; take a smaller --shape"):
        measure.measure(plan, quiet=True)


@WITHOUT_GPU
def test_without_a_gpu_its_rows_are_unknown_and_never_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--shape", "llama-3.1-8b", "--methods", "full,locret", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "locret-bench: warning: there is no CUDA device here: all that would be measured is unknown\n"
    record = json.loads(out)
    assert record["machine"]["device"] is record["machine"]["matmul_flops_per_second"] is None
    for row in record["results"]:
        assert row["error"] == "no CUDA device here"
        assert row["prefill"] is row["decode"] is row["bytes"] is None
        assert row["planned_bytes"]["weights"] > 16e9
