"""The model card of retaining heads, filled from their config: their use, how to run them, how they were made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from locret.base.tables import markdown
from locret.heads import evaluation
from locret.heads.config import HeadsConfig
from locret.heads.gates import GATES
from locret.labels import KINDS
from locret.policy.policy import RetentionPolicy

PLACEHOLDER = "path/to/these-heads"
"""What the card's example loads while the heads are in no repository; `locret-push` puts the repository there."""

_TITLES = {
    "budget": "Budget (cache units per layer and KV head)",
    "chunk_size": "Chunk size (tokens)",
    "local_len": "Local tokens",
    "positions": "Rotary positions",
    "decode_budget": "Budget while generating",
    "when": "Evicts",
    "memory": "Growth of memory",
    "pyramid_beta": "Beta of the pyramid",
    "layer_shares": "Shares of the layers, for layer budgets by shares",
    "head_floor": "Least share of a KV head",
    "decremental": "Shrinking chunks",
    "min_chunk": "Smallest chunk (tokens)",
    "dataset": "Data",
    "dataset_revision": "Commit of the data",
    "dataset_rows": "Rows of the data",
    "rows": "Rows read",
    "tokens": "Tokens read",
    "max_prompt_tokens": "Longest prompt (tokens)",
    "went_on_from": "Went on from the heads",
    "alpha": "Weight of smoothness (alpha)",
    "final_total": "Loss at the end",
    "final_ranking": "Ranking loss at the end",
    "final_regression": "Regression loss at the end",
    "final_smoothness": "Smoothness loss at the end",
    "final_overlap": "Overlap with the best units at the end",
    "include_last_prompt_token": "The prompt's last token asks too",
}
"""Names of facts as people write them; of others the underscores go."""

TEMPLATE = """\
---
{{ card_data }}
---

# Retaining heads for {{ base_name }}

Locret retaining heads let a long-context language model read any prompt in a fixed amount of memory. A small MLP per
layer predicts how much every future answer will need each cached token; the prompt is read chunk by chunk, and after
each chunk every layer keeps only the best `budget` cache units per KV head. The backbone is unchanged and needed too.

## How to use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate

model = AutoModelForCausalLM.from_pretrained("{{ base_id }}"{{ base_revision }}, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{{ base_id }}"{{ base_revision }})
heads = RetainingHeads.from_pretrained("{{ repo_id }}")
policy = RetentionPolicy({{ policy_arguments }})
cache = RetentionCache(model, scorer=heads, policy=policy)

text = open("long.txt").read() + "\\n\\nWhat is the text about?"
chat = [{"role": "user", "content": text}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = generate(model, prompt["input_ids"], cache=cache, max_new_tokens=64)
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
```

## Dimensions

{{ dimensions }}

## Training

{{ training }}

### Labels

{{ label }}

## Recommended policy

{{ policy }}

## Evaluation

{{ evaluation }}

## Citation

Locret, [arXiv 2410.01805]({{ paper_url }}):

```bibtex
@article{huang2024locret,
  title   = {Locret: Enhancing Eviction in Long-Context LLM Inference with Trained Retaining Heads},
  author  = {Huang, Yuxiang and Yuan, Binhang and Han, Xu and Xiao, Chaojun and Liu, Zhiyuan},
  journal = {arXiv preprint arXiv:2410.01805},
  year    = {2024}
}
```

Written by locret {{ toolkit_version }}.
"""


def fill(info: Any, config: HeadsConfig, *, repo_id: str | None = None, **values: Any) -> ModelCard:
    """Fill the template.

    Args:
        info: huggingface_hub's `MixinInfo` of the class: template, library, tags.
        config: The heads' config.
        repo_id: What the example loads; a placeholder if None.
        values: More values for the template; they win over those from the config.

    Returns:
        The card, front matter included.
    """
    card: ModelCard = ModelCard.from_template(
        card_data=front_matter(info, config, repo_id),
        template_str=info.model_card_template,
        **{
            "paper_url": info.paper_url,
            "repo_id": repo_id or PLACEHOLDER,
            "base_name": config.base_name,
            "base_id": config.base_model or "path/to/the-backbone",
            "base_revision": f', revision="{config.base_model_revision}"' if config.base_model_revision else "",
            "policy_arguments": _arguments(_differing(_shared_out(config.policy or {}))),
            "dimensions": _table(_dimensions(config)),
            "training": _training(config.training) if config.training else "Not trained: the weights are random.",
            "label": _label(config.label),
            "policy": _table({**config.policy, "head_shares": None})
            if config.policy
            else "None recorded; the defaults of `RetentionPolicy` apply.",
            "evaluation": _evaluation(config.evaluation) if config.evaluation else "No results recorded.",
            "toolkit_version": config.toolkit_version,
            **values,
        },
    )
    return card


