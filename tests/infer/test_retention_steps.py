"""Which positions are kept after each chunk: recorded as they were, counted by hand, and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eval_runs import prompt_ids

from locret import RetentionCache, RetentionPolicy
from locret.data import tasks
from locret.data.text.embedded_tokenizer import build_tokenizer
from locret.infer.evaluation.methods import Prompt, Setup
from locret.infer.evaluation.retention_steps import (
    RetentionSteps,
    answer_spans,
    draw_steps,
    record_steps,
    spread,
    step_grid,
    write_retention_steps,
)

POLICY = RetentionPolicy(budget=6, chunk_size=5, stabilizers=2, local_len=3)


def streaming_steps(model: Any, tokens: int) -> RetentionSteps:
    return record_steps(model, torch.arange(tokens)[None], RetentionCache(model, "streaming", POLICY), "streaming")


def test_every_step_holds_what_the_eviction_after_its_chunk_left(tiny_llama: Any) -> None:
    steps = streaming_steps(tiny_llama, 18)
    assert steps.read == (5, 10, 15)
    assert steps.prompt_tokens == 18
    # Four sinks and the newest two.
    expected = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 8, 9], [0, 1, 2, 3, 13, 14]]
    for step, positions in zip(steps.kept, expected, strict=True):
        assert sorted(step) == [0, 1]
        assert all(head.tolist() == positions for heads in step.values() for head in heads)


def test_grid_counts_kept_positions_per_stretch_and_step() -> None:
    kept = ({4: [torch.tensor([0, 1, 2])]}, {4: [torch.tensor([0, 5, 6])]})
    grid = step_grid(RetentionSteps("", kept, (3, 7), 8), layer=4, head=0, rows=4)
    # Of the stretches 0-1, 2-3, 4-5, 6-7; after the first step position 2 is all that was read of the second stretch.
    expected = torch.tensor([[1.0, 0.5], [1.0, 0.0], [torch.nan, 0.5], [torch.nan, 1.0]])
    torch.testing.assert_close(grid, expected, equal_nan=True)


def test_text_shorter_than_the_rows_has_a_row_per_position(tiny_llama: Any) -> None:
    grid = step_grid(streaming_steps(tiny_llama, 18), layer=1, head=1)
    assert grid.shape == (18, 3)
    assert grid[:, 2].nan_to_num(-1).tolist() == [1, 1, 1, 1] + [0] * 9 + [1, 1] + [-1] * 3


@pytest.mark.parametrize(("count", "expected"), [(3, [0, 1, 2]), (4, [0, 1, 2, 3]), (32, [0, 10, 21, 31])])
def test_shown_heads_are_spread_from_first_to_last(count: int, expected: list[int]) -> None:
    assert spread(range(count), 4) == expected


def test_spans_are_the_tokens_that_state_the_target() -> None:
    tokenizer = build_tokenizer()
    sample = tasks.get("passkey").sample(tokenizer, 256, depth=0.5, seed=3)
    ids = prompt_ids(tokenizer, sample)[0]
    spans = answer_spans(tokenizer, sample)
    assert len(spans) == 2  # the statement says the key twice
    for first, last in spans:
        assert tokenizer.decode(ids[first : last + 1]).strip(" .#") == sample.targets[0]
        assert 64 < first < 192


def test_picture_has_panels_for_layers_and_heads(tiny_llama: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra locret[eval]")
    draw_steps(streaming_steps(tiny_llama, 18), tmp_path / "steps.png", spans=[(4, 5)])
    assert (tmp_path / "steps.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_prompt_without_a_step_is_refused(tiny_llama: Any, tmp_path: Path) -> None:
    steps = streaming_steps(tiny_llama, 3)
    with pytest.raises(ValueError, match="3 prompt tokens are read in no step with an eviction; give a longer prompt"):
        draw_steps(steps, tmp_path / "steps.png")


@pytest.mark.slow
def test_every_method_gets_a_picture_of_the_sample(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra locret[eval]")
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer()
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, num_key_value_heads=1, **size)
    )
    sample = tasks.get("number").sample(tokenizer, 200, depth=0.5)
    prompt = Prompt(prompt_ids(tokenizer, sample), sample, Setup(model.eval(), tokenizer, None, 0))
    names = write_retention_steps(tmp_path, prompt, {"random": "random", "streaming": "streaming"}, POLICY)
    assert names == ["retention_steps_random.png", "retention_steps_streaming.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
