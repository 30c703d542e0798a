"""The model card of retaining heads: filled from their config, never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from locret.heads.heads import RetainingHeads


@pytest.fixture
def heads(tiny_llama) -> RetainingHeads:
    tiny_llama.config._name_or_path = "org/base"
    return RetainingHeads.for_model(tiny_llama, hidden_dim=12, seed=3).annotate(
        base_model_revision="abc123",
        label={"kind": "log_attention", "include_last_prompt_token": True},
        policy={"budget": 64, "chunk_size": 32},
        training={"dataset": "org/long-texts", "steps": 300},
        evaluation={"exact_match": 0.94},
    )


@pytest.fixture
def saved(heads, tmp_path) -> Path:
    heads.save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


def test_the_card_is_filled_and_has_the_hubs_metadata(saved):
    card = ModelCard.load(saved / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == "locret"
    assert data["base_model"] == "org/base"
    assert data["base_model_relation"] == "adapter"
    assert data["license"] == "apache-2.0"
    assert data["pipeline_tag"] == "text-generation"
    assert data["datasets"] == ["org/long-texts"]
    assert data["metrics"] == ["exact_match"]
    assert "retaining-heads" in data["tags"]
    for text in (
        "# Retaining heads for org/base",
        'AutoModelForCausalLM.from_pretrained("org/base", revision="abc123"',
        "RetentionPolicy(\n    budget=64,\n    chunk_size=32,\n)",
        "| Layers with a head | 2 of 2 |",
        "| Weights | 1,584 in float32 |",  # 2 layers * 12 * (64 + 2)
        "| steps | 300 |",
        "log of the attention",
        "| include_last_prompt_token | True |",
        "| exact_match | 0.94 |",
        "2410.01805",
    ):
        assert text in card.content, text
    for unfilled in ("{{", "None", "More Information Needed"):
        assert unfilled not in card.content


def test_the_cards_example_is_python_that_compiles(saved):
    code = (saved / "README.md").read_text().split("```python\n")[1].split("```")[0]
    compile(code, "README.md", "exec")


def test_a_card_without_facts_says_so_instead_of_guessing(tiny_llama):
    tiny_llama.config._name_or_path = ""
    heads = RetainingHeads.for_model(tiny_llama, 4).annotate(training={"dataset": "my file.jsonl"})
    card = heads.generate_model_card()
    assert not {"base_model", "base_model_relation", "metrics", "datasets"} & card.data.to_dict().keys()
    assert "No results recorded." in card.content
    assert "the defaults of `RetentionPolicy` apply" in card.content
    heads.annotate(training=None)
    assert "Not trained: the weights are random." in heads.generate_model_card().content