def front_matter(info: Any, config: HeadsConfig, repo_id: str | None = None) -> ModelCardData:
    """Return the YAML block by which the Hub indexes the repository; keys without a value are left out."""
    dataset = str((config.training or {}).get("dataset", ""))
    known = info.model_card_data.to_dict()
    results = evaluation.model_index(config.evaluation)
    return ModelCardData(
        **{
            **known,
            "base_model": config.base_model,
            "base_model_relation": "adapter" if config.base_model else None,
            # The Hub refuses a card whose data set is not a repository of its own, such as a local file.
            "datasets": [dataset] if re.fullmatch(r"[\w.-]+/[\w.-]+", dataset) else None,
            "license": config.license,
            "metrics": sorted({result.metric_type for result in results}) or None,
            # A model index needs a name.
            "model_name": (repo_id or f"Retaining heads for {config.base_name}") if results else None,
            "eval_results": results or None,
        }
    )


def _dimensions(config: HeadsConfig) -> dict[str, Any]:
    return {
        "Backbone": f"{config.base_name} ({config.base_architecture or config.base_model_type})",
        "Backbone revision": config.base_model_revision or "not recorded",
        **({"Backbone weights": f"fingerprint {config.base_weights[:12]}"} if config.base_weights else {}),
        "Layers with a head": f"{len(config.layers)} of {config.num_hidden_layers}",
        "Query heads": config.num_attention_heads,
        "KV heads": config.num_key_value_heads,
        "Head dim": config.head_dim,
        "Input width": config.feature_dim,
        "Hidden width (d_R)": config.hidden_dim,
        **(
            {"Activation": config.hidden_act}
            if config.gate is None
            else {"Architecture": f"{GATES[config.gate['name']].about}; {GATES[config.gate['name']].paper}"}
        ),
        **({"Neighbours (tokens before each one)": config.neighbours} if config.neighbours else {}),
        "Weights": f"{config.num_weights:,} in float32",
    }


def _training(notes: Mapping[str, Any]) -> str:
    """Return a table for the last run and one for each run before it, from the latest to the first."""
    earlier = notes.get("earlier")
    table = _table({name: value for name, value in notes.items() if name != "earlier"})
    return f"{table}\n\n### Before that\n\n{_training(earlier)}" if isinstance(earlier, Mapping) else table


def _evaluation(notes: Mapping[str, Any]) -> str:
    results = evaluation.rows(notes)
    if not results:
        return _table(notes)
    apart = evaluation.varied(results)
    lines = [
        (
            row["task"],
            _written(row["tokens"]) if row["tokens"] else "",
            row["method"],
            evaluation.amount(row),
            *("" if row[name] is None else _written(row[name]) for name in apart),
            f"{row['score']:.1f}" + (f" \u00b1 {row['standard_error']:.1f}" if row["standard_error"] else ""),
            row["n"],
        )
        for row in results
    ]
    heads = ("Task", "Prompt tokens", "Method", "Budget", *map(_title, apart), "Score", "Samples")
    version = f" of locret {notes['toolkit_version']}" if notes.get("toolkit_version") else ""
    share = ", or its share of the prompt" if any(row["budget_share"] for row in results) else ""
    said = f"Scores out of 100 \u00b1 standard error, by `locret-eval`{version}; the budget is cache units per KV head"
    return f"{said}{share}.\n\n" + "\n".join(markdown(heads, lines, numbers=False))


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
    return _TITLES.get(name) or (name.capitalize().replace("_", " ") if re.fullmatch("[a-z0-9_]+", name) else name)


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
    if isinstance(value, list | tuple):
        return ", ".join(map(_written, value))
    return str(value)


def _shared_out(policy: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a policy whose shares, if it has any, are used: by themselves they change nothing.

    Those of KV heads are too many to write down; the heads bring them along.
    """
    if policy.get("head_shares"):
        rest = {name: value for name, value in policy.items() if name != "head_shares"}
        return {**rest, "head_budgets": "shares"}
    return {**policy, "layer_budgets": "shares"} if policy.get("layer_shares") else policy


def _differing(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reader has to write: the four sizes, and what is not the default."""
    usual = {field.name: field.default for field in fields(RetentionPolicy)}
    sizes = ("budget", "chunk_size", "stabilizers", "local_len")
    return {name: value for name, value in values.items() if name in sizes or value != usual.get(name)}


def _arguments(values: Mapping[str, Any]) -> str:
    """Return keyword arguments as a formatter writes them: each on a line of its own."""
    lines = [f"    {name}={json.dumps(value) if isinstance(value, str) else value}," for name, value in values.items()]
    return "\n" + "\n".join(lines) + "\n" if lines else ""
