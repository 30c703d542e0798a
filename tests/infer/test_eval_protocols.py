"""A question known or unknown while its text is read: same prompts, one read for many questions, honest yardsticks; and
several turns: conversations in one cache that stays within its budget, and games.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_runs import FACTS, ROWS, cells, prompts, published, records, results
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from locret import RetainingHeads, RetentionPolicy, prefill
from locret.data import tasks
from locret.data.tasks import Sample
from locret.data.tasks.prompts import build_prompt
from locret.data.tasks.published.base import Making
from locret.data.tasks.rows import Row, open_rows
from locret.data.tasks.task import Wanted
from locret.infer.evaluation import answering, command, methods
from locret.infer.evaluation.methods import Prompt, Setup, document_tokens
from locret.infer.evaluation.plan import Allotment, Run, plan_cases, plan_runs, settled
from locret.infer.evaluation.records import AGNOSTIC, AWARE

POLICY = RetentionPolicy(budget=48, chunk_size=64, stabilizers=8, local_len=8)
SMALL = ("--chunk-size", 64, "--stabilizers", 8, "--local-len", 8, "--budget", 48, "--max-new-tokens", 4)
AMPLE = ("--budget", "2000", "--chunk-size", "64", "--stabilizers", "0", "--local-len", "8")
BOUNDED = ("--budget", "48", "--chunk-size", "32", "--stabilizers", "8", "--local-len", "8")
REQUESTS = replace(tasks.get("scbench/kv_requests"), max_new_tokens=6)


@pytest.fixture(scope="module")
def setup(backbone: Path, heads: Path) -> Setup:
    """Return the random backbone with its untrained heads."""
    model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32).eval()
    return Setup(model, AutoTokenizer.from_pretrained(backbone), RetainingHeads.from_pretrained(heads), 0)


@pytest.fixture
def asked(setup: Setup) -> list[Prompt]:
    """Return the prompts of three questions about one text."""
    (sample,) = REQUESTS.items([Row(0, "", ROWS["scbench/data/scbench_kv"][0])])
    return prompts(setup, REQUESTS, [sample.asking(question) for question in sample.asked])


@pytest.fixture
def evaluate(evaluate_with: Any) -> Any:
    """Return a function that runs the command and gives exit code, output and errors."""
    return evaluate_with()


def test_full_is_plain_transformers_and_a_stop_ends_an_answer(setup: Setup) -> None:
    task = replace(tasks.get("longbench/samsum"), max_new_tokens=20)
    ids = torch.tensor([setup.tokenizer("The red house stands near the river. " * 20)["input_ids"]])
    sample = Sample(content="", targets=("a",), reply="a")
    policy = RetentionPolicy(budget=64, chunk_size=32, stabilizers=8, local_len=8)
    for run in (Run(methods.get("full"), None), Run(methods.get("random"), policy)):

        def answered(run: Run = run, **changes: Any) -> dict[str, Any]:
            own = replace(task, **{"stop": (), "min_new_tokens": 0, **changes})
            prompt = replace(prompts(setup, own, [sample])[0], ids_1N=ids)
            return answering._answered(prompt, run)

        free = answered()
        plain = setup.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        said = setup.tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
        assert (free["prediction"] == said) == run.method.plain
        words = free["prediction"].split()
        stop = next(word for word in words[2:] if free["prediction"].index(word) > 2 and len(word) > 2)
        cut = answered(stop=(stop,))
        assert cut["prediction"] == free["prediction"][: free["prediction"].index(stop)]
        assert cut["generated_tokens"] < free["generated_tokens"]
        # An answer that must have a token does not begin with its end.
        first = setup.tokenizer.decode(setup.tokenizer(free["prediction"], add_special_tokens=False)["input_ids"][:1])
        assert answered(stop=(first,))["generated_tokens"] == 1
        assert answered(stop=(first,), min_new_tokens=1)["generated_tokens"] > 1


def test_all_questions_of_a_text_share_a_document_that_holds_none_of_them(asked: list[Prompt], setup: Setup) -> None:
    documents = [prompt.document.ids_1N for prompt in asked]
    assert all(torch.equal(one, documents[0]) for one in documents)
    assert setup.tokenizer.decode(documents[0][0]).endswith(asked[0].sample.document.strip()[-40:])
    for prompt in asked:
        assert torch.equal(prompt.ids_1N[:, : documents[0].shape[1]], documents[0])
        rest = setup.tokenizer.decode(prompt.ids_1N[0, documents[0].shape[1] :])
        assert rest.removesuffix("<eos> <assistant>").strip() == prompt.sample.question.strip()


def test_a_token_that_joins_text_and_question_belongs_to_the_question() -> None:
    from tokenizers import Tokenizer, models

    letters = {letter: number for number, letter in enumerate(map(chr, range(32, 127)))} | {"\n": 95, ".\n": 96}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(letters, [(".", "\n")])))
    tokenizer.chat_template = "{{ messages[0].content }}"
    task, text = tasks.get("longbench/qasper"), "One fact. Another.\nWhich?"
    sample = Sample(content=text, targets=("x",), reply="x", question="Which?", span=(0, 18))
    built = build_prompt(task, sample, tokenizer)
    assert 96 in built.ids
    assert document_tokens(tokenizer, task, sample, built) == len("One fact. Another")
    # Where the template trims the turn, its end is still found.
    tokenizer.chat_template = "<{{ messages[0].content | trim }}>"
    spaced = replace(sample, content=sample.content + " \n")
    assert document_tokens(tokenizer, task, spaced, build_prompt(task, spaced, tokenizer)) == 1 + 17


@pytest.mark.parametrize("name", ["full", "locret", "snapkv", "oracle", "full+minference"])
def test_with_room_for_all_both_protocols_say_the_same(name: str, asked: list[Prompt]) -> None:
    method, policy = methods.get(name), RetentionPolicy(budget=500, chunk_size=512, stabilizers=8, local_len=8)
    known = Run(method, None if method.plain else method.policy(policy))
    unknown = answering.answers_on_forks(asked, replace(known, protocol=AGNOSTIC))
    for prompt, later in zip(asked, unknown, strict=True):
        first = answering.answer(prompt, known)
        assert (first["prediction"], first["generated_tokens"]) == (later["prediction"], later["generated_tokens"])
        assert later["kept_units"] == prompt.document.ids_1N.shape[1]


def test_a_document_is_read_once_for_all_questions_but_for_the_oracle(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reads: list[int] = []

    def counted(*given: Any, **options: Any) -> Any:
        reads.append(given[1].shape[1])
        return prefill(*given, **options)

    monkeypatch.setattr(answering, "prefill", counted)
    wanted = Wanted(tokenizer=lambda: None, lengths=[], folders=[str(published(tmp_path))], max_new_tokens=2)
    places = settled(plan_cases([REQUESTS.select(wanted)], 0, questions=3), setup.tokenizer)[0][:3]
    assert [case.question for case in places] == [0, 1, 2]
    for name, protocol, times in (("random", AGNOSTIC, 1), ("oracle", AGNOSTIC, 3), ("random", AWARE, 3)):
        reads.clear()
        runs = plan_runs([methods.get(name)], [Allotment(POLICY.to_dict())], protocols=[protocol])
        assert len(list(answering.evaluate(setup, places, runs, set()))) == 3
        assert len(reads) == times


def test_protocols_are_on_record_and_in_the_table_and_an_interrupted_run_goes_on(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (
        "--tasks",
        REQUESTS.name,
        "--data-dir",
        published(tmp_path / "data"),
        "--methods",
        "full,random",
        "--protocol",
        "aware,agnostic",
        *SMALL,
    )
    code, table, err = evaluate(*line, "--output", tmp_path / "alone")
    assert code == 0, err
    found = records(tmp_path / "alone")
    for record in found:
        twins = [r for r in found if (r["index"], r["question"]) == (record["index"], record["question"])]
        assert len({r["prompt_sha256"] for r in twins}) == 1
        if record["method"] == "full":  # the full cache answers a fork as it answers the whole prompt
            assert record["prediction"] == twins[0]["prediction"]
    assert "| random, agnostic | 48 |" in table
    assert [(c["method"], c["protocol"], c["n"], c["questions"]) for c in cells(tmp_path / "alone")] == [
        (method, how, 2, 4) for how in ("aware", "agnostic") for method in ("full", "random")
    ]
    later, left = answering.answers_on_forks, [2]

    def interrupted(*given: Any) -> Any:
        for one in later(*given):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(answering, "answers_on_forks", interrupted)
    assert evaluate(*line, "--output", tmp_path / "out")[0] == 130
    monkeypatch.setattr(answering, "answers_on_forks", later)
    assert 0 < len(records(tmp_path / "out")) < len(found)
    assert evaluate(*line, "--output", tmp_path / "out", "--resume")[0] == 0
    assert records(tmp_path / "out") == found


# --- turns ---


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return published(tmp_path / "data")


def run(backbone: Path, data: Path, *arguments: str) -> list[dict[str, Any]]:
    output = data.parent / f"out{len(list(data.parent.iterdir()))}"
    line = ["--model", str(backbone), "--data-dir", str(data), "--dtype", "float32", "--quiet"]
    assert command.command([*line, "--output", str(output), "--methods", "full,streaming", *arguments]) == 0
    return records(output)


def written(setup: Setup, turns: tuple[str, ...], said: tuple[str, ...]) -> list[str]:
    """Return the plain model's answers, each from all that came before, read at once; without `said` its own stand."""
    tokenizer, answers, messages = setup.tokenizer, list[str](), list[dict[str, str]]()
    for number, turn in enumerate(turns):
        if number:
            messages.append({"role": "assistant", "content": said[number - 1] if said else answers[-1]})
        messages.append({"role": "user", "content": turn})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        out = setup.model.generate(ids, max_new_tokens=6, do_sample=False, temperature=1.0, top_p=1.0)
        answers.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


