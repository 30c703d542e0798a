"""Presses of kvpress as scorers: a press that rates units runs in chunks and within the budget, like one of ours.

Software:  kvpress, https://github.com/NVIDIA/kvpress, or any class with the method
           `score(module, hidden_states, keys, values, attentions, kwargs)`; kvpress itself is not imported here.
Formula:   the press's. It gets the hidden states of the chunk, all keys and values as they were attended, and what its
           attention module was called with; its compression ratio is what the budget leaves at the moment.
Deviates:  kvpress rates once, after a whole prompt in one pass (when="prompt_end" with a prompt of one pass). Here a
           press rates after each chunk, by the chunk's queries. A window that is not shorter than the chunk is cut to
           all its tokens but one; where a chunk has one token, older units keep their scores, and it stays.
Refused:   presses without `score` or with a selection, hooks or budgets of their own (the policy has those: +pyramid,
           +adaptive_heads, +prompt_end), and, when they ask, presses that need all attention weights.
Cost:      the press's. Generated tokens are not rated, and score 0.
"""

# B batch, K KV heads, L new tokens, S units, E hidden size

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass, make_dataclass, replace
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor, nn

from locret.backbone.adapters import attention_modules, find_decoder, rotary_module
from locret.backbone.chunk import Chunk
from locret.backbone.rotary import FULL_ATTENTION
from locret.scorers.base import Scorer

_ARGUMENTS = ["module", "hidden_states", "keys", "values", "attentions", "kwargs"]
_RATIO, _WINDOW = "compression_ratio", "window_size"
_OWN_SELECTION = ("compress", "forward_hook", "__call__")
_QUERIES = 64


class PressScorer(Scorer):
    """A press; a subclass per class of presses has its options as fields."""

    positions: ClassVar[str] = "original"
    rates_answers: ClassVar[bool] = False
    causal: ClassVar[bool] = False
    press: ClassVar[Callable[..., Any]]

    @property
    def lookback(self) -> int:
        """The window and one token more, where there is a window."""
        return getattr(self, _WINDOW, _QUERIES - 1) + 1

    def prepare(self, model: nn.Module) -> tuple[Any, list[nn.Module], Any]:
        """Make the press, and find the attention modules that it asks, and the rotary embedding."""
        options = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        try:
            press = type(self).press(**options)
            getattr(press, "post_init_from_model", lambda _: None)(model)
        except Exception as error:  # whatever a stranger's code does
            raise ValueError(f"scorer {self.name} cannot be made ({_reason(error)}); check its options") from error
        return press, attention_modules(model), rotary_module(find_decoder(model))

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, S), or (B, K, L) from a press that rates tokens by their hidden states alone."""
        batch, kv_heads, units = chunk.key.shape[:3]
        new, (press, *asked) = chunk.new_tokens, chunk.prepared
        if getattr(press, _WINDOW, 0) >= new:
            if new == 1:
                best = chunk.stored_scores.amax(-1, keepdim=True) + 1 if units > 1 else chunk.key.new_zeros(1)
                return torch.cat([chunk.stored_scores, best.float().expand(batch, kv_heads, 1)], dim=-1)
            press = replace(press, **{_WINDOW: new - 1})
        if hasattr(press, _RATIO):
            setattr(press, _RATIO, max(0.0, 1 - (chunk.budget + 0.5) / units))
        try:
            scores: Tensor = press.score(*_arguments(chunk, *asked))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a stranger's code does
            raise ValueError(
                f"scorer {self.name} cannot rate {new} new tokens among {units} units ({_reason(error)}); take a press "
                "that needs no attention weights and no whole prompt, only hidden states, keys and values"
            ) from error
        return scores.float()


def is_press(found: Any) -> bool:
    """Return whether something is a class of presses."""
    if not isinstance(found, type) or issubclass(found, Scorer):
        return False
    if any(one.__module__.split(".")[0] == "kvpress" for one in found.__mro__):
        return True
    score = getattr(found, "score", None)
    return callable(score) and list(inspect.signature(score).parameters)[1:7] == _ARGUMENTS


def press_scorer(press: type, name: str) -> type[Scorer]:
    """Return a class of presses as a class of scorers."""
    if not callable(getattr(press, "score", None)):
        raise ValueError(f"scorer {name} is a press without a score of units; take one that defines score")
    for method in _OWN_SELECTION:
        owner = next((one for one in press.__mro__ if method in vars(one)), None)
        if owner is not None and owner.__module__ not in ("kvpress.presses.scorer_press", "kvpress.presses.base_press"):
            raise ValueError(
                f"scorer {name} has a {method} of its own, which selects or rewrites units; take a press that only "
                "rates them, and let the policy select (+pyramid, +adaptive_heads, +prompt_end)"
            )
    hints = get_type_hints(press) if is_dataclass(press) else {}
    options = [
        (one.name, hints.get(one.name, Any), field(default=one.default, default_factory=one.default_factory))
        for one in (fields(press) if is_dataclass(press) else ())
        if one.init and one.name != _RATIO and not one.name.startswith("_")
    ]
    if taken := sorted({one for one, _, _ in options} & set(dir(Scorer))):
        raise ValueError(f"scorer {name} has an option {taken[0]}, which means something else here; rename it")
    about = (press.__doc__ or press.__name__).strip().splitlines()[0]
    return make_dataclass(
        f"{press.__name__}Scorer",
        options,
        bases=(PressScorer,),
        namespace={"name": name, "press": press, "__module__": press.__module__, "__doc__": about},
        frozen=True,
        kw_only=True,
    )


def _arguments(chunk: Chunk, modules: list[nn.Module], rotary: nn.Module | None) -> tuple[Any, ...]:
    hidden_BLE = chunk.projections.hidden
    module: Any = _AsSeen(modules[chunk.layer_idx], rotary, chunk.next_position - chunk.new_tokens)
    steps = torch.arange(chunk.new_tokens, device=chunk.key.device)
    embeddings = () if rotary is None else module.rotary_emb(hidden_BLE, steps[None])
    kwargs = {"position_embeddings": embeddings, "cache_position": steps, "hidden_states": hidden_BLE}
    return module, hidden_BLE, chunk.key, chunk.value, None, kwargs


class _AsSeen:
    """An attention module for a press: its projections wake no hooks, and its rotary embedding counts from the chunk.

    A press takes the pass for the first one, so that its positions are those of the chunk less `offset`.
    """

    def __init__(self, module: nn.Module, rotary: nn.Module | None, offset: int) -> None:
        self._module, self._rotary, self._offset = module, rotary, offset

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # presses ask which architecture it is
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        if name == "rotary_emb" and self._rotary is not None:
            rotary, offset = self._rotary, self._offset
            extra = (
                {"layer_type": FULL_ATTENTION} if "layer_type" in inspect.signature(rotary.forward).parameters else {}
            )
            return lambda states, position_ids: rotary(states, position_ids + offset, **extra)
        found = getattr(self._module, name)
        return _Unhooked(found) if isinstance(found, nn.Module) else found


class _Unhooked:
    """A module whose call wakes no hooks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any) -> Any:
        return self._module.forward(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
