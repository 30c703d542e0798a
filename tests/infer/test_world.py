"""The suite of all tasks that are made here: what it asks, how it goes on, what its record and page say."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from locret import pictures
from locret.cli.command import run
from locret.data.tasks.published import suites
from locret.infer.evaluation import job, methods, presses, records, runner
from locret.infer.evaluation.command import command
from locret.infer.evaluation.eval_options import BudgetOptions, EvalOptions
from locret.infer.evaluation.records import SAMPLES
from locret.infer.evaluation.world import ordering, page, plan, record
from locret.infer.evaluation.world import run as suite

FEW = ("multikey", "passkey")


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str], backbone: Path, heads: Path) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command and returns exit code, output and errors."""

    def evaluate(*line: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            run(command, ["--model", str(backbone), "--heads", str(heads), *line])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return evaluate


def asked(chosen: dict[str, Any], **budgets: Any) -> plan.Asked:
    evaluation = EvalOptions(**{"suite": "world", "heads": "checkpoints/world-heads", **chosen})
    return plan.asked(evaluation, BudgetOptions(**budgets), {*chosen, *budgets})


# -- the plan -------------------------------------------------------------------------------------------------------


def test_every_method_is_asked_and_what_is_missing_is_said() -> None:
    units, missing = plan.units(asked({}))
    assert {unit.part.name for unit in units} == {"field", "field_aware", "budgets", "capacity"}
    capacity = next(unit for unit in units if unit.part.capacity)
    assert capacity.options["facts"] == list(plan.FACTS), "8,192 tokens hold all of them"
    assert {"presses", "presses_aware", "best_presses", "best_presses_aware", "press_budgets"} <= set(missing)
    asked_with = {unit.part.name: unit.options["budget"] for unit in units}
    assert asked_with["field"] == [plan.BUDGETS[0]]
    assert asked_with["field_aware"] == [plan.AWARE_BUDGET], "where the question of a text has room in every layer"
    assert asked_with["budgets"] == list(plan.BUDGETS)
    assert "--kvpress-python" in missing["presses"]
    field = [unit for unit in units if unit.part.name == "field"]
    (budgets,) = (unit for unit in units if unit.part.name == "budgets")
    assert [unit.name for unit in field] == [f"field-{seed}.{piece}" for seed in range(3) for piece in (1, 2, 3)]
    assert {"full", "locret", "random", "oracle", "oracle_agnostic", "snapkv:window=8"} <= set(
        budgets.options["methods"]
    )
    assert field[0].options["tasks"] == list(suites.get("world").tasks)
    for seed in range(3):
        shared = [unit.options["methods"] for unit in field if unit.seed == seed]
        assert sorted(sum(shared, [])) == sorted(budgets.options["methods"]), "each method in one unit"
        assert max(map(len, shared)) <= plan.MOST_METHODS
        assert [any(map(methods.knows_answers, names)) for names in shared] == [False, False, True]
    with_presses, nothing = plan.units(asked({"kvpress_python": "python"}))
    assert not {part.name for part in plan.PARTS} & set(nothing)
    unequal = f"{plan.UNEQUAL_LAYERS} in press_budgets"
    assert "one mask serves all layers" in nothing.pop(unequal)
    others = next(unit for unit in with_presses if unit.part.name == "press_budgets")
    assert others.options["methods"] == [name for name in presses.names() if name != plan.UNEQUAL_LAYERS]
    chosen, nothing_else = plan.units(asked({"kvpress_python": "python", "methods": plan.UNEQUAL_LAYERS}))
    assert unequal not in nothing_else
    assert chosen[-1].options["methods"] == [plan.UNEQUAL_LAYERS]
    (budgets,) = (unit for unit in with_presses if unit.part.name == "budgets")
    named = set(budgets.options["methods"])
    known = {plan.OPTIONS.get(name, name) for name in methods.names()}
    assert named | set(nothing) == known | {*plan.MORE, *plan.AT_PLACES}, "every method is asked, or said to be missing"
    unmeasured, missing = plan.units(asked({"heads": "checkpoints/tiny-heads"}))
    assert "--layer-shares" in missing[plan.SHARES]
    assert missing[f"{plan.SHARES}{plan.PLACED}"] == missing[plan.SHARES]
    for found, there in ((with_presses, True), (unmeasured, False)):
        having = {unit.part.name for unit in found if plan.SHARES in unit.options["methods"]}
        assert having == ({"field", "field_aware", "budgets", "capacity"} if there else set())
    headless, missing = plan.units(asked({"heads": None}))
    assert missing["locret"] == "needs trained heads; give --heads"
    assert "locret" not in headless[0].options["methods"]
    own = next(unit for unit in with_presses if unit.part.name == "presses")
    assert own.options["methods"] == presses.names()
    assert own.options["kvpress_python"] == "python"


def test_what_the_user_gives_changes_every_part() -> None:
    what = asked(
        {"methods": "full,random", "lengths": 256, "samples": 2, "questions": 3, "seed": 7, "protocol": "agnostic"},
        budget="40,20",
        local_len=4,
    )
    units, missing = plan.units(what)
    assert [unit.name for unit in units] == [f"field-{7 + n}" for n in range(3)] + [
        "budgets-7",
        "capacity-7",
    ]
    assert [unit.options["budget"] for unit in units] == [*([40] for _ in range(3)), [40, 20], [40]]
    for unit in units:
        assert unit.options["methods"] == ["full", "random"]
        assert unit.options.get("lengths", [unit.options.get("tokens")]) == [256]
        assert (unit.options["samples"], unit.options["local_len"]) == (2, 4)
    assert units[0].options["questions"] == 3
    assert units[-1].options["facts"] == [4, 8], "as many as the text has room for"
    aware = ("field_aware", "presses_aware", "best_presses_aware")
    assert {missing.pop(name) for name in aware} == {"left out by --parts or --protocol"}
    assert set(missing) == {"presses", "best_presses", "press_budgets"}
    _, missing = plan.units(asked({}, budget=40))
    assert "one budget" in missing["budgets"]


def test_seeds_are_those_of_the_field_and_the_most_of_any_part() -> None:
    def seeds(given: int | None) -> dict[str, list[int]]:
        found: dict[str, dict[int, None]] = {}
        for unit in plan.units(asked({"seeds": given, "seed": 4}))[0]:
            found.setdefault(unit.part.name, {})[unit.seed] = None
        return {name: list(own) for name, own in found.items()}

    one, many = seeds(1), seeds(5)
    assert set(one) == set(many) == set(seeds(None))
    assert all(used == [4] for used in one.values())
    assert many["field"] == [4, 5, 6, 7, 8]
    assert (many["field_aware"], many["budgets"]) == (many["field"], [4])
    assert {name: len(used) for name, used in seeds(3).items()} == {
        name: len(used) for name, used in seeds(None).items()
    }


def test_texts_too_short_for_a_curve_of_facts_leave_it_out_with_the_reason() -> None:
    units, missing = plan.units(asked({"lengths": "90"}))
    assert "capacity" not in {unit.part.name for unit in units}
    assert missing["capacity"] == "--lengths 90 holds no 4 facts of 15 tokens"


@pytest.mark.parametrize("compared", record.COMPARED.values())
def test_the_best_presses_read_the_texts_of_the_field(compared: tuple[str, str]) -> None:
    units, _ = plan.units(asked({"kvpress_python": "python"}))
    field, best = ([unit for unit in units if unit.part.name == name] for name in compared)
    shared = ("tasks", "lengths", "budget", "protocol", "samples", "questions", "seed")
    assert [[one.options.get(name) for name in shared] for one in field if one.piece == 1] == [
        [one.options.get(name) for name in shared] for one in best
    ]
    assert all(len(one.options["methods"]) == plan.BEST for one in best), "as many as will be chosen stand for them"
    assert {one.options["kvpress_python"] for one in best} == {"python"}
    assert field[0].options["samples"] * len({unit.seed for unit in field}) >= 20
    named, _ = plan.units(asked({"kvpress_python": "python", "methods": "locret,kvpress/knorm"}))
    assert {tuple(one.options["methods"]) for one in named if one.part.name == compared[1]} == {("kvpress/knorm",)}


def test_answers_are_written_side_by_side_where_that_changes_anything() -> None:
    def sizes(chosen: dict[str, Any], **budgets: Any) -> set[int | None]:
        units, _ = plan.units(asked({"kvpress_python": "python", **chosen}, **budgets))
        return {unit.options.get("batch_size") for unit in units if not unit.part.presses}

    assert sizes({}) == {plan.BATCH}
    assert sizes({"batch_size": 3}) == {3}
    assert sizes({}, decode_budget=512) == {1}
    assert sizes({"methods": "full"}) == {None}
    units, _ = plan.units(asked({"kvpress_python": "python"}))
    assert not any("batch_size" in unit.options for unit in units if unit.part.presses)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--suite", "world", "--parts", "feild"], "--parts feild is unknown; choose of field,"),
        (["--parts", "field"], "--parts field is for --suite world; add that, or drop it"),
        (["--suite", "world", "--seeds", "0"], "--seeds 0 asks nothing; give 1 or more, or leave it out"),
        (["--tasks", "passkey", "--seeds", "2"], "--seeds 2 is for --suite world; add that, or give one --seed"),
        (
            ["--suite", "world", "--parts", "best_presses", "--kvpress-python", sys.executable],
            "--parts best_presses asks the best of presses; add presses, or name them in --methods",
        ),
        (
            ["--suite", "world", "--parts", "presses"],
            "--parts presses leaves nothing to ask (presses: no --kvpress-python, so kvpress's presses are not asked);",
        ),
        (
            ["--suite", "world", "--parts", "field", "--protocol", "aware"],
            "--parts field leaves nothing to ask (field: --protocol aware leaves it out); name other parts or methods",
        ),
        (
            ["--suite", "world", "--parts", "field,budgets", "--methods", "kvpress/knorm"],
            "--parts field,budgets leaves nothing to ask (field: nothing of --methods); name other parts or methods",
        ),
        (["--suite", "world", "--chunk-size", "64,128"], "--chunk-size 64,128: --suite world reads every method with"),
        (["--suite", "world", "--parts", "field_aware", "--questions", "3"], "--questions 3 changes nothing, for"),
        (
            ["--suite", "world", "--parts", "field,presses", "--methods", "full", "--protect", "system"],
            "--protect system changes nothing, for no method here evicts as ours do; drop it",
        ),
        (
            ["--suite", "world", "--parts", "field_aware,presses", "--methods", "full,random", "--questions", "2"],
            "--questions 2 changes nothing, for field_aware ask one question of a text; drop it",
        ),
        (
            ["--suite", "world", "--parts", "capacity", "--lengths", "1024,2048"],
            "--lengths 1024,2048: --parts capacity has texts of one length; give one",
        ),
        (["--suite", "world", "--parts", "budgets", "--seeds", "2"], "--seeds 2 changes nothing, for budgets are"),
        (
            ["--suite", "world", "--parts", "capacity", "--methods", "random", "--template", "original"],
            "--template original changes nothing in --parts capacity, which makes texts of its own; drop it",
        ),
        (
            ["--suite", "world", "--parts", "capacity", "--methods", "random", "--lengths", "120"]
            + ["--protect", "tokens:0-60"],
            "--parts capacity: --facts 4: --protect, method random, text 0 of task world/near_keys: the protected",
        ),
        (
            ["--suite", "world", "--methods", "random", "--lengths", "30", "--parts", "field", "--budget", "16"],
            "--lengths 30 has no room for tasks with several questions of a text, which part field asks; raise",
        ),
        (
            ["--suite", "world", "--parts", "field", "--methods", "full", "--kvpress-python", sys.executable],
            "runs kvpress's presses, and field ask none; drop it, or add a part of theirs, such as presses",
        ),
        (
            ["--suite", "world", "--parts", "field_aware", "--methods", "random", "--budget", "24"],
            "; --suite world protects every question that is known: raise the first of --budget, or give --prot",
        ),
        (["--suite", "world", "--budget-share", "0.1"], "--suite world compares equal units; give --budget"),
        (
            ["--suite", "world", "--lengths", "16", "--parts", "field", "--methods", "h2o"],
            "cannot be made at 16 tokens",
        ),
        (["--suite", "world", "--kvpress-python", "no/python", "--parts", "presses"], "no/python is not a program"),
        (["--suite", "world", "--output", "."], "holds something else than --suite world"),
        (
            ["--tasks", "passkey", "--methods", "full", "--kvpress-python", "p"],
            "and there is none; add one, or drop it",
        ),
        (["--tasks", "passkey", "--methods", "kvpress/snapkv"], "needs an environment with kvpress; make one with"),
        (["--tasks", "passkey", "--methods", "kvpress/snapkw"], "did you mean kvpress/snapkv"),
        (["--tasks", "passkey", "--methods", "kvpress/knorm+pyramid"], "runs as kvpress ships it; drop what follows"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(
    evaluate: Any, line: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("something").touch()
    output = [] if "--output" in line else ["--output", "out"]
    code, _, err = evaluate(*line, *output)
    assert code == 2
    assert said in err
    assert not Path("out").exists()


@pytest.mark.skipif(find_spec("kvpress") is not None, reason="kvpress is installed beside this package")
def test_a_python_without_kvpress_is_named_before_anything_is_written(evaluate: Any, tmp_path: Path) -> None:
    line = ("--tasks", "passkey", "--lengths", "256", "--samples", "1", "--methods", "kvpress/knorm", "--budget", "24")
    output = tmp_path / "out"
    code, _, err = evaluate(*line, "--kvpress-python", sys.executable, "--output", str(output))
    assert code == 2
    assert f"--kvpress-python {sys.executable} cannot run kvpress on this backbone: ModuleNotFoundError" in err
    assert not output.exists()


# -- a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(suites.get("world"), tasks=FEW)
    monkeypatch.setattr(plan.suites, "get", lambda _: few)


def small(backbone: Path, output: Path) -> list[str]:
    return [
        *("--model", str(backbone), "--dtype", "float32", "--suite", "world", "--methods", "full,random,oracle"),
        *("--parts", "budgets,field_aware", "--protocol", "agnostic", "--lengths", "256", "--budget", "24,16"),
        *("--samples", "2", "--questions", "2", "--figures", "none", "--quiet", "--output", str(output)),
    ]


def stripped(output: Path) -> dict[str, Any]:
    """Return a record without its times."""
    found = json.loads((output / record.RECORD).read_text())
    seconds = found["columns"].index("seconds")
    return {**found, "seconds": {}, "rows": [row[:seconds] for row in found["rows"]]}


def test_a_run_that_goes_on_ends_with_the_record_of_one_that_was_not_interrupted(
    few_tasks: None, backbone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "world"
    command([*small(backbone, output), "--dry-run"])
    planned = json.loads(capsys.readouterr().out)
    assert not output.exists()
    command(small(backbone, output))
    whole = stripped(output)
    assert planned["answers"] == sum(part["answers"] for part in whole["parts"])
    rows = record.table(json.loads((output / record.RECORD).read_text()))
    assert {row["task"] for row in rows} == set(FEW)
    assert {(row["method"], row["budget"]) for row in rows} == {
        ("full", None),
        *((method, budget) for method in ("random", "oracle") for budget in (24, 16)),
    }
    assert all(row["texts"] == 2 for row in rows)
    assert capsys.readouterr().out == (output / page.PAGE).read_text()
    with pytest.raises(ValueError, match="--resume goes on, --overwrite starts again"):
        command(small(backbone, output))
    samples = output / "budgets-0" / SAMPLES
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[: len(lines) // 2]))
    command([*small(backbone, output), "--resume"])
    assert stripped(output) == whole
    assert len(samples.read_text().splitlines()) == len(lines)
    # Parts that the folder holds and the line does not name would be lost to the record.
    (output / "field-0").mkdir()
    with pytest.raises(ValueError, match="holds field-0 too, which would be lost to its record; name their parts"):
        command([*small(backbone, output), "--resume"])
    (output / "field-0").rename(output / "field--1")
    with pytest.raises(ValueError, match="holds field--1 too, which would be lost to its record"):
        command([*small(backbone, output), "--resume"])
    (output / "field--1").rmdir()
    for broken in ("{", '{"budgets-0": NaN}', '{"budgets-0": -5}', '{"budgets-0": "x"}', "[]"):
        (output / suite.TIMES).write_text(broken)
        with pytest.raises(ValueError, match="is broken; write {} into it to go on without times, or --overwrite"):
            command([*small(backbone, output), "--resume"])
    (output / suite.TIMES).write_text("{}")
    command([*small(backbone, output), "--resume"])
    assert stripped(output) == whole


def test_what_overwrite_clears_is_the_suites_own_with_any_seed(tmp_path: Path) -> None:
    ours = ("field-0", "field--1", "field_aware-0.2", "best_presses_aware-2", "capacity--3")
    for name in (*ours, "field-x", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.log").touch()
    suite._clear(Mock(output=tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"field-x", "field-x.log", "notes", "notes.log"}


def test_a_run_goes_on_where_a_task_could_not_be_made_and_starts_again_over_anything(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = replace(suites.get("world"), tasks=("variable_tracking", "lookalikes/keys"))
    monkeypatch.setattr(plan.suites, "get", lambda _: few)
    output = tmp_path / "world"
    line = [*("--model", str(backbone), "--dtype", "float32", "--suite", "world", "--methods", "random"), "--parts"]
    line += ["field", "--lengths", "200", "--budget", "24", "--samples", "1", "--seeds", "1", "--figures", "none"]
    line += ["--quiet", "--output", str(output)]
    command(line)
    whole = stripped(output)
    assert "lookalikes/keys @ 200" in whole["left_out"]
    (output / "field-0" / SAMPLES).write_text("")
    command([*line, "--resume"])
    assert stripped(output) == whole
    for path in (output / "field-0").iterdir():
        path.unlink()
    (output / "field-0").rmdir()
    (output / "field-0").touch()
    (output / "budgets-3").mkdir()
    command([*line, "--overwrite"])
    assert stripped(output) == whole
    assert not (output / "budgets-3").exists()
    capsys.readouterr()
    command([*line[:-2], "--lengths", "200,1024", "--dry-run"])
    planned = json.loads(capsys.readouterr().out)
    assert planned["tasks"] == ["variable_tracking"], "a task is asked at every length or at none"
    assert list(planned["left_out"]) == ["lookalikes/keys @ 200"]
    assert planned["units"][0]["texts"] == 2
    both = [*line[:-2], "--lengths", "200,1024", "--max-new-tokens", "2", "--output", str(tmp_path / "both")]
    command(both)
    command([*both, "--resume"])
    capsys.readouterr()
    answers = records.read(tmp_path / "both" / "field-0" / SAMPLES)[0]
    assert {(one["task"], one["tokens"]) for one in answers} == {
        ("variable_tracking", 200),
        ("variable_tracking", 1024),
    }
    command([*line[:-2], "--dry-run", "--threads", "1000"])
    planned = json.loads(capsys.readouterr().out)
    assert planned["workers"] == 1, "a unit runs on one core"
    assert planned["estimate"].endswith(" on 1 core")


def test_system_messages_are_protected_where_there_are_any(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(suites.get("world"), tasks=("world/secret", "multikey"))
    monkeypatch.setattr(plan.suites, "get", lambda _: few)
    line = [*("--model", str(backbone), "--dtype", "float32", "--suite", "world", "--methods", "random"), "--parts"]
    line += ["field,capacity", "--lengths", "600", "--budget", "150", "--samples", "1", "--seeds", "1"]
    line += ["--protect", "system", "--figures", "none", "--quiet", "--output", str(tmp_path / "world")]
    command(line)
    found = json.loads((tmp_path / "world" / record.RECORD).read_text())
    assert found["parts"][0]["answers"] == 3
    assert found["capacity"]["rows"], "its texts have none"
    answers = records.read(tmp_path / "world" / "field-0" / SAMPLES)[0]
    assert all(("protected" in one) == (one["task"] == "world/secret") for one in answers)


def test_a_task_that_one_seed_cannot_make_is_asked_with_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = replace(suites.get("world"), tasks=("world/qa2", "multikey"))
    monkeypatch.setattr(plan.suites, "get", lambda _: few)
    line = ["--suite", "world", "--model", "checkpoints/tiny", "--methods", "full", "--parts", "field,budgets"]
    command([*line, "--budget", "32,16", "--samples", "3", "--lengths", "275", "--dry-run"])
    planned = json.loads(capsys.readouterr().out)
    assert list(planned["left_out"]) == ["world/qa2 @ 275"]
    assert planned["tasks"] == ["multikey"]
    assert [unit["texts"] for unit in planned["units"]] == [3, 3, 3, 3]


@pytest.mark.parametrize("part", ["field", "field_aware"])
def test_methods_are_shared_out_over_units_without_a_change_of_the_record(
    part: str,
    few_tasks: None,
    backbone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = [*("--model", str(backbone), "--dtype", "float32", "--suite", "world", "--parts", part)]
    line += ["--methods", "oracle,full,random,h2o", "--lengths", "256", "--budget", "40", "--samples", "1"]
    line += ["--seeds", "2", "--figures", "none", "--quiet", "--output"]
    command([*line, str(tmp_path / "whole")])
    monkeypatch.setattr(plan, "MOST_METHODS", 2)
    settled, protected = Mock(side_effect=runner.settled), Mock(side_effect=job.Job._protected)
    monkeypatch.setattr(runner, "settled", settled)
    monkeypatch.setattr(job.Job, "_protected", lambda *given: protected(*given))
    command([*line, str(tmp_path / "shared")])
    assert settled.call_count == 2, "texts are made once for each seed"
    assert protected.call_count == (0 if part == "field" else 2 * len(FEW)), "and looked through once"
    whole, shared = (stripped(tmp_path / name) for name in ("whole", "shared"))
    assert [one["parts"][0].pop("units") for one in (whole, shared)] == [
        [f"{part}-0", f"{part}-1"],
        [f"{part}-0.1", f"{part}-0.2", f"{part}-1.1", f"{part}-1.2"],
    ]
    assert sorted(shared.pop("rows")) == sorted(whole.pop("rows"))
    assert shared["order"] == whole["order"]
    only = whole["config"].keys() ^ shared["config"].keys()
    assert only <= {"methods", "runs"}, only
    assert {**shared, "config": None} == {**whole, "config": None}
    with pytest.raises(
        ValueError, match=rf"holds {part}-0\.1, .*, {part}-1\.2, and the methods that are asked now are"
    ):
        command([*line, str(tmp_path / "shared"), "--resume", "--methods", "random"])
    # What some methods alone hear, and what brings a method of its own, is asked in one unit.
    for own in (["--decode-budget", "120"], ["--methods", "full,random,h2o+adaptive_heads", "--head-floor", "0.5"]):
        capsys.readouterr()
        command([*line[:-1], *own, "--dry-run"])
        assert [unit["unit"] for unit in json.loads(capsys.readouterr().out)["units"]] == [f"{part}-0", f"{part}-1"]


def test_a_unit_whose_methods_are_chosen_late_has_the_texts_that_were_made(
    monkeypatch: pytest.MonkeyPatch, backbone: Path
) -> None:
    few = replace(suites.get("world"), tasks=("multikey", "passkey"))
    monkeypatch.setattr(plan.suites, "get", lambda _: few)
    worlds: list[suite.World] = []
    monkeypatch.setattr(suite, "described", lambda world: worlds.append(world) or {})
    line = [*("--suite", "world", "--model", str(backbone), "--dtype", "float32", "--parts", "field,budgets")]
    line += ["--methods", "random", "--lengths", "150,600", "--budget", "32,16", "--samples", "1", "--dry-run"]
    command(line)
    (world,) = worlds
    assert world.out == {"multikey"}, "and no text of passkey has several questions"
    unit = replace(world.units[0], seed=7)
    made = world.job(unit)
    world.leave_out(made)
    assert [case.axes for case in made.cases] == [case.axes for case in world.jobs[world.units[0].name].cases]


def test_without_matplotlib_the_page_has_no_pictures_and_an_interrupt_says_how_to_go_on(
    few_tasks: None,
    backbone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluate: Callable[..., tuple[int, str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, there = tmp_path / "world", pictures.importlib.util.find_spec
    line = [*small(backbone, output)[2:], "--methods", "full,random", "--figures", "all"]
    line.remove("--quiet")
    with monkeypatch.context() as patch:
        patch.setattr(suite._Runner, "_collect", Mock(side_effect=KeyboardInterrupt))
        code, _, err = evaluate(*line)
    assert code == 130
    assert f"the answers are in {output}; the same command with --resume goes on" in err
    monkeypatch.setattr(
        pictures.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else there(name)
    )
    code, out, err = evaluate(*line, "--resume")
    assert (code, err.count("needs matplotlib")) == (0, 1), err
    assert "everything but the pictures is written" in err
    assert "## Accuracy against bytes" in out
    assert "![" not in out
    assert not list(output.glob("*.png"))
    assert page.main([str(output / record.RECORD), str(tmp_path / "docs")]) == 0
    assert capsys.readouterr().err.count("needs matplotlib") == 1
    assert {path.name for path in (tmp_path / "docs").iterdir()} == {page.PAGE, record.RECORD}


def test_units_are_ended_where_interrupts_are_ignored_and_their_time_is_kept(tmp_path: Path) -> None:
    (tmp_path / suite.TIMES).write_text('{"field-0": 2.0}')
    runner = suite._Runner(SimpleNamespace(output=tmp_path))
    deaf = "import signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        runner.running["field-0"] = process, time.perf_counter() - 5, 0
        (tmp_path / "field-0").mkdir()
        (tmp_path / "field-0" / SAMPLES).write_text("{}\n")
        runner._end_all()
        assert process.returncode == -signal.SIGTERM
    assert not runner.running
    took = json.loads((tmp_path / suite.TIMES).read_text())["field-0"]
    assert took >= 7
    runner.running["field-1"] = process, time.perf_counter() - 40, 0
    runner._save()
    assert json.loads((tmp_path / suite.TIMES).read_text())["field-1"] >= 40, "a run that is killed leaves its times"
    runner.running.clear()
    runner._took("field-0", time.perf_counter() - 5, 1)  # only looked whether something was missing
    assert json.loads((tmp_path / suite.TIMES).read_text())["field-0"] == took


# -- order, chance and the top --------------------------------------------------------------------------------------


def test_kendalls_tau_counts_pairs_and_ties() -> None:
    assert ordering.tau_b([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert ordering.tau_b([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    # Of six pairs five agree and one is turned round.
    assert ordering.tau_b([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    # scipy.stats.kendalltau([1, 2, 2, 3], [1, 3, 2, 4]) = 5 / sqrt(5 * 6)
    assert ordering.tau_b([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(5 / 30**0.5)
    assert ordering.tau_b([1, 1, 1], [1, 2, 3]) is None


def scores(means: dict[str, float], seeds: int = 3, wobble: float = 3.0) -> dict[str, dict[Any, float]]:
    """Return texts of which some are harder for every method, and each a little for one of them."""
    return {
        name: {
            (seed, "task", 256, n): mean + 5 * n + wobble * ((7 * n + 3 * i + seed) % 5 - 2)
            for seed in range(seeds)
            for n in range(6)
        }
        for i, (name, mean) in enumerate(means.items())
    }


def test_an_order_that_every_seed_repeats_is_stable_and_one_of_chance_is_not() -> None:
    found = ordering.stability(scores({"best": 80, "middle": 50, "last": 20}))
    assert found["tau"] == [1, 1, 1]
    assert found["lowest"] == 1
    assert (found["pairs"], found["told_apart"], found["swapped"]) == (3, 3, [])
    equal = scores({"one": 50, "other": 50})
    assert not ordering.told_apart(equal, "one", "other")
    assert ordering.stability(equal)["told_apart"] == 0
    turned = scores({"one": 60, "other": 40})
    turned["one"] |= {text: value - 45 for text, value in turned["one"].items() if text[0] == 2}
    assert ordering.stability(turned)["lowest"] == -1


def test_ceilings_that_tie_are_not_counted_to_the_order_of_the_methods() -> None:
    tied = scores({"best": 80, "last": 20})
    for name, late in (("one", 0), ("other", 1)):  # the one is ahead with the first seed, the other with the second
        tied[name] = {text: 90.0 + (text[0] == late) for text in tied["best"]}
    found = ordering.stability(tied, ["one", "other"])
    assert found["tau"] == [1, 1, 1]
    assert found["lowest"] == 1
    assert found["tau_with_ceilings"] == [pytest.approx(4 / 6, abs=1e-4), *([pytest.approx(5 / 30**0.5, abs=1e-4)] * 2)]
    assert found == {**ordering.stability(tied), "tau": found["tau"], "lowest": 1}


def test_a_method_above_the_oracle_is_named() -> None:
    found = scores({"oracle": 70, "better": 90, "worse": 50, "as good": 70})
    assert ordering.above(found, "oracle", ["better", "worse", "as good"]) == ["better"]
    top = record.top(scores({"oracle_agnostic": 70, "full": 100, "h2o": 50, "oracle": 95, "quest": 99}), "agnostic")
    assert top == {"oracle": "oracle_agnostic", "above": []}
    both = scores({"oracle_agnostic": 70, "oracle_agnostic+original": 90, "locret+original": 85, "h2o+original": 95})
    assert record.top(both, "agnostic") == {"oracle": "oracle_agnostic+original", "above": ["h2o+original"]}
    assert record.top(both, "aware") == {"oracle": "oracle", "above": None}
    layers = scores({"oracle_agnostic": 70, "oracle_agnostic+shares": 90, "locret+shares": 85, "h2o": 50})
    assert record.top(layers, "agnostic") == {"oracle": "oracle_agnostic+shares", "above": []}


# -- the record -----------------------------------------------------------------------------------------------------


def answer(method: str, score: float, text: int = 0, question: int = 0, **more: Any) -> dict[str, Any]:
    return {
        **{"task": "multikey", "tokens": 256, "method": method, "budget": 64, "index": text, "question": question},
        **{"seed": 0, "score": score, "kept_units": 72, "cache_bytes": 1000, "peak_bytes": 2000},
        **{"prefill_seconds": 1.0, "decode_seconds": 0.5, **more},
    }


def test_questions_of_one_text_stand_or_fall_together() -> None:
    own = [
        answer("h2o", score, text, question)
        for text, both in enumerate([(1, 0), (1, 1), (0, 0)])
        for question, score in enumerate(both)
    ]
    (row,) = record.rows("field", own)
    found = dict(zip(record.COLUMNS, row, strict=True))
    assert (found["texts"], found["questions"], found["score"]) == (3, 6, 50)
    assert found["error"] == pytest.approx(50 / 3**0.5, abs=1e-3)
    assert (found["units"], found["bytes"], found["host_bytes"], found["seconds"]) == (72, 1000, 0, 1.5)


def test_the_best_keep_the_budget_in_its_bytes_and_know_no_answer() -> None:
    ranks = ["full", "oracle", "quest", "locret", "kvpress/kvzip", "kvpress/knorm", "h2o", "tova", "key_norm"]
    own = [answer(name, 1 - place / 10, text) for place, name in enumerate(ranks) for text in range(2)]
    own = [{**one, "cache_bytes": 1000 * (10 if "kvzip" in one["method"] else 1)} for one in own]
    assert record.best(own, 3) == ["kvpress/knorm", "h2o", "tova"]


def test_heads_are_compared_with_the_best_of_the_others_on_the_same_texts() -> None:
    own = [answer("locret", 1.0, text) for text in range(4)]
    own += [answer("h2o", float(text > 0), text) for text in range(4)] + [
        answer("tova", 0.0, text) for text in range(4)
    ]
    more = ("full", "oracle", "oracle_agnostic", "dms:path=some/model")  # gates of others are trained as well
    own += [answer(name, 1.0, text) for name in more for text in range(4)]
    (found,) = record.ahead(own)
    assert (found["rival"], found["difference"], found["texts"]) == ("h2o", 25, 4)
    assert found["error"] == pytest.approx(25, abs=1e-3)


def test_chance_is_the_score_on_another_texts_question_and_texts_are_what_errors_count(tmp_path: Path) -> None:
    unit = next(unit for unit in plan.units(asked({}))[0] if unit.name == "field-0.1")
    places = [(text, question) for text in range(4) for question in range(2)]
    counts = dict.fromkeys(("prompt_tokens", "generated_tokens", "peak_units", "chunk_size", "stabilizers"), 5)
    more = {**counts, "version": 1, "targets": [], "protocol": "agnostic"}
    found = [
        answer("random", float(text < 2), text, question, prediction=f"{text}", **more) for text, question in places
    ]
    folder = tmp_path / unit.name
    folder.mkdir()
    (folder / SAMPLES).write_text("".join(f"{json.dumps(one)}\n" for one in found))
    # The task is the run's own, options included: this one takes the text before for right.
    task = SimpleNamespace(name="multikey", score=lambda said, sample: float(int(said) == (sample - 1) % 4))
    cases = [
        SimpleNamespace(task=task, tokens=256, index=text, question=question, sample=lambda _, text=text: text)
        for text, question in places
    ]
    chance = record.chance_of([(unit, SimpleNamespace(cases=cases))], tmp_path, None)
    assert chance == {"agnostic": {"random": 50, "chance": 100, "error": 28.868, "kept": 1440.0, "answers": 8}}


def test_bytes_are_compared_on_the_questions_that_everybody_was_asked() -> None:
    field = [answer("locret", 1.0, text, question) for text in range(3) for question in range(4)]
    other = [{**one, "seed": 1} for one in field]
    budgets = [answer("locret", 0.0, text, question) for text in range(2) for question in range(2)]
    presses = [answer("kvpress/keydiff", 0.5, text, question) for text in range(2) for question in range(1, 4)]
    others = [{**one, "prompt_sha256": "of another text"} for one in presses]
    every_part = {"field": [*field, *other], "budgets": budgets, "presses": presses, "field_aware": other}
    found = record.of_frontier(every_part)
    assert [(one["method"], one["score"], one["index"], one["question"]) for one in found] == [
        *(("locret", 0.0, text, 1) for text in range(2)),
        *(("kvpress/keydiff", 0.5, text, 1) for text in range(2)),
    ], "the field's texts are others than those of the budgets"
    assert record.of_frontier({**every_part, "press_budgets": others}) == [], "nor are questions of other texts common"
    assert len(record.of_frontier({"budgets": budgets})) == len(budgets)
    assert record.of_frontier({"field": field, "presses": presses}) == [], "one budget is no frontier"


def drawn(rows: list[list[Any]], **more: Any) -> dict[str, Any]:
    part = {"name": "field", "protocol": "agnostic", "texts": 1, "questions": 4, "seeds": 1, "units": ["field-0"]}
    return {
        **{"config": {"model": "some/backbone", "heads": "some/heads", "tasks": {"multikey": {}}}, "missing": {}},
        **{"versions": {"locret": "1", "torch": "2", "transformers": "5"}, "seconds": {"field-0": 90.0}},
        **{
            "parts": [{**part, "methods": 2, "budgets": [64], "lengths": [256], "answers": 8}],
            "left_out": {},
            "ahead": [],
        },
        **{"columns": list(record.COLUMNS), "rows": rows, "order": {}, "ahead": [], **more},
    }


def row(part: str, task: str, method: str, score: float, budget: int | None = 64, size: int = 4096) -> list[Any]:
    return [part, task, 256, method, budget, 2, 4, score, 1.5, 72, size, 0, 2 * size, 0.25]


PARTS_OF_TWO = (("field", 32), ("field_aware", 64))


def test_the_page_says_what_the_record_holds(tmp_path: Path) -> None:
    rows = [row("field", task, name, score) for task in FEW for name, score in (("h2o", 12.5), ("locret", 87.5))]
    rows += [["frontier", *one[1:]] for one in rows]
    rows += [row("frontier", task, "locret", 50.0, 16, 1024) for task in FEW]
    rows += [row("field", FEW[0], "half", 99.0)]
    found = drawn(rows, missing={"presses": "no --kvpress-python, so kvpress's presses are not asked"})
    text = page.text(found)
    table = [line for line in text.splitlines() if line.startswith(("| locret", "| h2o", "| half"))]
    assert table[0].startswith("| locret | 87.5 ± 1.1 | 72 | 4 KiB | 8 KiB | 0.25 | 4 |")
    assert table[1].startswith("| h2o | 12.5 ± 1.1 |"), "the best first"
    assert not any(line.startswith("| half") for line in table), "means of other tasks are not compared"
    assert "| locret | 16 | 1 KiB | 50.0 ± 1.1 |" in text, "fewer bytes, and nobody is as good with them"
    assert "* presses: no --kvpress-python" in text
    assert text.count("| locret | 16 |") == 2, "by bytes kept and by those of the peak"
    record.save(found, tmp_path / "world.json")
    assert json.loads((tmp_path / "world.json").read_text()) == found


def test_what_the_full_cache_does_not_answer_is_left_out_of_the_headline_and_named() -> None:
    scores = {"full": (100.0, 20.0), "locret": (90.0, 0.0), "random": (30.0, 10.0)}
    rows = [row("field", task, name, own[n]) for name, own in scores.items() for n, task in enumerate(FEW[:2])]
    text = page.text(drawn(rows))
    assert "Means leave out tasks of which the full cache answers less than 95 %, where" in text
    assert f"can: `{FEW[1]}` (20). `all tasks` and the maps have them." in text
    lines = [line for line in text.splitlines() if line.startswith(("| method", "| locret", "| random"))]
    assert "| agnostic, all tasks |" in lines[0]
    assert lines[1].startswith("| locret | 90.0 ± 1.5 | 45.0 |")
    assert lines[2].startswith("| random | 30.0 ± 1.5 | 20.0 |")
    assert records_of(drawn(rows), every_task=True) == {"full": 60.0, "locret": 45.0, "random": 20.0}
    none = [row("field", task, name, 10.0) for name in ("full", "locret") for task in FEW]
    assert record.unanswerable(drawn(none)) == {}, "a headline of no task says nothing"
    assert "Means leave out" not in page.text(drawn(none))
    assert record.unanswerable(drawn([row("field", task, "locret", 10.0) for task in FEW])) == {}, "no full cache"


def records_of(found: dict[str, Any], **options: Any) -> dict[str, float]:
    return {name: one["score"] for (name, _), one in record.means(found, ["field"], **options).items()}


def test_a_table_of_two_budgets_says_which_is_whose() -> None:
    rows = [row(part, task, "locret", 80.0, units) for part, units in PARTS_OF_TWO for task in FEW]
    parts = [
        {"name": part, "protocol": protocol, "texts": 1, "questions": None, "seeds": 1, "units": [], "methods": 1}
        | {"budgets": [units, 256], "lengths": [256], "answers": 8}
        for (part, units), protocol in zip(PARTS_OF_TWO, ("agnostic", "aware"), strict=True)
    ]
    text = page.text(drawn(rows, parts=parts))
    assert "256 tokens, budget 32 (agnostic) and 64 (aware) per KV head" in text
    assert "| method | agnostic | aware, budget 64 | units / KV head |" in text
    assert "Units, bytes, seconds and texts are agnostic." in text
    frontier = {**parts[0], "name": "budgets"}
    only = page.text(drawn(rows[len(FEW) :], parts=[frontier, parts[1]]))
    assert "256 tokens, budget 64 per KV head" in only, "what the table does not have is not named"


def test_heads_are_counted_on_answerable_tasks_and_held_against_the_oracle() -> None:
    tasks = ["multikey", "number", "world/count"]
    scores = {"full": (100, 95, 10), "oracle_agnostic": (90, 80, 10), "locret": (90, 60, 0), "h2o": (0, 60, 10)}
    field = [row("field", task, name, own[n]) for name, own in scores.items() for n, task in enumerate(tasks)]
    press = [row("best_presses", task, "kvpress/knorm", 20.0) for task in tasks]
    ahead = [
        {"protocol": "agnostic", "method": "locret", "task": task, "tokens": 256, "texts": 20}
        | {"rival": "h2o", "difference": gap, "error": 2.0}
        for task, gap in zip(tasks, (90.0, 0.0, -10.0), strict=True)
    ]
    text = page.text(drawn([*field, *press], ahead=ahead))
    assert "`oracle_agnostic`, `locret` turn their keys to the ranks that units have" in text
    assert "| task | full | oracle_agnostic | locret | h2o | kvpress/knorm | locret − best other |" in text
    first = [row("presses", task, name, 90.0) for task in tasks for name in ("kvpress/knorm", "kvpress/tova")]
    both = page.text(drawn([*field, *first, *press], ahead=ahead))
    assert "| kvpress/knorm | 20.0 ± 1.1 | 20.0 | " in both.split("## ")[1], "the part with more texts counts"
    assert "| kvpress/tova | 90.0 ± 1.1 | 90.0 | " in both.split("## ")[1]
    assert "on 1 of 2 tasks that the means of the table have, and as far behind it on 0." in text
    assert "`locret` answers 88 % as much; on 1 of 2 at least 95 %, less on `number` (0.75)." in text
    aware = [row("field_aware", task, name, own[n]) for name, own in scores.items() for n, task in enumerate(tasks)]
    known = page.text(
        drawn([*field, *aware], ahead=[{**one, "protocol": "aware", "difference": -50.0} for one in ahead])
    )
    assert "### aware, 64 units: 2 texts per cell" in known
    assert "### agnostic" not in known
    assert "on 0 of 2 tasks that the means of the table have, and as far behind it on 2." in known
    assert "## Is it ahead?" not in page.text(drawn(field))
    placed = {"oracle_agnostic+original": (100, 80, 10), f"{plan.SHARES}+original": (90, 80, 0)}
    rows = [row("field", task, name, own[n]) for name, own in placed.items() for n, task in enumerate(tasks)]
    own = [{**one, "method": f"{plan.SHARES}+original"} for one in ahead]
    text = page.text(drawn([*field, *rows, *press], ahead=own))
    assert "Of what `oracle_agnostic+original` answers of these tasks, `locret+shares+original` answers 94 % as" in text
    ranked = next(line for line in text.splitlines() if "turn their keys to the ranks" in line)
    assert "original" not in ranked, "they have positions of the text"
    shared = {"oracle_agnostic+shares": (100, 90, 10), plan.SHARES: (95, 90, 0)}
    rows = [row("field", task, name, own[n]) for name, own in shared.items() for n, task in enumerate(tasks)]
    own = [{**one, "method": name} for name in ("locret", plan.SHARES) for one in ahead]
    text = page.text(drawn([*field, *rows, *press], ahead=own))
    assert "Of what `oracle_agnostic` answers of these tasks, `locret+shares` answers 109 % as much" in text
    assert "Of what `oracle_agnostic+shares` answers of these tasks, `locret+shares` answers 97 % as much" in text
    assert "Of what `oracle_agnostic+shares` answers of these tasks, `locret` " not in text, "its layers are uniform"


@pytest.mark.skipif(not (Path(__file__).parents[2] / "docs/world.json").is_file(), reason="no record of the suite yet")
def test_the_page_of_docs_is_drawn_from_its_record() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert (docs / page.PAGE).read_text() == page.text(json.loads((docs / record.RECORD).read_text()))


def test_what_is_kept_leaves_out_the_room_for_a_chunk_but_not_what_is_masked() -> None:
    found = drawn([row("field", FEW[0], "full", 100.0, None, 72 * 10)])
    each = record.unit_bytes(found)
    assert each == 10
    shape = {"units": 20, "bytes": 5000, "host_bytes": 7}
    assert record.kept_bytes({"method": "h2o", **shape}, each) == 207
    assert record.kept_bytes({"method": "h2o", **shape, "bytes": 150}, each) == 157
    assert record.kept_bytes({"method": "kvpress/adakv_snapkv", **shape}, each) == 5007
    assert record.kept_bytes({"method": "h2o", **shape}, None) == 5007


def test_every_press_is_a_method_with_a_reason_or_a_description() -> None:
    named = {presses.find(plan.presses.MethodSpec(name)).name for name in presses.names()}
    assert named == set(presses.names())
    assert all(presses.LEFT_OUT.values())


@pytest.mark.parametrize(
    ("holds", "message"),
    [
        ("{}", "is no whole record of a suite; give the world.json"),
        ("[1", "is not valid JSON"),
        (None, "--resume goes on"),
    ],
)
def test_a_page_of_something_else_is_refused_and_nothing_written(
    holds: str | None, message: str, tmp_path: Path
) -> None:
    given, folder = tmp_path / "given.json", tmp_path / "docs"
    if holds is not None:
        given.write_text(holds)
    with pytest.raises((ValueError, OSError), match=message):
        page.main([str(given), str(folder)])
    with pytest.raises(SystemExit) as end:
        page.main([str(given)])
    assert end.value.code == 2
    assert not folder.exists()


@pytest.mark.skipif(not (Path(__file__).parents[2] / "docs/world.json").is_file(), reason="no record of the suite yet")
@pytest.mark.parametrize(
    "change",
    [
        lambda whole: whole.pop("parts"),
        lambda whole: whole.pop("seconds"),
        lambda whole: whole.update(rows=5),
        lambda whole: whole["rows"][0].pop(),
        lambda whole: whole["rows"][0].__setitem__(1, None),
        lambda whole: whole["rows"][0].__setitem__(7, float("nan")),
        lambda whole: whole.update(capacity={"x": 1}),
        lambda whole: [whole.pop(name) for name in list(whole) if name not in ("suite", "rows")],
    ],
)
def test_a_page_of_a_damaged_record_is_refused_and_nothing_written(change: Any, tmp_path: Path) -> None:
    whole = json.loads((Path(__file__).parents[2] / "docs" / record.RECORD).read_text())
    change(whole)
    (tmp_path / "given.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="given.json is no whole record of a suite; give the world.json"):
        page.main([str(tmp_path / "given.json"), str(tmp_path / "docs")])
    assert not (tmp_path / "docs").exists()


def test_a_page_is_not_written_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "page").touch()
    with pytest.raises(ValueError, match="page is a file; name a folder for the page"):
        page.main([str(Path(__file__).parents[2] / "docs" / record.RECORD), str(tmp_path / "page")])
