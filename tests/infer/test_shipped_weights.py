"""The shipped heads keep what the shipped backbone needs, within a budget where other methods lose it.

With room for the whole prompt the answers are those of transformers alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from eval_runs import prompt_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret import RetentionCache, RetentionPolicy, generate, scorers
from locret.data import tasks
from locret.infer.command import command as infer
from locret.infer.evaluation.command import command

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
SAMPLES = 4


@pytest.mark.slow
@pytest.mark.parametrize("task", ["passkey", "number", "multikey"])
def test_shipped_heads_answer_what_the_full_cache_answers_and_other_methods_do_not(task: str, tmp_path: Path) -> None:
    weights = ["--model", CHECKPOINTS / "tiny", "--heads", CHECKPOINTS / "tiny-heads", "--device", "cpu"]
    methods = ["--methods", "full,locret,untrained,random,streaming", "--budget", 128]
    texts = ["--tasks", task, "--lengths", 2048, "--samples", SAMPLES]
    rest = ["--dtype", "float32", "--threads", 1, "--figures", "none", "--quiet", "--output", tmp_path / "out"]
    assert command([str(argument) for argument in [*weights, *methods, *texts, *rest]]) == 0
    cells = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    right = {cell["method"]: cell["score"] / 100 * SAMPLES for cell in cells}
    # 4, 4 and 0, 0, 0 of 4 were right when the weights were shipped; one may differ on another machine.
    assert right["full"] >= SAMPLES - 1
    assert right["locret"] >= SAMPLES - 1
    assert max(right["untrained"], right["random"], right["streaming"]) <= 1


@pytest.mark.parametrize("name", tasks.names())
@pytest.mark.slow
def test_with_room_for_the_prompt_the_shipped_backbone_answers_as_plain_transformers(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "tiny", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "tiny")
    task = tasks.get(name)
    ids_1N = prompt_ids(tokenizer, task.sample(tokenizer, 2048, seed=0))
    settings = {"max_new_tokens": task.max_new_tokens, "do_sample": False}
    plain = model.generate(ids_1N, attention_mask=torch.ones_like(ids_1N), **settings)
    policy = RetentionPolicy(budget=ids_1N.shape[1], chunk_size=512, stabilizers=64, local_len=32)
    # Good heads could hide that something was evicted.
    ours = generate(model, ids_1N, cache=RetentionCache(model, scorers.get("random"), policy), **settings)
    assert plain.shape[1] > ids_1N.shape[1] + 3
    assert torch.equal(ours, plain)


def test_the_first_example_answers_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads"]
    text = ["--prompt-file", "recipes/infer/pass_key.txt", "--question", "What is the pass key?"]
    assert infer([*pair, *text]) == 0
    shown = capsys.readouterr()
    assert shown.out == "The pass key is 43600.\n"
    assert "knows only texts that locret generates" not in shown.err  # it is such a text
