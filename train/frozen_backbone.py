"""Loading the backbone that heads are trained on: its config first, so that a wrong one costs no download."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from locret import shipped
from locret.backbone.adapters import describe


def load_config(model: str, revision: str | None) -> Any:
    """Return the backbone's transformers config.

    Raises:
        ValueError: If there is no such model, or retaining heads cannot work on its architecture.
        OSError: If the Hub cannot be reached.
    """
    from transformers import AutoConfig

    with _one_sentence("--model", model):
        config = AutoConfig.from_pretrained(shipped.find(model), revision=revision)
    describe(config)
    return config


def load_tokenizer(model: str, revision: str | None) -> Any:
    """Return the backbone's tokenizer.

    Raises:
        ValueError: If there is none.
        OSError: If the Hub cannot be reached.
    """
    from transformers import AutoTokenizer

    with _one_sentence("--model", model):
        return AutoTokenizer.from_pretrained(shipped.find(model), revision=revision)


def resolve_dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the type of the weights; "auto" is the checkpoint's, but float32 on a CPU, where it is faster."""
    if dtype == "auto":
        own = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
        if device.type == "cpu" or own is None:
            return torch.float32
        return own if isinstance(own, torch.dtype) else getattr(torch, str(own).removeprefix("torch."))
    return getattr(torch, dtype)  # type: ignore[no-any-return]


def load_backbone(
    model: str, revision: str | None, *, dtype: torch.dtype, device: torch.device, adapter: str | None = None
) -> nn.Module:
    """Return the backbone, frozen and in evaluation mode, with a LoRA adapter if one is named.

    Raises:
        ValueError: If weights or adapter are missing or do not fit.
        OSError: If the Hub cannot be reached.
    """
    from transformers import AutoModelForCausalLM

    with _one_sentence("--model", model):
        backbone = AutoModelForCausalLM.from_pretrained(shipped.find(model), revision=revision, dtype=dtype)
    if adapter is not None:
        from peft import PeftModel

        with _one_sentence("--adapter", adapter):
            backbone = PeftModel.from_pretrained(backbone, adapter)
    return backbone.to(device).eval().requires_grad_(False)  # type: ignore[no-any-return]


@contextmanager
def _one_sentence(flag: str, name: str) -> Iterator[None]:
    """Shorten the many lines of transformers and peft to what is wrong and what to do."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        message = f"{flag} {name} cannot be loaded ({lines[0]}); check the name, or give a local folder"
        if isinstance(error, ConnectionError | TimeoutError) or "connect" in str(error):
            raise OSError(message) from error
        raise ValueError(message) from error
