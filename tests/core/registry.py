"""Every family of causal models that transformers knows, built tiny and at random, and what becomes of it here.

Configs are made small by the names of their fields, so a new family needs nothing, or a correction in `_OWN`.
`python tests/core/registry.py --write docs/backbones.md` writes the tables of that page.
"""

from __future__ import annotations

import argparse
import copy
import re
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import locret
from locret import RetainingHeads, RetentionPolicy
from locret.backbone.adapters import describe
from locret.infer.verify import verify
from locret.infer.verify.report import REFUSED

PACKAGE = Path(locret.__file__).parent
FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYERS = 4
VOCABULARY = 97
_SIZES: dict[str, Any] = {
    name: value
    for value, names in (
        (VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
        (32, "hidden_size n_embd d_model dim_model_base embedding_size word_embed_proj_dim"),
        (
            4,
            "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_attention_heads "
            "n_head n_heads num_heads decoder_attention_heads swa_num_attention_heads num_experts "
            "n_routed_experts num_local_experts moe_num_experts moe_num_primary_experts mamba_n_heads "
            "mamba_num_heads n_mamba_heads mamba_dt_rank time_step_rank",
        ),
        (
            2,
            "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_experts_per_tok moe_topk "
            "moe_top_k moe_k top_k_experts num_experts_per_token index_n_heads linear_num_key_heads "
            "linear_num_value_heads linear_num_heads eos_token_id",
        ),
        (
            8,
            "head_dim kv_channels swa_head_dim attention_head_dim dim_head qk_rope_head_dim qk_nope_head_dim "
            "v_head_dim index_head_dim mamba_chunk_size linear_key_head_dim linear_value_head_dim linear_head_dim",
        ),
        (
            16,
            "global_head_dim mamba_d_head mamba_head_dim sliding_window sliding_window_size window_size "
            "local_attention attention_chunk_size kv_lora_rank q_lora_rank o_lora_rank qk_head_dim index_topk "
            "mamba_d_state state_size ssm_state_size mamba_d_ssm",
        ),
        (
            24,
            "intermediate_size ffn_hidden_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim dff "
            "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size dim_ff "
            "intermediate_size_mlp dense_intermediate_size moe_shared_expert_intermediate_size "
            "expert_ffn_hidden_size prefix_dense_intermediate_size shared_experts_intermediate_size",
        ),
        (
            1,
            "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts mamba_n_groups "
            "n_groups mamba_ngroups bos_token_id",
        ),
        (256, "max_position_embeddings n_positions n_ctx max_seq_len"),
        (0, "pad_token_id"),
        (
            0.0,
            "attention_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout dropout emb_pdrop "
            "hidden_dropout_prob attention_probs_dropout_prob residual_dropout embedding_dropout resid_dropout "
            "embed_dropout activation_dropout router_jitter_noise input_jitter_noise",
        ),
        (0.2, "initializer_range init_std initializer_factor"),
    )
    for name in names.split()
}
"""What fields of these names get, wherever they are."""
_ALWAYS = {"head_dim": 8, "num_key_value_heads": 2, "moe_intermediate_size": 24, "is_decoder": True}
"""What these fields get even where nothing is their default."""
_KINDS = ("full_attention", "sliding_attention")
_SHARED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
"""The last layers attend to the units of earlier ones (Gemma-4 E2B)."""
_GEMMA4 = {"global_head_dim": 16, "hidden_size_per_layer_input": 8, **_SHARED}
_QWEN4 = {
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
}
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(_KINDS, {"rope_type": "default", "rope_theta": 1e4})},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "gemma3n": {"text_config": _SHARED},
    "gemma3n_text": _SHARED,
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mimo_v2_flash": {"v_head_dim": 6},  # values are narrower than keys, and windows have more heads
    "ministral": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "mistral": {"sliding_window": None},
    "moshi": {"sliding_window": 512},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Corrections of single families."""


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return a config of the family with tiny sizes and its own structure: kinds of layers, experts, norms."""
    return _shrunk(CONFIG_MAPPING[model_type], {**_OWN.get(model_type, {}), **changes})


