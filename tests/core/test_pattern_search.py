"""The offline search for MInference's patterns: what it rates, what wins, and the command that writes the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from oracle import sparse_prefill as oracle
from oracle.attention_scorers import attention

from locret import RetentionCache, prefill_attention
from locret.backbone.adapters import describe
from locret.backbone.chunk import Attended, Projections
from locret.infer import pattern_search
from locret.prefill_attention import AShape, BlockSparse, VerticalSlash
from locret.prefill_attention.search import CANDIDATES, scaled, search_layer

LENGTH, DIM, SCALING = 300, 8, 0.5


def layer(query_NLD: torch.Tensor, key_KLD: torch.Tensor, value_KLD: torch.Tensor) -> Attended:
    return Attended(
        layer_idx=0,
        query=query_NLD[None],
        key=key_KLD[None],
        value=value_KLD[None],
        scaling=SCALING,
        softcap=None,
        projections=Projections(describe(build("llama").config).shape(0)),
    )


def random_states(heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(n, LENGTH, DIM, generator=random) for n in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("late", [0, 130, 299])
def test_the_score_is_the_attention_that_the_oracles_mask_leaves(late: int) -> None:
    states, pattern = random_states(), VerticalSlash(vertical=40, slash=101)
    found = search_layer(layer(*states), [pattern], late=late)
    weights = attention(*states[:2], SCALING)
    for head, one in enumerate(found):
        mask = oracle.vertical_slash(states[0][head], states[1][head // 2], 40, 101, SCALING)
        assert one.score == pytest.approx(float((weights[head] * mask)[late:].sum(-1).mean()), abs=1e-5)
        assert one.share < 1


def test_the_other_score_is_the_share_of_the_output_that_stays() -> None:
    states, pattern = random_states(), AShape(sinks=3, window=200)
    (found, *_) = search_layer(layer(*states), [pattern], late=250, by="output")
    query, key, value = (one[0] for one in states)
    sparse = oracle.masked_attention(query, key, value, oracle.a_shape(LENGTH, LENGTH, 3, 200), SCALING)
    dense = oracle.masked_attention(query, key, value, torch.ones(LENGTH, LENGTH), SCALING)
    stays = float(((sparse - dense).abs() <= 5e-3)[250:].float().mean())
    assert 0.05 < stays < 0.95
    assert found.score == pytest.approx(stays, abs=2e-3)


def test_the_pattern_that_was_built_into_a_head_wins() -> None:
    query, key, value = (one.clone() for one in random_states(heads=3, kv_heads=3))
    query[0], key[0] = 0, 0
    for position in range(LENGTH):  # head 0 sees its neighbours
        key[0, position] = torch.tensor([1.0, position, 0, 0, 0, 0, 0, 0])
        query[0, position, 1] = 0.06
    key[1, 7::8, 0], query[1, :, 0] = 40, 1.0  # head 1 a few columns everywhere
    query[2], key[2] = 0, 0
    for block in range(5):  # head 2 the blocks that look like its own, every other one
        key[2, 64 * block : 64 * block + 64, block % 2] = 6
        query[2, 64 * block : 64 * block + 64, block % 2] = 6
    patterns = [AShape(sinks=2, window=200), VerticalSlash(vertical=70, slash=50), BlockSparse(blocks=3)]
    found = search_layer(layer(query, key, value), patterns, late=240)
    assert [one.pattern for one in found] == patterns
    assert all(one.score > 0.95 for one in found)


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_scaled_patterns_compute_no_more_than_the_share(share: float) -> None:
    found = search_layer(layer(*random_states()), CANDIDATES, late=200, share=share)
    assert all(share / 2 < one.share <= share for one in found)


def test_a_share_that_no_pattern_can_keep_to_takes_the_least() -> None:
    found = search_layer(layer(*random_states()), CANDIDATES, late=200, share=0.01)
    assert {one.pattern for one in found} == {AShape(sinks=0, window=1)}


def test_of_equal_patterns_the_cheapest_wins() -> None:
    states = random_states()
    states[1][:, 0] = 0
    for head in range(4):
        states[0][head], states[1][head // 2, 0, 0] = 0, 200
        states[0][head, :, 0] = 1
    patterns = [
        VerticalSlash(vertical=200, slash=100),
        AShape(sinks=1, window=10),
        VerticalSlash(vertical=30, slash=50),
    ]
    assert {best.pattern for best in search_layer(layer(*states), patterns, late=100)} == {patterns[1]}


def test_a_scaled_pattern_sees_as_many_keys() -> None:
    assert scaled(AShape(sinks=100, window=800), 90) == AShape(sinks=10, window=80)
    assert scaled(VerticalSlash(vertical=500, slash=700), 120) == VerticalSlash(vertical=50, slash=70)
    assert scaled(BlockSparse(blocks=100), 640) == BlockSparse(blocks=10)


# -- the command ------------------------------------------------------------------------------------------------------

TINY = ["--model", "checkpoints/tiny"]


def text(folder: Path) -> str:
    file = folder / "text.txt"
    file.write_text("The red house stands near the river. The number of Oslo is 48213. " * 60)
    return str(file)


def test_the_command_writes_patterns_that_a_policy_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "patterns.json"
    options = ["--tokens", "600", "--late", "400", "--share", "0.5", "--json"]
    assert pattern_search.command([*TINY, "--text", text(tmp_path), "--out", str(out), *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tokens"] == 600
    assert 0.3 < record["score"] <= 1
    assert record["share"] <= 0.5
    assert json.loads(out.read_text()) == record["layers"]
    assert [len(heads) for heads in record["layers"]] == [8] * 5
    strategy = prefill_attention.get(f"minference:patterns={out}")
    assert strategy is not None
    strategy.by_head(describe(_tiny()))
    with pytest.raises(ValueError, match="has 5 layers, but the backbone has 3"):
        strategy.by_head(RetentionCache(build("llama"), "random").backbone)


def _tiny() -> Any:
    from transformers import AutoConfig

    from locret import shipped

    return AutoConfig.from_pretrained(shipped.find("checkpoints/tiny"))


@pytest.mark.parametrize(
    ("options", "about"),
    [
        (["--late", "8192"], "--late 8192 leaves none of --tokens 8192"),
        (["--share", "1"], "--share 1.0 is not a part"),
        (["--by", "sum"], "--by sum is unknown"),
        (["--tokens", "0"], "--tokens 0 is too small"),
        (["--out", "."], "that is no file"),
        (["--out", "no/such/file.json"], "there is no folder"),
        ([], "only those from --late 2500 on count"),
    ],
)
def test_the_command_refuses_what_cannot_be(tmp_path: Path, options: list[str], about: str) -> None:
    given = [*TINY, "--text", text(tmp_path), "--out", str(tmp_path / "patterns.json"), *options]
    with pytest.raises(ValueError, match=about):
        pattern_search.command(given)
    assert not (tmp_path / "patterns.json").exists()


def test_only_patterns_are_replaced(tmp_path: Path) -> None:
    book = text(tmp_path)
    before = Path(book).read_bytes()
    with pytest.raises(ValueError, match="is there already and holds no patterns; choose another file"):
        pattern_search.command([*TINY, "--text", book, "--out", book])
    assert Path(book).read_bytes() == before
    patterns = tmp_path / "patterns.json"
    patterns.write_text('[{"0": ["stream_llm", 100, 800, 1.0]}]')
    assert pattern_search.command([*TINY, "--text", book, "--out", str(patterns), "--dry-run"]) == 0


def test_a_dry_run_lists_the_candidates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*TINY, "--text", text(tmp_path), "--out", str(tmp_path / "patterns.json"), "--dry-run"]
    assert pattern_search.command(given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "stream_llm 100 800"
    assert len(lines) == len(CANDIDATES)
    assert not (tmp_path / "patterns.json").exists()
