"""The prompts of published tasks are the official ones, character by character, and are cut as the protocols say."""

from __future__ import annotations

import hashlib

import pytest
from bench_cases import entries, golden, word_tokenizer

from locret.data import tasks as benchmarks
from locret.data.tasks import Sample
from locret.data.tasks.prompts import build_prompt, cut_middle, cut_words
from locret.data.tasks.published.loading import open_task

PLAIN = [(family, form) for family in ("infinitebench", "longbench") for form in golden(family)]
REAL = golden("digests")


def items_of(name, records, **options):
    return list(benchmarks.get(name, **options).items(entries(records)))


@pytest.mark.parametrize(("family", "form"), PLAIN, ids=map("/".join, PLAIN))
def test_three_prompts_of_each_task_are_the_official_ones(family, form):
    case = golden(family)[form]
    items = items_of(f"{family}/{form}", case["records"])
    assert [item.content for item in items] == case["prompts"]
    for item, record in zip(items, case["records"], strict=True):
        mask = "**MASK**" if family == "infinitebench" else "$$MASK$$"
        assert item.document == record["context"].replace("$$MASK$$", mask)


@pytest.mark.parametrize("form", golden("leval"))
def test_three_prompts_of_each_leval_task_are_the_official_ones(form):
    case = golden("leval")[form]
    items = {item.id: item for item in items_of(f"leval/{form}", case["records"])}
    expected = {f"{row}/{name}": rest for row, asked in enumerate(case["prompts"]) for name, rest in asked.items()}
    assert list(items) == list(expected)
    for name, rest in expected.items():
        item = items[name]
        assert (item.content, item.lead) == (rest["content"], rest["lead"])
        assert item.system == rest.get("system", item.system)
        assert item.document == ("" if item.plain else case["records"][int(name[0])]["input"])


@pytest.mark.parametrize(("family", "marker"), [("llama", "<|start_header_id|>"), ("phi", "<|assistant|>")])
@pytest.mark.parametrize("form", golden("leval"))
def test_the_official_style_writes_the_malformed_turns_of_the_official_runs(form, family, marker):
    case = golden("leval")[form]
    item = items_of(f"leval/{form}", case["records"][:1])[0]
    built = build_prompt(benchmarks.get(f"leval/{form}", prompt_style="official"), item, word_tokenizer(marker))
    assert built.text == case["prompts"][0]["0"][family]


@pytest.mark.parametrize("name", REAL)
def test_prompts_of_real_rows_are_the_official_ones(shared, name):
    path = shared / "data" / REAL[name]["file"]
    # The folder above the file's own place in the published layout.
    task = benchmarks.get(name)
    root = path.parents[len(task.file.split("/")) - 1]
    contents = {item.id: item.content for item in open_task(task, data_dir=root).items()}
    for row, (digest, length) in REAL[name]["prompts"].items():
        assert (len(contents[row]), hashlib.sha256(contents[row].encode()).hexdigest()) == (length, digest)


def test_a_completion_prompt_has_its_middle_cut_out_in_tokens_and_room_left_for_the_reference():
    row = {"context": " ".join(f"w{index}" for index in range(100)), "input": "w900", "answer": ["w1 w2 w3"]}
    tokenizer = word_tokenizer()
    task = benchmarks.get("infinitebench/kv_retrieval", limit=25)
    (item,) = task.items(entries([row]))
    whole = tokenizer(item.content)["input_ids"]
    # The reference has 3 tokens and a bos: 25 - 4 = 21 are allowed, 10 at each end.
    built = build_prompt(task, item, tokenizer)
    assert built.ids == whole[:10] + whole[-10:]
    assert (built.tokens_before, built.tokens_after, built.truncated) == (len(whole), 20, True)
    free = benchmarks.get("infinitebench/kv_retrieval", limit=25, answer_room=False)
    assert build_prompt(free, item, tokenizer).ids == whole[:12] + whole[-12:]
    assert build_prompt(benchmarks.get("infinitebench/kv_retrieval"), item, tokenizer).ids == whole


def test_a_long_reference_takes_fifty_tokens_at_most():
    task = benchmarks.get("infinitebench/longbook_sum_eng")
    item = Sample(id="0", content="w1", targets=("w1 " * 70,), reply="w1")
    assert task.limit == 131072 - 1200
    assert task.allowed(item, lambda text: len(text.split())) == 131072 - 1200 - 50


