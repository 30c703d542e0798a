"""lm-evaluation-harness: our tasks score as `locret-eval` scores, and the model `locret` equals the plain one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from eval_runs import published
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret.data import tasks
from locret.data.tasks.prompts import build_prompt
from locret.data.tasks.task import Wanted
from locret.infer.evaluation import harness

POLICY = {"budget": 64, "chunk_size": 32, "stabilizers": 16, "local_len": 8}
NEEDED = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed (extra locret[eval])"
)


def locret_lm(backbone: Path, **settings: Any) -> Any:
    from locret.infer.evaluation.harness_model import LocretLM

    settings = settings if "heads" in settings else {"scorer": "streaming", **settings}
    return LocretLM(pretrained=str(backbone), device="cpu", **settings)


def asked(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def load(tmp_path: Path, name: str, **metadata: Any) -> Any:
    from lm_eval.tasks import TaskManager

    harness.write_task_files(tmp_path / "tasks")
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False, metadata=metadata)
    return manager.load([name])["tasks"]


def test_every_task_that_the_harness_lacks_gets_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert harness.command(["tasks", str(tmp_path / "mine")]) == 0
    names = capsys.readouterr().out.split()
    assert {"locret_leval_codeU", "locret_niah_needle", "locret_twostage_2stage"} < set(names)
    files = (tmp_path / "mine").iterdir()
    written = {path.stem: yaml.safe_load(path.read_text().replace("!function ", "")) for path in files}
    assert sorted(written) == sorted(names)
    assert all(content["task"] == name for name, content in written.items())
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .*; choose another folder"):
        harness.write_task_files(tmp_path / "file")


def test_other_arguments_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    for arguments, message in (
        (["tasks"], r"say `run` or `tasks FOLDER`; usage:"),
        (["run", "--include_path=mine"], "--include_path is taken by the tasks of locret"),
        (["run", "--model", "locret"], r"this needs lm-evaluation-harness; run pip install 'locret\["),
    ):
        with pytest.raises(ValueError, match=message):
            harness.command(arguments)


@NEEDED
@pytest.mark.parametrize("name", ["leval/natural_question", "leval/meeting_summ", "niah/passkey"])
def test_tasks_ask_and_score_as_locret_eval_does(backbone: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("rouge_score", reason="ROUGE needs locret[eval]")
    made = name.startswith("niah")
    folder, tokenizer = str(published(tmp_path)), AutoTokenizer.from_pretrained(backbone)
    more = {"lengths": [400, 500], "samples": 2, "seed": 5} if made else {"data_dir": folder, "max_prompt": 400}
    loaded = load(tmp_path, harness.harness_name(name), pretrained=str(backbone), **more)
    task = loaded[harness.harness_name(name)]
    docs = list(task.test_docs())
    given = {**{"lengths": [], "folders": None if made else [folder]}, **more}
    given.pop("data_dir", None)
    selection = tasks.get(name).select(Wanted(tokenizer=lambda: tokenizer, **given))
    samples = [found.sample(n) for found in selection.samples.values() for n in found.chosen]
    assert [doc["prompt"] for doc in docs] == [build_prompt(selection.task, one, tokenizer).text for one in samples]
    right = [task.process_results(doc, [doc["reply"]])["score"] for doc in docs]
    wrong = [task.process_results(doc, ["nothing"])["score"] for doc in docs]
    assert (task.aggregation()["score"](right), task.aggregation()["score"](wrong)) == (pytest.approx(1), 0)
    with pytest.raises(ValueError, match="writes its protocol's turns itself; leave out --apply_chat_template"):
        task.fewshot_context(docs[0], 0, apply_chat_template=True)


@NEEDED
@torch.no_grad()
def test_answers_and_scores_with_ample_budget_are_the_plain_models(backbone: Path) -> None:
    lm = locret_lm(backbone, budget=1000, chunk_size=64, stabilizers=0, local_len=8)
    text = "The pass key is 48213 . " * 12
    model: Any = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32).eval()
    ids = torch.tensor([lm.tok_encode(text)])
    out = model.generate(ids, max_new_tokens=12, do_sample=False, temperature=None, top_p=None)
    expected = lm.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for until in ([], [word := expected.split()[3]], [word[1:], word]):  # which the harness's models cut in turn
        request = asked("generate_until", text, {"max_gen_toks": 12, "until": until})
        assert lm.generate_until([request], True) == [expected.split((until or ["\0"])[0])[0]]
    pairs = [(text, " Remember it ."), (text, " The"), ("", "The grass is green .")]
    results = lm.loglikelihood([asked("loglikelihood", *pair) for pair in pairs], True)
    for (before, after), (value, greedy) in zip(pairs, results, strict=True):
        first = lm.tok_encode(before) if before else [lm.prefix_token_id]
        rest = lm.tok_encode(after, add_special_tokens=False)
        logs = model(torch.tensor([first + rest])).logits[0, len(first) - 1 : -1].log_softmax(-1)
        assert value == pytest.approx(logs.gather(1, torch.tensor(rest)[:, None]).sum().item(), abs=1e-3)
        assert greedy == (logs.argmax(-1).tolist() == rest)


@NEEDED
@pytest.mark.parametrize("length", [20, 200])
def test_cache_is_bounded_whatever_is_asked(backbone: Path, heads: Path, length: int) -> None:
    lm, text = locret_lm(backbone, heads=str(heads), **POLICY), "We go from Oslo to Rome again . " * length
    make, caches = lm._cache, list[Any]()
    lm._cache = lambda: caches.append(make()) or caches[-1]
    lm.generate_until([asked("generate_until", text, {"max_gen_toks": 4})], True)
    lm.loglikelihood([asked("loglikelihood", text, " It is so ."), asked("loglikelihood", text, " No .")], True)
    lm.loglikelihood_rolling([asked("loglikelihood_rolling", text)], True)
    assert len(caches) == 3
    for cache in caches:
        assert POLICY["budget"] <= cache.memory().units <= POLICY["budget"] + POLICY["local_len"] + 4


@NEEDED
def test_unknown_settings_and_numbers_without_effect_are_refused(backbone: Path, tmp_path: Path) -> None:
    for settings, message in (
        ({"bugdet": 3}, "--model_args: bugdet is not a setting of the model locret; choose among adapter"),
        ({"budget": 64, "min_chunk": 16}, "--min-chunk 16 changes nothing without --decremental"),
    ):
        with pytest.raises(ValueError, match=message):
            locret_lm(backbone, **settings)
    lm = locret_lm(backbone, **POLICY)
    with pytest.raises(ValueError, match="--gen_kwargs: min_p is not supported by the model locret"):
        lm.generate_until([asked("generate_until", "The", {"min_p": 0.1})], True)
    for metadata, message in (
        ({"lengths": ["long"]}, "--lengths .*long.* is not possible"),
        ({"task_options": {"multykey": {"keys": 12}}}, 'task "multykey" is unknown; did you mean multikey'),
        ({"pretrained": None}, "nothing says which tokenizer measures the prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            load(tmp_path, "locret_niah_passkey", **{"pretrained": str(backbone), "lengths": 400, **metadata})


@NEEDED
@pytest.mark.long
def test_command_line_of_the_harness_runs_our_model_on_our_tasks(
    backbone: Path, heads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = f"pretrained={backbone},heads={heads},budget=64", json.dumps({"lengths": [400], "samples": 2})
    flags = ["--tasks", "locret_niah_passkey", "--device", "cpu", "--metadata", data]
    out = ["--output_path", str(tmp_path / "out")]
    assert harness.command(["run", "--model", "locret", "--model_args", model, *flags, *out]) == 0
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert 0 <= json.loads(results.read_text())["results"]["locret_niah_passkey"]["score,none"] <= 1
    assert "locret_niah_passkey" in capsys.readouterr().out
