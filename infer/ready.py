"""What the options of a command come to before weights are loaded: scorer, policy, place, and what that takes.

Order matters: what can be refused from the options is refused before the backbone's config is fetched, what the config
shows before weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from locret import LongContextModel, RetainingHeads, RetentionPolicy, loading
from locret.cache.disk import Disk
from locret.cache.layers import checked_disk, find_store
from locret.infer import sizing
from locret.infer.infer_options import GenerationOptions, PlacedModelOptions, PolicyOptions
from locret.loading.options import ScorerOptions
from locret.scorers import Scorer
from locret.scorers.chosen import check_matches, chosen_heads, load_scorer


@dataclass(frozen=True)
class Ready:
    """A backbone, what rates its units and how many stay, all but its weights."""

    model: PlacedModelOptions
    named: ScorerOptions
    scorer: RetainingHeads | Scorer
    policy: RetentionPolicy
    config: Any
    device: torch.device
    dtype: torch.dtype
    run: sizing.PlannedRun | None = None
    """What the policy was found for; None for texts that have been read."""
    chunk_choice: Any = None
    disk: Disk | None = None

    def load(self, template: str | None = None, tokenizer: Any = None) -> LongContextModel:
        """Load the weights."""
        tokenizer = tokenizer or loading.load_tokenizer(self.model)
        backbone = loading.load_model(self.model, self.config, self.device, self.dtype)
        return LongContextModel(
            backbone, tokenizer, self.scorer, self.policy, template=template, store=self.model.store, disk=self.disk
        )

    def record(self) -> dict[str, Any]:
        """Return what a record says about how its numbers came about."""
        from locret.environment import versions

        return {
            "model": self.model.model,
            **self.model.given(),
            "scorer": self.named.label or self.scorer.name,  # type: ignore[union-attr]
            **({"store": self.model.store} if self.model.store else {}),
            "policy": self.policy.to_dict(),
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "versions": versions(),
            **({"chunk_choice": self.chunk_choice.to_dict()} if self.chunk_choice else {}),
        }


def ready(
    model: PlacedModelOptions,
    named: ScorerOptions,
    policy: PolicyOptions,
    chosen: Collection[str],
    generation: GenerationOptions,
    count: Callable[[], int | None] | None = None,
    *,
    dry_run: bool = False,
) -> Ready:
    """Resolve the options of a command that reads.

    Args:
        model: The backbone, and where it runs.
        named: Heads or a scorer.
        policy: How many units stay.
        chosen: Names that the user set.
        generation: How answers are written.
        count: Counts the text's tokens, where the plan depends on them; None: there is no such text.
        dry_run: Whether the plan is all that is wanted.

    Raises:
        ValueError: If something is missing, does not match, or takes more than there is.
    """
    if model.store is not None:
        find_store(model.store)
    device, named = loading.device_of_source(model), _chosen(model, named)
    scorer, recommended = load_scorer(named)
    draft = sizing.draft_policy(policy, chosen, recommended)
    config, dtype = _config(model, named, scorer, device)
    beams = generation.num_beams > 1 and not dry_run
    counted = count is not None and (sizing.must_count(policy, draft) or beams)
    run = sizing.PlannedRun(
        config=config,
        scorer=scorer,
        dtype=dtype,
        device=device,
        prompt_tokens=count() if counted and count is not None else None,
        new_tokens=generation.max_new_tokens,
        num_beams=generation.num_beams,
        on_disk=model.disk is not None,
        source=model,
    )
    final, chunk_choice = sizing.final_policy(policy, chosen, recommended, run)
    sizing.check_fits(run, final)
    disk = checked_disk(model.disk, final)
    return Ready(model, named, scorer, final, config, device, dtype, run, chunk_choice, disk)


def ready_for_saved(model: PlacedModelOptions, named: ScorerOptions) -> Ready:
    """Resolve the options of a command about texts that have been read, which bring their policies.

    Raises:
        ValueError: If something is missing or does not match.
    """
    device, named = loading.device_of_source(model), _chosen(model, named)
    scorer, _ = load_scorer(named)
    config, dtype = _config(model, named, scorer, device)
    return Ready(replace(model, disk=None), named, scorer, RetentionPolicy(), config, device, dtype)


def _chosen(model: PlacedModelOptions, named: ScorerOptions) -> ScorerOptions:
    return replace(named, heads=chosen_heads(named.heads, model.model))


def _config(model: PlacedModelOptions, named: ScorerOptions, scorer: Any, device: torch.device) -> tuple[Any, Any]:
    config = loading.load_config(model)
    check_matches(named, scorer, config)
    return config, loading.resolve_dtype(model.dtype, config, device)


@contextmanager
def refusals_with_flags(device: torch.device) -> Iterator[None]:
    """Name flags in what fails with a backbone: a device's memory, and settings that Python calls otherwise.

    Raises:
        OSError: If the device is out of memory.
        ValueError: For anything else that the user must change.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OSError(
            f"{device} is out of memory; lower --budget or --chunk-size (--dry-run prints the cache's bytes), or take "
            "a smaller --dtype"
        ) from error
    except ValueError as error:
        text = str(error)
        for name, flag in _FLAGS.items():
            text = text.replace(name, flag)
        raise ValueError(text) from error


_FLAGS = {
    "protect=": "--protect ",
    "allow_other_scorer=True": "--allow-other-scorer",
    "evidence=True": "--evidence",
    "source ": "--reread ",
}
