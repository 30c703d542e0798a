"""Layers that carry a state of fixed size: what it takes, and how it is carried from chunk to chunk.

Linear attention, state space and short convolution keep no keys and values, so a budget says nothing to them; their
states are read by the backbone's own code through the interface of transformers' caches. Two things that code does not
do are done here, around the module that owns a state. Some such modules (Mamba of the first kind, as in Jamba) start
anew whenever they are given more than one token, so they are given tokens one by one. And a state cannot be taken back,
so what it was before the newest token is remembered on the way, for a token that is fed again.
"""

# B batch, L new tokens, E hidden size

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM, Cache, DynamicCache

if TYPE_CHECKING:
    from locret.cache.states import States as Carrier

CONV, SCAN = "conv", "recurrent"
"""What the names of states begin with: the newest inputs of a convolution, and what a recurrence carries."""
_FORCE = 1e6
"""Much larger than what one token adds to a state, all of which are linear in what they were."""


def state_numbers(config: Any, decoder: type[nn.Module] | None = None) -> tuple[int, int]:
    """Return how many numbers the states of one row have: in the backbone's own dtype, and in float32.

    They are those that the backbone's code gives them, run over one token without weights; each kind of layer has a
    formula of its own otherwise.

    Args:
        config: The text config.
        decoder: The class of the stack of decoder layers, for a config that transformers has no causal model for.
    """
    said = f"{decoder} {config.to_json_string(use_diff=False)}"
    if said not in _NUMBERS:
        states = [
            state
            for layer in _traced(copy.deepcopy(config), decoder).layers
            for name in (CONV, SCAN)
            for state in getattr(layer, f"{name}_states", {}).values()
            if state is not None
        ]
        own, exact = (
            sum(math.prod(one.shape[1:]) for one in states if (one.dtype != torch.bfloat16) == apart)
            for apart in (False, True)
        )
        _NUMBERS[said] = own, exact
    return _NUMBERS[said]


_NUMBERS: dict[str, tuple[int, int]] = {}


def _traced(config: Any, decoder: type[nn.Module] | None) -> DynamicCache:
    config._attn_implementation = "eager"
    held = DynamicCache(config=config)
    try:
        with torch.device("meta"), torch.no_grad():
            model = _weightless(config, decoder)
            # In a dtype that no state is in for its own sake, those that follow the backbone's can be told apart.
            model.eval().to(torch.bfloat16)
            model(input_ids=torch.ones(1, 1, dtype=torch.long), past_key_values=held, use_cache=True)
    except Exception as error:  # whatever a backbone's code does where its states are not held as it wants
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{config.model_type} carries states that transformers' own cache does not hold ({reason}); use a backbone "
            "whose states it holds"
        ) from error
    return held


def _weightless(config: Any, decoder: type[nn.Module] | None) -> Any:
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM.from_config(config)
    return AutoModel.from_config(config) if decoder is None else decoder(config)


def weightless_or_none(config: Any) -> nn.Module | None:
    """Return the causal model of a text config on the meta device; None where transformers builds none."""
    try:
        with torch.device("meta"):
            return cast(nn.Module, _weightless(copy.deepcopy(config), None))
    except Exception:  # whatever a config is wrong in, which is reported by who asked
        return None


def state_module(layer: nn.Module, attention: nn.Module | None, index: int) -> nn.Module:
    """Return the module of a decoder layer that owns its state: the innermost that knows its index, and not attends."""
    inside = set() if attention is None else set(attention.modules())
    found = [
        module
        for module in layer.modules()
        if module is not layer and module not in inside and getattr(module, "layer_idx", None) == index
    ]
    found = [module for module in found if not any(inner in found for inner in list(module.modules())[1:])]
    if len(found) != 1:
        raise ValueError(
            f"layer {index} carries a state, but {len(found)} of its modules know which layer they are in, so its "
            "owner is unknown; use another backbone"
        )
    return found[0]


_RESTARTS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a module begins with a new state wherever it is given more than one token."""


def stepping(module: nn.Module, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Return a forward that carries the state of a layer's module from pass to pass, however many tokens a pass has."""
    signature = inspect.signature(forward)
    name = next(iter(signature.parameters))  # of the hidden states

    def step(*args: Any, **kwargs: Any) -> Any:
        held: Any = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        if (carriers := getattr(held, "carriers", None)) is None:
            return forward(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        hidden: Tensor = given.arguments[name]

        def run(tokens: Tensor) -> Any:
            given.arguments[name] = tokens
            return forward(*given.args, **given.kwargs)

        carrier: Carrier = carriers[index]
        length = hidden.shape[1]
        pieces = [length]
        if length > 1 and carrier.begun and _restarts(module, run, carrier, hidden):
            pieces = [1] * length
        elif length > 1 and carrier.marking:
            pieces = [length - 1, 1]
        outputs = []
        for nth, tokens in enumerate(hidden.split(pieces, dim=1)):
            if carrier.marking and nth == len(pieces) - 1:
                carrier.mark()
            outputs.append(run(tokens))
        return _together(outputs)

    return step


def _restarts(module: nn.Module, run: Callable[[Tensor], Any], carrier: Carrier, hidden: Tensor) -> bool:
    """Return whether a module forgets its state where it is given two tokens; tried once, with large numbers.

    Convolutions alone have no such state: what they need of earlier tokens, transformers' cache puts in front.
    """
    if module not in _RESTARTS:
        strengths = []
        for pieces in ([1, 1], [2]):
            with carrier.trial(_FORCE):
                for tokens in hidden[:, :2].split(pieces, dim=1):
                    run(tokens)
                strengths.append(carrier.strength())
        one_by_one, at_once = strengths
        _RESTARTS[module] = one_by_one > 2 * at_once
    return _RESTARTS[module]


def _together(outputs: Sequence[Any]) -> Any:
    if len(outputs) == 1:
        return outputs[0]
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs), dim=1)
    first, *others = outputs[-1]
    return (torch.cat([output[0] for output in outputs], dim=1), *others)
