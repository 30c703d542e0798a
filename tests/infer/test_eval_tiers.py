"""Score against bytes: the frontier by hand, the table's marks, and a run that writes both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from locret.data.tasks.published import suites
from locret.infer.evaluation import suite_table, summary, tiers, tiers_figure
from locret.infer.evaluation.command import command as evaluate


def cell(
    method: str, budget: int | None, score: float, fast: int, host: int | None = None, **more: Any
) -> dict[str, Any]:
    slow = {} if host is None else {"host_bytes": host, "moved_bytes": 64}
    return {
        "task": "passkey", "tokens": 2048, "method": method, "budget": budget, "chunk_size": 64, "stabilizers": 8,
        "score": score, "standard_error": 3.0, "cache_bytes": fast, "peak_bytes": fast, **slow, **more,
    }  # fmt: skip


CELLS = [
    cell("full", None, 100.0, 4096),
    cell("locret", 32, 10.0, 256),
    cell("locret", 128, 60.0, 1024),
    cell("locret+recall", 32, 95.0, 256, 2048),
    cell("random", 128, 0.0, 1024),
]


def found(tier: str, cells: list[dict[str, Any]] = CELLS) -> list[tuple[str, str]]:
    return [(one.method, one.amount) for one in tiers.frontier(tiers.by_task(cells, 2048)["passkey"], tier)]


def test_the_frontier_is_what_no_method_beats_with_as_many_bytes_or_fewer() -> None:
    assert found("fast") == [("locret+recall", "32"), ("full", "all")]
    assert found("total") == [("locret", "32"), ("locret", "128"), ("locret+recall", "32"), ("full", "all")]


def test_equals_are_both_on_the_frontier_and_a_better_score_at_equal_bytes_leaves_one() -> None:
    assert len(found("fast", [cell("a", 32, 50.0, 256), cell("b", 32, 50.0, 256)])) == 2
    assert found("fast", [cell("a", 32, 50.0, 256), cell("b", 32, 51.0, 256)]) == [("b", "32")]


def test_the_mean_of_all_tasks_is_of_those_that_all_were_asked_and_its_error_that_of_samples_drawn_apart() -> None:
    other = [{**one, "task": "number", "score": one["score"] / 2, "standard_error": 4.0} for one in CELLS[:3]]
    held = tiers.by_task([*CELLS, *other], 2048)
    assert list(held) == ["passkey", "number", "mean"]
    assert [(one.method, one.score, one.error) for one in held["mean"]] == [
        ("full", 75.0, 2.5), ("locret", 7.5, 2.5), ("locret", 45.0, 2.5),
    ]  # fmt: skip


def test_the_table_has_the_bytes_of_each_tier_and_marks_the_frontiers() -> None:
    lines = tiers.table(CELLS).splitlines()
    assert lines[2] == "| method | budget | fast | second tier | total | moved / answer | passkey |"
    assert lines[4] == "| full | all | 4 KiB | 0 B | 4 KiB | 0 B | 100.0 ± 3.0 ft |"
    assert lines[5] == "| locret | 32 | 256 B | 0 B | 256 B | 0 B | 10.0 ± 3.0 t |"
    assert lines[7] == "| locret+recall | 32 | 256 B | 2 KiB | 2.25 KiB | 64 B | 95.0 ± 3.0 ft |"
    assert lines[8] == "| random | 128 | 1 KiB | 0 B | 1 KiB | 0 B | 0.0 ± 3.0 |"


def test_results_hold_every_frontier() -> None:
    fast, total = tiers.results(CELLS)
    assert (fast["task"], fast["tokens"], fast["tier"], total["tier"]) == ("passkey", 2048, "fast", "total")
    assert fast["methods"][0] == {"method": "locret+recall", "budget": "32", "bytes": 256, "score": 95.0}
    assert [one["bytes"] for one in total["methods"]] == [256, 1024, 2304, 4096]


def test_a_picture_is_drawn_for_every_length(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [*CELLS, *({**one, "tokens": 8192} for one in CELLS), *({**one, "task": "number"} for one in CELLS)]
    names = tiers_figure.write(tmp_path, cells)
    assert names == ["score_by_bytes_2048.png", "score_by_bytes_8192.png"]
    assert all((tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for name in names)


def test_cells_hold_the_second_tier_where_every_answer_has_one() -> None:
    record = {
        "task": "passkey", "tokens": 64, "method": "locret", "budget": 8, "score": 1.0, "prompt_tokens": 64,
        "kept_units": 8, "peak_units": 9, "cache_bytes": 10, "peak_bytes": 12, "generated_tokens": 2,
        "prefill_seconds": 1.0, "decode_seconds": 1.0, "host_bytes": 20, "moved_bytes": 4,
    }  # fmt: skip
    (one,) = summary.cells([record, {**record, "host_bytes": 30}])
    assert (one["host_bytes"], one["moved_bytes"]) == (30, 4)
    assert "| host |" in summary.table([one])
    (plain,) = summary.cells(
        [{name: value for name, value in record.items() if name not in ("host_bytes", "moved_bytes")}]
    )
    assert "host_bytes" not in plain
    assert "| host |" not in summary.table([plain])


def suite_lines(name: str, cells: list[dict[str, Any]], published: bool) -> list[str]:
    suite = suites.get(name)
    facts = {"prompt": {"limit_from": "protocol"}, "generation": {"shortened": False}, "data": []}
    settings = {"model": "tiny", "dtype": "float32", "tasks": dict.fromkeys(suite.tasks, facts)}
    return suite_table.table(suite_table.results(suite, cells, {}, settings, published)).splitlines()


def test_a_suite_shows_the_memory_of_its_tiers_beside_that_of_its_papers() -> None:
    ours = [cell("locret+recall", 32, 40.0, 2**20, 3 * 2**20, task="longbench/qasper")]
    lines = suite_lines("longbench-en", ours, published=True)
    assert lines[2].endswith("| average | fast | second tier |")
    assert lines[4].endswith("| 1 MiB | 3 MiB |")
    memory = {line.split(",")[0].removeprefix("| published: "): line.split(" | ")[-2:] for line in lines[5:10]}
    assert memory["InfLLM"] == ["20.03 GB", "8.95 GB |"]
    assert memory["full"] == ["", " |"]
    assert "Memory: ours are the bytes of the cache, counted; published are whole processes, with weights." in lines
    assert (
        "second tier" not in suite_lines("longbench-en", [cell("h2o", 32, 1.0, 9, task="longbench/qasper")], False)[2]
    )


def test_a_row_without_a_printed_average_shows_that_of_its_cells() -> None:
    lines = suite_lines("multistep-omnikv", [cell("full", None, 40.0, 9, task="multistep/2stage")], published=True)
    (row,) = (line for line in lines if "published: OmniKV, 40 %" in line)
    assert row.endswith("| none (its cells give 48.33) |")
    (row,) = (line for line in lines if "published: full, at once" in line)
    assert row.endswith("| none |")


@pytest.mark.slow
def test_an_evaluation_sets_a_second_tier_against_eviction_with_as_many_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, recalling = tmp_path / "out", "locret+recall:host_budget=64,recall=4"
    line = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads", "--tasks", "lookalikes/keys"]
    line += ["--task-options", "{'lookalikes/keys': {'keys': 4}}", "--lengths", "300", "--samples", "1", "--quiet"]
    line += ["--budget", "16,80", "--chunk-size", "64", "--figures", "none", "--output", str(out)]
    assert evaluate([*line, "--methods", f"full,locret,{recalling}", "--tiers", "true"]) == 0
    page, found = capsys.readouterr().out, json.loads((out / "results.json").read_text())
    held = {(one.method, one.amount): one for one in tiers.by_task(found["cells"], 300)["lookalikes/keys"]}
    # 16 units and 64 in the second tier take what 80 units take, but for the room that rotates 64 keys of a layer.
    assert held[recalling, "16"].fast == held["locret", "16"].fast
    assert held[recalling, "16"].total + 64 * 4 * 32 * 4 == held["locret", "80"].total
    assert {entry["tier"] for entry in found["frontier"]} == {"fast", "total"}
    assert "Bytes held and scores at 300 tokens:" in page
    assert page.split("Bytes held")[1] in (out / "results.md").read_text()


def test_cells_that_the_budget_does_not_tell_apart_say_what_does() -> None:
    cells = [
        cell("locret", 32, 20.0, 500_000, chunk_size=64),
        cell("locret", 32, 90.0, 3_000_000, chunk_size=512),
        cell("random", 32, 5.0, 500_000, stabilizers=8),
        cell("random", 64, 6.0, 600_000, stabilizers=16),
    ]
    lines = [line for line in tiers.table(cells).splitlines() if line.startswith("| ")][2:]
    named = [line.split(" | ")[0].removeprefix("| ") for line in lines]
    assert named == ["locret, chunk size 64", "locret, chunk size 512", "random", "random"]
    assert ["20.0" in line for line in lines] == [True, False, False, False]
    assert ["90.0" in line for line in lines] == [False, True, False, False]
