"""The folder of a trained backbone: refused early, written whole or not at all, with a filled model card."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from locret.files import visible, written_whole
from locret.tables import markdown

RECORD = "training.json"
CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [locret, long-context, synthetic]
---
# Locret's embedded backbone

A Llama of {parameters} parameters ({layers} layers, hidden {hidden}, {heads} query / {kv_heads} KV heads of {head_dim},
vocabulary {vocabulary}) that answers questions about facts hidden in generated texts: the families `generated` and
`world` of `locret.data.tasks` (keys and values, stories, rules, ways, counts; docs/evaluation.md). It exists so that
retaining heads can be trained, tested, compared and shown offline on a CPU. It knows no language beyond the generator.

Prompt format (the tokenizer's chat template): `<bos><user>TEXT\\nWhat is the pass key?<eos><assistant>`; the question
comes after the text. `python -m locret.data.training.question_rows` writes examples of every task.

{measured}
Made from {origin} in {minutes} minutes on {machine} by `python -m checkpoints.build`, on generated texts
only. `training.json` holds the resolved options and the training log. Versions: {versions}.
"""


def check_output(output: str, overwrite: bool) -> None:
    """Refuse a folder that must not or cannot be written, before anything is trained.

    Raises:
        ValueError: Where it holds something and `overwrite` is off, or is a file.
        OSError: Where its parent folder cannot be written.
    """
    target = Path(output)
    if target.is_file():
        raise ValueError(f"output={output} is a file; name a folder")
    content = visible(target)
    if content and not overwrite:
        raise ValueError(f"output={output} is not empty; choose another folder, or add --overwrite to replace it")
    if content and not (target / RECORD).is_file():
        raise ValueError(f"output={output} holds something else than a trained backbone; choose another folder")
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not os.access(parent, os.W_OK):
        raise OSError(f"output={output} cannot be written: no permission in {parent}; choose another folder")


def save(
    output: str, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], card: str
) -> None:
    """Write model, tokenizer, `training.json` and model card; `config.json` appears last, and each file whole."""
    with written_whole(output, parents=True, last="config.json") as fresh:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        (fresh / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (fresh / "README.md").write_text(card, encoding="utf-8")
        written = visible(fresh)
    for stale in set(visible(Path(output))) - {*written}:  # of the backbone that was here before
        Path(output, stale).unlink()


def model_card(model: LlamaForCausalLM, record: dict[str, Any]) -> str:
    """Return the README of the folder, filled with what was built and measured."""
    config, options = model.config, record["options"]
    measured = f"{accuracy(record['exact'], options['eval_samples'])}\n"
    return CARD.format(
        parameters=f"{model.num_parameters():,}",
        vocabulary=config.vocab_size,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        measured=measured,
        origin=f"`{options['init']}`" if options["init"] else "scratch",
        minutes=f"{record['seconds'] / 60:.0f}",
        machine=record["machine"],
        versions=", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    )


def accuracy(exact: dict[str, dict[str, float]], samples: int) -> str:
    """Return the share of exact answers per task and length as a Markdown table under a sentence."""
    if not exact:
        return "Accuracy: unknown (`eval_samples` was 0).\n"
    lengths = list(next(iter(exact.values())))
    lines = [
        f"Exact answers with full attention, greedy decoding, {samples} fresh samples a cell, needles at even depths:",
        "",
        *markdown(
            ["task", *(f"{int(length):,} tokens" for length in lengths)],
            ([task, *(f"{share:.0%}" for share in row.values())] for task, row in exact.items()),
        ),
    ]
    return "\n".join(lines) + "\n"
