"""The capacity curve: what was recalled, what was possible, and a run that goes on where it stopped."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eval_runs import TIMES

from locret.cli.command import run
from locret.data.text.embedded_tokenizer import build_tokenizer
from locret.infer.evaluation import capacity, runner
from locret.infer.evaluation.capacity import Value, areas, command, points, value_of

SMALL = ("--task", "multikey", "--tokens", 300, "--samples", 2, "--budget", 16, "--stabilizers", 2, "--local-len", 4)
SMALL = (*SMALL, "--chunk-size", 64, "--methods", "full,random", "--threads", 1, "--questions", 2)


@pytest.fixture
def measure(capsys: pytest.CaptureFixture[str], backbone: Path) -> Callable[..., Any]:
    """Return a function that runs the command on a random backbone and gives exit code, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            run(command, ["--model", str(backbone), *map(str, (*SMALL, *arguments))])
        out, err = capsys.readouterr()
        return int(leaving.value.code or 0), out, err

    return call


def record(facts: int, scores: list[list[float]], **changes: Any) -> list[dict[str, Any]]:
    same = {"method": "locret", "budget": 64, "chunk_size": 64, "stabilizers": 8, "protocol": "agnostic"}
    return [
        {**same, "kept_units": 40, "index": text, "question": question, "score": score, **changes}
        for text, own in enumerate(scores)
        for question, score in enumerate(own)
    ]


def test_what_is_possible_is_what_fits_the_kept_units() -> None:
    found = [
        row
        for facts, scores in ((4, [[1, 1], [1, 1]]), (16, [[1, 0.5], [0.5, 0]]))
        for row in points(facts, record(facts, scores), Value(tokens=5, bits=20), unit_bits=1000)
    ]
    assert [row["recalled"] for row in found] == [4, 8]
    assert [row["possible"] for row in found] == [4, 8]  # 40 units, 5 of them for a value
    assert [row["bits_possible"] for row in found] == [4, 16]  # 40,000 bits would hold 2,000
    assert found[1]["recalled_per_unit"] == 0.2
    assert found[1]["standard_error"] == pytest.approx(16 * 0.25)  # of two texts, 0.75 and 0.25 of their facts
    (area,) = areas(found)
    assert area["area"] == 1
    assert area["standard_error"] == pytest.approx(0.5 * 4 / 8)


def test_the_area_is_over_the_logarithm_of_the_facts() -> None:
    row = {**record(1, [[1]])[0], "budget_share": None, "possible": 1, "standard_error": None}
    found = areas([{**row, "facts": facts, "ratio": ratio} for facts, ratio in ((4, 1.0), (8, 0.5), (32, 0.0))])
    # One step of 0.75 on average, and two of 0.25.
    assert found[0]["area"] == pytest.approx((0.75 + 2 * 0.25) / 3, abs=1e-4)
    assert found[0]["standard_error"] is None
    assert areas([{**row, "facts": 7, "ratio": 0.3}])[0]["area"] == 0.3


def test_a_value_is_worth_its_own_tokens_and_digits() -> None:
    tokenizer = build_tokenizer()
    short, long = value_of([("12",), ("34",)], tokenizer), value_of([("1234567",)], tokenizer)
    assert long.tokens > short.tokens >= 1
    assert short.bits == pytest.approx(2 * math.log2(10))
    word = value_of([("Nairobi",)], tokenizer)
    assert word.bits == pytest.approx(word.tokens * math.log2(len(tokenizer)))
    assert value_of([("12", "34")], tokenizer).tokens == 2 * short.tokens


def test_the_command_answers_signals_before_it_loads_anything_heavy() -> None:
    code = "import sys, locret.infer.evaluation.capacity; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_file_is_no_folder(measure: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = measure("--facts", "2", "--output", tmp_path / "file")
    assert (code, f"--output {tmp_path / 'file'} is a file; name a folder" in err) == (2, True)
    code, _, err = measure("--facts", "2", "--output", tmp_path)
    assert (code, f"--output {tmp_path} holds something else than such a run; choose" in err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_curve_is_measured_drawn_and_gone_on_with(
    measure: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    code, table, err = measure("--facts", "2", "--output", out)
    assert code == 0, err
    assert "| random, agnostic | 16 |" in table
    assert table == (out / "capacity.md").read_text()
    assert (out / "capacity.png").stat().st_size > 10_000
    first = json.loads((out / "capacity.json").read_text())
    assert [(row["method"], row["facts"]) for row in first["rows"]] == [("full", 2), ("random", 2)]
    assert first["rows"][1]["kept_units"] == 16 + 4
    assert all(0 <= row["recalled"] <= row["facts"] and row["possible"] <= row["facts"] for row in first["rows"])
    # More facts go on from there: what has been answered is not asked again.
    asked: list[int] = []
    answer = runner.answers_on_forks

    def counted(texts: Any, *given: Any) -> Any:
        asked.append(sum(map(len, texts)))
        return answer(texts, *given)

    monkeypatch.setattr(runner, "answers_on_forks", counted)
    code, printed, err = measure("--facts", "2,3", "--output", out, "--json", "--figures", "none")
    assert code == 0, err
    assert asked == [2, 2, 2, 2]  # two texts, two methods
    rows = json.loads(printed)["rows"]
    assert [row for row in rows if row["facts"] != 3] == first["rows"]
    assert TIMES[0] not in rows[0]
    # What is refused changes nothing that is there.
    recipe = (out / "facts-2.json").read_text()
    code, _, err = measure("--facts", "2,3", "--output", out, "--seed", 3)
    assert code == 2
    assert "(other seed); choose another folder\n" in err
    assert (out / "facts-2.json").read_text() == recipe
    code, _, err = measure("--facts", "3", "--output", out)
    assert code == 2
    assert "holds 2 facts too, which would be lost to its record; add them to --facts" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--facts", "2,64"), "--facts 64: one text cannot hold that many keys"),
        (("--facts", "0"), "--facts 0 asks for nothing; give 1 or more"),
        (("--facts", "2,24"), "--facts 24: sample 0 of multikey cannot be made at 300 tokens: tokens=300 cannot hold"),
        (("--facts", "2", "--questions", 0), "--questions 0 asks nothing; give 1 or more"),
        (("--facts", "2", "--questions", -3), "--questions -3 asks nothing; give 1 or more"),
        (("--facts", "2", "--tokens", 0), "--tokens 0 asks nothing; give 1 or more"),
        (("--facts", "2", "--protect", "system"), "--protect system changes nothing, for no text of multikey has"),
        (("--facts", "2", "--task", "multikey,number"), "--task multikey,number names several; give one"),
        (("--facts", "2", "--option", "locks"), '--facts 2: task multikey: it has no option "locks"'),
        (("--facts", "9", "--option", "digits"), "with digits=9 multikey asks 8 questions of a text; name the option"),
        (("--facts", "2", "--task", "multistep/hotpotqa"), "--facts 2: "),
        (("--facts", "2", "--methods", "random_answer"), "--facts 2: --methods random_answer evicts an answer"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_first_answer(
    arguments: tuple[object, ...], message: str, measure: Callable[..., Any], tmp_path: Path
) -> None:
    code, out, err = measure(*arguments, "--output", tmp_path / "out")
    assert (code, out) == (2, "")
    assert message in err
    assert not list(tmp_path.iterdir())
    assert capacity.CapacityOptions(output="x").steps()[-1] == 512
