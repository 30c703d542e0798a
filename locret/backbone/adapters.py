"""Where a backbone keeps what retaining heads need: its attention modules, projections, norms and rotary embedding.

All facts about architectures live here. They come from the config and the module tree, never from a model's name.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from locret.backbone import head_ranks
from locret.backbone.head_ranks import HeadRanks
from locret.backbone.latent import Latent, is_latent
from locret.backbone.recurrence import state_module, state_numbers, weightless_or_none
from locret.backbone.shape import BOTH, FULL, NONE, RECURRENT, SLIDING, Backbone, LayerShape

SEPARATE = ("q_proj", "k_proj", "v_proj")
FUSED = "qkv_proj"
_SUPPORTED = (
    "use a decoder-only model with softmax attention (Llama, Mistral, Qwen2, Qwen3, Qwen3-Next, Qwen3.5, Phi-3, "
    "Gemma-2, Gemma-3, SmolLM3, Granite, OLMo-2, OLMo-3, LFM2, Nemotron-H, Falcon-H1)"
)
_GLOBAL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""What configs call the numbers of layers with full attention, where others have those of the plain names."""
_STATELESS = {"moe", "mlp"}  # which transformers 5.17 gives a cache of states that stays empty
# Kinds of adapters that do part of their work in PEFT's own forward pass, which reading and answering never call.
_OUTSIDE = {"ADAPTION_PROMPT", "POLY", "SHADOW", "XLORA"}


def describe(model_or_config: Any) -> Backbone:
    """Describe a backbone from its config; given a model, also check that its modules are where they should be.

    Where processes share the heads of a model, they are those of this process; a config knows of no processes.

    Raises:
        ValueError: For encoder-decoder models, those that choose what they attend to, those without a layer whose units
            a budget could govern, and adapters that work outside of the layers.
    """
    backbone = describe_whole(model_or_config)
    ranks = ranks_of(model_or_config) if isinstance(model_or_config, nn.Module) else None
    return backbone if ranks is None else on_rank(backbone, ranks.size)


def config_of(model_or_config: Any) -> Any:
    """Return the transformers config of a backbone, or the config that is given."""
    return unwrap(model_or_config).config if isinstance(model_or_config, nn.Module) else model_or_config


def text_config(model_or_config: Any) -> Any:
    """Return the config of the layers that read text; that of a model of images, too, has it under another name."""
    config = config_of(model_or_config)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def ranks_of(model: nn.Module) -> HeadRanks | None:
    """Return the processes that share the attention heads of a model; None: it has all of them."""
    base = unwrap(model)
    if head_ranks.sharing(base) is None:  # as nearly always, and then its layers need not be looked through
        return None
    layers = set(find_decoder(model).layers)
    return head_ranks.find(base, [one for one in attention_modules(model) if one not in layers])


def sharers_of(model: nn.Module) -> HeadRanks | None:
    """Return the processes that share the weights of a model by tensor parallelism, even if each has all heads."""
    return head_ranks.sharing(unwrap(model))


def on_rank(backbone: Backbone, ranks: int) -> Backbone:
    """Return a backbone as each of so many processes has it that share its heads."""
    kv_heads = {shape.num_kv_heads for shape in backbone.shapes} or {backbone.num_kv_heads}
    if any(count % ranks for count in kv_heads):
        counts = [count for count in range(2, min(kv_heads) + 1) if not any(one % count for one in kv_heads)]
        way_out = f"start {' or '.join(map(str, counts))} processes, or use" if counts else "use"
        raise ValueError(
            f"{ranks} processes cannot share the KV heads of {backbone.model_type} equally in tensor parallelism "
            f"(--shard tp): it has {' or '.join(map(str, sorted(kv_heads)))}; {way_out} --shard fsdp"
        )
    shapes = tuple(_part(shape, ranks) for shape in backbone.shapes)
    shared: Backbone = _part(backbone, ranks)
    return replace(shared, shapes=shapes)


