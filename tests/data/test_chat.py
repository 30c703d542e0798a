"""Prompts are rendered around a document and tokenised with the boundary to the answer exact."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from locret.conversation.document import TokenStream, encode, leading_special_ids
from locret.conversation.turns import ORIGINAL_SYSTEM, Message, Transcript, render
from locret.data.training.rows import Row
from locret.data.training.stream import tokenise_row

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
