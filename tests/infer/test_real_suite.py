"""`locret-eval --suite real` and `locret demo`: answers scored from what was kept, a record that goes on, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from locret import LongContextModel, shipped
from locret.conversation.document import encode
from locret.conversation.evidence import likelihood, policy_of_share
from locret.conversation.turns import Transcript
from locret.data import real
from locret.infer import demo, kept_page
from locret.infer.evaluation import command as locret_eval
from locret.infer.evaluation.real import Cell, RealOptions, _Reading, recovered, summary, tables
from locret.loading.options import ScorerOptions
from locret.pictures import Retention, as_lines, kept_shares

TINY = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads"]
SMALL = ["--sets=sqlite_faq", "--tokens=128", "--pieces=1", "--questions=2", "--quiet", "--chunk-size=64"]


def run(output: Path, *more: str, suite: tuple[str, str] = ("--suite", "real")) -> int:
    return locret_eval.command([*suite, *TINY, *SMALL, "--output", str(output), *more])


def record(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]


def test_every_method_is_asked_the_same_and_a_record_goes_on(tmp_path: Path, capsys: Any) -> None:
    methods = "full,nothing,locret,locret+original,random:sinks=4,key_difference,oracle_agnostic"
    assert run(tmp_path / "run", "--methods", methods, "--keep", "25", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = record(tmp_path / "run")
    asked = {(one["piece"], one["question"]): one["answer_tokens"] for one in found if one["method"] == "full"}
    nats = {name: [one["nats"] for one in found if one["method"] == name] for name in ("locret", "locret+original")}
    assert nats["locret"] != nats["locret+original"]
    for name in methods.split(","):
        own = [one for one in found if one["method"] == name]
        assert {(one["piece"], one["question"]): one["answer_tokens"] for one in own} == asked
    bounded = {one["method"]: one["units"] for one in found if one["share"] is not None}
    assert len(set(bounded.values())) == 1, "all rows hold the same number of units"
    assert {row["set"] for row in rows} == {"all", "sqlite_faq"}
    file = tmp_path / "run" / "answers.jsonl"
    whole = file.read_text()
    assert run(tmp_path / "run", "--methods", f"{methods},streaming", "--keep", "25") == 0
    assert file.read_text().startswith(whole), "what is known is not measured again"
    assert "| streaming |" in (tmp_path / "run" / "table.md").read_text()
    # What is left of an interrupted cell is measured again.
    file.write_text(whole[:-20])
    (tmp_path / "real.yaml").write_text(f"suite: real\nmethods: {methods}\nkeep: '25'\n")
    assert run(tmp_path / "run", suite=("--config", str(tmp_path / "real.yaml"))) == 0
    again = [{**one, "read_seconds": 0} for one in record(tmp_path / "run")]
    assert again == [{**one, "read_seconds": 0} for one in found]
    with pytest.raises(ValueError, match=r"another configuration \(other pieces\); choose another folder, or --over"):
        run(tmp_path / "run", "--methods", "nothing", "--pieces", "2")
    with pytest.raises(ValueError, match="no piece of 64 tokens answers a question of its set; give more --tokens"):
        run(tmp_path / "short", "--tokens", "64")
    assert run(tmp_path / "rounded", "--methods", "full", "--load-in-8bit") == 0
    assert {one["nats"] for one in record(tmp_path / "rounded")} != {n["nats"] for n in found if n["method"] == "full"}
    assert json.loads((tmp_path / "rounded" / "configuration.json").read_text())["load_in_8bit"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--keep", "25,x"], r"--keep 25,x is not possible \(x% is not a share of the prompt\); write it like"),
        (["--keep", "0"], r"--keep 0 is not possible \(0% is not a share"),
        (["--sets", "poems"], "--sets poems is unknown; choose one of postgres_glossary, python_glossary"),
        (["--pieces", "0"], "pieces=0 is too small; it must be 1 or more"),
        (["--tokens", "8"], r"--tokens 8 is not possible \(8 is not a whole number of 64 to"),
        (["--methods", "snapkw"], "snapkv"),
        (["--methods", "oracle"], "--methods oracle is called oracle_agnostic here"),
        (["--methods", "random+spaced"], r"\+spaced changes nothing without \+head_shares; add that, or drop \+spaced"),
        (["--keep", "0.25"], r"--keep 0.25 is not possible \(0.25 could be a share or a percentage\)"),
        (["--method", "locret+4bit"], "method=locret\\+4bit is not for --suite real, which reads"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", *more)
    assert not (tmp_path / "run" / "configuration.json").exists()


def test_a_likelihood_is_that_of_the_whole_text_where_everything_is_kept() -> None:
    lm = LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", budget=4096)
    text = "The grass is green. " * 20 + "The pass key is 71432. " + "The sky is blue. " * 20 + "Nothing stands"
    question, answer = "What is the pass key?", "The pass key is 71432."
    asked = (real.Asked(question, answer),)
    whole = _Reading(lm, RealOptions(suite="real", output=""), ScorerOptions())
    score, _ = whole.read(Cell("full", None, 512), piece := real.Piece(text, 512, asked), asked)
    tier = whole.by(Cell("locret+recall:recall=3", 25.0, 512), piece, asked).policy
    assert (tier.recall, tier.host_budget) == (3, 128), "what a method says wins over what the suite takes"
    wanted = encode(lm.tokenizer, answer)
    ids = torch.tensor([[*encode(lm.tokenizer, text.join(Transcript(lm.tokenizer, "chat").around(question))), *wanted]])
    logs = lm.model(ids).logits[0, -len(wanted) - 1 : -1].log_softmax(-1)
    for found in (score(asked[0]), likelihood(lm.read(text, progress=False), question, answer)):
        assert found.tokens == len(wanted)
        assert found.nats == pytest.approx(-float(logs.gather(1, torch.tensor(wanted)[:, None]).sum()), abs=1e-3)
        assert found.hits == int((logs.argmax(-1) == torch.tensor(wanted)).sum())


def test_a_share_counts_the_newest_tokens_too() -> None:
    for tokens, share in [(1000, 0.25), (1000, 0.0625), (100, 0.06)]:
        policy = policy_of_share(tokens, share)
        assert policy.budget + policy.local_len == max(8, round(tokens * share))
        assert policy.local_len <= max(1, (policy.budget + policy.local_len) // 8)


def test_held_out_pieces_and_those_of_training_share_nothing() -> None:
    tokenizer = AutoTokenizer.from_pretrained(shipped.find("checkpoints/tiny"))
    for name in real.SETS[1:]:
        seen, unseen = (real.pieces(name, tokenizer, 256, seen=one) for one in (True, False))
        questions = [{one.question for piece in found for one in piece.asked} for found in (seen, unseen)]
        assert all(questions)
        assert not questions[0] & questions[1]
    assert real.pieces(real.UNSEEN, tokenizer, 256, seen=True) == []


def test_the_table_says_how_much_of_the_distance_is_left() -> None:
    def rows(method: str, share: float | None, nats: float) -> list[dict[str, Any]]:
        one = {"method": method, "share": share, "tokens": 9, "set": "faq", "nats": 4 * nats, "hits": 2}
        return [{**one, "answer_tokens": 4, "units": 3, "cache_bytes": 5}] * 2

    found = summary([*rows("full", None, 1.0), *rows("nothing", None, 3.0), *rows("locret", 25.0, 1.5)])
    (row,) = [one for one in found if one["method"] == "locret" and one["set"] == "all"]
    assert recovered(found, row) == pytest.approx(75)
    assert row["error"] == 0
    assert "| locret | 1.50 ± 0.00 (75 %) |" in tables(found)
    assert Cell("locret", 25.0, 9).share == 25.0


def test_the_page_of_numbers_shows_its_record() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "numbers.md").read_text()
    for line in tables(json.loads((docs / "numbers.json").read_text())["rows"]).splitlines():
        assert line in page


QUESTION = "What is the pass key?"


def test_three_ways_of_reading_answer_and_the_text_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (text := tmp_path / "text.txt").write_text(shipped.text("recipes/infer/pass_key.txt")[7000:14000])
    tiny = {"MODEL": "checkpoints/tiny", "HEADS": "checkpoints/tiny-heads", "TEXT": str(text)}
    for name, value in {**tiny, "QUESTIONS": {QUESTION: "43600"}, "SHARE": 0.1}.items():
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
