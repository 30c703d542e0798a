"""The bytes of a second tier in cells, and in the table of a suite."""

from __future__ import annotations

from typing import Any

from locret.data.tasks.published import suites
from locret.infer.evaluation import summary, tables


def cell(
    method: str, budget: int | None, score: float, fast: int, host: int | None = None, **more: Any
) -> dict[str, Any]:
    slow = {} if host is None else {"host_bytes": host, "moved_bytes": 64}
    return {
        "task": "passkey", "tokens": 2048, "method": method, "budget": budget, "chunk_size": 64, "stabilizers": 8,
        "score": score, "standard_error": 3.0, "cache_bytes": fast, "peak_bytes": fast, **slow, **more,
    }  # fmt: skip


def test_cells_hold_the_second_tier_where_every_answer_has_one() -> None:
    record = {
        "task": "passkey", "tokens": 64, "method": "locret", "budget": 8, "score": 1.0, "prompt_tokens": 64,
        "kept_units": 8, "peak_units": 9, "cache_bytes": 10, "peak_bytes": 12, "generated_tokens": 2,
        "prefill_seconds": 1.0, "decode_seconds": 1.0, "host_bytes": 20, "moved_bytes": 4,
    }  # fmt: skip
    (one,) = summary.cells([record, {**record, "host_bytes": 30}])
    assert (one["host_bytes"], one["moved_bytes"]) == (30, 4)
    assert "| host |" in tables.table([one])
    (plain,) = summary.cells(
        [{name: value for name, value in record.items() if name not in ("host_bytes", "moved_bytes")}]
    )
    assert "host_bytes" not in plain
    assert "| host |" not in tables.table([plain])


def suite_lines(name: str, cells: list[dict[str, Any]], published: bool) -> list[str]:
    suite = suites.get(name)
    facts = {"prompt": {"limit_from": "protocol"}, "generation": {"shortened": False}, "data": []}
    settings = {"model": "tiny", "dtype": "float32", "tasks": dict.fromkeys(suite.tasks, facts)}
    return tables.suite_table(tables.suite_results(suite, cells, {}, settings, published)).splitlines()


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
