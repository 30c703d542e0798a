"""The object for people: what it reads, how it answers, and that a context is not changed by being asked."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import locret
from locret import Chat, Context, LongContextModel, RetentionPolicy

POLICY = RetentionPolicy(budget=64, chunk_size=128, stabilizers=16, local_len=16)
FACT = "The pass key is 71432. Remember it. 71432 is the pass key. "
TEXT = "The grass is green. " * 40 + FACT + "The sky is blue. " * 40
QUESTION = "What is the pass key?"
ANSWER = "The pass key is 71432."


@pytest.fixture(scope="module")
def lm() -> LongContextModel:
    pair = {"model": "checkpoints/tiny", "heads": "checkpoints/tiny-heads"}
    loaded = LongContextModel.from_pretrained(**pair, policy=POLICY, device="cpu", dtype="float32")
    return loaded


@pytest.fixture(scope="module")
def context(lm: LongContextModel) -> Context:
    return lm.read(TEXT, name="text")


def state(context: Any) -> tuple[list[torch.Tensor], Any]:
    tensors, numbers = context.cache.copy().state()
    return list(tensors.values()), numbers


def test_many_questions_leave_the_context_as_it_was(context: Context) -> None:
    before, numbers = state(context)
    answers = context.ask([QUESTION, "Who?", QUESTION], max_new_tokens=16)
    assert answers[0] == answers[2] == ANSWER == context.ask(QUESTION)
    after, numbers_after = state(context)
    assert numbers == numbers_after
    assert all(map(torch.equal, before, after))


def test_everything_that_can_be_read_gives_the_same_answer(lm: LongContextModel, tmp_path: Path) -> None:
    path = tmp_path / "a text.txt"
    path.write_text("\ufeff\n" + TEXT, encoding="utf-8")
    ids = lm.tokenizer(TEXT.strip()).input_ids
    pieces = (TEXT[start : start + 7] for start in range(0, len(TEXT), 7))
    blocks = iter([ids[:10], torch.tensor(ids[10:30]), ids[30:]])
    for source in (path, str(path), pieces, ids, torch.tensor([ids]), iter(ids), blocks, numpy.array(ids)):
        assert lm.read(source, progress=False).ask(QUESTION) == ANSWER
    lines = iter([ids[:10], [], (), ids[10:], []])  # a line of a text may have no tokens
    assert lm.read(lines).ask(QUESTION) == ANSWER
    with pytest.raises(ValueError, match="name=5 is no text"):
        lm.read(TEXT, name=5)  # type: ignore[call-overload]
    both = lm.read([TEXT, path])
    assert [one.name for one in both] == ["text", "a text.txt"]
    assert [one.ask(QUESTION) for one in both] == [ANSWER, ANSWER]


def test_a_text_of_one_word_is_read_whole(lm: LongContextModel) -> None:
    context = lm.read("tower")
    assert context.ask("Who?", max_new_tokens=2)
    assert context.fork().chat().say("Who?", max_new_tokens=2) == context.ask("Who?", max_new_tokens=2)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "the text is empty"),
        (" \n", "the text is empty"),
        ([], "the text is empty"),
        (iter([" ", "\n"]), "is empty; give a text to read"),
        ("bok.txt", "bok.txt: no such file"),
        ("books/moby", "books/moby: no such file"),
        (Path("bok"), "bok: no such file"),
        ("checkpoints/tiny", "is a folder; give one text file"),
        ("checkpoints/tiny/model.safetensors", "model.safetensors: not UTF-8 text"),
        (7, "int cannot be read; give a text"),
        (b"The tower", "bytes cannot be read; give a text"),
        ({"text": "The tower"}, "dict cannot be read; give a text"),
        ([1, 10**9], "token id 1000000000 is not among the 900"),
        ([-1], "token id -1 is not among the 900"),
        ("half a \ud800 character", "which is no text in Unicode"),
        (iter(["half a \ud800 character"]), "which is no text in Unicode"),
        ([1, 2.5], "2.5 among the token ids is none"),
        ([1, None], "None among the token ids is none"),
        ([True, 3], "True among the token ids is none"),
        (iter(["The tower ", None]), "a piece of the text is None"),
        (torch.zeros(2, 3, dtype=torch.long), "are no single text"),
    ],
)
def test_what_cannot_be_read_is_refused(lm: LongContextModel, source: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lm.read(source)


@pytest.mark.parametrize("question", ["", " \n", None, 3, "half \ud800", [""]])
def test_what_is_no_question_is_refused(context: Context, question: Any) -> None:
    with pytest.raises(ValueError, match="is nothing to answer; give a question as text"):
        context.ask(question)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 1e-40}, "temperature 1e-40 makes no usable"),
        ({"max_new_token": 5}, "did you mean max_new_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is no length"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 is no length"),
        ({"num_return_sequences": 2}, "there is one answer"),
        ({"streamer": None}, "use stream=True"),
        ({"max_length": 9}, "max_new_tokens"),
        ({"prompt_lookup_num_tokens": 3}, "assisted and prompt-lookup"),
        ({"dola_layers": "high"}, "decoding by dola_generation is not supported"),
        ({"guidance_scale": 2.0}, "guidance_scale has no effect here"),
        ({"output_scores": True}, "there is only the answer's text"),
        ({"num_beams": "2"}, "num_beams='2' is not a whole number"),
        ({"num_beams": 2.5}, "num_beams=2.5 is not a whole number"),
        ({"do_sample": False, "temperature": 0.5}, "temperature=0.5 has no effect with do_sample=False"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_read(
    context: Context, options: dict[str, Any], said: str
) -> None:
    chat = context.chat()
    with pytest.raises(ValueError, match=said):
        chat.say(QUESTION, **options)
    with pytest.raises(ValueError, match="nothing to answer"):
        chat.say(" ")
    assert chat.say(QUESTION) == ANSWER


def test_a_stream_is_the_answer_word_by_word(context: Context) -> None:
    assert list(context.ask(QUESTION, stream=True)) == ["The ", "pass ", "key ", "is ", "71432."]
    assert "".join(context.stream(QUESTION, num_beams=2)) == context.ask(QUESTION, num_beams=2)


def test_leaving_a_stream_ends_the_answer_there_and_the_chat_goes_on(context: Context) -> None:
    chat = context.chat()
    for _ in chat.stream(QUESTION, min_new_tokens=200, max_new_tokens=200):
        break
    said = chat.messages[-1]["content"]
    assert len(said.split()) < 100
    assert chat.cache.reader is None
    assert chat.say(QUESTION) == ANSWER


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"max_new_tokens": 3}, {"stop_strings": ["key"]}, {"top_k": 1}])
def test_a_chat_goes_on_whatever_ended_the_answer_before(context: Context, options: dict[str, Any]) -> None:
    chat = context.chat()
    chat.say(QUESTION, **options)
    fork = chat.fork()
    assert chat.say(QUESTION) == ANSWER == fork.say(QUESTION)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert chat.messages == fork.messages


def test_a_turn_that_broke_off_is_not_gone_on_with(context: Context) -> None:
    chat = context.chat()

    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a criterion of the user's")

    with pytest.raises(KeyError):
        chat.say(QUESTION, stopping_criteria=[broken])
    for go_on in (lambda: chat.say(QUESTION), chat.fork, lambda: chat.save("x")):
        with pytest.raises(ValueError, match="the last turn of this chat broke off"):
            go_on()
    assert context.ask(QUESTION) == ANSWER


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_k": -1}, "top_k"),
        ({"top_p": -1.0, "temperature": 0.7}, "top_p"),
        ({"num_beams": 2, "bad_words_ids": [[10**9]]}, "1000000000"),
        ({"stop_strings": []}, "[Ss]top string"),
    ],
)
def test_options_that_fail_late_leave_a_turn_that_can_be_answered(
    context: Context, options: dict[str, Any], said: str
) -> None:
    # transformers looks at these once the turn has been read.
    chat, plain = context.chat(), context.chat()
    with pytest.raises(ValueError, match=said):
        chat.say(QUESTION, **options)
    for go_on in (lambda: chat.say("Who?"), chat.fork, lambda: chat.save("x")):
        with pytest.raises(ValueError, match="'What is the pass key.' has been read but not answered"):
            go_on()
    assert chat.say(QUESTION, stopping_criteria=None, temperature=None) == ANSWER == plain.say(QUESTION)
    assert chat.cache.seen == plain.cache.seen
    assert chat.say("Who?") == plain.say("Who?")
    assert chat.messages == plain.messages


def test_a_chat_that_is_answering_says_so(context: Context) -> None:
    chat = context.chat()
    parts = chat.stream(QUESTION)
    first = next(parts)
    for go_on in (lambda: chat.say("Who?"), chat.fork, lambda: chat.save("x")):
        with pytest.raises(ValueError, match="this chat is answering; go on when that answer has ended"):
            go_on()
    assert first + "".join(parts) == ANSWER
    assert chat.fork().say(QUESTION) == ANSWER


def test_memory_and_repr_say_what_is_held(context: Context) -> None:
    held = context.memory()
    assert repr(context) == (
        f"Context('text': {context.cache.seen:,} tokens read, 80 units per KV head, {held.actual:,} bytes, "
        "scorer retaining_heads, budget 64)"
    )
    chat = context.chat()
    chat.say(QUESTION)
    assert repr(chat).startswith("Chat('text': 2 turns, ")
    assert "checkpoints/tiny" in repr(context.lm)


def test_a_bar_has_a_total_in_what_is_known_of_a_text(
    lm: LongContextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    path = tmp_path / "a.txt"
    path.write_text(TEXT * 8)
    for source, unit in ((path, "B/s"), (TEXT * 8, "chars/s"), (lm.tokenizer(TEXT).input_ids, "token/s")):
        lm.read(source)
        shown = capsys.readouterr().err.split("\r")
        assert "100%" in shown[-1]
        assert unit in shown[-1]
        assert "<" in shown[-2], "the time that is left"
    lm.read(iter([TEXT]))
    assert "%" not in capsys.readouterr().err
    lm.read(TEXT, progress=False)
    assert capsys.readouterr().err == ""


SECOND = """
import sys, warnings
from locret import LongContextModel
warnings.simplefilter("ignore")
lm = LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", device="cpu", dtype="float32")
print(lm.load(sys.argv[1]).ask(sys.argv[3]))
chat = lm.load_chat(sys.argv[2])
print(len(chat.messages), chat.say(sys.argv[3]), len(chat.messages))
"""


@pytest.mark.slow
def test_a_second_process_goes_on(context: Context, tmp_path: Path) -> None:
    chat = context.chat()
    chat.say(QUESTION, max_new_tokens=3)
    context.save(tmp_path / "a.ctx")
    chat.save(tmp_path / "a.chat")
    line = [sys.executable, "-c", SECOND, tmp_path / "a.ctx", tmp_path / "a.chat", QUESTION]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [ANSWER, f"2 {ANSWER} 4"], done.stderr
    assert chat.say(QUESTION) == ANSWER


def test_a_file_is_what_it_was_saved_as(lm: LongContextModel, context: Context, tmp_path: Path) -> None:
    chat = context.chat()
    chat.say(QUESTION)
    chat.save(tmp_path / "chat")
    context.save(tmp_path / "context")
    locret.save_cache(context.cache, tmp_path / "cache")
    with pytest.raises(ValueError, match="holds a conversation; load it with load_chat"):
        lm.load(tmp_path / "chat")
    with pytest.raises(ValueError, match="read it with locret.load_cache"):
        lm.load(tmp_path / "cache")
    assert lm.load_chat(tmp_path / "context").say(QUESTION) == ANSWER
    assert lm.load(tmp_path / "context").name == "text"
    chat.save(tmp_path / "context")  # one saved file may take the place of another
    assert lm.load_chat(tmp_path / "context").say(QUESTION) == ANSWER


def test_the_text_that_was_read_is_not_overwritten(context: Context, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(TEXT, encoding="utf-8")
    for save in (context.save, context.chat().save):
        with pytest.raises(ValueError, match=r"book\.txt is there already and is not a saved cache; choose another"):
            save(book)
    assert book.read_text(encoding="utf-8") == TEXT


def test_a_file_of_another_tokenizer_is_refused(lm: LongContextModel, context: Context, tmp_path: Path) -> None:
    context.save(tmp_path / "a")
    other = copy.deepcopy(lm.tokenizer)
    other.add_tokens(["71432"])
    with pytest.raises(ValueError, match="was made with another tokenizer"):
        LongContextModel(lm.model, other, lm.scorer, POLICY).load(tmp_path / "a")
    notes = locret.read_notes(tmp_path / "a")["conversation"]
    notes.pop("tokenizer")  # as earlier versions wrote it
    locret.save_cache(context.cache, tmp_path / "a", notes={"conversation": notes})
    assert lm.load(tmp_path / "a").ask(QUESTION) == ANSWER


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unread", [10**9]),
        ("unread", [True]),
        ("turns", [["user", "a"]]),
        ("turns", [["system", "a"], ["assistant", "b"]]),
        ("pending", None),
        ("template", "no such"),
        ("system", 3),
    ],
)
def test_a_damaged_file_is_refused(context: Context, name: str, value: Any, tmp_path: Path) -> None:
    context.save(tmp_path / "a")
    notes = locret.read_notes(tmp_path / "a")["conversation"]
    locret.save_cache(context.cache, tmp_path / "b", notes={"conversation": {**notes, name: value}})
    with pytest.raises(ValueError, match=name):
        context.lm.load_chat(tmp_path / "b")
    locret.save_cache(context.cache, tmp_path / "b", notes={"conversation": [1]})
    with pytest.raises(ValueError, match="is damaged"):
        context.lm.load_chat(tmp_path / "b")


def test_an_interrupted_read_leaves_no_context(lm: LongContextModel) -> None:
    def pieces() -> Iterator[str]:
        yield TEXT
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lm.read(pieces())
    assert isinstance(lm.read(TEXT).chat(), Chat)


@pytest.mark.parametrize(
    "rule", [{"when": "prompt_end"}, {"memory": "sqrt", "chunk_size": 64}, {"positions": "original"}]
)
def test_every_policy_reads(lm: LongContextModel, rule: dict[str, Any]) -> None:
    policy = RetentionPolicy(**{**POLICY.to_dict(), **rule})
    other = LongContextModel(lm.model, lm.tokenizer, "snapkv", policy)
    context = other.read(TEXT)
    assert context.ask([QUESTION, "Who?"], max_new_tokens=2)
    assert context.chat().say(QUESTION, max_new_tokens=2)


def test_arguments_are_named_as_in_python() -> None:
    with pytest.raises(ValueError, match=r"^model nowhere/at/all: there is no such folder"):
        LongContextModel.from_pretrained("nowhere/at/all", scorer="snapkv")
    with pytest.raises(ValueError, match="exclude each other"):
        LongContextModel.from_pretrained("checkpoints/tiny", scorer="snapkv", heads="checkpoints/tiny-heads")


def test_a_policy_may_be_numbers_by_name_or_a_budget() -> None:
    def load(**given: Any) -> LongContextModel:
        return LongContextModel.from_pretrained("checkpoints/tiny", scorer="snapkv", device="cpu", **given)

    wanted = load(policy=RetentionPolicy(budget=256)).policy
    assert load(policy={"budget": 256}).policy == wanted
    assert load(budget=256, torch_dtype=torch.float32).policy == wanted
    with pytest.raises(ValueError, match=r"^policy=256 is an int; give a RetentionPolicy, such as RetentionPolicy\("):
        load(policy=256)
    with pytest.raises(ValueError, match="budget=256 and policy exclude each other"):
        load(policy={"budget": 128}, budget=256)
    with pytest.raises(ValueError, match="dtype=float32 and torch_dtype=bfloat16 are one setting"):
        load(dtype="float32", torch_dtype="bfloat16")


def test_another_scorer_may_ask_what_was_saved(lm: LongContextModel, context: Context, tmp_path: Path) -> None:
    context.save(tmp_path / "a")
    other = LongContextModel(lm.model, lm.tokenizer, "streaming", POLICY)
    with pytest.raises(ValueError, match="allow_other_scorer=True"):
        other.load(tmp_path / "a")
    assert other.load(tmp_path / "a", allow_other_scorer=True).cache.seen == context.cache.seen
    assert other.load_chat(tmp_path / "a", allow_other_scorer=True).say(QUESTION)
    with pytest.raises(ValueError, match=r"nowhere does not exist; give a file written by context\.save"):
        lm.load(tmp_path / "nowhere")


def test_a_folder_of_heads_is_no_name_of_a_scorer(lm: LongContextModel) -> None:
    with pytest.raises(ValueError, match=r'RetainingHeads.from_pretrained\("checkpoints/tiny-heads"\)'):
        locret.RetentionCache(lm.model, scorer="checkpoints/tiny-heads")
