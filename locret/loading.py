"""From options to a backbone, its tokenizer and what decides which units stay; every failure is one sentence."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from locret import method_spec, scorers, shipped
from locret.backbone.adapters import describe
from locret.cache.cache import RetentionCache
from locret.heads import hub
from locret.heads.heads import RetainingHeads
from locret.load_options import BackboneSource, ScorerOptions
from locret.policy.policy import RetentionPolicy
from locret.scorers import Scorer

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_device(name: str) -> torch.device:
    """Return the device that `--device` means on this machine.

    Raises:
        ValueError: For a name that is unknown, or a device that PyTorch does not see.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if _has_mps() else "cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise ValueError(f"--device {name} is unknown; choose auto, cpu, cuda, cuda:N or mps")
    device = torch.device(name)
    count = {"cpu": 1, "mps": int(_has_mps()), "cuda": torch.cuda.device_count()}[device.type]
    if (device.index or 0) >= count:
        raise ValueError(f"--device {name}: PyTorch sees {count} {device.type} devices here; use --device auto")
    return device


def _has_mps() -> bool:
    return torch.backends.mps.is_available()


def resolve_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype that `--dtype` means for a backbone on a device.

    `auto` is the backbone's own. On the CPU it is float32 all the same, unless the backbone is in bfloat16 and the CPU
    has instructions that multiply it: elsewhere half precisions are slow or missing.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if device.type == "cpu":
        return own if own == torch.bfloat16 and _cpu_multiplies_bfloat16() else torch.float32
    return own if isinstance(own, torch.dtype) else torch.float32


def _cpu_multiplies_bfloat16() -> bool:
    """Return whether the CPU has products in bfloat16; asked of it, not timed, so that every run here decides alike."""
    # Older PyTorch does not say.
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def load_config(options: BackboneSource) -> Any:
    """Read the backbone's config and refuse an architecture that cannot work, before any weights are touched.

    Raises:
        ValueError: For a folder without a config, a repository that is not there, or an unsupported architecture.
        OSError: If the Hub refuses or cannot be reached.
    """
    from transformers import AutoConfig

    name = shipped.find(options.model)
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "config.json")):
            raise ValueError(f"--model {name} has no config.json; give the folder of a backbone, or its Hub id")
    elif os.path.exists(name):
        raise ValueError(f"--model {name} is a file; give the folder of a backbone, or its Hub id")
    elif not _HUB_ID.fullmatch(name):
        raise ValueError(f"--model {name}: there is no such folder; give the folder of a backbone, or its Hub id")
    else:
        _fetch_config(name, options.revision)
    with _one_sentence(f"--model {name} cannot be read"):
        config = AutoConfig.from_pretrained(
            name, revision=options.revision, trust_remote_code=options.trust_remote_code
        )
    describe(config)
    return config


def _fetch_config(name: str, revision: str | None) -> None:
    """Download the config alone, because huggingface_hub's errors are clearer than what transformers makes of them."""
    from huggingface_hub import errors, hf_hub_download

    with hub.one_sentence("load", name):
        try:
            hf_hub_download(name, "config.json", revision=revision)
        except errors.LocalEntryNotFoundError:
            raise
        except errors.EntryNotFoundError:
            raise ValueError("it has no config.json, so it is not a backbone; check --model") from None


def load_tokenizer(options: BackboneSource) -> Any:
    """Load the backbone's own tokenizer.

    Raises:
        ValueError: If there is none.
    """
    from transformers import AutoTokenizer

    with _one_sentence(f"--model {options.model} has no tokenizer that can be read"):
        return AutoTokenizer.from_pretrained(
            shipped.find(options.model), revision=options.revision, trust_remote_code=options.trust_remote_code
        )


def load_model(options: BackboneSource, config: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Load the backbone, with its adapter if there is one, frozen and in evaluation mode.

    Raises:
        ValueError: If weights are missing or broken, or the adapter does not fit.
    """
    from transformers import AutoModelForCausalLM

    with _one_sentence(f"--model {options.model} cannot be loaded"):
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            shipped.find(options.model),
            config=config,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            dtype=dtype,
            attn_implementation=options.attn_implementation,
            # Straight to the device: the host need not hold the weights.
            device_map=None if device.type == "cpu" else {"": device},
        )
    if options.adapter:
        from peft import PeftModel

        with _one_sentence(f"--adapter {options.adapter} cannot be put on --model {options.model}"):
            model = PeftModel.from_pretrained(model, options.adapter)
    return model.eval().requires_grad_(False)


def load_scorer(options: ScorerOptions) -> tuple[RetainingHeads | Scorer, dict[str, Any]]:
    """Load the heads, or make the scorer; return it with the policy it recommends, which may be empty.

    Raises:
        ValueError: If the heads are missing or broken, or there is no such scorer or option.
        OSError: If the Hub refuses or cannot be reached.
    """
    if options.heads is None:
        if options.scorer is None:
            warnings.warn(
                f"without trained heads the scorer {scorers.FALLBACK} decides which units stay; give heads for this "
                "backbone with --heads, or another scorer with --scorer",
                stacklevel=2,
            )
        spec = method_spec.parse(scorers.FALLBACK if options.scorer is None else options.scorer, "--scorer")
        scorer = scorers.make(spec, options.scorer_options)
        return scorer, {"positions": scorer.positions, **spec.changes}
    try:
        heads = RetainingHeads.from_pretrained(options.heads, allow_other_base=options.allow_other_base)
    except ValueError as error:
        raise ValueError(f"--heads {options.heads}: {error}") from error
    return heads, heads.config.policy or {}


def check_matches(options: ScorerOptions, scorer: RetainingHeads | Scorer, config: Any) -> None:
    """Refuse heads of another backbone, from its config alone.

    Raises:
        ValueError: If they differ; the message shows both sides.
    """
    if isinstance(scorer, RetainingHeads):
        try:
            scorer.check_matches(config)
        except ValueError as error:
            raise ValueError(f"--heads {options.heads}: {error}") from error


def planned_bytes(
    options: BackboneSource,
    config: Any,
    dtype: torch.dtype,
    scorer: RetainingHeads | Scorer,
    policy: RetentionPolicy,
    new_tokens: int,
    num_beams: int = 1,
    prompt_tokens: int | None = None,
) -> int:
    """Return the bytes that a prompt's cache will take, from the config alone; the scorer is used up.

    Without `prompt_tokens` the prompt is a long one.

    A beam search works on a copy of the cache with one row per beam, in addition to the cache itself.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=options.trust_remote_code)
    cache = RetentionCache(model, scorer, policy)
    cache.reserve(prompt_tokens, new_tokens)
    return cache.memory().planned * (1 if num_beams == 1 else 1 + num_beams)


@contextmanager
def _one_sentence(what: str) -> Iterator[None]:
    """Turn the paragraphs that loaders raise into the first line that says something."""
    from safetensors import SafetensorError

    # RuntimeError: peft, when an adapter's shapes are another model's.
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = re.split(r"(?<=[a-z\])'\"])\. ", " ".join(lines[:2]))[0].rstrip(".")
        raise ValueError(f"{what} ({reason}); check that it is whole and of the right kind") from error