def _part(shape: Any, ranks: int) -> Any:
    return replace(shape, num_heads=shape.num_heads // ranks, num_kv_heads=shape.num_kv_heads // ranks)


def unwrap(model: Any) -> Any:
    """Return the transformers model inside the wrappers of PEFT (its adapters stay active) and of torch.compile."""
    model = getattr(model, "_orig_mod", model)
    if not hasattr(model, "get_base_model"):
        return model
    configs = getattr(model, "peft_config", {})
    for name in getattr(model, "active_adapters", configs):
        config = configs[name]
        kind = getattr(config.peft_type, "value", config.peft_type)
        if getattr(config, "alora_invocation_tokens", None):
            kind = "activated LoRA"
        elif not (config.is_prompt_learning or kind in _OUTSIDE):
            continue
        raise ValueError(
            f"adapter {name!r} is of the kind {kind}, which works outside of the backbone's layers and would be "
            "dropped; use one that changes the layers, such as LoRA, or merge it"
        )
    return model.get_base_model()


def device_of(module: nn.Module) -> torch.device:
    """Return where a module computes, which for weights that accelerate offloads is not where they are."""
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for single in getattr(hook, "hooks", (hook,)):
            if (device := getattr(single, "execution_device", None)) is not None:
                return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    weight = next(module.parameters())
    mesh = getattr(weight, "device_mesh", None)
    if mesh is not None and mesh.device_type != weight.device.type:  # sharded, and kept in the host's memory
        return torch.device(mesh.device_type, torch.accelerator.current_device_index())
    return weight.device


def input_device(model: nn.Module) -> torch.device:
    """Return where a backbone wants its token ids."""
    return device_of(unwrap(model).get_input_embeddings())


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that a backbone computes in, and so that of its keys and values.

    It is the embeddings': quantised matrices hold codes, and parameters of eight bits are none that are computed in.
    """
    weights = [*unwrap(model).get_input_embeddings().parameters(), *model.parameters()]
    found: list[torch.dtype] = [weight.dtype for weight in weights]
    return next(dtype for dtype in found if dtype.is_floating_point and dtype.itemsize > 1)


def find_decoder(model: nn.Module) -> Any:
    """Return the stack of decoder layers, which owns `layers`, and `rotary_emb` where positions are rotated."""
    base = unwrap(model)
    found = base.get_decoder() if hasattr(base, "get_decoder") else getattr(base, "model", base)
    # ModernBERT's `decoder` is the layer that returns logits.
    decoder = next((one for one in (found, getattr(base, "model", None)) if hasattr(one, "layers")), found)
    if (hasattr(decoder, "layers") and rotary_module(decoder) is not None) or not isinstance(decoder, nn.Module):
        return decoder
    name, bounded = type(base).__name__, f"so its cache cannot be bounded; {_SUPPORTED}"
    stack = decoder if isinstance(decoder, PreTrainedModel) else base
    if getattr(base.config, "alibi", any("alibi" in method for method in dir(stack))):
        raise ValueError(f"{name} lowers attention by distance (ALiBi), and does not rotate keys, {bounded}")
    if places := _position_places(stack):
        what = "biases attention by distance" if "bias" in places[0] else "adds its positions to the hidden states"
        raise ValueError(f"{name} {what} ({places[0]}), and does not rotate keys, {bounded}")
    if not hasattr(decoder, "layers"):
        lists = [path for path, module in stack.named_modules() if isinstance(module, nn.ModuleList)]
        outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
        where = f" (it has {', '.join(outer)})" if outer else ""
        raise ValueError(f"{name} has no decoder with 'layers'{where}, {bounded}")
    return decoder


def _position_places(stack: nn.Module) -> list[str]:
    """Return the names of what gives positions to all layers, where that is not a rotation."""
    if hasattr(getattr(stack, "config", None), "rotary_value"):  # RoFormer rotates by a table of sines
        return []
    named = [name for name, _ in (*stack.named_modules(), *stack.named_buffers(recurse=False))]
    names = [name for name in named if not any(part.isdigit() for part in name.split("."))]
    own = [name for name in names if any(word in name.rpartition(".")[2] for word in ("position", "wpe", "pos_enc"))]
    return [name for name in own if not name.endswith("_ids")]


def lends_neuron(model_or_config: Any) -> bool:
    """Return whether the first query head of each KV head lends its last number to decisions of DMS.

    Attention takes that number for 0, before rotation and after it (DMS, arXiv 2506.05345).
    """
    text = text_config(model_or_config)
    return getattr(text, "dms_alpha_scale", None) is not None and not getattr(text, "dms_separate_alpha", False)


def hidden_size(model_or_config: Any) -> int:
    """Return the width of a backbone's hidden states."""
    return int(text_config(model_or_config).hidden_size)


def rotary_module(decoder: Any) -> Any:
    """Return the rotary embedding of a stack of decoder layers; None where its attention knows no positions."""
    if hasattr(decoder, "rotary_emb"):
        return decoder.rotary_emb
    return next((child for child in decoder.children() if hasattr(child, "rope_type")), None)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the attention module of every decoder layer, in order; of one that does not attend, the layer itself."""
    layers = list(zip(find_decoder(model).layers, layer_kinds(text_config(model)), strict=False))
    modules = [
        layer if kind in (RECURRENT, NONE) else _attention_of(layer, index, model)
        for index, (layer, kind) in enumerate(layers)
    ]
    if len(set(modules)) < len(modules):
        raise ValueError(
            f"layers of {type(unwrap(model)).__name__} share one attention module, which is not supported; {_SUPPORTED}"
        )
    return modules


def state_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Return the module that owns the state of each layer that carries one."""
    backbone, layers, modules = describe(model), find_decoder(model).layers, attention_modules(model)
    return {
        index: state_module(layers[index], modules[index] if kind == BOTH else None, index)
        for index, kind in enumerate(backbone.kinds)
        if kind in (RECURRENT, BOTH)
    }


def _attention_of(layer: nn.Module, index: int, model: nn.Module) -> nn.Module:
    attending = [module for module in layer.modules() if _attends(module)]
    if len(attending) > 1:
        raise ValueError(
            f"layer {index} of {type(unwrap(model)).__name__} attends {len(attending)} times, and a layer of a cache "
            f"holds the units of one attention; {_SUPPORTED}"
        )
    for module in attending:
        fused = getattr(module, FUSED, None)
        if fused is not None and not hasattr(fused, "base_layer") and any(True for _ in fused.children()):
            raise ValueError(
                f"the {FUSED} of {type(unwrap(model)).__name__} is no projection but a {type(fused).__name__}, "
                f"which mixes tokens; {_SUPPORTED}"
            )
        return module
    where = f"layer {index} of {type(unwrap(model)).__name__} has no attention with {', '.join(SEPARATE)} or {FUSED}"
    found = [name for name, _ in layer.named_children()]
    for name in (name for name in found if "attention" in name.replace("attn", "attention")):
        inner = sorted(child for child, _ in getattr(layer, name).named_children())
        if inner and "norm" not in name:
            raise ValueError(
                f"{where} (its {name} has {', '.join(inner)}), so its cache cannot be bounded; {_SUPPORTED}"
            )
    raise ValueError(
        f"{where} (it has {', '.join(sorted(found))}); state-space and recurrent layers have no keys to evict"
    )


def _attends(module: nn.Module) -> bool:
    if not module._modules:  # most are leaves, and have no projections
        return False
    if getattr(module, "is_kv_shared_layer", False):
        return hasattr(module, SEPARATE[0])
    return is_latent(module) or hasattr(module, FUSED) or all(hasattr(module, name) for name in SEPARATE)


def latents(model: nn.Module, modules: list[nn.Module] | None = None) -> dict[int, Latent]:
    """Return the layers with latent attention."""
    modules = attention_modules(model) if modules is None else modules
    return {index: Latent.of(module) for index, module in enumerate(modules) if is_latent(module)}


def describe_whole(model_or_config: Any) -> Backbone:
    """Describe a backbone with the heads of all processes; see `describe`."""
    config, model = config_of(model_or_config), model_or_config if isinstance(model_or_config, nn.Module) else None
    model_type = getattr(config, "model_type", "unknown")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{model_type} is an encoder-decoder model; looked for self_attn.q_proj in a decoder-only stack: "
            "use a causal language model"
        )
    text = text_config(config)
    if not hasattr(text, "num_hidden_layers"):
        raise ValueError(f"{model_type} is made of several stacks of layers, which is not supported; {_SUPPORTED}")
    _check_layers(text, model_type)
    heads, types = _of_layer(text, 0, "num_attention_heads"), layer_kinds(text)
    num_layers, window = text.num_hidden_layers, getattr(text, "sliding_window", None)
    if not isinstance(heads, int) or not set(types) - {RECURRENT, NONE}:
        raise ValueError(
            f"no layer of {model_type} has softmax attention, so there is nothing to evict and a budget would govern "
            "nothing; use model.generate, whose memory does not grow, or a backbone with full attention"
        )
    if model is None and not {"max_position_embeddings", "initializer_range"} <= vars(text).keys():
        model = weightless_or_none(text)
    if model is not None:
        attention_modules(model)  # which says what is in the way before it is asked for numbers
    # A window as long as the context (Phi-3-mini-128K: 262,144) never slides, so such layers count as full attention.
    slides = window is not None and window < (getattr(text, "max_position_embeddings", None) or math.inf)
    kinds = tuple(FULL if kind == SLIDING and not slides else kind for kind in types[:num_layers])
    sources = _sources(text, kinds)
    kinds = tuple(kinds[index] if source == index else NONE for index, source in enumerate(sources))
    layers = tuple(index for index, kind in enumerate(kinds) if kind in (FULL, BOTH))
    if not layers:
        raise ValueError(
            f"every layer of {model_type} slides over a window of {window} tokens"
            f"{' or carries a state' if RECURRENT in kinds else ''}, so its cache is bounded already and "
            "a budget would govern nothing; use model.generate, or a backbone with full attention"
        )
    carried = (0, 0)
    if RECURRENT in kinds or BOTH in kinds:
        carried = state_numbers(text, None if model is None else type(find_decoder(model)))
    attending = [index for index, kind in enumerate(kinds) if kind not in (RECURRENT, NONE) or sources[index] != index]
    # Such a config does not say how many heads values have, nor that layers with a window have others (MiMo-V2).
    apart = getattr(text, "v_head_dim", None) and not getattr(text, "kv_lora_rank", None)
    sketch = weightless_or_none(text) if apart else None
    modules = None if sketch is None else attention_modules(sketch)
    found = {index: _shape_of(text, index, None if modules is None else modules[index]) for index in attending}
    first = found[layers[0]]
    shapes = tuple(found.get(index, first) for index in range(num_layers))
    return Backbone(
        model_type=model_type,
        num_layers=num_layers,
        layers=layers,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        hidden_act=_first(text, "hidden_act", "hidden_activation", "mlp_hidden_act", default="silu"),
        initializer_range=_first(text, "initializer_range"),
        max_positions=_first(text, "max_position_embeddings"),
        window=window if SLIDING in kinds else None,
        kinds=kinds,
        sources=() if sources == tuple(range(num_layers)) else sources,
        shapes=() if first.plain and set(shapes) == {first} else shapes,
        state_numbers=carried,
    )