def _shrunk(kind: Any, own: dict[str, Any]) -> Any:
    known = {name: value for name, value in vars(kind()).items() if not name.startswith("_")}
    given = {name: value for name, value in _SIZES.items() if known.get(name) is not None}
    given |= {name: value for name, value in _ALWAYS.items() if name in known}
    given["pad_token_id"] = 0
    if known.get("kv_lora_rank") is not None:  # latent attention has as many heads for keys as for queries
        given["num_key_value_heads"] = _SIZES["num_attention_heads"]
    given |= _per_layer(known)
    if isinstance(known.get("rope_parameters"), dict):
        given["rope_parameters"] = _rope(copy.deepcopy(known["rope_parameters"]))
    for name in getattr(kind, "sub_configs", {}):
        if known.get(name) is not None:
            given[name] = _shrunk(type(known[name]), own.get(name, {})).to_dict()
    return kind(**given | {name: value for name, value in own.items() if name not in getattr(kind, "sub_configs", {})})


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    for name, value in parameters.items():
        if isinstance(value, dict):
            parameters[name] = _rope(value)
        elif name == "mrope_section":
            parameters[name] = [2, 1, 1] if len(value) == 3 else [2, 2]
        elif name == "original_max_position_embeddings":
            parameters[name] = 64
    return parameters


def _per_layer(known: dict[str, Any]) -> dict[str, Any]:
    """Return the lists with an entry per layer, of a few layers that differ from each other."""
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    depth = next((known[name] for name in names if isinstance(known.get(name), int)), 0)
    lists = {
        name: value for name, value in known.items() if isinstance(value, list | tuple) and len(value) == depth > 0
    }
    if not lists:
        return {}
    rows = list(zip(*lists.values(), strict=True))
    different = [index for index, row in enumerate(rows) if row not in rows[:index]]
    chosen = sorted((different + [index for index in range(depth) if index not in different])[:LAYERS])
    return {name: [_small(name, value[index]) for index in chosen] for name, value in lists.items()}


def _small(name: str, value: Any) -> Any:
    """Return an entry of a list with one per layer; numbers of heads and the like are of the usual tiny size."""
    counts = isinstance(value, int) and not isinstance(value, bool) and value > 1
    return _SIZES.get(name.removesuffix("_per_layer"), value) if counts else value


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a model with weights spread so widely that attention is far from uniform, in float32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1 and weight.is_floating_point():
                weight.copy_(noise * 0.2)
            elif "sink" in name:
                weight.copy_(noise)
            else:
                weight.add_(noise * 0.1)
    return model


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """Return random (1, length) token ids without special tokens."""
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


# -- what becomes of a family -----------------------------------------------------------------------------------------

CHECKS = ("full-budget", "batch", "eviction", "bytes", "save", "training-scores")
"""Those of `locret-verify` that a family must pass."""
POLICY = RetentionPolicy(budget=24, chunk_size=9, stabilizers=4, local_len=5)


@dataclass(frozen=True)
class Outcome:
    """What this package does with a family: it is right, or says why not; or transformers itself does not run it."""

    family: str
    kind: str
    """"right", "refused", or "not run"."""
    positions: tuple[str, ...] = ()
    layers: str = ""
    reason: str = ""


def walk(family: str) -> Outcome:
    """Try a family out.

    Raises:
        AssertionError: If an answer is wrong.
        Exception: Anything but a ValueError that the engine raises.
    """
    try:
        config = tiny_config(family)
    except Exception as error:
        return Outcome(family, "not run", reason=_line(error))
    try:
        describe(config)
    except ValueError as error:
        return Outcome(family, "refused", reason=_line(error))
    try:
        model = random_model(config)
        model.generate(prompt(8), max_new_tokens=2)
    except Exception as error:
        return Outcome(family, "not run", reason=_line(error))
    reasons: list[str] = []
    for positions in ("compact", "original"):
        try:
            right = _right(model, POLICY.changed(positions=positions))
            layers = ", ".join(sorted(set(describe(model).kinds)))
            return Outcome(family, "right", tuple(right), layers, next(iter(reasons), ""))
        except ValueError as error:
            if not Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(PACKAGE):
                raise  # not by this package
            reasons.append(_line(error))
    return Outcome(family, "refused", reason=reasons[0])