def test_a_conversation_is_answered_as_by_the_plain_model_that_reads_it_anew(
    setup: Setup, backbone: Path, data: Path
) -> None:
    found = run(backbone, data, "--tasks", "scbench/kv", *AMPLE, "--max-new-tokens", "6")
    sample, single = map(open_rows(tasks.get("scbench/kv"), [str(data)]).sample, range(2))
    assert sample.said == tuple(FACTS.values())[:2]
    expected = [written(setup, one.turns, one.said) for one in (sample, single)]
    assert any(answer.strip() for answer in expected[0])
    for record in found:
        assert json.loads(record["prediction"]) == expected[record["index"]]
    full, bounded = (record for record in found if record["index"] == 0)
    assert full["prompt_tokens"] == bounded["prompt_tokens"] < full["peak_units"]


# --- games ---


def played(setup: Setup, turns: int, policy: RetentionPolicy | None = None) -> dict[str, Any]:
    task = tasks.get("sirllm/rock", turns=turns)
    (prompt,) = prompts(setup, task, [task.sampler(Making(None))(0)])
    return answering.answer_turns(prompt, Run(methods.get("random" if policy else "full"), policy))


def test_a_choice_is_what_three_branches_of_the_same_past_would_choose(setup: Setup) -> None:
    sample = tasks.get("sirllm/rock", turns=6).sampler(Making(None))(0)
    past, best = setup.tokenizer("")["input_ids"], ""
    for turn in sample.turns:
        branches = {}
        for letter in "ABC":
            before = setup.tokenizer(turn.rstrip(), add_special_tokens=False)["input_ids"]
            ids = setup.tokenizer(f"{turn.rstrip()} {letter}", add_special_tokens=False)["input_ids"]
            logits = setup.model(input_ids=torch.tensor([past + ids])).logits[0].log_softmax(-1)
            branches[letter] = (logits[len(past) + len(before) - 1, ids[len(before)]].item(), past + ids)
        best += max(branches, key=lambda letter: branches[letter][0])
        past = branches[best[-1]][1]
    roomy = RetentionPolicy(budget=3000, chunk_size=512, stabilizers=8, local_len=8)
    plain, bounded = played(setup, 6), played(setup, 6, roomy)
    assert plain["prediction"] == bounded["prediction"] == best
    assert bounded["peak_units"] == plain["peak_units"] > 200


@pytest.mark.parametrize("local_len", [16, 200])  # shorter and longer than a turn
def test_a_session_stays_within_its_budget_over_all_turns(setup: Setup, local_len: int) -> None:
    policy = RetentionPolicy(budget=96, chunk_size=128, stabilizers=8, local_len=local_len)
    short, long = played(setup, 20, policy), played(setup, 60, policy)
    assert long["prompt_tokens"] > 60 * 30 > policy.prefill_units
    assert long["peak_units"] == short["peak_units"] <= policy.prefill_units
    assert long["cache_bytes"] == short["cache_bytes"]
    assert long["prediction"].startswith(short["prediction"])


def test_a_published_file_is_one_game_scored_turn_by_turn(backbone: Path, data: Path) -> None:
    full, bounded = run(backbone, data, "--tasks", "sirllm/rock", *BOUNDED)
    assert bounded["targets"] == full["targets"] == ["BCABBCBACBAB"]
    assert bounded["peak_units"] <= 48 + 32 < full["peak_units"]
    won = [mine == best for mine, best in zip(bounded["prediction"], bounded["targets"][0], strict=True)]
    assert bounded["score"] == sum(won) / 12
    cells = results(next(data.parent.glob("out*")))["cells"]
    assert [cell["score"] for cell in cells] == [round(100 * record["score"], 4) for record in (full, bounded)]
