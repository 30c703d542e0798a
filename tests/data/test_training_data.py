"""The stream of training examples: its order, the boundary of prompt and answer, and bad rows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from locret.data.training.stream import TrainingStream, load_rows

DERIVED = Path(__file__).resolve().parents[3] / "shared" / "data" / "derived"
ROWS = [{"prompt": f"w{index} " * (index + 1), "answer": f"w{index}"} for index in range(7)]
CHATML = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenizer():
    words = ["<unk>", "</s>", "<|im_start|>", "<|im_end|>", "user", "assistant", *(f"w{index}" for index in range(9))]
    words_tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    words_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words_tokenizer, eos_token="</s>", unk_token="<unk>")
    fast.chat_template = CHATML
    return fast


def stream_of(tokenizer, rows=ROWS, **arguments):
    return TrainingStream(rows, tokenizer, **{"seed": 1, "max_length": 100, **arguments})


def take(stream, count):
    return [
        (example.row, example.prompt_ids.tolist(), example.answer_ids.tolist())
        for example in itertools.islice(stream, count)
    ]


def rows_of(examples):
    return [row for row, *_ in examples]


def test_an_example_is_the_prompt_and_what_the_answer_adds(tokenizer):
    example = next(stream_of(tokenizer, [{"prompt": "w1 w2", "answer": "w3"}]))
    assert tokenizer.decode(example.prompt_ids[0]) == "<|im_start|> user w1 w2 <|im_end|> <|im_start|> assistant"
    assert tokenizer.decode(example.answer_ids[0]) == "w3 <|im_end|>"
    assert example.prompt_ids.shape == (1, 7)
    assert example.row == 0


def test_every_epoch_is_another_permutation_of_all_rows(tokenizer):
    seen = rows_of(take(stream_of(tokenizer), 21))
    epochs = [seen[:7], seen[7:14], seen[14:]]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_seed_decides_the_order(tokenizer):
    assert take(stream_of(tokenizer), 9) == take(stream_of(tokenizer), 9)
    assert rows_of(take(stream_of(tokenizer), 7)) != rows_of(take(stream_of(tokenizer, seed=2), 7))


@pytest.mark.parametrize("done", [0, 3, 7, 10])
def test_a_restored_stream_goes_on_where_the_state_was_taken(tokenizer, done):
    rows = [*ROWS, {"prompt": "w1", "answer": ""}]
    uninterrupted = stream_of(tokenizer, rows, skip_bad_rows=True)
    expected = take(uninterrupted, done + 9)[done:]
    first = stream_of(tokenizer, rows, skip_bad_rows=True)
    take(first, done)
    resumed = stream_of(tokenizer, rows, skip_bad_rows=True)
    resumed.restore(json.loads(json.dumps(first.state())))
    assert take(resumed, 9) == expected
    assert resumed.dropped == uninterrupted.dropped


@pytest.mark.parametrize(("name", "changed"), [("seed", {"seed": 2}), ("max_length", {"max_length": 50})])
def test_a_state_of_another_stream_is_refused(tokenizer, name, changed):
    with pytest.raises(ValueError, match=f"^--resume: the checkpoint's stream was made with {name}=.*use the same"):
        stream_of(tokenizer, **changed).restore(stream_of(tokenizer).state())


def test_other_rows_of_the_same_number_are_refused_and_states_of_earlier_versions_are_taken(tokenizer):
    state = stream_of(tokenizer).state()
    others = [{**row, "answer": f"{row['answer']} w1"} for row in ROWS]
    with pytest.raises(ValueError, match="--resume: the first row of --dataset .* is another than the checkpoint's"):
        stream_of(tokenizer, others).restore(state)
    stream_of(tokenizer, others).restore({name: value for name, value in state.items() if name != "first_row"})


def test_processes_together_read_what_one_process_reads(tokenizer):
    rows = [*ROWS, {"prompt": "w1", "answer": ""}]
    alone = take(stream_of(tokenizer, rows, skip_bad_rows=True), 12)
    streams = [stream_of(tokenizer, rows, skip_bad_rows=True, rank=rank, world=3) for rank in range(3)]
    shared = [take(stream, 4) for stream in streams]
    assert [shared[index % 3][index // 3] for index in range(12)] == alone
    assert streams[0].state() == streams[1].state() == streams[2].state()


def test_rows_are_tokenised_only_when_their_turn_comes(tokenizer):
    order = rows_of(take(stream_of(tokenizer), 7))
    rows = [dict(row) for row in ROWS]
    rows[order[3]]["answer"] = ""
    stream = stream_of(tokenizer, rows)
    assert rows_of(take(stream, 3)) == order[:3]
    with pytest.raises(ValueError, match=rf"row {order[3]} \(counted from 0\) has no answer"):
        next(stream)


def test_skipped_rows_are_counted_by_reason(tokenizer):
    rows = [
        {"prompt": "w1", "answer": "w2"},
        {"prompt": "w1", "answer": ""},
        {"prompt": " ", "answer": "w2"},
        {"prompt": "w1 " * 30, "answer": "w2"},
        {"prompt": "w1", "answer": "w2 " * 30},
    ]
    stream = stream_of(tokenizer, rows, max_length=20, skip_bad_rows=True)
    assert rows_of(take(stream, 2)) == [0, 0]
    state = stream.state()
    assert (state["epoch"], sum(stream.dropped.values())) == (1, 4)  # each once, whatever the epoch
    assert set(stream.dropped) == {
        "no answer",
        "empty prompt",
        "longer than the context",
        "answer longer than the context",
    }


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "w1", "answer": "w2 " * 30}, "has an answer of 31 tokens, longer than the context of 20 tokens; "),
        (
            {"prompt": "w1 " * 15, "answer": "w2"},
            "has 20 prompt and 2 answer tokens, together longer than the context of 20 tokens; shorten the row,",
        ),
    ],
)
def test_a_row_longer_than_the_context_is_an_error_that_says_so(tokenizer, row, sentence):
    with pytest.raises(ValueError) as caught:
        next(stream_of(tokenizer, [row], max_length=20, source="x.json"))
    assert str(caught.value).startswith(f"--dataset x.json: row 0 (counted from 0) {sentence}")


def test_a_row_exactly_as_long_as_the_context_is_used(tokenizer):
    assert next(stream_of(tokenizer, [{"prompt": "w1 " * 13, "answer": "w2"}], max_length=20)).row == 0


def test_a_data_set_without_one_good_row_ends_with_the_counts(tokenizer):
    with pytest.raises(
        ValueError, match=r"^--dataset x.json: no row can be trained on \(2 no answer\); choose another"
    ):
        next(stream_of(tokenizer, [{"prompt": "w1", "answer": ""}] * 2, skip_bad_rows=True, source="x.json"))


def test_turns_the_chat_template_refuses_are_a_bad_row(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"row 0 .* has turns that do not fit \(.*roles must alternate"):
        next(stream_of(tokenizer, ROWS[:1]))


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"template": "alpaca"}, "--template alpaca: no template of that name"),
        ({"rank": 2, "world": 2}, "rank=2 is not a process of world=2"),
        ({"rows": []}, "there are no rows"),
        ({"rows": [{"body": "x"}]}, "columns 'body' fit no known schema"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(tokenizer, setting, sentence):
    with pytest.raises(ValueError, match=sentence):
        stream_of(tokenizer, **setting)


def test_a_tokenizer_without_chat_template_is_told_what_to_use(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="^--template chat: .* use --template original or --template none$"):
        stream_of(tokenizer)
    assert next(stream_of(tokenizer, template="none")).answer_ids.shape == (1, 2)


@pytest.mark.parametrize(
    ("dataset", "rows", "columns"),
    [
        ("LongAlpaca", 73, ["instruction", "input", "output", "file"]),
        ("longalign", 25, ["messages", "length"]),
        ("wenbopan/anti-haystack", 16, ["document", "question", "answer"]),
    ],
)
@pytest.mark.skipif(not DERIVED.exists(), reason="the small data files are not on this machine")
@pytest.mark.slow
def test_a_named_set_is_read_from_a_local_copy_in_the_published_layout(tokenizer, dataset, rows, columns):
    loaded = load_rows(dataset, data_dir=str(DERIVED))
    assert len(loaded) == rows
    assert list(loaded[0]) == columns
    stream = TrainingStream(loaded, tokenizer, seed=0, max_length=None)
    seen = list(itertools.islice(stream, rows))
    assert sorted(example.row for example in seen) == list(range(rows))
    assert stream.dropped == {}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("dataset", "file"),
    [
        ("LongAlpaca", "LongAlpaca-12k.json"),
        ("Yukang/LongAlpaca-16k-length", "LongAlpaca-16k-length.json"),
        ("LongAlign", "long.jsonl"),
        ("Anti-Haystack", "data/train-00000-of-00001.parquet"),
        ("sharegpt.json", "sharegpt.json"),
        ("messages.jsonl", "messages.jsonl"),
    ],
)
def test_every_published_form_of_the_same_rows_is_the_same_stream(tokenizer, tmp_path, dataset, file, streaming):
    import datasets

    turns = [[("w1 w2", "w3"), ("w4", "w5 w6"), ("w7", "w8")][index % 3] for index in range(7)]
    made = {
        "LongAlpaca": lambda user, answer: {"instruction": user, "output": answer, "input": None, "file": None},
        "LongAlign": lambda user, answer: {"messages": chat("role", "content", "user", "assistant", user, answer)},
        "Anti-Haystack": lambda user, answer: {"document": user, "question": "", "answer": answer},
        "sharegpt.json": lambda user, answer: {"conversations": chat("from", "value", "human", "gpt", user, answer)},
    }
    made["Yukang/LongAlpaca-16k-length"], made["messages.jsonl"] = made["LongAlpaca"], made["LongAlign"]
    rows = [made[dataset](*turn) for turn in turns]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)))
    loaded = load_rows(dataset, data_dir=str(tmp_path), streaming=streaming)
    plain = [{"prompt": user, "answer": answer} for user, answer in turns]
    found = take(stream_of(tokenizer, loaded, shuffle_buffer=1), 7)
    if streaming:
        expected = {row: example for row, *example in take(stream_of(tokenizer, plain), 7)}
        assert [row for row, *_ in found] == list(range(7))
        assert {row: example for row, *example in found} == expected
    else:
        assert found == take(stream_of(tokenizer, plain), 7)


def chat(role, content, asks, answers, user, answer):
    return [{role: asks, content: user}, {role: answers, content: answer}]