def _right(model: PreTrainedModel, policy: RetentionPolicy) -> list[str]:
    """Return the positions in which a backbone reads and answers as it does by itself, and forgets as it is told.

    What units a layer keeps is compared by scores of its own projections.
    """
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    report = verify(model, heads, policy, ids=prompt(64), only=CHECKS)
    assert report.ok, report.table()
    refused = {row.compared.removeprefix("positions ") for row in report.rows if row.status == REFUSED}
    return [positions for positions in ("compact", "original") if positions not in refused]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


# -- the page ---------------------------------------------------------------------------------------------------------

_BEGIN, _END = "<!-- families of transformers {version} -->", "<!-- end -->"
_TITLES = {
    "right": ("right", ("family", "for instance", "layers")),
    "refused": ("refused", ("family", "why")),
    "not run": ("not run by transformers", ("family", "why")),
}


def said(outcome: Outcome) -> str:
    """Return what the page says of a family: an example and its layers; or why not, in words that families share."""
    why = re.split("[;|]|, so | and does not rotate|, which is not", outcome.reason[:200])[0].rstrip(",")
    if outcome.kind == "not run":
        return why
    if outcome.kind == "refused":
        named = rf"\b({re.escape(outcome.family)}\w*|[A-Z]\w+(ForCausalLM|LMHeadModel|Decoder|Attention))\b"
        return re.sub(named, "the model", re.sub(r" \(.*?\)+", "", why))
    documented = re.findall(r"huggingface\.co/([\w.\-]+/[\w.\-]+)", CONFIG_MAPPING[outcome.family].__doc__ or "")
    example = next((name for name in documented if not name.startswith("papers/")), "")
    alone = f"; {outcome.positions[0]} positions alone: {why}" if len(outcome.positions) == 1 else ""
    return f"{example} | {outcome.layers}{alone}".strip()


def tables(outcomes: Iterable[Outcome]) -> str:
    """Return the page's tables, from begin to end mark."""
    outcomes = list(outcomes)
    lines = [_BEGIN.format(version=transformers.__version__)]
    for kind, (title, columns) in _TITLES.items():
        alike: dict[str, list[str]] = {}
        for outcome in outcomes:
            if outcome.kind == kind:
                alike.setdefault(f"{outcome.family} " * (kind == "right") + said(outcome), []).append(outcome.family)
        lines += [
            "",
            f"### {sum(map(len, alike.values()))} {title}",
            "",
            f"| {' | '.join(columns)} |",
            "| --- " * len(columns) + "|",
            *(f"| {', '.join(names)} | {text.removeprefix(f'{names[0]} ')} |" for text, names in alike.items()),
        ]
    return "\n".join([*lines, "", _END])


def documented(page: str) -> tuple[str, dict[str, str]]:
    """Return the version of transformers that a page's tables are of, and what they say of each family."""
    version = re.search(_BEGIN.format(version=r"(\S+)"), page)
    assert version is not None
    found = {}
    for line in page[version.end() : page.index(_END)].splitlines():
        if line.startswith("| ") and not line.startswith(("| family |", "| ---")):
            names, text = line[2:].removesuffix(" |").split(" | ", 1)
            found |= dict.fromkeys(names.split(", "), text)
    return version[1], found


def main() -> None:
    """Walk through all families, and write what came out."""
    parser = argparse.ArgumentParser(description="Walk through the families of transformers.")
    parser.add_argument("--write", metavar="PAGE", required=True, help="page whose tables are replaced")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    text = tables(walk(family) for family in FAMILIES)
    with open(arguments.write, encoding="utf-8") as page:
        before = page.read()
    begin = re.search(_BEGIN.format(version=r"\S+"), before)
    assert begin is not None
    with open(arguments.write, "w", encoding="utf-8") as page:
        page.write(before[: begin.start()] + text + before[before.index(_END) + len(_END) :])


if __name__ == "__main__":
    main()
