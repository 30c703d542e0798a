"""A text of any size: written piece by piece, with its key once and at its depth."""

from __future__ import annotations

import itertools

import pytest

from locret.data.text.embedded_tokenizer import build_tokenizer
from locret.data.text.filler import FillerOptions
from locret.data.text.haystack import count_tokens
from locret.data.text.passkey_stream import stream_passkey


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_stream_states_the_key_at_its_depth_in_pieces_of_bounded_size(depth: float) -> None:
    stream, question = stream_passkey(depth, seed=1, sentences=200)
    pieces = list(stream)
    assert max(count_tokens(build_tokenizer(), piece) for piece in pieces) < 1500
    text = "".join(pieces)
    assert text.count(question.targets[0]) == 2
    assert text.index("The pass key is ") / len(text) == pytest.approx(depth, abs=0.03)
    assert ".The" not in text


def test_a_stream_is_lazy() -> None:
    pieces, _ = stream_passkey(0.5, sentences=10**12)
    assert len(list(itertools.islice(pieces, 3))) == 3


def test_impossible_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="sentences=0 leaves no text"):
        stream_passkey(sentences=0)
    with pytest.raises(ValueError, match=r"depth=1.5 is outside the text"):
        stream_passkey(1.5)
    with pytest.raises(ValueError, match=r"number_share=2.0 is no share"):
        FillerOptions(number_share=2.0)
    with pytest.raises(ValueError, match=r"digits=\(\) leaves no number to write"):
        FillerOptions(digits=())