def _check_layers(text: Any, model_type: str) -> None:
    """Refuse layers that differ in more than their shape, or that choose by themselves what they attend to."""
    differing = set(getattr(text, "per_layer_attributes", None) or ())
    if strange := sorted(differing & {"sliding_window", "attention_chunk_size", "num_hidden_layers", "hidden_size"}):
        raise ValueError(
            f"the layers of {model_type} differ in {', '.join(strange)}, which is not supported; {_SUPPORTED}"
        )
    if getattr(text, "is_heterogeneous", False):
        for index, layer in enumerate(text.per_layer_config):
            if skipped := getattr(layer, "skip", None):
                raise ValueError(
                    f"layer {index} of {model_type} leaves out {', '.join(skipped)}, which is not supported"
                )
    if across := getattr(text, "cross_attention_layers", None):
        raise ValueError(
            f"layers {', '.join(map(str, across))} of {model_type} attend to an image, whose units are not those of "
            f"the text, which is not supported; {_SUPPORTED}"
        )
    if getattr(text, "index_topk", None):
        raise ValueError(
            f"the layers of {model_type} choose by an indexer of their own what they attend to (index_topk="
            f"{text.index_topk}), and its keys would have to be evicted too, which is not supported; {_SUPPORTED}"
        )


def _sources(text: Any, kinds: tuple[str, ...]) -> tuple[int, ...]:
    """Return the layer whose units each layer attends to: the last ones may borrow those of the last of their kind."""
    own = max(0, len(kinds) - (getattr(text, "num_kv_shared_layers", None) or 0))
    types = _layer_types(text)
    sources = list(range(own))
    for index in range(own, len(kinds)):
        lenders = [layer for layer in range(own) if types[layer] == types[index]]
        if not lenders or kinds[index] not in (FULL, SLIDING):
            raise ValueError(
                f"layer {index} of {getattr(text, 'model_type', 'this model')} has no keys of its own "
                f"(num_kv_shared_layers={text.num_kv_shared_layers}), and no earlier layer of {types[index]} has any"
            )
        sources.append(lenders[-1])
    return tuple(sources)


