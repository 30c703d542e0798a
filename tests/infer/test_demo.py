"""The demonstration: three ways to read a text, their answers, and the text with what was kept of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from locret import shipped
from locret.infer import kept_page

TINY = ("--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads", "--text", "recipes/infer/pass_key.txt")
QUESTION = "What is the pass key?"


def test_three_ways_of_reading_answer_and_the_text_is_drawn(demo: Callable[..., Any], tmp_path: Any) -> None:
    outcome = demo(*TINY, "--question", QUESTION, "--keep", 5, "--output", tmp_path / "demo", "--json")
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out)["rows"]
    assert rows["everything"]["answers"][QUESTION] == rows["retaining heads"]["answers"][QUESTION]
    assert "43600" in rows["retaining heads"]["answers"][QUESTION]
    assert "43600" not in rows["newest only"]["answers"][QUESTION]
    assert rows["retaining heads"]["bytes"] == rows["newest only"]["bytes"] < rows["everything"]["bytes"] / 5
    page = (tmp_path / "demo" / "kept.html").read_text()
    assert page.count("<span") > 1000
    if find_spec("matplotlib"):
        assert (tmp_path / "demo" / "kept.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--keep", 0], "--keep 0 is not a share of a text; give percents such as 25"),
        (["--text", "book.txt"], "--text book.txt needs questions of its own; add --question TEXT for each"),
        (["--threads", 0], "--threads 0"),
    ],
)
def test_what_cannot_be_shown_is_refused(demo: Callable[..., Any], more: list[Any], message: str) -> None:
    outcome = demo(*more)
    assert outcome.code == 2
    assert message in outcome.err


def test_a_text_is_marked_piece_by_piece_and_another_one_refused() -> None:
    tokenizer = AutoTokenizer.from_pretrained(shipped.find("checkpoints/tiny"))
    text = "The grass is green. The pass key is 71432.\nThe sky is blue."
    opening = kept_page.Transcript(tokenizer, "chat", None).opening()
    count = len(tokenizer(opening + text, add_special_tokens=False)["input_ids"])
    share = torch.linspace(0, 0.5, count)
    pieces = kept_page.marked(text, share, tokenizer, "chat")
    assert "".join(piece for piece, _ in pieces) == text
    assert pieces[-1][1] == 1.0
    assert all(0 <= one <= 1 for _, one in pieces)
    with pytest.raises(ValueError, match="so it is another one; give that one"):
        kept_page.marked(text, torch.zeros(count + 1), tokenizer, "chat")
