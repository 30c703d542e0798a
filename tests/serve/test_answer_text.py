"""Tokens become text as they are written: nothing is lost, half characters wait, a stop text ends it wherever it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from locret.conversation.document import decode
from locret.engines.transformers import Written
from locret.infer.serve.answers import AnswerText, Piece
from locret.infer.serve.responses import ChatForm, CompletionForm
from locret.infer.serve.schemas import ChatRequest, CompletionRequest

CHAT = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "logprobs": True})
COMPLETION = CompletionRequest(prompt="x", logprobs=0)


def tokenizer_of(kind: Any, pieces: Any, *decoding: Any, cut: Any = None, **options: Any) -> Any:
    """Return a tokenizer of some pieces that writes them with some decoders."""
    inner = Tokenizer(kind({piece: nth for nth, piece in enumerate(pieces)}, **options))
    inner.decoder = decoders.Sequence(list(decoding))
    if cut is not None:
        inner.pre_tokenizer = cut
    return PreTrainedTokenizerFast(tokenizer_object=inner)


LETTERS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
BYTES = tokenizer_of(models.BPE, sorted(LETTERS.alphabet()), decoders.ByteLevel(), cut=LETTERS, merges=[])
"""A token for each byte, so that most characters are several tokens."""
STRIPPED = (decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0))
SENTENCES = tokenizer_of(models.WordLevel, ["▁The", "▁grass", "▁is", "▁green", ".", "s", "▁"], *STRIPPED, unk_token=".")
"""As SentencePiece's: a space belongs to the word after it, and the first one has none."""
FALLBACK = tokenizer_of(
    models.WordLevel,
    ["▁The", "▁", "s", "<0xE2>", "<0x82>", "<0xAC>", "<0xC3>", "<0xA9>"],
    *(STRIPPED[0], decoders.ByteFallback(), *STRIPPED[1:]),
    unk_token="s",
)
"""With a token for each byte of a character that it does not know."""


def written(
    tokenizer: Any, ids: Sequence[int], stops: Sequence[str], *, ends: bool, before: Sequence[int] = ()
) -> list[Piece]:
    """Return the pieces of an answer of these tokens, which ends by itself or at its length."""
    text = AnswerText(tokenizer, stops, frozenset({-1}), before)
    steps = [Written(token=one, logprob=-float(nth)) for nth, one in enumerate(ids)]
    if ends:
        steps.append(Written(token=-1, finish="stop"))
    else:
        steps[-1] = Written(token=ids[-1], finish="length", logprob=1.0 - len(ids))
    pieces = []
    for step in steps:
        piece = text.add(step)
        pieces += [] if piece is None else [piece]
        if piece is not None and piece.finish is not None:
            break
    return pieces


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.lists(st.integers(0, 6), max_size=12), st.booleans())
def test_an_answer_goes_on_with_the_text_before_it(ids: list[int], before: list[int], ends: bool) -> None:
    tokenizer = SENTENCES
    text = "".join(piece.text for piece in written(tokenizer, ids, [], ends=ends, before=before))
    assert decode(tokenizer, before) + text == decode(tokenizer, [*before, *ids])


@given(st.data(), st.sampled_from([BYTES, SENTENCES, FALLBACK]), st.booleans())
def test_tokens_tile_the_answer_in_text_bytes_and_offsets(data: st.DataObject, tokenizer: Any, ends: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=12))
    stops = data.draw(st.lists(st.text("Theé€ ", min_size=1, max_size=3), max_size=2))
    pieces = written(tokenizer, ids, stops, ends=ends)
    answer, text = [token for piece in pieces for token in piece.tokens], "".join(piece.text for piece in pieces)
    assert [token.logprob for token in answer] == [-float(nth) for nth in range(len(answer))]
    (told,) = ChatForm("m", CHAT).whole([Piece(0, text, answer)], {})["choices"]
    content = told["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == text
    assert bytes(byte for one in content for byte in one["bytes"]) == text.encode()
    (told,) = CompletionForm("m", COMPLETION).whole([Piece(0, text, answer)], {})["choices"]
    columns = told["logprobs"]
    for at, one in zip(columns["text_offset"], columns["tokens"], strict=True):
        assert text[at : at + len(one)] == one


def cut(text: str, stops: Sequence[str]) -> str:
    """Return a text up to where the first stop text begins that is complete."""
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    first = min((end for end, _ in ends), default=None)
    return text if first is None else text[: min(at for end, at in ends if end == first)]


@given(st.text(min_size=1, max_size=20), st.booleans())
def test_characters_of_several_tokens_come_whole(text: str, ends: bool) -> None:
    pieces = written(BYTES, BYTES(text)["input_ids"], [], ends=ends)
    assert "".join(piece.text for piece in pieces) == text
    assert all("\ufffd" not in piece.text for piece in pieces) or "\ufffd" in text


@given(
    st.text("abc", min_size=1, max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_stop_text_ends_the_answer_wherever_tokens_part(text: str, stops: list[str], ends: bool) -> None:
    pieces = written(BYTES, BYTES(text)["input_ids"], stops, ends=ends)
    kept = cut(text, stops)
    assert "".join(piece.text for piece in pieces) == kept
    assert pieces[-1].finish == ("stop" if ends or kept != text else "length")
    assert sum(len(piece.tokens) for piece in pieces) == len(kept)  # a token is a character here