def _of_layer(text: Any, index: int, name: str) -> Any:
    """Return what a text config says of a layer, which may be more than of another; None: nothing."""
    if getattr(text, "is_heterogeneous", False):
        return getattr(text.per_layer_config[index], name, None)
    if name in _GLOBAL and _layer_types(text)[index] == "full_attention":  # Gemma-4 before transformers 5.2x
        usual = getattr(text, name, None)
        wide = getattr(text, _GLOBAL[name], None)
        return wide if wide and (name != "num_key_value_heads" or getattr(text, "attention_k_eq_v", True)) else usual
    return getattr(text, name, None)


def _shape_of(text: Any, index: int, module: Any = None) -> LayerShape:
    """Return the shape of a layer's attention, by its config and, if given, a module of it."""
    heads = _of_layer(text, index, "num_attention_heads")
    rank = _of_layer(text, index, "kv_lora_rank")
    if rank:
        plain, rotated = (_of_layer(text, index, f"qk_{name}_head_dim") for name in ("nope", "rope"))
        return LayerShape(heads, 1, rotated, value_dim=rank, query_dim=plain + rotated)
    dim = _of_layer(text, index, "head_dim") or text.hidden_size // heads
    if module is not None:
        kv_heads = module.k_proj.out_features // dim
        return LayerShape(heads, kv_heads, dim, value_dim=module.v_proj.out_features // kv_heads)
    return LayerShape(heads, _of_layer(text, index, "num_key_value_heads") or heads, dim)


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Return what every layer of a text config remembers (see `Backbone.kinds`), as transformers' own cache has it."""
    types = _layer_types(config)
    kinds = {kind: _kind_of(kind) for kind in types}
    if others := sorted(kind for kind, found in kinds.items() if found is None):
        raise ValueError(
            f"{getattr(config, 'model_type', 'this model')} has layers of {', '.join(others)}, which is not supported; "
            f"{_SUPPORTED}"
        )
    return tuple(str(kinds[kind]) for kind in types)


def _layer_types(config: Any) -> list[str]:
    if (types := getattr(config, "layer_types", None)) is not None:
        return list(types)
    if hasattr(config, "ssm_cfg") or getattr(config, "state_size", None):  # Mamba and RWKV of earlier versions
        return ["linear_attention"] * config.num_hidden_layers
    for name in ("sliding", "chunked"):
        if getattr(config, {"sliding": "sliding_window", "chunked": "attention_chunk_size"}[name], None) is not None:
            return [f"{name}_attention"] * config.num_hidden_layers
    return ["full_attention"] * config.num_hidden_layers


def _kind_of(layer_type: str) -> str | None:
    """Return what layers of a type remember; None: something that is not supported."""
    if layer_type in _STATELESS:
        return NONE
    # Private names of transformers, by which DynamicCache(config=...) makes its layers; the same in 5.17 and 5.23.
    known = getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", None)
    recurrent = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
    if known is None or recurrent is None:
        raise ValueError(
            "transformers has moved DYNAMIC_LAYER_TYPE_MAPPING or LinearAttentionCacheLayerMixin, by which the layers "
            "of a backbone are told apart; install transformers 5.17 to 5.23"
        )
    if (held := known.get(layer_type)) is None:
        return None
    if issubclass(held, recurrent):
        if not issubclass(held, CacheLayerMixin):
            return RECURRENT
        return None if issubclass(held, DynamicSlidingWindowLayer) else BOTH
    # Of layers with a window, chunked ones see another one.
    return {DynamicLayer: FULL, DynamicSlidingWindowLayer: SLIDING}.get(held) if "chunked" not in layer_type else None


def _first(config: Any, *names: str, default: Any = None) -> Any:
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    if default is not None:
        return default
    raise ValueError(
        f"{getattr(config, 'model_type', 'this model')} has no {' or '.join(names)} in its config; {_SUPPORTED}"
    )
