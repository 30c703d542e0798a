"""SCBench: official prompts and metrics in both of its modes, with all questions of a text."""

from __future__ import annotations

import json
import re

import pytest
from bench_cases import entries, golden
from hub_server import Repo

from locret.data import tasks
from locret.data.tasks.metrics.overlap import bleu, first_code_block, repeated_function
from locret.data.tasks.published.loading import open_task
from locret.data.training.json_rows import BadRow

CASES = golden("scbench")


def samples(name, records=None, **options):
    records = CASES[name.removesuffix("_requests")]["records"] if records is None else records
    return list(tasks.get(f"scbench/{name}", **options).items(entries(records)))


@pytest.mark.parametrize("name", CASES)
def test_requests_are_the_official_ones_and_share_their_text(name) -> None:
    found = samples(f"{name}_requests")
    for one, (text, *rest) in zip(found, CASES[name]["requests"], strict=True):
        assert one.content[: one.span[1]] == text
        assert [one.asking(question).content for question in one.asked] == [text + asked for asked in rest]
        assert one.asking(one.asked[0]) == one
    assert [one.id for one in found] == ["0", "1"]
    assert tasks.get(f"scbench/{name}_requests").questions == 5


@pytest.mark.parametrize("name", CASES)
def test_conversations_have_the_official_turns(name) -> None:
    """The official prompts have the toy chat template in them."""
    case = CASES[name]
    for one, (first, *later) in zip(samples(name), case["turns"], strict=True):
        assert f"<|im_start|> user {one.content} <|im_end|> <|im_start|> assistant " == first
        assert one.turns[0] == one.content
        opened = "<|im_end|> <|im_start|> assistant " + "This paper" * (name == "summary")
        mine = [
            f"{said} <|im_end|> <|im_start|> user {asked} {opened}"
            for said, asked in zip(one.said, one.turns[1:], strict=True)
        ]
        assert mine == later
        assert samples(name, golden=False)[0].said == ()


@pytest.mark.parametrize("name", CASES)
def test_answers_score_as_the_official_code_scores_them(name) -> None:
    pytest.importorskip("rouge_score", reason="ROUGE needs locret[eval]")
    one, _ = samples(f"{name}_requests")
    found = [one.asking(question) for question in one.asked]
    task = tasks.get(f"scbench/{name}_requests", scorer="official")
    for number, said, expected in CASES[name]["scores"]:
        assert task.score(said, found[number]) == pytest.approx(expected, abs=1e-12), (number, said)


def test_a_text_answer_is_one_reference_unless_the_official_quirk_is_asked_for() -> None:
    (one, *_) = samples("many_shot_requests")
    assert one.targets == ("(A)",)
    fixed, official = (tasks.get("scbench/many_shot_requests", scorer=one) for one in ("fixed", "official"))
    assert [fixed.score(said, one) for said in ("(A)", "(B)")] == [1, 0]
    assert [official.score(said, one) for said in ("(A)", "(B)")] == [1, 1]
    (one, *_) = samples("qa_chn_requests")
    task = tasks.get("scbench/qa_chn_requests")
    assert task.score("在河边", one) == 1


def test_a_repeated_function_is_compared_with_all_of_its_repository() -> None:
    pytest.importorskip("nltk", reason="BLEU needs locret[eval]")
    for candidate, reference, expected in CASES["repoqa"]["similarity"]:
        mine = bleu(re.split(r"\s+", candidate.strip()), re.split(r"\s+", reference.strip()), smooth=True)
        assert mine == pytest.approx(expected, abs=1e-12)
    task, (one, _) = tasks.get("scbench/repoqa_requests"), samples("repoqa_requests")
    found = [one.asking(question) for question in one.asked]
    block = f"Here it is:\n```python\n{found[0].reply}```\nIt adds."
    assert first_code_block(block) == found[0].reply
    assert [task.score(block, one) for one in found] == [1, 0]
    assert repeated_function("", [("a", "def a(): pass")]) == ("", 0.0)
    # Likest to the right one, but not like enough.
    assert task.score("def add(x, y, z):\n    return x + y", found[0]) == 0
    # In the task's score the functions of all rows of a repository count.
    answers = [(found[1].reply, found[0].targets), (found[1].reply, found[1].targets)]
    assert task.summarise([], answers) == 0.5
    assert task.summarise([], answers[:1]) == 0


def test_a_conversation_scores_the_mean_of_its_turns_and_a_task_the_mean_of_all() -> None:
    task, (one, _) = tasks.get("scbench/kv"), samples("kv")
    said = json.dumps(["it is b3f1", "x"])
    assert task.score(said, one) == 0.5
    assert task.score(one.reply, one) == 1
    for wrong in ("b3f1", "[1, 2]", '["b3f1"]', "[" * 10_000):
        with pytest.raises(ValueError, match="is not a JSON list of 2 answers, one for each turn"):
            task.score(wrong, one)
    short = (json.dumps(["ffff"]), one.targets[1:])
    assert task.summarise([0.5, 1.0], [(said, one.targets), short]) == pytest.approx(2 / 3)


