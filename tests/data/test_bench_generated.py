"""Generated InfiniteBench, 2StageRetr and needle rows: as published, of the wanted length, at the wanted depth."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from bench_cases import load, made
from embedded import tiny_tokenizer

from locret.data.tasks.prompts import build_prompt
from locret.data.tasks.published import infinitebench_generated, niah, omnikv
from locret.data.tasks.published.infinitebench_generated import LINES, draw_answer, needle_line
from locret.data.training.json_rows import stream_entries

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
TASKS = {task.name: task for task in (*infinitebench_generated.TASKS, *omnikv.TASKS, *niah.TASKS)}
NUMBER, PASSKEY = TASKS["infinitebench_generated/number_string"], TASKS["infinitebench_generated/passkey"]
KV, TWO_STAGE = TASKS["infinitebench_generated/kv_retrieval"], TASKS["twostage/2stage"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


rows = made


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_fills_its_length_and_never_more(name: str, tokenizer: Any) -> None:
    task = TASKS[name]
    sample = task.sampler(tokenizer, 3000, samples=3, seed=0)
    for index in range(3):
        prompt = build_prompt(task, sample(index), tokenizer)
        assert 3000 - 170 < len(prompt.ids) + task.max_new_tokens <= 3000
        assert not prompt.truncated


@pytest.mark.parametrize("name", TASKS)
def test_a_row_does_not_depend_on_which_others_are_made(name: str, tokenizer: Any) -> None:
    whole = made(TASKS[name], tokenizer, 1200, 4, seed=3)
    assert made(TASKS[name], tokenizer, 1200, 4, seed=3, only=[2]) == [whole[2]]
    sample = TASKS[name].sampler(tokenizer, 1200, samples=4, seed=3)
    assert [sample(index).id for index in range(4)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("name", TASKS)
def test_the_true_answer_scores_1_and_silence_0(name: str, tokenizer: Any) -> None:
    item = TASKS[name].sampler(tokenizer, 1200, samples=1, seed=0)(0)
    assert TASKS[name].score(item.reply, item) == 1
    assert TASKS[name].score("", item) == 0
    assert item.reply in item.content


# --- InfiniteBench ---


@pytest.mark.parametrize("name", ["passkey", "number_string"])
def test_published_contexts_are_rebuilt_from_their_answer_and_place(name: str, tokenizer: Any) -> None:
    path = SHARED / "infinitebench_generated" / "data" / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip("needs the reconstructed rows in ../shared/data")
    noise = f"{infinitebench_generated.NOISE_LINE} "
    for line in path.read_text().splitlines():
        row = json.loads(line)
        needle = f"{needle_line(name, row['answer'][0])} "
        place, rest = divmod(row["context"].index(needle), len(noise))
        count = (len(row["context"]) - len(needle)) // len(noise)
        assert rest == 0
        assert row["context"] == noise * place + needle + noise * (count - place)
        assert count in LINES.values()
        assert row["input"] == infinitebench_generated.question(name)


def test_real_rows_of_the_older_copy_have_the_same_sentences() -> None:
    path = SHARED / "infinitebench" / "data" / "passkey_8192.jsonl"
    if not path.is_file():
        pytest.skip("needs the published rows in ../shared/data")
    for line in path.read_text().splitlines():
        row = json.loads(line)
        lines = row["context"].splitlines()
        assert set(lines) == {infinitebench_generated.NOISE_LINE, needle_line("passkey", row["answer"])}
        assert len(lines) == LINES[8192] + 1


def test_without_a_length_rows_have_the_published_size(tokenizer: Any) -> None:
    (number,) = rows(NUMBER, tokenizer, None, 1)
    (kv,) = rows(KV, tokenizer, None, 1)
    assert number["context"].count("grass") == 5220
    assert len(json.loads(kv["context"].removeprefix("JSON data:\n"))) == 2500
    path = SHARED / "infinitebench_generated" / "data" / "number_string.jsonl"
    if path.is_file():
        published = next(row for row in load(path) if row["id"] == 233)
        assert set(number) - {"depth"} == set(published)
        assert len(number["context"]) == len(published["context"])


def test_needles_stand_evenly_from_the_first_line_to_the_last(tokenizer: Any) -> None:
    found = rows(PASSKEY, tokenizer, 2000, 5)
    places = [row["context"].index("The pass key") / (len(row["context"]) - 50) for row in found]
    assert places == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.03)
    assert [row["depth"] for row in found] == [0, 0.25, 0.5, 0.75, 1]


def test_asked_pairs_are_swept_and_the_value_belongs_to_the_key(tokenizer: Any) -> None:
    for row, share in zip(rows(KV, tokenizer, 4000, 3), (0, 0.5, 1), strict=True):
        pairs = json.loads(row["context"].removeprefix("JSON data:\n"))
        key = re.fullmatch(r'\nKey: "(.+)"\nThe value associated with the specified key is: ', row["input"])[1]
        assert [pairs[key]] == row["answer"]
        assert list(pairs).index(key) == pytest.approx(share * (len(pairs) - 1), abs=0.5)


def test_every_sequence_of_digits_repeats_neighbours() -> None:
    rng = random.Random(0)
    for _ in range(200):
        digits = draw_answer("number_string", rng)
        runs = [len(list(run)) for _, run in itertools.groupby(digits)]
        assert (len(digits), sum(runs) - len(runs) >= 5) == (10, True)
    assert len({draw_answer("passkey", rng) for _ in range(50)}) > 45


# --- 2StageRetr ---


def test_a_dictionary_has_the_published_form_and_sizes(tokenizer: Any) -> None:
    found = rows(TWO_STAGE, tokenizer, None, 12)
    sizes = [len(re.findall(r"\d+: '", row["prompt"])) for row in found]
    assert sizes == [*omnikv.SIZES, 40, 50]
    path = SHARED / "twostage" / "2stage.jsonl"
    if not path.is_file():
        pytest.skip("needs the generated rows in ../shared/data")
    published = [json.loads(line) for line in path.read_text().splitlines()]
    assert {form(row["prompt"]) for row in published} == {form(row["prompt"]) for row in found}
    assert [len(re.findall(r"\d+: '", row["prompt"])) for row in published[:10]] == sizes[:10]
    assert {color for row in published for color in row["answers"]} <= set(omnikv.COLORS)


def form(prompt: str) -> str:
    return re.sub(r"\d+ \+ \d+", "A + B", re.sub(r"\{.*\}", "{}", prompt))


def test_the_colour_of_the_sum_is_the_answer(tokenizer: Any) -> None:
    for row in rows(TWO_STAGE, tokenizer, None, 20):
        entries = dict(re.findall(r"(\d+): '(\w+)'", row["prompt"]))
        first, second = re.search(r"equation is (\d+) \+ (\d+) = \?", row["prompt"]).groups()
        assert row["answers"] == [entries[str(int(first) + int(second))]]


def test_every_published_two_stage_row_reads() -> None:
    for name in ("2stage", "2stage_long"):
        path = SHARED / "twostage" / f"{name}.jsonl"
        if not path.is_file():
            pytest.skip("needs the generated rows in ../shared/data")
        items = list(TWO_STAGE.items(stream_entries([path])))
        assert [(item.content, list(item.targets)) for item in items] == [
            (row["prompt"], row["answers"]) for row in load(path)
        ]


# --- needle in a haystack ---


def test_depths_are_those_of_the_published_configuration(tokenizer: Any) -> None:
    found = rows(TASKS["niah/needle"], tokenizer, 6000, 9)
    assert [row["depth"] for row in found] == pytest.approx([0.1 * step for step in range(1, 10)])
    for row in found:
        assert row["context"].index("\nThe best thing") / len(row["context"]) == pytest.approx(row["depth"], abs=0.03)
        assert row["context"].count("sandwich") == 1
        assert row["haystack"] == "filler"


def test_needle_and_question_are_the_published_ones() -> None:
    path = SHARED / "niah" / "Needle_test" / "config-prompt.yaml"
    if not path.is_file():
        pytest.skip("needs the published configuration in ../shared/data")
    import yaml

    config = yaml.safe_load(path.read_text())["prompt"]
    assert (config["needle"], config["retrieval_question"]) == (niah.NEEDLE, niah.QUESTION)


def test_essays_of_the_data_folder_are_the_haystack(tokenizer: Any) -> None:
    if not (SHARED / "niah").is_dir():
        pytest.skip("needs the essays in ../shared/data")
    for folder in (SHARED, SHARED / "niah", SHARED / "niah" / "PaulGrahamEssays"):
        (row,) = rows(TASKS["niah/passkey"], tokenizer, 3000, 1, data_dir=folder)
        assert row["haystack"] == "essays"
        assert row["context"].startswith("July 2010What hard liquor")
        assert re.search(r"[.!?]\nThe pass key is (\d+)\. Remember it\.", row["context"])[1] == row["answer"]


def test_a_part_of_the_needle_earns_a_part_of_the_score(tokenizer: Any) -> None:
    task = TASKS["niah/needle"]
    item = task.sampler(tokenizer, 1000, samples=1, seed=0)(0)
    assert task.score("You should eat a SANDWICH.", item) == pytest.approx(3 / 11)
    assert build_prompt(task, item, tokenizer).text.count("You are a helpful AI bot") == 1


def test_impossible_settings_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="min_depth=60, max_depth=50 is not a range of depths"):
        niah.NeedleTask(**{**vars(TASKS["niah/needle"]), "min_depth": 60, "max_depth": 50})
    with pytest.raises(ValueError, match="niah/needle has no length of its own"):
        rows(TASKS["niah/needle"], tokenizer, None, 1)
    with pytest.raises(ValueError, match=r"tokens=50 cannot hold a row of infinitebench_generated/kv_retrieval"):
        rows(KV, tokenizer, 50, 1)
