"""The stream of training examples: its order, bad rows, going on, and the boundary of prompt and answer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from embedded import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from locret.conversation.document import TokenStream, encode, leading_special_ids
from locret.conversation.turns import ORIGINAL_SYSTEM, Message, Transcript, render
from locret.data.training.rows import Row
from locret.data.training.stream import PLACES, TrainingStream, tokenise_row

TOKENIZER = tiny_tokenizer()
ROWS = [{"prompt": "the house " * (index + 1), "answer": "Oslo"} for index in range(7)]
BAD = {"prompt": "the house", "answer": ""}


def stream_of(rows: Any = ROWS, **options: Any) -> TrainingStream:
    return TrainingStream(rows, TOKENIZER, **{"seed": 1, "max_length": 100, **options})


def take(stream: TrainingStream, count: int) -> list[Any]:
    return [(one.row, one.prompt_ids.tolist(), one.answer_ids.tolist()) for one in itertools.islice(stream, count)]


def rows_of(stream: TrainingStream, count: int) -> list[int]:
    return [example.row for example in itertools.islice(stream, count)]


def test_an_example_is_the_prompt_and_what_the_answer_adds() -> None:
    example = next(stream_of(ROWS[:1]))
    assert TOKENIZER.decode(example.prompt_ids[0]) == "<bos> <user> the house <eos> <assistant>"
    assert TOKENIZER.decode(example.answer_ids[0]) == "Oslo <eos>"
    assert next(stream_of(ROWS[:1], template="none")).answer_ids.shape == (1, 2)


def test_every_epoch_is_another_permutation_of_all_rows_that_the_seed_decides() -> None:
    stream = stream_of()
    epochs = [rows_of(stream, 7) for _ in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert rows_of(stream_of(), 7) == epochs[0] != rows_of(stream_of(seed=2), 7)
    assert epochs[0] == [0, 1, 6, 4, 2, 3, 5]  # the order of earlier versions, whose runs go on


@pytest.mark.parametrize("done", [0, 3, 7, 10])
def test_a_restored_stream_goes_on_where_the_state_was_taken(done: int) -> None:
    made = [stream_of([*ROWS, BAD]) for _ in range(3)]
    expected = take(made[0], done + 9)[done:]
    take(made[1], done)
    made[2].restore(json.loads(json.dumps(made[1].state())))
    assert take(made[2], 9) == expected
    assert made[2].report.to_dict() == made[0].report.to_dict()


def test_a_state_of_another_stream_is_refused() -> None:
    state = stream_of().state()
    for name, changed in [("seed", {"seed": 2}), ("max_length", {"max_length": 50}), ("rows", {"rows": ROWS[1:]})]:
        with pytest.raises(ValueError, match=f"^--resume: the checkpoint's stream was made with {name}=.*use the same"):
            stream_of(**changed).restore(state)
    others = [{**row, "answer": "x"} for row in ROWS]
    with pytest.raises(ValueError, match="--resume: the checkpoint's stream was made with first_row="):
        stream_of(others).restore(state)
    stream_of(others).restore({name: value for name, value in state.items() if name != "first_row"})  # of 0.0.x


def test_processes_together_read_what_one_process_reads() -> None:
    made = [stream_of([*ROWS, BAD], rank=rank, world=3) for rank in range(3)]
    shared = [take(stream, 4) for stream in made]
    alone = take(stream_of([*ROWS, BAD]), 12)
    assert [shared[index % 3][index // 3] for index in range(12)] == alone
    assert made[0].state() == made[1].state() == made[2].state()


def test_rows_left_out_are_counted_by_reason_with_the_first_places() -> None:
    long = [{"prompt": "the house " * 30, "answer": "Oslo"}, {"prompt": "Oslo", "answer": "the house " * 30}]
    stream = stream_of([ROWS[0], *[BAD] * 30, *long, {"prompt": " ", "answer": "Oslo"}], max_length=20)
    assert rows_of(stream, 2) == [0, 0]
    report = stream.report.to_dict()
    assert (report["read"], report["used"], stream.state()["epoch"]) == (34, 1, 1)  # each once, whatever the epoch
    assert {reason: found["count"] for reason, found in report["dropped"].items()} == {
        "no answer": 30,
        "longer than the context": 1,
        "answer longer than the context": 1,
        "empty prompt": 1,
    }
    assert len(report["dropped"]["no answer"]["first_rows"]) == PLACES
    said = "row 31 (counted from 0) has 64 prompt and 2 answer tokens, together longer than the context of 20"
    assert said in str(report["dropped"]["longer than the context"]["first_rows"])
    no = r"^--dataset \(rows\): no row can be trained on \(2 no answer; row . \(counted from 0\) has no answer .*choose"
    with pytest.raises(ValueError, match=no):
        next(stream_of([BAD] * 2))


def test_rows_outside_the_wanted_lengths_are_no_bad_rows() -> None:
    lengths = {row: len(prompt[0]) + len(answer[0]) for row, prompt, answer in take(stream_of(), 7)}
    low, high = sorted(lengths.values())[1], sorted(lengths.values())[4]
    stream = stream_of(min_tokens=low, max_tokens=high)
    assert sorted(rows_of(stream, 4)) == [row for row in range(7) if low <= lengths[row] <= high]
    take(stream, 1)
    assert stream.report.counts == {f"shorter than --min-tokens {low}": 1, f"longer than --max-tokens {high}": 2}


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"template": "alpaca"}, "template=alpaca is unknown; choose one of chat, original, none"),
        ({"rows": []}, "there are no rows"),
        ({"rows": [{"body": "x"}]}, "columns 'body' fit no known schema"),
        ({"answers": "each"}, "are in the prompt/answer schema, with one answer each; write document and questions"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        stream_of(**setting)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} </s>"
    "{% else %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ROW = Row((Message("user", "Who was it?"),), "It was me.")


def make_tokenizer(template=CHATML, bos=True):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    how = {"special_tokens": SPECIAL, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=400, **how)
    tokenizer.train_from_iterator(["Who was it? It was me. user assistant the cat of the cats"] * 5, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


def texts(tokenizer, row, template):
    return tuple(tokenizer.decode(ids) for ids in tokenise_row(tokenizer, row, template))


@pytest.mark.parametrize("template", [CHATML, LLAMA2])
def test_prompt_and_answer_together_are_the_templates_own_tokens(template):
    tokenizer = make_tokenizer(template)
    chat = [message._asdict() for message in ROW.messages]
    prompt_ids, answer_ids = tokenise_row(tokenizer, ROW, "chat")
    whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": ROW.answer}], return_dict=False)
    assert prompt_ids == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert prompt_ids + answer_ids == whole


TURNS = Row((Message("user", "Hi."), Message("assistant", "Hello."), Message("user", "Who was it?")), "It was me.")
ONE_SHOT = f"<s>{ORIGINAL_SYSTEM}\n### Human: Hi.\n### Assistant: Hello.\n### Human: Who was it?\n### Assistant:"


@pytest.mark.parametrize(
    ("row", "template", "chat", "prompt", "answer"),
    [
        (ROW, "chat", LLAMA2, "<s>[INST] Who was it? [/INST]", " It was me. </s>"),  # bos is not doubled
        # What the prompt ends with and the full text lacks: prompt and answer stay whole.
        (
            ROW,
            "chat",
            THINKING,
            "<|im_start|>user\nWho was it?<|im_end|>\n<|im_start|>assistant\n<think>\n",
            "It was me.</s>",
        ),
        (TURNS, "original", None, ONE_SHOT, " It was me.\n### "),
        (Row((Message("user", "the cat"),), " of the cats"), "none", None, "<s>the cat", " of the cats</s>"),
    ],
)
def test_an_answer_ends_with_the_end_of_its_turn(row, template, chat, prompt, answer):
    assert texts(make_tokenizer(chat), row, template) == (prompt, answer)


def test_a_token_across_the_boundary_is_split_not_lost():
    tokenizer = make_tokenizer(template=None)
    row = Row((Message("user", "the ca"),), "t of")
    prompt_ids, answer_ids = tokenise_row(tokenizer, row, "none")
    joint = encode(tokenizer, "the cat of")
    assert joint[: len(prompt_ids) - 1] != prompt_ids[1:]  # the whole text has a token "cat": this row is such a case
    assert tokenizer.decode(prompt_ids + answer_ids) == "<s>the cat of</s>"
    assert prompt_ids == tokenizer("the ca")["input_ids"]


@pytest.mark.parametrize("template", ["chat", "original", "none"])
@pytest.mark.parametrize("question", [None, "Who was it?"])
def test_a_framed_document_reads_like_the_row_it_would_be(template, question):
    tokenizer = make_tokenizer()
    before, after = Transcript(tokenizer, template).around(question)
    document = "It was me. the cat " * 50 + "end"
    prompt = document if question is None else f"{document}\n\n{question}"
    expected, _ = tokenise_row(tokenizer, Row((Message("user", prompt),), "x"), template)
    pieces = [before, document, after]
    stream = TokenStream(tokenizer, window=200, margin=40)
    special = leading_special_ids(tokenizer) if template != "chat" else []
    assert [*special, *sum(stream.add(pieces), []), *stream.finish()] == expected
    assert expected.count(tokenizer.bos_token_id) == (template != "chat")


def test_templates_that_cannot_be_used_are_refused():
    twice = "{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match=r"refuses turns of system, user \(no system role\); use original"):
        render(make_tokenizer(LLAMA2), [Message("system", "Be kind."), Message("user", "Who?")], "chat")
    for template, said in [
        ("{{ messages[0].content + 5 }}", r"refuses turns of user \(can only concatenate str"),
        (twice, "writes the user's text twice or not at all, so no document can be streamed"),
    ]:
        with pytest.raises(ValueError, match=said):
            Transcript(make_tokenizer(template), "chat").around(None)
