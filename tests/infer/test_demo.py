"""The demonstration: it trains, reads, compares, draws, and fails where trained heads fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret import RetainingHeads
from locret.data.needles import passkey_sample
from locret.infer.demo import TRAINED, UNTRAINED, DemoOptions, compare, find_fact, prompt_tensor, recommended_policy

ROOT = Path(__file__).parents[2]
RECIPE = """
model: ignored
dataset: ignored
hidden_dim: 8
steps: 3
policy: {budget: 32, chunk_size: 32, stabilizers: 8, local_len: 16}
"""


@pytest.mark.slow
def test_demo_trains_heads_and_fails_where_the_backbone_finds_nothing(
    demo: Callable[..., Any], backbone: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    training = ("--recipe", tmp_path / "recipe.yaml", "--rows", 3, "--steps", 3, "--row-tokens", 256, "--threads", 1)
    outcome = demo("--model", backbone, "--output", tmp_path, "--samples", 2, *training)
    assert outcome.code == 1, outcome.err
    assert "$ locret-train --config" in outcome.out
    assert "the trained heads should find at least 50% of the keys" in outcome.out
    rows = dict(re.findall(r"^(full cache|trained heads|untrained heads)\s+0/2\s+([\d,]+)", outcome.out, re.M))
    assert int(rows["full cache"].replace(",", "")) > 512
    assert int(rows["trained heads"]) == int(rows["untrained heads"]) < 80
    assert RetainingHeads.from_pretrained(tmp_path / "training").config.policy["budget"] == 32
    assert (tmp_path / "kept_positions.png").read_bytes().startswith(b"\x89PNG")


def test_demo_needs_a_text_of_sixteen_budgets() -> None:
    with pytest.raises(ValueError, match="--times 15 shows little; give 16 or more"):
        DemoOptions(times=15)


def test_demo_needs_heads_that_recommend_a_policy(demo: Callable[..., Any], backbone: Path, tmp_path: Path) -> None:
    RetainingHeads.for_model(AutoModelForCausalLM.from_pretrained(backbone), 8).save_pretrained(tmp_path / "heads")
    outcome = demo("--model", backbone, "--heads", tmp_path / "heads", "--output", tmp_path / "out", "--threads", 1)
    assert outcome.code == 2
    assert "recommend no policy" in outcome.err


def test_demo_away_from_the_repository_says_where_to_run(demo: Callable[..., Any], tmp_path: Path) -> None:
    outcome = demo("--model", tmp_path, "--output", tmp_path / "out")
    assert outcome.code == 2
    assert "holds no backbone; run this from the repository's root" in outcome.err
    assert not (tmp_path / "out").exists()


def test_fact_is_found_where_the_text_states_it(backbone: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    sample = passkey_sample(tokenizer, 512, 0.4, seed=1)
    ids = prompt_tensor(tokenizer, sample)
    first, last = find_fact(tokenizer, sample, ids)
    assert tokenizer.decode(ids[0, first : last + 1]) == f"The pass key is {sample.answer}."
    assert 0.3 < first / 512 < 0.5


@pytest.mark.slow
def test_trained_heads_find_what_untrained_heads_lose() -> None:
    folders = ROOT / "checkpoints" / "tiny", ROOT / "checkpoints" / "tiny-heads"
    for folder in folders:
        if not (folder / "config.json").is_file():
            pytest.skip(f"{folder.relative_to(ROOT)} is not in this checkout")
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    model = AutoModelForCausalLM.from_pretrained(folders[0]).eval()
    trained = RetainingHeads.from_pretrained(folders[1])
    untrained = RetainingHeads.for_model(model, trained.config.hidden_dim, seed=0)
    policy = recommended_policy(trained, "checkpoints/tiny-heads")
    samples = [passkey_sample(tokenizer, 16 * policy.budget, (i + 0.5) / 6, seed=100 + i) for i in range(6)]
    full, good, bad = compare(model, tokenizer, policy, samples, {TRAINED: trained, UNTRAINED: untrained})
    assert good.units == bad.units < full.units / 10
    assert good.cache_bytes == bad.cache_bytes < full.cache_bytes / 4
    assert sum(good.right) >= sum(bad.right) + 3
