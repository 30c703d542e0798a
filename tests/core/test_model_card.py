"""The model card of retaining heads: filled from their config, never guessed."""

from __future__ import annotations

import json
from pathlib import Path

import mutations
import pytest
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from locret import RetentionPolicy, shipped
from locret.heads import evaluation
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
        "| Steps | 300 |",
        "log of the attention",
        "| The prompt's last token asks too | yes |",
        "| Exact match | 0.94 |",
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


RESULTS = {
    "complete": True,
    "commit": "abc",
    "versions": {"locret": "0.2.0"},
    "cells": [
        {"task": "passkey", "tokens": 8192, "method": method, "budget": budget, "n": 50, "score": score, **more}
        for method, budget, score, more in (
            ("full", None, 100.0, {"standard_error": 0.0}),
            ("locret", 1024, 93.4567, {"standard_error": 2.5123}),
            ("locret+pyramid", 1024, 91.0, {"standard_error": None}),
            ("streaming", 1024, 12.0, {"standard_error": 1.0}),
        )
    ],
}


def results_file(folder: Path, **changes: object) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps({**RESULTS, **changes}))
    return path


def test_results_of_an_evaluation_become_a_table_and_a_model_index(heads, tmp_path):
    heads.annotate(evaluation=evaluation.from_results(results_file(tmp_path)))
    heads.save_pretrained(tmp_path / "heads")
    card = ModelCard.load(tmp_path / "heads" / "README.md")
    assert "| passkey | 8,192 | locret | 1,024 | 93.5 \u00b1 2.5 | 50 |" in card.content
    assert "| passkey | 8,192 | full | all | 100.0 | 50 |" in card.content
    assert "by `locret-eval` of locret 0.2.0" in card.content
    results = {(r.metric_name, r.metric_value) for r in card.data.eval_results}
    assert results == {("locret, 1,024 units per KV head", 93.46), ("locret+pyramid, 1,024 units per KV head", 91.0)}
    assert {r.dataset_name for r in card.data.eval_results} == {"passkey, 8,192 tokens"}
    assert card.data.model_name == "Retaining heads for org/base"
    assert heads.from_pretrained(tmp_path / "heads").config == heads.config


def test_shares_and_settings_that_tell_results_apart_stand_in_the_card(heads, tmp_path):
    usual = {"task": "passkey", "tokens": 64, "method": "locret", "n": 5, "score": 50.0, "standard_error": 1.0}
    shares = [{**usual, "budget": None, "budget_share": share, "chunk_size": None} for share in (0.1, 0.25)]
    sizes = [{**usual, "budget": 8, "chunk_size": size} for size in (16, 32)]
    notes = evaluation.from_results(results_file(tmp_path, cells=[*shares, *sizes]))
    card = heads.annotate(evaluation=notes).generate_model_card()
    assert "| passkey | 64 | locret | 10% |  | 50.0" in card.content
    assert "| passkey | 64 | locret | 8 | 32 | 50.0" in card.content
    names = [result.metric_name for result in card.data.eval_results]
    assert names[0] == "locret, 10% of the prompt"
    assert names[3] == "locret, 8 units per KV head, chunk size 32"
    assert len(set(names)) == 4


def test_results_of_other_heads_are_refused(tmp_path):
    file = results_file(tmp_path, config={"weights": {"heads": "ab" * 32}})
    with pytest.raises(ValueError, match="is of other heads .fingerprint .abababababab., those to be .* cdcdcdcdcdcd"):
        evaluation.from_results(file, "cd" * 32)
    assert evaluation.from_results(file, "ab" * 32)["results"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"complete": False}, "has not ended; finish it with locret-eval --resume"),
        ({"cells": []}, "has no cells"),
        ({"cells": [RESULTS["cells"][0]]}, "has no results of the method locret"),
        ({"cells": [{"task": 1}]}, "cell 0 is .* without task, method and score"),
        ({"cells": [{**RESULTS["cells"][1], "score": float("nan")}]}, "cell 0 is"),
    ],
)
def test_results_that_cannot_be_are_refused(tmp_path, changes, said):
    with pytest.raises(ValueError, match=said) as refused:
        evaluation.from_results(results_file(tmp_path, **changes))
    assert "\n" not in str(refused.value)


@given(data=st.data())
def test_damaged_results_are_refused_or_read(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "results.json"
    file.write_bytes(mutations.json_text_of(data.draw, RESULTS))
    notes = mutations.loaded_or_refused(lambda: evaluation.from_results(file))
    if notes is not None:
        heads = RetainingHeads.for_model(LlamaConfig(num_hidden_layers=1), 2)
        assert heads.annotate(evaluation=notes).generate_model_card().data.eval_results


def test_numbers_are_rounded_and_facts_have_names(heads):
    heads.annotate(training={"tokens": 2331034, "final_total": 1.050513744354248, "adapter": None, "went_on_from": "x"})
    text = heads.generate_model_card().content
    for line in ("| Tokens read | 2,331,034 |", "| Loss at the end | 1.051 |", "| Went on from the heads | x |"):
        assert line in text
    assert "dapter" not in text.split("## Training")[1].split("##")[0]


def test_the_card_of_the_shipped_heads_is_what_this_version_writes():
    name = "checkpoints/tiny-heads"
    heads = RetainingHeads.from_pretrained(name)
    assert (Path(shipped.find(name)) / "README.md").read_text() == str(heads.generate_model_card())


def test_the_example_of_heads_with_shares_of_the_layers_uses_them(heads):
    assert "shares" not in heads.generate_model_card().content
    shares = [0.5] * (heads.config.num_hidden_layers - 1) + [1 + 0.5 * (heads.config.num_hidden_layers - 1)]
    heads.annotate(policy={"budget": 64, "layer_shares": shares})
    code = heads.generate_model_card().content.split("```python\n")[1].split("```")[0]
    arguments = code.split("RetentionPolicy(")[1].split("\n)")[0]
    policy = eval(f"RetentionPolicy({arguments}\n)", {"RetentionPolicy": RetentionPolicy})
    assert (policy.layer_budgets, list(policy.layer_shares)) == ("shares", shares)
    assert "layer_shares" not in policy.idle()


def test_the_example_of_heads_with_shares_of_the_kv_heads_uses_theirs(heads):
    shares = [1.0] * heads.config.num_key_value_heads * len(heads)
    annotated = heads.annotate(policy={**RetentionPolicy(budget=64).to_dict(), "head_shares": shares})
    card = str(annotated.generate_model_card())
    assert 'head_budgets="shares"' in card
    assert "head_shares" not in card
    assert "1.0, 1.0" not in card
