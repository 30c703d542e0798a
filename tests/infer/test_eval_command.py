"""`locret-eval`: methods are treated alike, runs go on where they stopped, and mistakes get one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from eval_runs import prompt_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret import RetentionCache, RetentionPolicy, generate, scorers
from locret.data import tasks
from locret.infer.evaluation import methods, runner

METHODS = "full,locret,untrained,random,streaming,streaming-original,oracle"
TIMES = ("prefill_seconds", "decode_seconds")
SMALL = ("--chunk-size", 32, "--stabilizers", 16, "--local-len", 8, "--threads", 1, "--figures", "none")


@pytest.fixture
def evaluate(evaluate_with: Any, heads: Path) -> Callable[..., Any]:
    """Return a function that runs the command on a random backbone and gives exit code, output and errors."""

    def call(*arguments: object, own_heads: Path | None = heads) -> Any:
        return evaluate_with(*([] if own_heads is None else ["--heads", own_heads]))(*arguments)

    return call


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


@pytest.mark.slow
def test_every_method_holds_the_same_budget_and_everything_is_on_record(evaluate: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--methods", METHODS, "--tasks", "passkey,multikey", "--lengths", "400,600", "--budget", 64)
    code, table, err = evaluate(*arguments, "--samples", 2, "--output", out, *SMALL)
    assert code == 0, err
    found = records(out)
    assert len(found) == 7 * 2 * 2 * 2
    for record in found:
        if record["method"] == "full":
            assert record["budget"] is None
            assert record["kept_units"] == record["prompt_tokens"] == record["tokens"]
        else:
            assert record["kept_units"] == 64 + 8
            assert record["peak_units"] <= 64 + 32 + 8 + record["generated_tokens"]
            # 2 layers of 2 KV heads hold keys and values of 8 bfloat16 numbers, here as float32.
            assert record["cache_bytes"] >= 72 * 2 * 2 * 2 * 8 * 4
    assert len({(r["task"], r["tokens"], r["index"], r["prompt_sha256"]) for r in found}) == 8
    results = json.loads((out / "results.json").read_text())
    assert results["complete"]
    assert results["config"]["policies"] == [
        RetentionPolicy(budget=64, chunk_size=32, stabilizers=16, local_len=8).to_dict()
    ]
    assert len(results["cells"]) == 7 * 2 * 2
    assert {cell["n"] for cell in results["cells"]} == {2}
    assert {"locret", "torch", "transformers"} <= set(results["versions"])
    assert (out / "results.md").read_text() == table
    assert sorted(path.name for path in out.iterdir()) == [
        "configuration.json",
        "results.json",
        "results.md",
        "samples.jsonl",
    ]


def test_full_is_plain_transformers_and_the_engine_with_room_for_all_says_the_same(backbone: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    setup = methods.Setup(model, tokenizer, None, 0)
    said = set()
    for seed in range(4):
        task = tasks.get("multikey", keys=2)
        sample = task.sample(tokenizer, 300, seed=seed)
        ids = prompt_ids(tokenizer, sample)
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        prediction = tokenizer.decode(plain[0, 300:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        full = runner.answer(methods.Prompt(ids, sample, setup), runner.Run(methods.get("full"), None), 24)
        assert full["prediction"] == prediction
        policy = RetentionPolicy(budget=300, chunk_size=64, stabilizers=16, local_len=8)
        cache = RetentionCache(model, scorers.get("random"), policy)
        ours = generate(model, ids, cache=cache, max_new_tokens=24, do_sample=False)
        assert torch.equal(ours, plain)
        said.add(prediction)
    assert len(said) > 1


@pytest.mark.slow
def test_an_interrupted_run_goes_on_and_equals_an_uninterrupted_one(
    evaluate: Any, tmp_path: Path, stopped_after: Any
) -> None:
    arguments = ("--methods", "full,locret,random", "--tasks", "passkey,number", "--lengths", 400, "--budget", 64)
    arguments = (*arguments, "--samples", 2, *SMALL)
    assert evaluate(*arguments, "--output", tmp_path / "whole")[0] == 0
    with stopped_after(5):
        code, _, err = evaluate(*arguments, "--output", tmp_path / "halves")
    assert code == 130
    assert "--resume goes on" in err
    assert len(records(tmp_path / "halves")) == 5
    with (tmp_path / "halves" / "samples.jsonl").open("a") as file:
        file.write('{"task": "passkey", "vers')  # what a crash in the middle of a line leaves
    assert evaluate(*arguments, "--output", tmp_path / "halves")[0] == 2  # neither --resume nor --overwrite
    assert evaluate(*arguments, "--output", tmp_path / "halves", "--resume")[0] == 0
    assert records(tmp_path / "halves") == records(tmp_path / "whole")
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("halves", "whole")]
    for result in results:
        for cell in result["cells"]:
            cell.pop("prefill_tokens_per_second")
            cell.pop("decode_tokens_per_second")
    assert results[0]["cells"] == results[1]["cells"]


def test_a_broken_line_in_the_middle_is_refused(evaluate: Any, tmp_path: Path) -> None:
    arguments = ("--methods", "random", "--tasks", "passkey", "--lengths", 300, "--budget", 64, "--samples", 2, *SMALL)
    assert evaluate(*arguments, "--output", tmp_path)[0] == 0
    log = tmp_path / "samples.jsonl"
    log.write_text("nonsense\n" + log.read_text())
    code, _, err = evaluate(*arguments, "--output", tmp_path, "--resume")
    assert code == 2
    assert "samples.jsonl, line 1 is not a record of an evaluation: it is not JSON; mend the file, or use --over" in err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"index": 999},
            "has an answer to what is not asked here (passkey, 300 tokens, sample 999, method random); mend",
        ),
        ({"method": "h2o"}, "has an answer to what is not asked here (passkey, 300 tokens, sample 0, method h2o)"),
        (
            {"seed": 7},
            "has an answer with seed 7 (passkey, 300 tokens, sample 0, method random); mend the file, or use",
        ),
    ],
)
@pytest.mark.parametrize("file", ["samples.jsonl", "samples.process-1.jsonl"])
def test_answers_of_another_run_are_refused(
    file: str, changed: dict[str, Any], message: str, evaluate: Any, tmp_path: Path
) -> None:
    arguments = ("--methods", "random", "--tasks", "passkey", "--lengths", 300, "--budget", 64, "--samples", 1, *SMALL)
    assert evaluate(*arguments, "--output", tmp_path)[0] == 0
    foreign = {**json.loads((tmp_path / "samples.jsonl").read_text()), **changed}
    (tmp_path / file).write_text(json.dumps(foreign) + "\n")
    code, _, err = evaluate(*arguments, "--output", tmp_path, "--resume")
    assert code == 2
    assert f"{file} {message}" in err
    assert (tmp_path / file).is_file()


@pytest.mark.slow
def test_a_folder_of_another_configuration_is_refused_unless_overwritten(evaluate: Any, tmp_path: Path) -> None:
    arguments = ("--methods", "random", "--tasks", "passkey", "--lengths", 300, "--budget", 64, *SMALL)
    out = tmp_path / "out"
    assert evaluate(*arguments, "--samples", 1, "--output", out)[0] == 0
    before = (out / "samples.jsonl").read_text()
    for flags in ((), ("--resume",)):
        code, _, err = evaluate(*arguments, "--samples", 1, "--seed", 5, "--output", out, *flags)
        assert code == 2
        assert "holds an evaluation of another configuration (other seed); choose another folder, or --overwrite" in err
    assert (out / "samples.jsonl").read_text() == before
    assert evaluate(*arguments, "--samples", 1, "--seed", 5, "--output", out, "--overwrite")[0] == 0
    assert records(out)[0]["seed"] == 5
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    code, _, err = evaluate(*arguments, "--samples", 1, "--output", tmp_path / "mine", "--overwrite")
    assert code == 2
    assert "holds something else than an evaluation" in err


def test_local_tokens_besides_a_share_are_said(evaluate: Any) -> None:
    line = ("--methods", "full,random", "--tasks", "passkey", "--lengths", "500,900", "--samples", 1, "--dry-run")
    notes = json.loads(evaluate(*line, "--budget-share", 0.1, own_heads=None)[1])["notes"]
    said = (
        "the last 50 tokens (--local-len) stay besides a share: of 500 tokens 20% do; give --local-len 1 for the share"
    )
    assert [note for note in notes if note.startswith(said)]
    assert json.loads(evaluate(*line, "--budget-share", 0.1, "--local-len", 1, own_heads=None)[1])["notes"] == []
    assert json.loads(evaluate(*line, "--budget", 50, own_heads=None)[1])["notes"] == []


def test_options_that_only_some_methods_use_are_taken(evaluate: Any) -> None:
    line = ("--tasks", "passkey", "--lengths", 300, "--samples", 1, "--budget", 64, *SMALL, "--dry-run")
    beta = ("--methods", "full,random,random+pyramid", "--pyramid-beta", 10)
    assert evaluate(*line, *beta)[0] == 0
    assert evaluate(*line, "--methods", "random", "--pyramid-beta", 20, "--head-floor", 0.2)[0] == 0, "the defaults"
    code, _, err = evaluate(*line, "--methods", "random", "--allow-other-base", own_heads=None)
    assert code == 2
    assert "--allow-other-base is about --heads, which are not given; add them, or drop it" in err


def test_stabilizers_follow_a_small_budget_unless_they_are_given(evaluate: Any, tmp_path: Path) -> None:
    code, out, err = evaluate("--methods", "random", "--budget", "8,32", "--lengths", 300, "--dry-run")
    assert code == 0, err
    plan = json.loads(out)
    assert [(p["budget"], p["stabilizers"]) for p in plan["policies"]] == [(8, 2), (32, 8)]
    assert all(policy["planned_cache_bytes"] > 0 for policy in plan["policies"])
    assert plan["runs"] == 3 * 100 * 2
    assert list(tmp_path.iterdir()) == []


def test_original_positions_beyond_the_backbone_get_a_warning(evaluate: Any) -> None:
    arguments = ("--tasks", "passkey", "--lengths", 5000, "--budget", 64, "--dry-run")
    _, _, err = evaluate("--methods", "streaming,streaming-original", *arguments)
    assert "prompts of 5,000 tokens go beyond the 4,096 positions of this backbone" in err
    assert "streaming-original count positions in the text" in err
    _, _, err = evaluate("--methods", "streaming", *arguments)
    assert "go beyond" not in err


@pytest.mark.slow
def test_a_recipe_may_use_lists_and_task_options(evaluate: Any, tmp_path: Path) -> None:
    recipe = {
        "methods": ["random"],
        "tasks": ["multikey"],
        "task_options": {"multikey": {"keys": 2}},
        "lengths": [300],
        "budget": [32, 64],
        "chunk_size": [32, 64],
        "samples": 1,
        "figures": "none",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, out, err = evaluate("--config", tmp_path / "recipe.yaml", "--output", tmp_path / "out", "--json")
    assert code == 0, err
    results = json.loads(out)
    assert results["config"]["tasks"]["multikey"]["keys"] == 2
    assert {(cell["budget"], cell["chunk_size"]) for cell in results["cells"]} == {
        (32, 32),
        (32, 64),
        (64, 32),
        (64, 64),
    }


def test_task_options_are_json_on_the_command_line(evaluate: Any, tmp_path: Path) -> None:
    arguments = ("--methods", "random", "--tasks", "multikey", "--lengths", 300, "--budget", 64, "--task-options")
    code, out, err = evaluate(*arguments, '{"multikey": {"keys": 3, "digits": 4}}', "--dry-run")
    assert code == 0, err
    assert json.loads(out)["config"]["tasks"] == {"multikey": {"version": 2, "keys": 3, "digits": 4}}
    for options, message in (
        ('{"multikey": {"kees": 3}}', 'task multikey: it has no option "kees"; did you mean keys?'),
        ('{"multikey": {"keys": "many"}}', "task multikey: keys='many' must be a whole number, 1 or more"),
        ('{"number": {"digits": 4}}', "--task-options speaks of number, which is not among --tasks"),
    ):
        code, _, err = evaluate(*arguments, options, "--output", tmp_path / "out")
        assert code == 2
        assert message in err
        assert not (tmp_path / "out").exists()


def test_a_plan_that_depends_on_the_length_is_made_for_the_longest_prompt(evaluate: Any, tmp_path: Path) -> None:
    growing = ("--memory", "linear", "--decremental", "--min-chunk", 8, "--layer-budgets", "pyramid")
    arguments = ("--methods", "random", "--tasks", "passkey", "--lengths", "300,600", "--budget", 32, *SMALL)
    arguments = (*arguments, "--samples", 1)
    code, plan, err = evaluate(*arguments, *growing, "--dry-run")
    assert code == 0, err
    (planned,) = json.loads(plan)["policies"]
    assert (planned["memory"], planned["decremental"], planned["layer_budgets"]) == ("linear", True, "pyramid")
    code, _, err = evaluate(*arguments, *growing, "--output", tmp_path / "out")
    assert code == 0, err
    (_, longest) = records(tmp_path / "out")
    assert longest["peak_bytes"] <= planned["planned_cache_bytes"]
    assert (longest["memory"], longest["decremental"], longest["min_chunk"]) == ("linear", True, 8)
    code, _, err = evaluate(*arguments, "--decremental", "--dry-run")
    assert (code, err.count("\n")) == (2, 1)
    assert 'memory="fixed" does not grow; choose memory linear, sqrt or square' in err


def test_without_heads_the_default_methods_are_those_that_need_none(evaluate: Any) -> None:
    code, out, err = evaluate("--tasks", "passkey", "--lengths", 400, "--samples", 2, "--dry-run", own_heads=None)
    assert code == 0, err
    plan = json.loads(out)
    assert plan["config"]["methods"] == ["full", "untrained", "random", "streaming"]
    assert plan["notes"] == ["--methods without locret, as trained heads are needed for that; give --heads"]
    # An eighth of 400 tokens: the default would hold the prompt whole.
    assert {(p["budget"], p["stabilizers"]) for p in plan["policies"]} == {(50, 12)}


def test_the_minimal_command_runs_and_says_where_the_results_are(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ("--tasks", "passkey", "--lengths", 200, "--samples", 1, "--figures", "none")
    code, table, err = evaluate(*line, own_heads=None)
    assert code == 0, err
    (output,) = (tmp_path / "runs").iterdir()
    assert output.name.startswith("backbone-passkey-")
    assert "locret-eval: --methods without locret, as trained heads are needed for that; give --heads" in err
    assert f"locret-eval: 4 answers, 800 prompt tokens; results go to runs/{output.name}" in err
    assert (output / "results.md").read_text() == table
    code, _, err = evaluate(*line, own_heads=None)
    assert code == 2
    assert f"--output runs/{output.name} holds this evaluation already; --resume goes on, --overwrite starts" in err


def test_a_budget_that_holds_every_prompt_is_said_to_compare_nothing(evaluate: Any) -> None:
    line = ("--methods", "full,random", "--tasks", "passkey", "--samples", 1, "--dry-run", "--local-len", 8)
    _, out, _ = evaluate(*line, "--lengths", 300, "--budget", 292, own_heads=None)
    assert json.loads(out)["notes"][0].startswith("no prompt is longer than the budget and --local-len together")
    _, out, _ = evaluate(*line, "--lengths", 300, "--budget", 291, own_heads=None)
    assert json.loads(out)["notes"] == []


def test_shares_of_the_prompt_are_on_record_by_share_with_what_they_came_to(evaluate: Any, tmp_path: Path) -> None:
    line = ("--methods", "full,random", "--tasks", "passkey", "--lengths", "200,400", "--samples", 1, *SMALL[:2])
    line = (*line, "--local-len", 8, "--threads", 1, "--figures", "none", "--output", tmp_path / "out")
    code, table, err = evaluate(*line, "--budget-share", "0.1,0.25", own_heads=None)
    assert code == 0, err
    found = [one for one in records(tmp_path / "out") if one["method"] == "random"]
    sizes = {(one["tokens"], one["budget_share"]): one["resolved"]["budget"] for one in found}
    prompts = {one["tokens"]: one["prompt_tokens"] for one in found}
    assert sizes == {(n, share): int(share * prompts[n]) for n in (200, 400) for share in (0.1, 0.25)}
    assert all(one["kept_units"] == one["resolved"]["budget"] + 8 and one["budget"] is None for one in found)
    assert [line.split("|")[2].strip() for line in table.splitlines()[2:5]] == ["all", "10%", "25%"]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [policy["budget_share"] for policy in results["config"]["policies"]] == [0.1, 0.25]
    assert [cell.get("budget_share") for cell in results["cells"]] == [None, 0.1, 0.25] * 2
    before = (tmp_path / "out" / "samples.jsonl").read_text()
    assert evaluate(*line, "--budget-share", "0.1,0.25", "--resume", own_heads=None)[0] == 0
    assert (tmp_path / "out" / "samples.jsonl").read_text() == before


def test_prompts_that_fit_are_not_refused(evaluate: Any) -> None:
    line = ("--methods", "full,random", "--samples", 1000, "--tasks", "passkey", "--lengths", "2048,131072")
    assert evaluate(*line, "--dry-run", own_heads=None)[0] == 0