def test_a_longbench_prompt_is_cut_decoded_and_framed_as_a_chat_turn():
    row = {"context": " ".join(f"w{index}" for index in range(50)), "input": "w900", "answers": ["w1"]}
    tokenizer = word_tokenizer()
    task = benchmarks.get("longbench/lcc", limit=11)
    (item,) = task.items(entries([row]))
    whole = tokenizer(item.content)["input_ids"]
    built = build_prompt(task, item, tokenizer)
    # Half of 11 is 5; the bos is dropped by decoding and comes back with encoding; the halves meet without a space.
    joined = tokenizer.decode(whole[1:5]) + tokenizer.decode(whole[-5:])
    assert built.text == joined
    assert built.ids == tokenizer(joined)["input_ids"]
    chat = benchmarks.get("longbench/qasper", limit=11)
    (item,) = chat.items(entries([row]))
    text = build_prompt(chat, item, tokenizer).text
    assert text.startswith("<|im_start|> user ")
    assert text.endswith(" <|im_end|> <|im_start|> assistant ")
    assert build_prompt(chat, item, tokenizer).ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    bare = build_prompt(chat, item, tokenizer, template="none").text
    assert text == f"<|im_start|> user {bare} <|im_end|> <|im_start|> assistant "


def test_only_the_document_of_a_leval_prompt_is_cut_by_words():
    row = {"input": " ".join(f"w{index}" for index in range(40)), "instructions": ["w900"], "outputs": ["w1 w2"]}
    tokenizer = word_tokenizer()
    for name, kept in [("natural_question", range(5)), ("codeU", range(35, 40))]:
        task = benchmarks.get(f"leval/{name}", limit=10)
        (item,) = task.items(entries([{**row, "evaluation": "f1"}]))
        built = build_prompt(task, item, tokenizer)
        # 10 words and a bos are 11 tokens: too many; half as many fit.
        words = " ".join(f"w{index}" for index in kept)
        assert item.content.replace(row["input"], words) in built.text
        assert (built.tokens_before, built.tokens_after) == (41, 6)
        assert f"system {item.system}" in built.text


def test_the_second_question_of_science_fiction_is_asked_without_document_and_turns():
    case = golden("leval")["sci_fi"]
    item = items_of("leval/sci_fi", case["records"])[1]
    built = build_prompt(benchmarks.get("leval/sci_fi"), item, word_tokenizer())
    assert item.id == "0/0/fact"
    assert built.text == item.content
    assert "im_start" not in built.text


@pytest.mark.parametrize(("length", "limit", "kept"), [(9, 10, 9), (10, 10, 10), (11, 10, 10), (11, 9, 8), (3, 2, 2)])
def test_the_middle_is_cut_to_half_the_limit_at_each_end(length, limit, kept):
    tokens = list(range(length))
    cut = cut_middle(tokens, limit)
    assert len(cut) == kept
    assert cut == tokens[: (kept + 1) // 2] + tokens[length - kept // 2 :]


def test_words_are_cut_by_250_at_a_time():
    document = " ".join(["a"] * 3000)
    assert len(cut_words(document, 2000, lambda text: 2 * len(text.split())).split()) == 1000
    assert len(cut_words(document, 2000, lambda text: len(text.split()) + 1).split()) == 1750
    assert cut_words(document, 3000, lambda text: len(text.split())) == document


def test_what_cannot_be_cut_or_framed_says_why():
    with pytest.raises(ValueError, match="limit=1 leaves no tokens of the prompt"):
        cut_middle([1, 2, 3], 1)
    with pytest.raises(ValueError, match="100 characters has too few spaces to be cut by words to limit=8 tokens"):
        cut_words("x" * 100, 8, len)
    record = golden("leval")["tpo"]["records"][:1]
    official = benchmarks.get("leval/tpo", prompt_style="official")
    with pytest.raises(ValueError, match="prompt_style=official is known for Llama-3 and Phi-3 tokenizers only"):
        build_prompt(official, items_of("leval/tpo", record)[0], word_tokenizer())
    bare = word_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="--template chat: the tokenizer has no chat template"):
        build_prompt(benchmarks.get("leval/tpo"), items_of("leval/tpo", record)[0], bare)
