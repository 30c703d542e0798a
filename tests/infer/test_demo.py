"""The demonstration: three ways to read a text, their answers, the text with what was kept of it, and bars of that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from locret import shipped
from locret.infer import demo, kept_page
from locret.pictures import Retention, as_lines, kept_shares

pytestmark = pytest.mark.slow

QUESTION = "What is the pass key?"


def test_three_ways_of_reading_answer_and_the_text_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {"MODEL": "checkpoints/tiny", "HEADS": "checkpoints/tiny-heads", "TEXT": "recipes/infer/pass_key.txt"}
    for name, value in {**tiny, "QUESTIONS": {QUESTION: "43600"}, "SHARE": 0.05}.items():
        monkeypatch.setattr(demo, name, value)
    assert demo.command(["--output", str(tmp_path / "demo")]) == 0
    out, err = capsys.readouterr()
    said = {line[2:18].strip(): line[19:] for line in out.splitlines() if line.startswith("  ")}
    assert said["everything"] == said["retaining heads"]
    assert "43600" in said["everything"]
    assert "43600" not in said["newest only"]
    told = {line.partition(":")[0]: line for line in err.splitlines() if "units per KV head" in line}
    assert [told[name][-20:] for name in told] == ["1 of 1 answers right"] * 2 + ["0 of 1 answers right"]
    size = {name: float(line.split(" MiB")[0].split()[-1]) for name, line in told.items()}
    assert size["retaining heads"] == size["newest only"] < size["everything"] / 5
    assert (tmp_path / "demo" / "kept.html").read_text().count("<span") > 1000
    assert (tmp_path / "demo" / "kept.png").read_bytes().startswith(b"\x89PNG")


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


def test_shares_count_kept_positions_column_by_column() -> None:
    kept = {0: [torch.tensor([0, 1, 9]), torch.tensor([4, 5, 6])], 3: [torch.tensor([7, 8, 9])]}
    shares = kept_shares(Retention(kept, 10), 4)
    expected = [[1, 0, 0, 0.5], [0, 1 / 3, 2 / 3, 0], [0, 0, 1 / 3, 1]]
    assert torch.allclose(shares, torch.tensor(expected))  # of the columns [0, 2), [2, 5), [5, 8) and [8, 10)
    assert as_lines(Retention({0: kept[0], 3: kept[3]}, 10), 4) == ["    0 |▆▄▅▄|", "    3 |  ▅█|"]
