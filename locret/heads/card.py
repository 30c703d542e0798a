"""The model card of retaining heads, filled from their config: their use, how to run them, how they were made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from locret.base.tables import markdown
from locret.heads.config import HeadsConfig
from locret.heads.fingerprint import NORMS
from locret.labels import KINDS
from locret.policy.policy import RetentionPolicy

PLACEHOLDER = "path/to/these-heads"
"""What the card's example loads while the heads are in no repository; `locret-push` puts the repository there."""
_SIZES = ("budget", "chunk_size", "stabilizers", "local_len")

_TEMPLATE = Path(__file__).with_name("card_template.md")


def fill(config: HeadsConfig, repo_id: str | None = None) -> ModelCard:
    """Return the card of heads, front matter included; its example loads `repo_id`, or a placeholder."""
    card: ModelCard = ModelCard.from_template(
        card_data=_front_matter(config),
        template_str=_TEMPLATE.read_text(encoding="utf-8"),
        repo_id=repo_id or PLACEHOLDER,
        base_name=config.base_name,
        base_id=config.base_model or "path/to/the-backbone",
        base_revision=f', revision="{config.base_model_revision}"' if config.base_model_revision else "",
        dimensions=_table(_dimensions(config)),
        training=_training(config.training) if config.training else "Not trained: the weights are random.",
        label=_label(config.label),
        policy=_policy(config.policy),
        evaluation=_table(config.evaluation) if config.evaluation else "No results recorded.",
        toolkit_version=config.toolkit_version,
    )
    return card


def _front_matter(config: HeadsConfig) -> ModelCardData:
    """Return the YAML block by which the Hub indexes the repository; keys without a value are left out."""
    dataset = str((config.training or {}).get("dataset", ""))
    return ModelCardData(
        library_name="locret",
        pipeline_tag="text-generation",
        tags=["kv-cache", "locret", "long-context", "retaining-heads"],
        base_model=config.base_model,
        base_model_relation="adapter" if config.base_model else None,
        # The Hub refuses a card whose data set is not a repository of its own, such as a local file.
        datasets=[dataset] if re.fullmatch(r"[\w.-]+/[\w.-]+", dataset) else None,
        license=config.license,
    )


def _dimensions(config: HeadsConfig) -> dict[str, Any]:
    weights = (config.base_weights or "").removeprefix(NORMS)[:12]
    return {
        "backbone": f"{config.base_name} ({config.base_architecture or config.base_model_type})",
        "backbone_revision": config.base_model_revision,
        "backbone_weights": f"fingerprint {weights}" if weights else None,
        "layers_with_a_head": f"{len(config.layers)} of {config.num_hidden_layers}",
        "hidden_width": config.hidden_dim,
        "architecture": config.gate["name"] if config.gate else None,
        "weights": f"{config.num_weights:,} in float32",
    }


def _training(notes: Mapping[str, Any]) -> str:
    """Return a table for the last run and one for each run before it, from the latest to the first."""
    earlier = notes.get("earlier")
    table = _table({name: value for name, value in notes.items() if name != "earlier"})
    return f"{table}\n\n### Before that\n\n{_training(earlier)}" if isinstance(earlier, Mapping) else table


def _policy(policy: Mapping[str, Any] | None) -> str:
    """Return a table of what is not the default; shares of KV heads are too many to write down."""
    if not policy:
        return "None recorded; the defaults of `RetentionPolicy` apply."
    usual = {field.name: field.default for field in fields(RetentionPolicy)}
    shown = {name: value for name, value in policy.items() if name in _SIZES or value != usual.get(name)}
    return _table({**shown, "head_shares": "as measured, in config.json" if policy.get("head_shares") else None})


def _label(label: Mapping[str, Any] | None) -> str:
    if not label:
        return "Not recorded."
    name = str(label.get("kind"))
    meaning = KINDS[name].meaning if name in KINDS else name
    repeated = label.get("source") == "reconstruction"
    queries = "the tokens of the text's repetition" if repeated else "the answer's tokens"
    sentence = f"A token's label is {meaning}, maximum over {queries} and the query heads of the group."
    return f"{sentence}\n\n{_table(label)}"


def _table(values: Mapping[str, Any]) -> str:
    """Return a table of two columns; what is not known is left out."""
    lines = [(_title(name), _written(value)) for name, value in values.items() if value is not None]
    return "\n".join(markdown(("", ""), lines, numbers=False))


def _title(name: str) -> str:
    return (name[:1].upper() + name[1:]).replace("_", " ") if re.fullmatch("[A-Za-z0-9_]+", name) else name


def _written(value: Any) -> str:
    """Return a value as people write it: four digits of a measured number, thousands apart."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{_title(name).lower()} {_written(one)}" for name, one in value.items())
    return ", ".join(map(_written, value)) if isinstance(value, list | tuple) else str(value)
