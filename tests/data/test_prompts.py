"""The prompts of published tasks are the official ones, character by character, and are cut as the protocols say."""

from __future__ import annotations

import hashlib
import json

import pytest
from bench_cases import SHARED, entries, golden, word_tokenizer

from locret.data import tasks
from locret.data.tasks import Sample
from locret.data.tasks.prompts import build_prompt, cut_middle
from locret.data.tasks.rows import open_rows

PLAIN = [(family, form) for family in ("infinitebench", "longbench") for form in golden(family)]
SC, V2 = golden("scbench"), golden("longbench_v2")


def items_of(name, records, **options):
    return list(tasks.get(name, **options).items(entries(records)))


@pytest.mark.parametrize(("family", "form"), PLAIN, ids=map("/".join, PLAIN))
def test_prompts_of_each_task_are_the_official_ones(family, form) -> None:
    case, mask = golden(family)[form], "**MASK**" if family == "infinitebench" else "$$MASK$$"
    items = items_of(f"{family}/{form}", case["records"])
    prompts = case["prompts"]
    assert [item.content for item in items] == (prompts if isinstance(prompts, list) else [prompts["111"]])
    assert [item.document for item in items] == [row["context"].replace("$$MASK$$", mask) for row in case["records"]]


@pytest.mark.parametrize("form", golden("leval"))
def test_three_prompts_of_each_leval_task_are_the_official_ones_and_so_are_their_malformed_turns(form) -> None:
    case = golden("leval")[form]
    items = {item.id: item for item in items_of(f"leval/{form}", case["records"])}
    expected = {f"{row}/{name}": rest for row, asked in enumerate(case["prompts"]) for name, rest in asked.items()}
    assert list(items) == list(expected)
    for name, rest in expected.items():
        item = items[name]
        assert (item.content, item.lead) == (rest["content"], rest["lead"])
        assert item.system == rest.get("system", item.system)
        assert item.document == ("" if item.plain else case["records"][int(name[0])]["input"])
    for family, marker in (("llama", "<|start_header_id|>"), ("phi", "<|assistant|>")):
        official = tasks.get(f"leval/{form}", prompt_style="official")
        assert build_prompt(official, items["0/0"], word_tokenizer(marker)).text == expected["0/0"][family]


@pytest.mark.parametrize("name", SC)
def test_requests_of_scbench_are_the_official_ones_and_share_their_text(name) -> None:
    found = items_of(f"scbench/{name}_requests", SC[name]["records"])
    for one, (text, *rest) in zip(found, SC[name]["requests"], strict=True):
        assert one.content[: one.span[1]] == text
        assert [one.asking(question).content for question in one.asked] == [text + asked for asked in rest]
        assert one.asking(one.asked[0]) == one


@pytest.mark.parametrize("name", SC)
def test_conversations_of_scbench_have_the_official_turns(name) -> None:
    """The official prompts have the toy chat template in them."""
    for one, (first, *later) in zip(items_of(f"scbench/{name}", SC[name]["records"]), SC[name]["turns"], strict=True):
        assert f"<|im_start|> user {one.content} <|im_end|> <|im_start|> assistant " == first
        opened = "<|im_end|> <|im_start|> assistant " + "This paper" * (name == "summary")
        turns = zip(one.said, one.turns[1:], strict=True)
        assert [f"{said} <|im_end|> <|im_start|> user {asked} {opened}" for said, asked in turns] == later
    row = {**SC[name]["records"][0], "multi_turns": SC[name]["records"][0]["multi_turns"] * 4}
    assert [len(one.turns) for one in items_of(f"scbench/{name}", [row])] == [5]


def test_prompts_of_longbench_v2_are_the_official_ones() -> None:
    assert [one.content for one in items_of("longbench_v2/all", V2["records"])] == V2["prompts"]["0shot"]
    assert [len(items_of(f"longbench_v2/{name}", V2["records"])) for name in ("easy", "medium")] == [1, 0]


REAL = golden("digests")


@pytest.mark.parametrize("name", [name for name in REAL if "passkey_" not in name])
def test_prompts_of_real_rows_are_the_official_ones(shared, name) -> None:
    path, task = shared / "data" / REAL[name]["file"], tasks.get(name)
    # The folder above the file's own place in the published layout.
    rows = open_rows(task, [str(path.parents[len(task.file.split("/")) - 1])])
    contents = {(item := rows.sample(number)).id: item.content for number in rows.chosen}
    for row, (digest, length) in REAL[name]["prompts"].items():
        assert (len(contents[row]), hashlib.sha256(contents[row].encode()).hexdigest()) == (length, digest)


