"""`locret-train` on the published training sets' schemas, streamed rows, several turns, and rows that are left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_cases import refused, train, train_arguments, write_backbone

from locret import RetainingHeads

# Bad in every way a row of JSON Lines can be; row 0 and 8 are good.
GOOD = b'{"instruction": "The number of Oslo is 314. What is it?", "output": "It is 314."}'
BAD_LINES = {
    "no answer": b'{"instruction": "Who?", "output": ""}',
    "empty prompt": b'{"instruction": " ", "output": "Me."}',
    "wrong type": b'{"instruction": 7, "output": "Me."}',
    "invalid UTF-8": b'{"instruction": "caf\xe9", "output": "Me."}',
    "not JSON": b'{"instruction": "cut of',
    "row too long": b'{"instruction": "' + b"x" * 5_000_000 + b'", "output": "Me."}',
    "longer than the context": b'{"instruction": "' + b"the house " * 2100 + b'", "output": "Me."}',
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return RetainingHeads.from_pretrained(folder).state_dict()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_backbone(tmp_path_factory.mktemp("long") / "model", max_position_embeddings=16384)


@pytest.mark.parametrize(
    ("dataset", "folder", "repo"),
    [
        ("LongAlpaca", "longalpaca", "Yukang/LongAlpaca-12k"),
        ("LongAlign", "longalign", "THUDM/LongAlign-10k"),
        ("Anti-Haystack", "anti_haystack", "wenbopan/anti-haystack"),
    ],
)
@pytest.mark.slow
def test_a_published_set_trains_from_its_local_copy(
    shared: Path, long_context: Path, tmp_path: Path, dataset: str, folder: str, repo: str
) -> None:
    """Real schemas, derived rows; those up to 9,400 tokens, of which the first 256 prompt tokens are trained on."""
    data_dir = shared / "data" / "derived" / folder
    options = [f"--dataset={dataset}", f"--data-dir={data_dir}", "--min-tokens=1000", "--max-tokens=9700", "--steps=2"]
    small = ["--max-prompt-tokens=256", "--warmup-steps=0"]
    assert train((long_context, Path(dataset)), tmp_path / "run", *options, *small) == 0
    config = RetainingHeads.from_pretrained(tmp_path / "run").config
    assert config.training is not None
    assert (config.training["dataset"], config.training["rows"]) == (repo, 2)
    assert config.training["tokens"] > 2 * 8000
    report = json.loads((tmp_path / "run" / "dropped_rows.json").read_text())
    assert (report["dataset"], report["used"]) == (dataset, 2)
    assert set(report["dropped"]) <= {"shorter than --min-tokens 1000", "longer than --max-tokens 9700"}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_a_bad_line_stops_training_with_file_and_line(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"\n".join([GOOD, BAD_LINES[reason]]))
    code, message = refused(
        capsys, train_arguments((paths[0], rows), tmp_path / "run", "--steps=2", "--skip-bad-rows=false")
    )
    assert (code, f"{rows}: row 1 (counted from 0) " in message) == (2, True), message
    assert message.endswith("or pass --skip-bad-rows to leave out such rows")


def test_bad_lines_are_left_out_and_reported(
    paths: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"\n".join([GOOD, *BAD_LINES.values(), GOOD]))
    assert train((paths[0], rows), tmp_path / "run", "--steps=3") == 0
    report = json.loads((tmp_path / "run" / "dropped_rows.json").read_text())
    assert (report["read"], report["used"], report["rows"]) == (9, 2, 9)
    assert report["dropped"] == {
        reason: {"count": 1, "first_rows": [f"{rows}: row {row} (counted from 0)"]}
        for row, reason in enumerate(BAD_LINES, start=1)
    }
    assert "rows left out of 9 read: " in caplog.text
    assert "1 invalid UTF-8" in caplog.text
    assert RetainingHeads.from_pretrained(tmp_path / "run").config.training["dropped_rows"] == dict.fromkeys(
        BAD_LINES, 1
    )  # type: ignore[index]
