"""BABILong: official prompts and metric, its lengths, both of its collections."""

from __future__ import annotations

import re

import pytest
from bench_cases import entries, golden, write_lines
from hub_server import Repo

from locret.data import tasks
from locret.data.tasks.published.babilong import LENGTHS
from locret.data.tasks.published.loading import parts
from locret.data.tasks.task import NoSamples, Wanted
from locret.data.training.json_rows import BadRow

CASES = golden("babilong")
ROW = CASES["qa1"]["records"][0]


def wanted(**more):
    return Wanted(**{"tokenizer": lambda: None, "lengths": [4096], **more})


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_the_official_ones_with_and_without_their_parts(name) -> None:
    case = CASES[name]
    for flags, prompt in case["prompts"].items():
        chosen = zip(("instruction", "examples", "post_prompt"), flags, strict=True)
        task = tasks.get(f"babilong/{name}", **{part: flag == "1" for part, flag in chosen})
        (sample,) = task.items(entries(case["records"]))
        assert sample.content == prompt
        assert sample.document == case["records"][0]["input"].strip()


@pytest.mark.parametrize("name", CASES)
def test_answers_score_as_the_official_code_scores_them(name) -> None:
    case, task = CASES[name], tasks.get(f"babilong/{name}")
    (sample,) = task.items(entries(case["records"]))
    assert {said: task.score(said, sample) for said, _ in case["scores"]} == dict(case["scores"])
    assert 0 < sum(score for _, score in case["scores"]) < len(case["scores"])


def test_a_length_has_a_file_of_its_own(tmp_path) -> None:
    for length, target in (("4k", "garden"), ("0k", "office")):
        write_lines(tmp_path / "babilong" / "data" / "qa1" / f"{length}.json", [{**ROW, "target": target}])
    task = tasks.get("babilong/qa1")
    selection = task.select(wanted(folders=[str(tmp_path)]))
    assert selection.samples[4096].sample(0, None).reply == "garden"
    assert (selection.samples[4096].of, selection.facts["prompt"]["limit_from"]) == (100, "length")
    none = tasks.get("babilong/qa1", length="0k").select(wanted(folders=[str(tmp_path)]))
    assert none.samples[0].sample(0, None).reply == "office"
    both = task.select(wanted(folders=[str(tmp_path)], lengths=[0, 4096]))
    assert sorted(both.samples) == [0, 4096]
    with pytest.raises(NoSamples, match=r"holds no rows of babilong/qa1; looked for babilong/qa1_1M\.jsonl, babilong/"):
        task.select(wanted(folders=[str(tmp_path)], lengths=[LENGTHS["1M"]]))


def test_another_length_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"--lengths 4000: babilong/qa1 has rows of 1024 \(1k\), 2048 \(2k\), 4096"):
        tasks.get("babilong/qa1").select(wanted(lengths=[4000]))
    with pytest.raises(ValueError, match="length='3k' is unknown; use one of 0k, 1k, 2k"):
        tasks.get("babilong/qa1", length="3k")
    with pytest.raises(ValueError, match="collection='1k' is unknown; use one of babilong, babilong-1k-samples"):
        tasks.get("babilong/qa1", collection="1k")


def test_both_collections_come_from_the_hub(hub) -> None:
    small, large = (tasks.get("babilong/qa1", collection=one) for one in ("babilong", "babilong-1k-samples"))
    repo = Repo(commits={small.of_length(4096).revision: {"data/qa1/4k.json": b'{"input": "a", "question": "q", '
                b'"target": "office"}'}}, branches={})  # fmt: skip
    hub.repos["datasets/RMT-team/babilong"] = repo
    selection = small.select(wanted())
    assert [selection.samples[4096].sample(0, None).reply] == ["office"]
    assert large.of_length(4096).hub_file == "4k/qa1-00000-of-00001.parquet"


def test_a_file_in_parts_is_read_as_one(hub, tmp_path, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    task = tasks.get("babilong/qa1", collection="babilong-1k-samples")
    names, files = parts(task.of_length(LENGTHS["128k"]).hub_file), {}
    for name, target in zip(names, ("office", "garden"), strict=True):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list([{**ROW, "target": target}]).to_parquet(path)
        files[name] = path.read_bytes()
    hub.repos["datasets/RMT-team/babilong-1k-samples"] = Repo(
        commits={task.of_length(LENGTHS["128k"]).revision: files}, branches={}
    )
    for folders in (None, [str(tmp_path / "set")]):
        (found,) = task.select(wanted(lengths=[LENGTHS["128k"]], folders=folders)).samples.values()
        assert [found.sample(number, None).reply for number in found.chosen] == ["office", "garden"]
        assert len(found.facts()["sha256"]) == 64
    (tmp_path / "set" / names[1]).unlink()
    with pytest.raises(ValueError, match=r"has only 1 of the 2 parts of 128k/qa1-00000-of-00002\.parquet; put all"):
        task.select(wanted(lengths=[LENGTHS["128k"]], folders=[str(tmp_path / "set")]))


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"input": "  "}, "has an empty field 'input'"),
        ({"input": ["a"]}, "has a field 'input' of type list where text is needed"),
        ({"question": None}, "has a field 'question' of type NoneType where text is needed"),
        ({"target": "moon"}, "holds 'moon' in field 'target' where bathroom, bedroom, garden"),
        ({"target": 3}, "has a field 'target' of type int where text is needed"),
    ],
)
def test_a_bad_row_says_what_is_wrong(change, detail) -> None:
    with pytest.raises(BadRow, match=re.escape(detail)):
        list(tasks.get("babilong/qa1").items(entries([{**ROW, **change}])))


@pytest.mark.parametrize("field", ["input", "question", "target"])
def test_a_missing_column_is_named(field) -> None:
    with pytest.raises(BadRow, match=f"has no field '{field}'"):
        list(tasks.get("babilong/qa1").items(entries([{name: ROW[name] for name in ROW if name != field}])))
