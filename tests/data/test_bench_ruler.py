"""RULER: generated rows have the form of the published ones, fill their length, and hold what they ask for."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bench_cases import made
from embedded import tiny_tokenizer

from locret.data.tasks.prompts import build_prompt
from locret.data.tasks.published.row_maker import largest
from locret.data.tasks.ruler import TASKS
from locret.data.tasks.ruler.counting import _zeta
from locret.data.training.json_rows import BadRow, stream_entries

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
BY_NAME = {task.name.removeprefix("ruler/"): task for task in TASKS}
GENERATED = [name for name in BY_NAME if not name.startswith("qa")]
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NEEDLE = re.compile(rf"One of the special magic (numbers|uuids) for ({UUID}|\S+) is: ({UUID}|\d{{7}})\.")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.mark.slow
def test_long_rows_do_not_depend_on_who_makes_them_either(tokenizer: Any) -> None:
    # Long rows may leave some tokens unused, so how their size was found must be the same.
    task = BY_NAME["niah_multikey_2"]
    assert made(task, tokenizer, 120_000, 2, only=[1]) == made(task, tokenizer, 120_000, 2)[1:]


def row(name: str, tokenizer: Any, tokens: int = 2048, index: int = 0, **options: Any) -> dict[str, Any]:
    (found,) = made(BY_NAME[name], tokenizer, tokens, index + 1, only=[index], **options)
    return found


def item(name: str, found: dict[str, Any]) -> Any:
    return BY_NAME[name].read(0, "here:1", found)[0]


# --- form, compared with published rows where they are at hand ---


def form(name: str, text: str) -> str:
    """A prompt with all that is drawn replaced by what kind of thing it is."""
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


@pytest.mark.parametrize("name", [name for name in GENERATED if name != "vt"])
def test_a_generated_row_has_the_form_of_a_published_one(name: str, tokenizer: Any) -> None:
    folder = "ruler" if name == "niah_multikey_3" else "ruler_generated"
    path = SHARED / folder / "4096" / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip("needs the published rows in ../shared/data")
    theirs = [item(name, json.loads(line)) for line in path.read_text().splitlines()]
    ours = item(name, row(name, tokenizer))
    assert {form(name, their.content) for their in theirs} == {form(name, ours.content)}
    assert {form(name, their.content + their.lead) for their in theirs} == {form(name, ours.content + ours.lead)}
    assert {len(their.targets) for their in theirs} == {len(ours.targets)}
    kinds = {bool(re.fullmatch(UUID, target)) for their in theirs for target in their.targets}
    assert kinds == {bool(re.fullmatch(UUID, target)) for target in ours.targets}


@pytest.mark.parametrize("name", ["vt", "niah_single_2", "niah_multikey_3"])
def test_a_generated_row_has_the_fields_and_form_of_the_newer_layout(name: str, tokenizer: Any) -> None:
    path = SHARED / "ruler_generated" / "8192" / name / "validation.jsonl"
    if not path.is_file():
        pytest.skip("needs the published rows in ../shared/data")
    published = [json.loads(line) for line in path.read_text().splitlines()]
    found = row(name, tokenizer)
    assert set(published[0]) - {"length_w_model_temp", "token_position_answer"} <= set(found)
    assert {form(name, their["input"] + their["answer_prefix"]) for their in published} == {
        form(name, found["input"] + found["answer_prefix"])
    }
    if name == "vt":
        both = published[0], found
        assert all(len(re.findall("Memorize and track", each["input"])) == 2 for each in both)
        assert all(re.search(r"they are:  \w{3}( \w{3}){4}\n\nMemorize", each["input"]) for each in both)


def test_every_published_row_reads_whatever_its_layout() -> None:
    paths = sorted(SHARED.glob("ruler*/**/*.jsonl"))
    if not paths:
        pytest.skip("needs the published rows in ../shared/data")
    for path in paths:
        name = path.parent.name if path.stem == "validation" else path.stem
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        items = list(BY_NAME[name].items(stream_entries([path])))
        assert [each.id for each in items] == [str(number) for number in range(len(rows))]
        for each, published in zip(items, rows, strict=True):
            assert each.content + each.lead == published["input"] + published.get("answer_prefix", "")
            assert list(each.targets) == published["outputs"]
            assert each.lead.startswith((" The special magic", " Answer: "))
            assert len(each.lead) < 250
            assert BY_NAME[name].score(each.reply, each) == 1
    assert len(paths) == 14


# --- lengths ---


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("tokens", [1500, 5000])
def test_a_row_fills_its_length_and_never_more(name: str, tokens: int, tokenizer: Any) -> None:
    task, found = BY_NAME[name], row(name, tokenizer, tokens)
    prompt = build_prompt(task, item(name, found), tokenizer)
    assert len(prompt.ids) + task.max_new_tokens == found["length"] <= tokens
    # One more line, word or list entry would not fit.
    assert found["length"] > tokens - 120


@pytest.mark.parametrize("name", GENERATED)
def test_rows_differ_by_index_and_seed_and_do_not_depend_on_who_makes_them(name: str, tokenizer: Any) -> None:
    rows = made(BY_NAME[name], tokenizer, 1500, 3, seed=5)
    assert rows[2] == row(name, tokenizer, 1500, index=2, seed=5)
    assert len({tuple(each["outputs"]) for each in [*rows, row(name, tokenizer, 1500, seed=6)]}) == 4


@pytest.mark.parametrize("limit", [3, 10, 11, 97])
@pytest.mark.parametrize("guess", [1, 9, 1000])
def test_the_largest_size_is_found_from_any_guess(limit: int, guess: int) -> None:
    assert largest(lambda size: 3 + size, limit, least=0, guess=guess, what="a row") == limit - 3
    uneven = [3 + size + size % 2 for size in range(5000)]
    found = largest(lambda size: uneven[size], limit, least=0, guess=guess, what="a row")
    assert uneven[found] <= limit
    assert all(cost > limit for cost in uneven[found + 2 :])


def test_a_length_that_cannot_hold_a_row_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="tokens: ruler/vt has no length of its own"):
        row("vt", tokenizer, None)
    with pytest.raises(ValueError, match=r"tokens=100 cannot hold a row of ruler/vt, which takes at least \d+; raise"):
        row("vt", tokenizer, 100)


# --- contents ---


@pytest.mark.parametrize(
    ("name", "needles", "keys"),
    [("niah_single_1", 1, 1), ("niah_multikey_1", 4, 4), ("niah_multivalue", 4, 1), ("niah_multiquery", 4, 4)],
)
def test_needles_are_as_many_as_the_task_says_and_answer_the_question(
    name: str, needles: int, keys: int, tokenizer: Any
) -> None:
    found = row(name, tokenizer, index=3)
    hidden = NEEDLE.findall(found["input"])
    assert (len(hidden), len({key for _, key, _ in hidden})) == (needles, keys)
    asked = re.search(r"for (.+) mentioned in the provided text\?$", found["input"])[1].replace("and ", "").split(", ")
    assert Counter(found["outputs"]) == Counter(value for _, key, value in hidden if key in asked)


@pytest.mark.parametrize("name", ["niah_multikey_2", "niah_multikey_3"])
def test_a_haystack_of_needles_states_the_asked_key_once(name: str, tokenizer: Any) -> None:
    found = row(name, tokenizer, 6000)
    hidden = NEEDLE.findall(found["input"])
    asked = re.search(r"for (\S+) mentioned", found["input"])[1]
    assert len(hidden) > 40
    assert [value for _, key, value in hidden if key == asked] == found["outputs"]


def test_needles_stand_at_their_depths(tokenizer: Any) -> None:
    found = row("niah_single_2", tokenizer, 4096, index=1)
    haystack = found["input"].split("\n")[1]
    assert haystack.index("One of the special") / len(haystack) == pytest.approx(found["depths"][0], abs=0.03)


def test_a_chain_assigns_its_value_in_order(tokenizer: Any) -> None:
    found = row("vt", tokenizer)
    task = found["input"].split("\n\nMemorize")[1]
    value = re.search(r"value (\d+) in", task)[1]
    names = found["outputs"]
    statements = [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:], strict=False)]
    assert re.findall(r"^VAR .*$", task, flags=re.MULTILINE) == statements
    assert all(len(name) == 5 for name in names)


@pytest.mark.parametrize(("tokens", "often", "rarely"), [(2048, 6, 1), (12000, 30, 3)])
def test_common_words_appear_as_often_as_ruler_says(tokens: int, often: int, rarely: int, tokenizer: Any) -> None:
    found = row("cwe", tokenizer, tokens)
    counts = Counter(re.findall(r"\d+\. (\S+)", found["input"].split("Below is")[-1]))
    assert sorted(word for word, times in counts.items() if times == often) == sorted(found["outputs"])
    assert set(counts.values()) == {often, rarely}
    assert len(found["outputs"]) == 10


def test_coded_words_follow_zipf_and_dots_are_the_most_frequent(tokenizer: Any) -> None:
    found = row("fwe", tokenizer, 4096)
    counts = Counter(found["input"].split("coded words. ")[1].split("\nQuestion")[0].split(" ")).most_common()
    assert [word for word, _ in counts[:4]] == ["...", *found["outputs"]]
    assert [counts[0][1] // rank**2 for rank in (2, 3)] == pytest.approx([times for _, times in counts[1:3]], abs=1)


def test_zeta_is_the_sum_of_its_series() -> None:
    assert _zeta(2.0) == pytest.approx(3.141592653589793**2 / 6, abs=1e-9)


def test_essays_come_from_the_data_folder_and_are_repeated_where_they_are_too_short(
    tmp_path: Path, tokenizer: Any
) -> None:
    (tmp_path / "PaulGrahamEssays").mkdir()
    (tmp_path / "PaulGrahamEssays" / "a.txt").write_text("The tower stands. It\nrests!")
    (tmp_path / "PaulGrahamEssays" / "b.txt").write_text("A dog turns.")
    found = row("niah_single_2", tokenizer, 400, data_dir=tmp_path)
    words = NEEDLE.sub("", found["input"].split("\n")[1]).split()
    assert found["form"] == "essays"
    assert " ".join(words).startswith("The tower stands. It rests! A dog turns. The tower stands.")
    with pytest.raises(ValueError, match=r"holds no essays \(looked for PaulGrahamEssays"):
        row("niah_single_2", tokenizer, 400, data_dir=tmp_path / "PaulGrahamEssays" / "no")
    assert row("niah_single_2", tokenizer, 400)["form"] == "filler"


def test_more_different_words_than_there_are_get_invented(tokenizer: Any) -> None:
    import random

    from locret.data.tasks.ruler.vocabulary import vocabulary

    drawn = vocabulary("own").distinct(random.Random(0), 50_000)
    assert len(set(drawn)) == 50_000
    assert all(word.isalpha() for word in drawn)
    with pytest.raises(ValueError, match='words="mine" is not a source of words'):
        vocabulary("mine")


# --- question answering ---

SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Paragraph {article}{part}.",
                    "qas": [
                        {
                            "question": f"What is {article}{part}?",
                            "answers": [{"text": f"Answer {article}{part}"}, {"text": "It"}],
                            "is_impossible": part == 2,
                        }
                    ],
                }
                for part in range(3)
            ]
        }
        for article in "ab"
    ]
}
HOTPOT = [
    {"question": f"Who is {name}?", "answer": name, "context": [[name, ["One. ", "Two."]], ["Shared", ["Both."]]]}
    for name in ("Ann", "Bob", "Cid")
]


@pytest.mark.parametrize(("name", "file", "data"), [("qa_1", "squad.json", SQUAD), ("qa_2", "hotpotqa.json", HOTPOT)])
def test_a_question_comes_with_its_own_documents_and_distractors(
    name: str, file: str, data: Any, tmp_path: Path, tokenizer: Any
) -> None:
    (tmp_path / file).write_text(json.dumps(data))
    rows = made(BY_NAME[name], tokenizer, 1000, 3, data_dir=tmp_path)
    asked = item(name, rows[1])
    assert asked.content.count("Document ") == (6 if name == "qa_1" else 4)
    own = "Paragraph a1." if name == "qa_1" else "Bob\nOne. Two."
    assert f":\n{own}\n\n" in asked.content
    question = "What is a1?" if name == "qa_1" else "Who is Bob?"
    assert asked.content.endswith(f"do not output any other words.\n\nQuestion: {question}")
    assert asked.lead == " Answer:"
    assert BY_NAME[name].score("it is " + asked.targets[-1].upper(), asked) == 1
    assert BY_NAME[name].score("none", asked) == 0


def test_a_question_prefers_paragraphs_of_its_own_article(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "squad.json").write_text(json.dumps(SQUAD))
    whole = row("qa_1", tokenizer, 1000, data_dir=tmp_path)["length"]
    fewer = row("qa_1", tokenizer, whole - 60, data_dir=tmp_path)["input"]
    shown = set(re.findall(r"Paragraph (\w\d)", fewer))
    assert "a0" in shown
    assert len(shown) < 6
    assert len(shown & {"a0", "a1", "a2"}) == min(3, len(shown))


def test_question_sets_that_are_missing_or_broken_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"ruler/qa_1 is made from questions of squad.*pass --data-dir"):
        row("qa_1", tokenizer)
    with pytest.raises(ValueError, match=r"has no question set for ruler/qa_2; put hotpotqa.json or"):
        row("qa_2", tokenizer, data_dir=tmp_path)
    (tmp_path / "hotpotqa.json").write_text('[{"question": "Who?"}]')
    with pytest.raises(ValueError, match=r"hotpotqa.json is no hotpotqa file \(KeyError: 'context'\)"):
        row("qa_2", tokenizer, data_dir=tmp_path)


def test_a_row_that_cannot_be_asked_names_its_place_and_field() -> None:
    with pytest.raises(BadRow, match="here:1 has no field 'outputs'"):
        BY_NAME["vt"].read(0, "here:1", {"input": "x"})
    with pytest.raises(BadRow, match="here:1 has a field 'input' that does not end with how an answer begins"):
        BY_NAME["vt"].read(0, "here:1", {"input": "x", "outputs": ["A"]})
