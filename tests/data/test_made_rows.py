"""Rows that are made here: of the published form and the wanted length, holding what they ask for, seeded."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

import pytest
from bench_cases import SHARED, entries
from embedded import tiny_tokenizer

from locret.data import tasks
from locret.data.tasks.prompts import build_prompt
from locret.data.tasks.published.base import Making, RowMaker, largest
from locret.data.tasks.published.infinitebench import needle
from locret.data.tasks.rows import Row
from locret.data.tasks.ruler.vocabulary import vocabulary

TOKENIZER = tiny_tokenizer()
MADE = {name: task for name in tasks.names() if isinstance(task := tasks.get(name), RowMaker)}
ANYWHERE = [name for name in MADE if not name.startswith(("ruler/qa", "sirllm"))]
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NEEDLE = re.compile(rf"One of the special magic (numbers|uuids) for ({UUID}|\S+) is: ({UUID}|\d{{7}})\.")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"


def rows(name: str, tokens: int | None, samples: int, *only: int, seed: int = 0, data_dir: Any = None) -> list[Any]:
    make = MADE[name].maker(Making(TOKENIZER, tokens, samples, seed, data_dir))
    return [make(index) for index in only or range(samples)]


def row(name: str, tokens: int | None = 2048, **options: Any) -> dict[str, Any]:
    return rows(name, tokens, 1, **options)[0]


@pytest.mark.parametrize("name", ANYWHERE)
def test_a_prompt_fills_its_length_and_its_true_answer_scores_1(name: str) -> None:
    task = MADE[name]
    sample = task.sampler(TOKENIZER, 3000, samples=2, seed=0)
    for index in range(2):
        one = sample(index)
        prompt = build_prompt(task, one, TOKENIZER)
        assert 3000 - 170 < len(prompt.ids) + task.max_new_tokens <= 3000
        assert (task.score(one.reply, one), task.score("", one), one.id) == (1, 0, str(index))
        assert all(target in one.content for target in one.targets)


@pytest.mark.parametrize("name", ANYWHERE)
def test_a_row_depends_on_seed_and_index_and_not_on_which_others_are_made(name: str) -> None:
    whole = rows(name, 1500, 3, seed=3)
    assert rows(name, 1500, 3, 2, seed=3) == whole[2:]
    if name != "niah/needle":  # its statement is the same in all rows
        assert len({json.dumps(one) for one in [*whole, *rows(name, 1500, 3, 2, seed=4)]}) == 4


@pytest.mark.parametrize("limit", [3, 10, 11, 97])
@pytest.mark.parametrize("guess", [1, 9, 1000])
def test_the_largest_size_is_found_from_any_guess(limit: int, guess: int) -> None:
    assert largest(lambda size: 3 + size, limit, least=0, guess=guess, what="a row") == limit - 3
    uneven = [3 + size + size % 2 for size in range(5000)]
    found = largest(lambda size: uneven[size], limit, least=0, guess=guess, what="a row")
    assert uneven[found] <= limit
    assert all(cost > limit for cost in uneven[found + 2 :])


def test_a_length_that_is_missing_or_cannot_hold_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens: ruler/vt has no length of its own"):
        MADE["ruler/vt"].sample(TOKENIZER)
    with pytest.raises(ValueError, match=r"tokens=100 cannot hold a row of ruler/vt, which takes at least \d+; raise"):
        row("ruler/vt", 100)


# --- InfiniteBench, needles, 2StageRetr, the game ---


def test_without_a_length_rows_have_the_published_size() -> None:
    assert row("infinitebench_generated/number_string", None)["context"].count("grass") == 5220
    pairs = json.loads(row("infinitebench_generated/kv_retrieval", None)["context"].removeprefix("JSON data:\n"))
    assert len(pairs) == 2500
    sizes = [len(re.findall(r"\d+: '", one["prompt"])) for one in rows("twostage/2stage", None, 12)]
    assert sizes == [40, 50, 60, 70, 80, 90, 100, 140, 180, 200, 40, 50]


def test_needles_stand_evenly_from_the_first_place_to_the_last() -> None:
    found = rows("infinitebench_generated/passkey", 2000, 5)
    places = [one["context"].index("The pass key") / (len(one["context"]) - 50) for one in found]
    assert places == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.03)
    for one, share in zip(rows("infinitebench_generated/kv_retrieval", 4000, 3), (0, 0.5, 1), strict=True):
        pairs = json.loads(one["context"].removeprefix("JSON data:\n"))
        key = re.search(r'Key: "(.+)"', one["input"])[1]  # type: ignore[index]
        assert [pairs[key]] == one["answer"]
        assert list(pairs).index(key) == pytest.approx(share * (len(pairs) - 1), abs=0.5)
    for number, one in enumerate(rows("niah/needle", 6000, 9), start=1):
        assert one["depth"] == pytest.approx(0.1 * number)
        assert one["context"].index("\nThe best thing") / len(one["context"]) == pytest.approx(one["depth"], abs=0.03)
    sample = MADE["niah/needle"].sample(TOKENIZER, 1000)
    assert MADE["niah/needle"].score("You should eat a SANDWICH.", sample) == pytest.approx(3 / 11)
    digits = [needle("number_string", random.Random(seed))[2] for seed in range(50)]
    assert all(len(one) == 10 and sum(a == b for a, b in zip(one, one[1:], strict=False)) >= 5 for one in digits)


def test_the_colour_of_the_sum_is_the_answer_and_the_lead_counts_to_the_length() -> None:
    for one in rows("twostage/2stage", None, 20):
        colours = dict(re.findall(r"(\d+): '(\w+)'", one["prompt"]))
        first, second = re.search(r"equation is (\d+) \+ (\d+) = \?", one["prompt"]).groups()  # type: ignore[union-attr]
        assert one["answers"] == [colours[str(int(first) + int(second))]]
    for style in ("chat", "yi"):
        task = tasks.get("multistep/2stage", style=style)
        assert 840 < len(build_prompt(task, task.sample(TOKENIZER, 900), TOKENIZER).ids) + task.max_new_tokens <= 900


@pytest.mark.parametrize(("move", "share"), [("rock", 0.5), ("paper", 0.502), ("scissors", 0.5205)])
def test_a_constant_answer_wins_what_the_preferred_move_allows(move: str, share: float) -> None:
    task = tasks.get(f"sirllm/{move}")
    sample = task.sample(None)
    best = {"rock": "B", "paper": "C", "scissors": "A"}[move]
    assert task.score(best * 2000, sample) == pytest.approx(share, abs=0.04)
    (short,) = tasks.get(f"sirllm/{move}", turns=2).items(entries([{"user_choice": letter} for letter in "ABC"]))
    assert (short.targets, task.score("BA", short)) == (("BC",), 0.5)


# --- RULER ---


def form(name: str, text: str) -> str:
    """Return a prompt with all that is drawn replaced by what kind of thing it is."""
    if name in ("vt", "cwe"):  # one worked example, then the task
        start = "Memorize and track" if name == "vt" else "Below is a numbered"
        text = start + text.split(start)[-1]
    text = text.replace(NOISE, "")
    text = NEEDLE.sub(r"One of the special magic \1 for K is: V.", text)
    text = re.sub(r"(One of the special magic \w+ for K is: V\.\n)+", "NEEDLES\n", text)
    text = re.sub(r"afterwards\.\n.*?\nWhat", "afterwards.\nHAYSTACK\nWhat", text, flags=re.DOTALL)
    text = re.sub(r"for (\S+, )+and \S+ mentioned", "for KEYS mentioned", text)
    text = re.sub(r"for \S+ mentioned", "for K mentioned" if "KEYS" not in text else "for KEYS mentioned", text)
    text = re.sub(r"(VAR \w+ = (VAR \w+ |\d+)\n?)+", "CHAIN\n", text)
    text = re.sub(r"value \d{5}", "value N", text)
    text = re.sub(r"\n1\. .*?\nQ", "\nLIST\nQ", text)
    return re.sub(r"coded words\. .*?\nQ", "coded words. TEXT\nQ", text, flags=re.DOTALL)


@pytest.mark.parametrize(
    "name", [name.partition("/")[2] for name in MADE if name.startswith("ruler/") and "qa" not in name]
)
def test_a_generated_row_has_the_form_of_a_published_one(name: str) -> None:
    paths = [
        *SHARED.glob(f"ruler*/4096/{name}.jsonl"),
        *SHARED.glob(f"ruler_generated/8192/{name}/validation.jsonl"),
    ]
    if not paths:
        pytest.skip("needs the published rows in ../shared/data")
    ours = row(f"ruler/{name}")
    for path in paths:
        for line in path.read_text().splitlines():
            theirs = json.loads(line)
            if name == "vt" and path.name != "validation.jsonl":
                continue  # the older layout has another worked example
            said = theirs["input"] + theirs.get("answer_prefix", "")
            assert form(name, said) == form(name, ours["input"] + ours["answer_prefix"])
            assert len(theirs["outputs"]) == len(ours["outputs"])


def test_a_chain_assigns_its_value_in_order() -> None:
    found = row("ruler/vt")
    task, names = found["input"].split("\n\nMemorize")[1], found["outputs"]
    value = re.search(r"value (\d+) in", task)[1]  # type: ignore[index]
    statements = [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:], strict=False)]
    assert re.findall(r"^VAR .*$", task, flags=re.MULTILINE) == statements


@pytest.mark.parametrize(("tokens", "often", "rarely"), [(2048, 6, 1), (12000, 30, 3)])
def test_common_words_appear_as_often_as_ruler_says(tokens: int, often: int, rarely: int) -> None:
    found = row("ruler/cwe", tokens)
    counts = Counter(re.findall(r"\d+\. (\S+)", found["input"].split("Below is")[-1]))
    assert sorted(word for word, times in counts.items() if times == often) == sorted(found["outputs"])
    assert set(counts.values()) == {often, rarely}
    drawn = vocabulary("own").distinct(random.Random(0), 50_000)  # more than there are get invented
    assert len(set(drawn)) == 50_000


def test_essays_come_from_the_data_folder_and_are_repeated_where_they_are_too_short(tmp_path) -> None:
    (tmp_path / "PaulGrahamEssays").mkdir()
    (tmp_path / "PaulGrahamEssays" / "a.txt").write_text("The tower stands. It\nrests!")
    (tmp_path / "PaulGrahamEssays" / "b.txt").write_text("A dog turns.")
    words = NEEDLE.sub("", row("ruler/niah_single_2", 400, data_dir=tmp_path)["input"].split("\n")[1]).split()
    assert " ".join(words).startswith("The tower stands. It rests! A dog turns. The tower stands.")
    with pytest.raises(ValueError, match=r"holds no essays \(looked for PaulGrahamEssays"):
        row("niah/passkey", 400, data_dir=tmp_path / "no")


def paragraph(name: str, impossible: bool) -> dict[str, Any]:
    answers = [{"text": f"Answer {name}"}, {"text": "It"}]
    asked = {"question": f"What is {name}?", "answers": answers, "is_impossible": impossible}
    return {"context": f"Paragraph {name}.", "qas": [asked]}


SQUAD = {"data": [{"paragraphs": [paragraph(f"{article}{part}", part == 2) for part in range(3)]} for article in "ab"]}
HOTPOT = [
    {"question": f"Who is {name}?", "answer": name, "context": [[name, ["One. ", "Two."]], ["Shared", ["Both."]]]}
    for name in ("Ann", "Bob", "Cid")
]


@pytest.mark.parametrize(
    ("name", "file", "data", "count", "own", "question"),
    [
        ("qa_1", "squad.json", SQUAD, 6, "Paragraph a1.", "What is a1?"),
        ("qa_2", "hotpotqa.json", HOTPOT, 4, "Bob\nOne. Two.", "Who is Bob?"),
    ],
)
def test_a_question_comes_with_its_own_documents_and_distractors(
    name: str, file: str, data: Any, count: int, own: str, question: str, tmp_path
) -> None:
    task, path = MADE[f"ruler/{name}"], tmp_path / file
    path.write_text(json.dumps(data))
    found = rows(f"ruler/{name}", 1000, 3, 1, data_dir=tmp_path)[0]
    (asked,) = task.read(Row(0, "", found))
    assert (asked.content.count("Document "), asked.lead) == (count, " Answer:")
    assert f":\n{own}\n\n" in asked.content
    assert asked.content.endswith(f"do not output any other words.\n\nQuestion: {question}")
    assert (task.score("it is " + asked.targets[-1].upper(), asked), task.score("none", asked)) == (1, 0)
    for written, message in (('[{"question": "Who?"}]', rf"{file} is no"), ("[]", "no questions|is no")):
        path.write_text(written)
        with pytest.raises(ValueError, match=message):
            row(f"ruler/{name}", 1000, data_dir=tmp_path)
    with pytest.raises(ValueError, match="is made from questions of"):
        row(f"ruler/{name}")
