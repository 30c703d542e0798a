"""Comparing variants: recipes are resolved and checked first, runs go on where they stopped, and the table adds up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from locret import RetainingHeads
from locret.train import compare
from locret.train.compare import REFERENCES, CompareOptions, check, command, table

RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "train").glob("compare*.yaml"))


def options(**changes: Any) -> CompareOptions:
    given = {
        "model": "somewhere",
        "output": "out",
        "common": {"steps": 4, "warmup_steps": 1, "hidden_dim": 8, "dataset": "short"},
        "rows": {"short": {"rows": 4, "tokens": 128, "tasks": "passkey"}},
        "variants": {"paper": {}, "second": {"init_from": "paper", "label_floor": -8, "steps": 2}},
    }
    return CompareOptions(**{**given, **changes})


def cell(task: str, tokens: int, budget: int | None, score: float, method: str = "locret") -> dict[str, Any]:
    return {"task": task, "tokens": tokens, "budget": budget, "score": score, "method": method}


def test_names_of_rows_and_variants_become_paths_and_a_variant_overrides_what_is_common() -> None:
    assert options().recipe("second") == {
        "model": "somewhere",
        "steps": 2,
        "warmup_steps": 1,
        "hidden_dim": 8,
        "dataset": "out/rows/short.jsonl",
        "init_from": "out/paper",
        "label_floor": -8,
    }
    assert options(only="second").chosen() == ["second"]
    assert not options(only="second").with_references()
    assert options(only="references").with_references()
    assert options(only="references").chosen() == []
    assert options().with_references()


def test_the_table_has_means_the_best_variant_and_the_references() -> None:
    results = {
        "paper": {"cells": [cell("a", 1024, 32, 20), cell("b", 1024, 32, 40), cell("a", 8192, 64, 90)]},
        "mine": {"cells": [cell("a", 1024, 32, 50), cell("b", 1024, 32, 70)]},
        REFERENCES: {
            "cells": [
                cell("a", 1024, None, 100, "full"),
                cell("b", 1024, None, 98, "full"),
                cell("a", 1024, 32, 60, "oracle"),
                cell("b", 1024, 32, 90, "oracle"),
            ]
        },
    }
    by_place, places, by_task, tasks = table(results, ["paper", "mine", "unfinished"]).split("\n\n")
    assert by_place == "Mean score of the tasks by prompt tokens @ budget:"
    assert by_task == "Mean score of these cells by task:"
    assert places.splitlines() == [
        "| heads | 1,024 @ 32 | 8,192 @ 64 | mean |",
        "| --- | ---: | ---: | ---: |",
        "| paper | 30.0 |  |  |",  # task b is missing at 8,192
        "| mine | **60.0** |  |  |",
        "| full | 99.0 |  |  |",
        "| oracle | 75.0 |  |  |",
    ]
    assert tasks.splitlines()[0] == "| heads | a | b |"
    assert tasks.splitlines()[2:4] == ["| paper | **55.0** |  |", "| mine |  |  |"]


def test_a_variant_has_a_line_per_method() -> None:
    cells = [cell("a", 1024, 32, 20), cell("a", 1024, 32, 30, "locret+shares")]
    lines = table({"paper": {"cells": cells}}, ["paper"], ["locret", "locret+shares"]).splitlines()
    assert lines[4:6] == ["| paper | 20.0 | 20.0 |", "| paper, locret+shares | **30.0** | **30.0** |"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": {}}, "variants is empty; name at least one"),
        ({"variants": {"a/b": {}}}, 'the name "a/b" cannot be a folder here'),
        ({"variants": {"rows": {}}}, 'the name "rows" cannot be a folder here'),
        ({"only": "papr"}, "--only papr: no such variant; choose from paper, second, references"),
        (
            {"variants": {"a": {}, "b": {"init_from": "a"}}, "only": "b", "output": "no/such"},
            "--only b: b goes on from a, which no/such lacks; add it to --only",
        ),
        ({"variants": {"a": {"init_from": "b"}, "b": {}}}, 'variant "a" goes on from "b", which comes after it'),
        ({"variants": {"a": {"alpha": -1}}}, "variants.a: --alpha -1.0 is negative"),
        ({"variants": {"a": {"alhpa": 1}}}, "variants.a: --alhpa is unknown; did you mean --alpha"),
        ({"methods": []}, "methods is empty or names one twice"),
        ({"methods": ["locret", "snapkv"]}, "methods has snapkv, which reads no heads of a variant"),
        ({"methods": ["locret", "locret"]}, "methods is empty or names one twice"),
        ({"methods": ["locret+shares"]}, r"variants.paper has no layer_shares, which locret\+shares in methods needs"),
        ({"rows": {"short": {"rows": 0}}}, "rows.short: --rows 0 leaves nothing to write"),
        ({"rows": {"short": {"row": 5}}}, "rows.short: .*unexpected keyword argument 'row'"),
        ({"rows": {"short": {"output": "a"}}}, "rows.short has output, which this command sets itself; leave it out"),
        ({"variants": {"a": {"model": "other"}}}, "variants.a has model, which this command sets itself"),
        ({"common": {"dry-run": True}}, "common has dry-run, which this command sets itself"),
        ({"evaluation": {"heads": "some"}}, "evaluation has heads, which this command sets itself"),
        (
            {"evaluation": {"protocol": "aware,agnostic"}},
            "evaluation has several values of protocol, and the table has one score of a task, length and budget",
        ),
        ({"evaluation": {"chunk_size": [64, 128]}}, "evaluation has several values of chunk_size"),
    ],
)
def test_a_bad_recipe_is_refused_before_anything_is_trained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(options(**changes))


def test_a_recipe_with_an_evaluation_passes() -> None:
    check(options(evaluation={"tasks": ["passkey"], "lengths": "1K,2K", "budget": [64, 32], "protocol": "agnostic"}))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
@pytest.mark.slow
def test_shipped_comparisons_are_right(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([f"--config={recipe}", f"--output={tmp_path / 'out'}", "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_variants_are_trained_once_and_other_options_in_the_same_folder_are_refused(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(model=str(paths[0]), output=str(tmp_path / "out"))
    for name in given.chosen():
        compare._train(given, name)
    second = RetainingHeads.from_pretrained(tmp_path / "out" / "second").config
    assert second.label is not None
    assert second.label["floor"] == -8
    assert len((tmp_path / "out" / "rows" / "short.jsonl").read_text().splitlines()) == 4
    before = (tmp_path / "out" / "second" / "model.safetensors").stat().st_mtime_ns
    compare._train(given, "second")
    assert "second: already trained" in capsys.readouterr().err
    assert (tmp_path / "out" / "second" / "model.safetensors").stat().st_mtime_ns == before
    other = options(model=str(paths[0]), output=str(tmp_path / "out"), variants={"paper": {"steps": 5}})
    with pytest.raises(ValueError, match=r'paper.yaml says that variant "paper" had other options; choose another'):
        compare._train(other, "paper")
    failing = options(model="no/such/model", output=str(tmp_path / "new"), rows={}, common={"dataset": str(paths[1])})
    with pytest.raises(ChildProcessError, match=r"paper: locret.train.command ended with exit code 2, see above"):
        compare._train(failing, "paper")


@pytest.mark.slow
def test_one_command_trains_evaluates_and_writes_the_table(
    paths: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = {
        "model": str(paths[0]),
        "rows": {"short": {"rows": 2, "tokens": 128, "tasks": "passkey"}},
        "common": {"steps": 2, "warmup_steps": 1, "hidden_dim": 8, "dataset": "short"},
        "variants": {"paper": {}, "other": {"objective": "ranking"}},
        "references": ["full", "oracle"],
        "evaluation": {
            "tasks": "passkey",
            "lengths": 128,
            "budget": [16, 32],
            "chunk_size": 16,
            "local_len": 8,
            "samples": 1,
            "figures": "none",
        },
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    assert command([f"--config={tmp_path / 'recipe.yaml'}", f"--output={tmp_path / 'out'}"]) == 0
    written = (tmp_path / "out" / "compare.md").read_text()
    assert capfd.readouterr().out == written
    _, places, _, tasks = written.split("\n\n")
    assert places.startswith("| heads | 128 @ 16 | 128 @ 32 | mean |")
    for lines in (places.splitlines(), tasks.splitlines()):
        assert [line.split(" |")[0] for line in lines[:6]] == [
            "| heads",
            "| ---",
            "| paper",
            "| other",
            "| full",
            "| oracle",
        ]


@pytest.mark.slow
def test_an_evaluation_that_cannot_be_is_refused_before_anything_is_trained_and_may_be_mended(
    paths: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = {
        "model": str(paths[0]),
        "common": {"dataset": str(paths[1]), "steps": 1, "warmup_steps": 0, "hidden_dim": 8},
        "variants": {"paper": {}},
        "references": ["full"],
    }
    for evaluation, message in (({"taks": "passkey"}, "taks"), ({"tasks": "passkey", "lengths": 9}, "passkey")):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "evaluation": evaluation}))
        with pytest.raises(ChildProcessError, match=f"{REFERENCES}: .* ended with exit code 2"):
            command([f"--config={tmp_path / 'recipe.yaml'}", f"--output={tmp_path / 'out'}"])
        assert message in capfd.readouterr().err
        assert not (tmp_path / "out" / "paper").exists()


def test_the_table_is_written_from_what_is_finished(tmp_path: Path) -> None:
    results = tmp_path / "evaluation" / "paper" / "results.json"
    results.parent.mkdir(parents=True)
    results.write_text(json.dumps({"cells": [cell("a", 1024, 32, 20)]}))
    compare.write_table(options(output=str(tmp_path)))
    assert "| paper | **20.0** | **20.0** |" in (tmp_path / "compare.md").read_text()
    assert json.loads((tmp_path / "compare.json").read_text())["recipes"]["second"]["label_floor"] == -8
