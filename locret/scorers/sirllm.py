"""SirLLM: tokens that surprised the model stay, the same ones in all layers and heads.

Paper:     SirLLM, arXiv 2405.12528, section 3 ("token entropy").
Formula:   s_t = -ln p(x_t | x_<t), under the model with the cache it had; the first `sinks` tokens
           and the `keep_recent` newest ones stay. Every further text of a conversation multiplies the scores of the
           units held by `decay`.
Deviates:  budget units stay after every chunk (the released code: budget less the chunk to come). Nothing precedes
           the first token of a text, so it gets ln(vocabulary), the surprisal of a blind guess; sinks keep it anyway.
           In the released code s_t is what the logits at t - 1 say of x_{t-1} itself, which is not repeated here.
Cost:      the language-model head on every token, in slices, so that logits of a chunk never exist at once: for a small
           backbone with a large vocabulary that is more than the layers cost. A score does not change later.
"""

# B batch, L new tokens, E hidden size, T tokens of all rows

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from locret.backbone.adapters import unwrap
from locret.base.fields import Range
from locret.scorers.base import TokenPass, TokenScorer

_LOGITS = 2**23
"""Logits of a slice: 32 MiB."""


@dataclass(frozen=True, kw_only=True)
class SirLLMScorer(TokenScorer):
    """Keep surprising tokens."""

    name: ClassVar[str] = "sirllm"
    over_ranks: ClassVar[bool] = True
    ranges = {"sinks": Range(0), "keep_recent": Range(0)}

    sinks: int = 4
    """First tokens of the text that always stay (the paper: 4)."""
    keep_recent: int = 0
    """Newest units that always stay (the paper's tasks: 0; as a baseline in Locret's evaluation: 1000)."""
    decay: float = 1.0
    """Factor of the scores held when another text is read into the cache, above 0 and at most 1 (the released code: 1;
    0.9 for rock-paper-scissors, 0.7 for DailyDialog)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay <= 1:
            self.refuse(f"decay={self.decay} is not above 0 and at most 1; 1 fades nothing")

    @property
    def fade(self) -> float:
        return self.decay

    def prepare(self, model: nn.Module) -> None:
        base: Any = unwrap(model)
        if base.get_output_embeddings() is None:
            raise ValueError(
                f"scorer {self.name} asks a language-model head, but {type(base).__name__} has none; "
                "load the backbone with AutoModelForCausalLM"
            )

    def score_tokens(self, model: nn.Module, tokens: TokenPass) -> Tensor:
        """Return scores (B, L)."""
        states_BLE, ids_BL = tokens.hidden_BLE[:, :-1], tokens.ids_BL
        if tokens.before_B1E is not None:
            states_BLE = torch.cat([tokens.before_B1E, states_BLE], dim=1)
            return surprisal_of(model, states_BLE, ids_BL)
        known_BL = surprisal_of(model, states_BLE, ids_BL[:, 1:])
        return nn.functional.pad(known_BL, (1, 0), value=math.log(_head(model).weight.shape[0]))


def _head(model: nn.Module) -> Any:
    base: Any = unwrap(model)
    return base.get_output_embeddings()


def surprisal_of(model: nn.Module, states_BLE: Tensor, ids_BL: Tensor) -> Tensor:
    """Return (B, L) float32: -ln of the probability that each state gives to the next id."""
    head = _head(model)
    states_TE, ids_T = states_BLE.flatten(0, 1), ids_BL.flatten()
    step = max(1, _LOGITS // head.weight.shape[0])
    slices = []
    for start in range(0, len(states_TE), step):
        logits_TV = _scaled(model, head(states_TE[start : start + step])).float()
        chosen_T1 = ids_T[start : start + step, None].to(logits_TV.device)
        slices.append(logits_TV.logsumexp(-1) - logits_TV.gather(-1, chosen_T1)[:, 0])
    return torch.cat(slices or [states_TE.new_zeros(0, dtype=torch.float32)]).view(ids_BL.shape)


def _scaled(model: nn.Module, logits: Tensor) -> Tensor:
    """Do to a head's output what some architectures do behind their head, as their configs say."""
    base: Any = unwrap(model)
    config = base.config.get_text_config()
    logits = logits * (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits
