"""What an answer is written with: the options of `model.generate` that make sense for a context, checked."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import GenerationConfig

from locret.backbone.adapters import unwrap
from locret.base.fields import check_sampling
from locret.base.nearest import check_retired, nearest
from locret.generation import checked_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MORE_OPTIONS = ("logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria")
_NOT_HERE = {
    "max_length": "say how long an answer may be with max_new_tokens",
    "num_return_sequences": "there is one answer; ask again, or fork",
    **dict.fromkeys(
        ("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states"),
        "there is only the answer's text; use locret.generate with context.cache",
    ),
    "streamer": "use stream=True, or chat.stream",
    "use_cache": "the context is the cache",
}
_GREEDY = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def settings(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    max_new_tokens: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of `locret.generate` for one answer.

    Raises:
        ValueError: For an option that `model.generate` does not have, or that makes no sense here.
    """
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} is no length of an answer; give a number of tokens")
    known = GenerationConfig().to_dict()
    for name, value in options.items():
        if name in _NOT_HERE:
            raise ValueError(f"{name}={value!r} has no effect here; {_NOT_HERE[name]}")
        if name not in known and name not in _MORE_OPTIONS:
            check_retired("option", name)
            meant = nearest(name, ("max_new_tokens", *known, *_MORE_OPTIONS))
            hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
            raise ValueError(f"{name}={value!r}: model.generate has no such option{hint}")
    options = {name: value for name, value in options.items() if value is not None}
    for name in ("temperature", "repetition_penalty"):
        if isinstance(value := options.get(name), (int, float)) and not (name == "temperature" and value == 0):
            check_sampling(name, value)
    sampling = any(name in options for name in _SAMPLING) and options.get("temperature") != 0
    settings: dict[str, Any] = {"max_new_tokens": int(max_new_tokens), "do_sample": sampling, **options}
    if not settings["do_sample"]:  # what a backbone recommends for sampling shapes no greedy answer
        for name in _SAMPLING:
            if "do_sample" in options and options.get(name, 0) not in (0, _GREEDY.get(name)):
                raise ValueError(f"{name}={options[name]!r} has no effect with do_sample=False; leave one of them out")
        settings |= _GREEDY
    checked_options(unwrap(model), dict(settings))
    pad = tokenizer.pad_token_id
    settings.setdefault("pad_token_id", pad if pad is not None else next(iter(end_ids), None))
    return settings