def test_a_mixed_task_is_the_mean_of_its_kinds() -> None:
    pytest.importorskip("rouge_score", reason="ROUGE needs locret[eval]")
    task, (one, _) = tasks.get("scbench/summary_with_needles"), samples("summary_with_needles")
    answers = [(json.dumps(["A cat purred.", said]), one.targets) for said in ("48213", "none", "none")]
    assert [task.score(said, one) for said, _ in answers] == [1, 0.5, 0.5]
    assert task.summarise([], answers) == pytest.approx((1 + 1 / 3) / 2)
    assert [task.kind_of(json.loads(targets)) for targets in one.targets] == ["summary", "passkey"]


def test_no_more_turns_are_asked_than_in_the_official_runs() -> None:
    (row,) = CASES["kv"]["records"][:1]
    row = {**row, "multi_turns": row["multi_turns"] * 4}
    assert len(samples("kv", [row])[0].turns) == 5
    assert len(samples("kv", [row], max_turns=7)[0].turns) == 7
    assert len(samples("kv_requests", [row])[0].asked) == 8


def test_a_text_has_the_room_that_the_official_runs_leave() -> None:
    limits = {name: tasks.get(f"scbench/{name}").limit for name in ("kv", "mf", "repoqa_and_kv", "kv_requests")}
    assert limits == {
        "kv": 131_072 - 750, "mf": 131_072 - 25, "repoqa_and_kv": 131_072 - 2760, "kv_requests": 131_072 - 1750,
    }  # fmt: skip


def test_rows_come_from_the_hub(hub) -> None:
    task = tasks.get("scbench/vt")
    lines = "\n".join(json.dumps(row) for row in CASES["vt"]["records"]).encode()
    hub.repos[f"datasets/{task.repo}"] = Repo(commits={task.revision: {"data/scbench_vt.jsonl": lines}}, branches={})
    rows = open_task(task)
    assert rows.revision == task.revision
    assert [len(one.turns) for one in rows.items()] == [2, 2]


ROW, TURN = CASES["kv"]["records"][0], CASES["kv"]["records"][0]["multi_turns"][0]


@pytest.mark.parametrize(
    ("name", "row", "detail"),
    [
        ("kv", {**ROW, "context": ""}, "has an empty field 'context'"),
        ("kv", {**ROW, "context": [1]}, "has a field 'context' of type list where text is needed"),
        ("kv", {"context": "a"}, "has no list of questions in field 'multi_turns'"),
        ("kv", {**ROW, "multi_turns": []}, "has no list of questions in field 'multi_turns'"),
        ("kv", {**ROW, "multi_turns": ["a"]}, "has no list of questions in field 'multi_turns'"),
        ("kv", {**ROW, "multi_turns": [{"input": "a"}]}, "has no field 'answer'"),
        ("kv", {**ROW, "multi_turns": [{"answer": "a"}]}, "has no field 'input'"),
        ("kv", {**ROW, "multi_turns": [TURN, {**TURN, "answer": {}}]}, "has a field 'answer' of type dict where text"),
        ("kv", {**ROW, "multi_turns": [{**TURN, "input": 4}]}, "has a field 'input' of type int where text is needed"),
        ("mf", ROW, "has no list of numbers in field 'context'"),
        ("mf", {**ROW, "context": [True]}, "has no list of numbers in field 'context'"),
        ("mf", {"context": [1], "multi_turns": [TURN]}, "holds 'b3f1' in field 'answer' where a number is needed"),
        ("mf", {"context": [1], "multi_turns": [{"input": "?", "answer": 4}]}, 'does not say "The ... is"'),
        ("choice_eng", ROW, "has no field 'options'"),
        (
            "choice_eng",
            {**ROW, "multi_turns": [{**TURN, "options": ["a", "b", "c", "d"]}]},
            "has the options ('a', 'b', 'c', 'd') to the answer 'b3f1'",
        ),
        ("repoqa", ROW, "has no field 'name'"),
        ("repoqa", {**ROW, "multi_turns": [{**TURN, "name": "f"}]}, "has no field 'repo'"),
        ("summary_with_needles", ROW, "has no field 'task'"),
        (
            "summary_with_needles",
            {**ROW, "multi_turns": [{**TURN, "task": "scbench_kv"}]},
            "holds 'kv' in field 'task' where summary or passkey is right",
        ),
        (
            "summary_with_needles",
            {**ROW, "multi_turns": [{**TURN, "task": "scbench_passkey"}]},
            "holds 'b3f1' in field 'answer' where a number is needed",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["", "_requests"])
def test_a_bad_row_says_what_is_wrong(name, row, detail, mode) -> None:
    with pytest.raises(BadRow, match=re.escape(detail)):
        samples(f"{name}{mode}", [row])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kv", {"max_turns": 0}, "max_turns=0 must be a whole number, 1 or more"),
        ("kv", {"scorer": "x"}, "scorer='x' is unknown; use one of fixed, official"),
        ("kv_requests", {"golden": False}, "golden=False has no effect, as requests have no history"),
        ("kv_requests", {"max_turns": 3}, "max_turns=3 has no effect on requests; use --questions"),
    ],
)
def test_options_without_effect_are_refused(name, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        tasks.get(f"scbench/{name}", **options)