def test_the_protocols_are_the_published_ones() -> None:
    no_chat = {name.partition("/")[2] for name in tasks.names("longbench") if not tasks.get(name).chat}
    assert no_chat == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert (tasks.get("longbench/samsum").stop, tasks.get("longbench/samsum").min_new_tokens) == (("\n",), 1)
    limits = {name: tasks.get(f"scbench/{name}").limit for name in ("kv", "mf", "repoqa_and_kv", "kv_requests")}
    assert limits == {"kv": 130322, "mf": 131047, "repoqa_and_kv": 128312, "kv_requests": 129322}
    if (lengths := SHARED / "longbench/config/dataset2maxlen.json").is_file():
        known = json.loads(lengths.read_text())
        assert {name: tasks.get(f"longbench/{name}").max_new_tokens for name in known} == known


def test_a_completion_prompt_has_its_middle_cut_out_in_tokens_and_room_left_for_the_reference() -> None:
    row = {"context": " ".join(f"w{index}" for index in range(100)), "input": "w900", "answer": ["w1 w2 w3"]}
    tokenizer, task = word_tokenizer(), tasks.get("infinitebench/kv_retrieval", limit=25)
    (item,) = task.items(entries([row]))
    whole = tokenizer(item.content)["input_ids"]
    # The reference has 3 tokens and a bos: 25 - 4 = 21 are allowed, 10 at each end.
    built = build_prompt(task, item, tokenizer)
    assert (built.ids, built.tokens_before, built.tokens_after) == (whole[:10] + whole[-10:], len(whole), 20)
    assert build_prompt(tasks.get("infinitebench/kv_retrieval"), item, tokenizer).ids == whole
    long = Sample(id="0", content="w1", targets=("w1 " * 70,), reply="w1")  # fifty tokens at most
    assert task.allowed(long, lambda text: len(text.split())) == 2


def test_a_longbench_prompt_is_cut_decoded_and_framed_as_a_chat_turn() -> None:
    row = {"context": " ".join(f"w{index}" for index in range(50)), "input": "w900", "answers": ["w1"]}
    tokenizer, (task, chat) = word_tokenizer(), (tasks.get(f"longbench/{name}", limit=11) for name in ("lcc", "qasper"))
    (item,) = task.items(entries([row]))
    whole = tokenizer(item.content)["input_ids"]
    # Half of 11 is 5; the bos is dropped by decoding and comes back with encoding; the halves meet without a space.
    joined = tokenizer.decode(whole[1:5]) + tokenizer.decode(whole[-5:])
    built = build_prompt(task, item, tokenizer)
    assert (built.text, built.ids) == (joined, tokenizer(joined)["input_ids"])
    (item,) = chat.items(entries([row]))
    bare = build_prompt(chat, item, tokenizer, template="none").text
    framed = build_prompt(chat, item, tokenizer)
    assert framed.text == f"<|im_start|> user {bare} <|im_end|> <|im_start|> assistant "
    assert framed.ids == tokenizer(framed.text, add_special_tokens=False)["input_ids"]


def test_only_the_document_of_a_leval_prompt_is_cut_by_words() -> None:
    row = {"input": " ".join(f"w{index}" for index in range(40)), "instructions": ["w900"], "outputs": ["w1 w2"]}
    for name, kept in [("natural_question", range(5)), ("codeU", range(35, 40))]:
        task = tasks.get(f"leval/{name}", limit=10)
        (item,) = task.items(entries([{**row, "evaluation": "f1"}]))
        built = build_prompt(task, item, word_tokenizer())
        # 10 words and a bos are 11 tokens: too many; half as many fit.
        assert item.content.replace(row["input"], " ".join(f"w{index}" for index in kept)) in built.text
        assert (built.tokens_before, built.tokens_after) == (41, 6)
        assert f"system {item.system}" in built.text
    fact = items_of("leval/sci_fi", golden("leval")["sci_fi"]["records"])[1]
    assert build_prompt(tasks.get("leval/sci_fi"), fact, word_tokenizer()).text == fact.content  # no document, no turns


@pytest.mark.parametrize(("length", "limit", "kept"), [(9, 10, 9), (10, 10, 10), (11, 10, 10), (11, 9, 8), (3, 2, 2)])
def test_the_middle_is_cut_to_half_the_limit_at_each_end(length, limit, kept) -> None:
    tokens = list(range(length))
    assert cut_middle(tokens, limit) == tokens[: (kept + 1) // 2] + tokens[length - kept // 2 :]
