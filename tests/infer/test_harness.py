"""lm-evaluation-harness: our tasks score as `locret-eval` scores, and the model `locret` equals the plain one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from locret.data import tasks
from locret.infer.evaluation import harness
from locret.infer.evaluation.command import command as eval_command
from locret.infer.evaluation.eval_options import BudgetOptions

POLICY = {"budget": 64, "chunk_size": 32, "stabilizers": 16, "local_len": 8}
AMPLE = {"budget": 1000, "chunk_size": 64, "stabilizers": 0, "local_len": 8}
NEEDED = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed (extra locret[eval])"
)


def locret_lm(backbone: Path, **settings: Any) -> Any:
    from locret.infer.evaluation.harness_model import LocretLM

    settings = settings if "heads" in settings else {"scorer": "streaming", **settings}
    return LocretLM(pretrained=str(backbone), device="cpu", **settings)


def plain(backbone: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32).eval()


def asked(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def load(tmp_path: Path, name: str, **metadata: Any) -> Any:
    from lm_eval.tasks import TaskManager

    harness.write_task_files(tmp_path / "tasks")
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False, metadata=metadata)
    return manager.load([name])["tasks"]


def test_every_task_of_ours_gets_a_file(tmp_path: Path) -> None:
    names = harness.write_task_files(tmp_path)
    assert names[: len(tasks.names())] == [f"locret_{name}" for name in tasks.names()]
    assert {"locret_leval_codeU", "locret_niah_needle", "locret_twostage_2stage"} < set(names)
    written = {path.stem: yaml.safe_load(path.read_text().replace("!function ", "")) for path in tmp_path.iterdir()}
    assert sorted(written) == sorted(names)
    assert all(content["task"] == name for name, content in written.items())
    tags = {content["tag"] for content in written.values()}
    assert tags == {"locret", "locret_leval", "locret_niah", "locret_twostage"}


def test_command_writes_the_tasks_and_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert harness.command(["tasks", str(tmp_path / "mine")]) == 0
    assert capsys.readouterr().out.split()[0] == "locret_passkey"
    assert (tmp_path / "mine" / "locret_passkey.yaml").is_file()


def test_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .*; choose another folder"):
        harness.write_task_files(tmp_path / "file")


def test_other_arguments_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ([], ["walk"], ["tasks"]):
        with pytest.raises(ValueError, match=r"say `run` or `tasks FOLDER`; usage:"):
            harness.command(arguments)
    with pytest.raises(ValueError, match="--include_path is taken by the tasks of locret"):
        harness.command(["run", "--include_path=mine"])
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"this needs lm-evaluation-harness; install it with `pip install 'locret\["):
        harness.command(["run", "--model", "locret"])


@NEEDED
def test_documents_are_the_samples_of_locret_eval(backbone: Path, tmp_path: Path) -> None:
    from eval_runs import cases
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(backbone)
    loaded = load(tmp_path, "locret_number", pretrained=str(backbone), lengths=[128, 256], samples=2, seed=5)
    docs = list(loaded["locret_number"].test_docs())
    places = cases([tasks.get("number")], [128, 256], samples=2, seed=5)
    expected = {(place.tokens, place.sample(tokenizer).content) for place in places}
    assert [doc["tokens"] for doc in docs] == [128, 256, 128, 256]
    assert {(doc["tokens"], doc["content"]) for doc in docs} == expected


@NEEDED
def test_gold_answers_score_one_and_wrong_ones_zero_on_every_task(backbone: Path, tmp_path: Path) -> None:
    loaded = load(tmp_path, "locret", pretrained=str(backbone), lengths=[512], samples=1)
    assert sorted(loaded) == sorted(f"locret_{name}" for name in tasks.names())
    for task in loaded.values():
        (doc,) = task.test_docs()
        assert task.process_results(doc, [doc["reply"]]) == {"score@512": 1.0}
        assert task.process_results(doc, ["nothing"]) == {"score@512": 0.0}
        assert task.doc_to_text(doc).endswith(doc["question"])


@NEEDED
@pytest.mark.parametrize(("name", "whole"), [("natural_question", 1.0), ("meeting_summ", 1.0)])
def test_published_tasks_ask_and_score_as_locret_eval_does(
    backbone: Path, tmp_path: Path, name: str, whole: float
) -> None:
    from published_cases import leval
    from transformers import AutoTokenizer

    from locret.data.tasks.prompts import build_prompt
    from locret.data.tasks.task import Wanted

    pytest.importorskip("rouge_score", reason="ROUGE needs locret[eval]")
    folder, tokenizer = str(leval(tmp_path)), AutoTokenizer.from_pretrained(backbone)
    loaded = load(tmp_path, f"locret_leval_{name}", pretrained=str(backbone), data_dir=folder, max_prompt=400)
    task = loaded[f"locret_leval_{name}"]
    docs = list(task.test_docs())
    wanted = Wanted(tokenizer=lambda: tokenizer, lengths=[], folders=[folder], max_prompt=400)
    selection = tasks.get(f"leval/{name}").select(wanted)
    (samples,) = selection.samples.values()
    prompts = [build_prompt(selection.task, samples.sample(n, tokenizer), tokenizer).text for n in samples.chosen]
    assert [task.doc_to_text(doc) for doc in docs] == prompts
    right = [task.process_results(doc, [doc["reply"]])["score"] for doc in docs]
    wrong = [task.process_results(doc, ["nothing"])["score"] for doc in docs]
    assert task.aggregation()["score"](right) == pytest.approx(whole)
    assert task.aggregation()["score"](wrong) == 0
    with pytest.raises(ValueError, match="writes its protocol's turns itself; leave out --apply_chat_template"):
        task.fewshot_context(docs[0], 0, apply_chat_template=True)


@NEEDED
def test_task_options_reach_their_own_task_among_all(backbone: Path, tmp_path: Path) -> None:
    options = {"multikey": {"keys": 2}, "number": {"digits": 6}}
    loaded = load(tmp_path, "locret", pretrained=str(backbone), lengths=512, samples=1, task_options=options)
    found = {name: task.own.options() for name, task in loaded.items()}
    assert found == {f"locret_{name}": tasks.get(name, **options.get(name, {})).options() for name in tasks.names()}


@NEEDED
@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"lengths": ["long"]}, "lengths=.*long.* is not a list of lengths"),
        ({"samples": 0}, "samples=0 is not a count; give 1 or more"),
        (
            {"task_options": {"keys": 12}},
            "--metadata: task_options={'keys': 12} does not say whose options they are; name",
        ),
        ({"task_options": {"multykey": {"keys": 12}}}, 'task "multykey" is unknown; did you mean multikey'),
        ({"task_options": {"multikey": {"kees": 12}}}, 'task multikey: it has no option "kees"; did you mean keys'),
        ({"pretrained": None}, "nothing says which tokenizer measures the prompts"),
    ],
)
def test_bad_metadata_is_refused(backbone: Path, tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "locret_passkey", **{"pretrained": str(backbone), **metadata})


@NEEDED
def test_answer_with_ample_budget_is_the_plain_models(backbone: Path) -> None:
    lm, text = locret_lm(backbone, **AMPLE), "The pass key is 48213 . " * 12
    ids = torch.tensor([lm.tok_encode(text)])
    with torch.no_grad():
        out = plain(backbone).generate(ids, max_new_tokens=12, do_sample=False, temperature=None, top_p=None)
    expected = lm.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    (answer,) = lm.generate_until([asked("generate_until", text, {"max_gen_toks": 12, "until": []})], True)
    assert expected
    assert answer == expected


@NEEDED
def test_answer_ends_before_a_stop_text(backbone: Path) -> None:
    lm, text = locret_lm(backbone, **AMPLE), "The pass key is 48213 . " * 12
    (whole,) = lm.generate_until([asked("generate_until", text, {"max_gen_toks": 12})], True)
    stop = whole.split()[3]
    (cut,) = lm.generate_until([asked("generate_until", text, {"max_gen_toks": 12, "until": [stop]})], True)
    assert cut == whole.split(stop)[0]


@NEEDED
def test_scores_with_ample_budget_are_the_plain_models(backbone: Path) -> None:
    lm, model = locret_lm(backbone, **AMPLE), plain(backbone)
    context = "The pass key is 48213 . " * 12
    pairs = [(context, " Remember it ."), (context, " The"), ("", "The grass is green .")]
    results = lm.loglikelihood([asked("loglikelihood", *pair) for pair in pairs], True)
    for (before, after), (value, greedy) in zip(pairs, results, strict=True):
        first = lm.tok_encode(before) if before else [lm.prefix_token_id]
        rest = lm.tok_encode(after, add_special_tokens=False)
        with torch.no_grad():
            logs = model(torch.tensor([first + rest])).logits[0, len(first) - 1 : -1].log_softmax(-1)
        expected = logs.gather(1, torch.tensor(rest)[:, None]).sum().item()
        assert value == pytest.approx(expected, abs=1e-3)
        assert greedy == (logs.argmax(-1).tolist() == rest)


@NEEDED
def test_text_scores_with_ample_budget_are_the_plain_models(backbone: Path) -> None:
    lm, text = locret_lm(backbone, **AMPLE), "We go from Oslo to Rome again . " * 30
    ids = [lm.prefix_token_id, *lm.tok_encode(text, add_special_tokens=False)]
    assert len(ids) > 2 * AMPLE["chunk_size"]
    with torch.no_grad():
        logs = plain(backbone)(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logs.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
    (value,) = lm.loglikelihood_rolling([asked("loglikelihood_rolling", text)], True)
    assert value == pytest.approx(expected, abs=1e-2)


@NEEDED
def test_text_scores_follow_growing_memory_shrinking_chunks_and_the_budget(backbone: Path, heads: Path) -> None:
    text = "We go from Oslo to Rome again . The pass key is 48213 . " * 30
    policies = [
        POLICY,
        {**POLICY, "memory": "linear"},
        {**POLICY, "memory": "square"},
        {**POLICY, "memory": "linear", "decremental": True, "min_chunk": 8},
        {**POLICY, "layer_budgets": "pyramid"},
        {**POLICY, "budget": 128},
    ]
    found = []
    for policy in policies:
        lm = locret_lm(backbone, heads=str(heads), **policy)
        found += lm.loglikelihood_rolling([asked("loglikelihood_rolling", text)], True)
    assert len({round(value, 3) for value in found}) == len(policies)


@NEEDED
@pytest.mark.parametrize("length", [20, 200])
@pytest.mark.slow
def test_cache_is_bounded_whatever_is_asked(backbone: Path, heads: Path, length: int) -> None:
    lm, text = locret_lm(backbone, heads=str(heads), **POLICY), "We go from Oslo to Rome again . " * length
    lm.generate_until([asked("generate_until", text, {"max_gen_toks": 4})], True)
    lm.loglikelihood([asked("loglikelihood", text, " It is so ."), asked("loglikelihood", text, " No .")], True)
    lm.loglikelihood_rolling([asked("loglikelihood_rolling", text)], True)
    assert POLICY["budget"] <= lm.peak_units <= POLICY["budget"] + POLICY["local_len"] + 4


@NEEDED
def test_heads_recommend_what_the_user_does_not_set(backbone: Path, heads: Path) -> None:
    lm = locret_lm(backbone, heads=str(heads), budget=48)
    assert (lm.policy.budget, lm.policy.chunk_size, lm.policy.stabilizers) == (48, 32, 12)


@NEEDED
@pytest.mark.parametrize("own", [{}, {"budget": 16}, {"budget": 256}, {"budget": 40, "stabilizers": 30}])
def test_settings_become_the_policy_of_locret_eval(backbone: Path, heads: Path, own: dict[str, int]) -> None:
    lm = locret_lm(backbone, heads=str(heads), **own)
    assert [lm.policy] == [one.policy(1) for one in BudgetOptions(**own).allotments(own, lm.scorer.config.policy)]


@NEEDED
@pytest.mark.slow
def test_answers_and_scores_are_those_of_locret_eval(backbone: Path, heads: Path, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    flags = ["--model", backbone, "--heads", heads, "--methods", "locret", "--tasks", "number", "--budget", 32]
    texts = ["--lengths", 400, "--samples", 3, "--seed", 5, "--figures", "none", "--device", "cpu"]
    assert eval_command([str(flag) for flag in [*flags, *texts, "--quiet", "--output", tmp_path / "own"]]) == 0
    records = [json.loads(line) for line in (tmp_path / "own" / "samples.jsonl").read_text().splitlines()]

    harness.register()
    harness.write_task_files(tmp_path / "tasks")
    plan = {"pretrained": str(backbone), "lengths": [400], "samples": 3, "seed": 5}
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False, metadata=plan)
    found = simple_evaluate(
        model="locret",
        model_args=f"pretrained={backbone},heads={heads},budget=32",
        device="cpu",
        tasks=["locret_number"],
        task_manager=manager,
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    answers = {tuple(sample["doc"]["targets"]): sample["resps"] for sample in found["samples"]["locret_number"]}
    assert answers == {tuple(record["targets"]): [[record["prediction"]]] for record in records}
    assert len({record["prediction"] for record in records}) > 1
    score = sum(record["score"] for record in records) / 3
    assert found["results"]["locret_number"]["score@400,none"] == pytest.approx(score)


@NEEDED
def test_a_number_that_changes_nothing_is_refused(backbone: Path) -> None:
    with pytest.raises(ValueError, match="--min-chunk 16 changes nothing without --decremental"):
        locret_lm(backbone, scorer="streaming", budget=64, min_chunk=16)


@NEEDED
def test_unknown_setting_and_argument_are_refused(backbone: Path) -> None:
    with pytest.raises(
        ValueError, match="--model_args: bugdet is not a setting of the model locret; choose among adapter"
    ):
        locret_lm(backbone, bugdet=3)
    lm = locret_lm(backbone, **AMPLE)
    with pytest.raises(ValueError, match="--gen_kwargs: min_p is not supported by the model locret"):
        lm.generate_until([asked("generate_until", "The", {"min_p": 0.1})], True)


@NEEDED
@pytest.mark.slow
def test_command_line_of_the_harness_runs_our_model_on_our_tasks(
    backbone: Path, heads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"pretrained={backbone},heads={heads},budget=64"
    metadata = '{"lengths": [128, 256], "samples": 2}'
    flags = ["--tasks", "locret_passkey", "--apply_chat_template", "--device", "cpu"]
    output = ["--metadata", metadata, "--output_path", str(tmp_path / "out")]
    assert harness.command(["run", "--model", "locret", "--model_args", model, *flags, *output]) == 0
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["locret_passkey"]
    assert 0 <= found["score@128,none"] <= 1
    assert 0 <= found["score@256,none"] <= 1
    assert "locret_passkey" in capsys.readouterr().out
