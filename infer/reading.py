"""From options to a text that has been read: scorer, policy and place before weights are loaded, and what that takes.

Order matters: what can be refused from the options is refused before the backbone's config is fetched, what the config
shows before weights are loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, dropwhile, islice
from pathlib import Path
from typing import Any

import torch

from locret import LongContextModel, RetainingHeads, RetentionPolicy, backbone_names, loading, read_notes
from locret.base.fields import Refusal, shown
from locret.base.warned import note_user, warn_user
from locret.cache.cache_file import CONTEXT_WRITERS, read_scorer
from locret.conversation.document import Document, encode, open_file
from locret.conversation.head_shares import sharing
from locret.conversation.saved import find_context
from locret.conversation.turns import Transcript
from locret.environment import versions
from locret.infer import sizing
from locret.infer.fetch import fetched, is_address
from locret.infer.infer_options import GenerationOptions, ModelOptions, PolicyOptions, TextOptions
from locret.loading.options import LOCRET, WITHOUT_EVICTION, ScorerOptions
from locret.policy.resolve import EQUAL, SHARES
from locret.scorers import Scorer
from locret.scorers.chosen import MEASURED, check_matches, chosen_heads, load_scorer, shipped_heads


@dataclass
class Ready:
    """A backbone, what rates its units and how many stay, all but its weights."""

    model: ModelOptions
    named: ScorerOptions
    run: sizing.PlannedRun
    """What the policy was found for."""
    policy: RetentionPolicy
    asked: bool = True
    """Whether the user named what decides, and so the sizes of KV heads."""
    recommended: dict[str, Any] = field(default_factory=dict)
    """Numbers of a policy that the heads or the method recommend."""

    @contextmanager
    def loaded(self, template: str | None = None) -> Iterator[LongContextModel]:
        """Load the weights, and give a model; a device that runs out of memory meanwhile is said in one sentence."""
        run = self.run
        try:
            tokenizer = loading.load_tokenizer(self.model)
            backbone = loading.load_model(self.model, run.config, run.device, run.dtype)
            self.policy = sharing(self.policy, run.scorer, backbone, tokenizer, template, asked=self.asked)
            lm = LongContextModel(backbone, tokenizer, run.scorer, self.policy, template=template)
            if run.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(run.device)
            yield lm
        except torch.OutOfMemoryError as error:
            raise OSError(
                f"{run.device} is out of memory; lower --budget or --chunk-size (--dry-run prints the cache's bytes), "
                "or take a smaller --dtype"
            ) from error

    def record(self) -> dict[str, Any]:
        """Return what a record says about how its numbers came about."""
        return {
            "model": self.model.model,
            **self.model.given(),
            "scorer": self.named.label or self.run.scorer.name,  # type: ignore[union-attr]
            "policy": self.policy.to_dict(),
            "device": str(self.run.device),
            "dtype": str(self.run.dtype).removeprefix("torch."),
            "versions": versions(),
        }

    def foreseen(self, options: Iterable[Any], *, quiet: bool) -> dict[str, Any]:
        """Return what a run would do and take; say in a line or two what stays."""
        if not quiet:
            sys.stderr.write(sizing.plan_lines(self.run, self.policy))
        given = {name: value for part in options for name, value in asdict(part).items()}
        settled = {one.name for one in fields(RetentionPolicy)}  # the policy says what these came to
        return {
            **self.run.plan(self.policy),
            "planned_weights": self.run.weights.to_dict(),
            "prompt_tokens": self.run.prompt_tokens,
            "full_cache_bytes": self.run.full_bytes,
            "not_given": self.policy.following(),
            **self.record(),
            "options": {name: value for name, value in given.items() if name not in settled},
        }


def ready(
    model: ModelOptions,
    named: ScorerOptions,
    policy: PolicyOptions,
    chosen: Collection[str],
    generation: GenerationOptions,
    count: Callable[[], int] | None = None,
    *,
    foresee: bool = False,
    equal: bool = False,
) -> Ready:
    """Resolve the options of a command that reads.

    `count` counts the text's tokens where the plan depends on them, and `foresee` says that it does so anyway; without
    it there is no such text. With `equal` KV heads get as many units, unless the user says otherwise.
    """
    device = loading.device_of_source(model)
    usual = named.spec is None or (named.scorer is None and named.spec.name == LOCRET)
    named = replace(named, heads=chosen_heads(named.heads, model, usual=usual))
    level = equal or ("head_budgets" in chosen and policy.head_budgets != "shares")
    sharing = not level and (model.shard, policy.kv_memory) == (None, None)
    scorer, recommended = load_scorer(named, sharing=sharing)
    if named.keeps_all:
        for name in sorted({*chosen} & {one.name for one in fields(PolicyOptions)} - {"chunk_size", *WITHOUT_EVICTION}):
            raise Refusal(name, getattr(policy, name), "means nothing to full, which keeps every unit")
    shares = recommended.get("head_budgets") == "shares" and "head_budgets" not in {*chosen, *named.changes}
    if shares and (equal or model.shard == "tp"):
        recommended = {name: value for name, value in recommended.items() if name not in SHARES}
        warn_user(EQUAL)
    draft = sizing.drafted(policy, chosen, recommended, named.changes)
    config, dtype = _config(model, named, scorer, device)
    counted = foresee or draft.plans_by_length or policy.keep is not None or policy.kv_memory == sizing.AUTO
    run = sizing.PlannedRun(
        config=config,
        scorer=scorer,
        dtype=dtype,
        device=device,
        prompt_tokens=count() if counted and count is not None else None,
        new_tokens=generation.max_new_tokens,
        source=model,
    )
    final = sizing.settled(policy, draft, run, named="budget" in {*chosen, *recommended})
    sizing.check_fits(run, final)
    asked = bool({"head_budgets", "spacing"} & {*chosen}) or recommended != MEASURED or named.spec is not None
    return Ready(model, named, run, final, asked, recommended)


def ready_without_policy(model: ModelOptions, named: ScorerOptions) -> Ready:
    """Resolve all but a policy, which texts that have been read bring with them, and others find by rules of theirs."""
    device = loading.device_of_source(model)
    named = replace(named, heads=chosen_heads(named.heads, model))
    scorer, recommended = load_scorer(named)
    config, dtype = _config(model, named, scorer, device)
    run = sizing.PlannedRun(config=config, scorer=scorer, dtype=dtype, device=device, source=model)
    return Ready(model, named, run, RetentionPolicy(), recommended=recommended)


@dataclass(frozen=True)
class Saved:
    """Contexts in files, and what they are loaded with."""

    files: list[Path]
    model: ModelOptions
    scorer: ScorerOptions
    unrated: bool
    """Whether nothing rates further units as those of the contexts were."""

    def loaded(self, load: Callable[..., Any], path: str | Path, *, allow_other_scorer: bool = False) -> Any:
        """Return what a model loads from a file."""
        found = load(path, allow_other_scorer=allow_other_scorer or self.unrated)
        held = found.cache.policy
        if self.unrated and (held.decode_budget is not None or held.turns == "text"):
            raise ValueError(f"{path} lets units go while it is asked; give the --heads or --scorer that read it")
        return found


def saved_in(paths: Sequence[str], model: ModelOptions, named: ScorerOptions, *, answers: bool) -> Saved:
    """Check files of contexts; they say the backbone, and shipped heads that read them, where nobody does.

    Args:
        paths: Files, or repositories on the Hub.
        model: The backbone, whose name may be None.
        named: Heads or a scorer.
        answers: Whether they are only asked: an answer needs nothing to rate units, unless it evicts some.
    """
    files = [find_context(os.path.expanduser(path)) for path in paths]
    names = [(read_notes(file, CONTEXT_WRITERS).get("conversation") or {}).get("backbone") for file in files]
    if model.model is None:
        name = names[0]
        if len(several := sorted({shown(one) for one in names if one})) > 1:
            raise ValueError(f"{' '.join(paths)} name several backbones, {' and '.join(several)}; ask those of one")
        if set(map(str, names)) != {name} or not name.isprintable() or not name.strip():
            raise ValueError(f"--model is missing, and no one backbone is named in {' '.join(paths)}; give --model")
        note_user(f"{paths[0]} names the backbone {name}, which is taken; --model names another")
        model = replace(model, model=backbone_names.name_of(name))
    unnamed = named.heads is None and named.spec is None
    if unnamed and (heads := shipped_heads(model)) is not None:
        weights = f"weights={RetainingHeads.from_pretrained(heads).fingerprint()}"[:20]
        if all(weights in read_scorer(file, CONTEXT_WRITERS) for file in files):
            named, unnamed = replace(named, heads=heads), False
    unrated = unnamed and answers
    named = replace(named, scorer="streaming") if unrated else named
    return Saved(files, model, named, unrated)


def _config(model: ModelOptions, named: ScorerOptions, scorer: Any, device: torch.device) -> tuple[Any, Any]:
    config = loading.load_config(model)
    check_matches(named, scorer, config)
    return config, loading.resolve_dtype(model.dtype, config, device)


def opened(text: TextOptions) -> Document:
    if not text.prompt_file and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError("there is nothing to read; give a text with --prompt-file, or pipe one in")
    return open_all(text.prompt_file or ["-"], "--prompt-file ")


def open_all(names: Sequence[str], setting: str) -> Document:
    """Open a file, a folder or a page; several become one text, each below its name."""
    found = [fetched(name, setting) if is_address(name) else open_file(name, setting=setting) for name in names]
    empty = f"{setting}%s is empty; give a text to read, or leave it out"
    for one in found:  # what has no words is refused before a backbone is loaded
        begun = list(islice(blocks := iter(one.pieces or ()), 2))
        if len(begun) < 2 and not "".join(begun).strip():
            raise ValueError(empty % one.name)
        one.pieces = chain(begun, blocks)
    if len(found) == 1:
        return found[0]

    def pieces() -> Iterator[str]:
        for one in found:
            blocks = dropwhile(lambda block: not block.strip(), one.pieces or ())
            if (first := next(blocks, None)) is None:
                raise ValueError(empty % one.name)
            yield from chain([f"# {one.name}\n\n", first], blocks, ["\n\n"])

    sizes = [one.size for one in found if one.size is not None]
    return Document(found[0].name, pieces(), size=sum(sizes) if len(sizes) == len(found) else None, unit="bytes")


def counted(model: ModelOptions, text: TextOptions, document: Document | None, question: str | None) -> int:
    """Return the tokens of a text, which is then held as them, of a question and of what the template writes around."""
    tokenizer, document = loading.load_tokenizer(model), document or opened(text)
    document.count(tokenizer)
    transcript = Transcript(tokenizer, text.template, text.system)
    around = sum(len(encode(tokenizer, part)) for part in transcript.around(question) if part)
    return int(document.size or 0) + len(transcript.special) + around


def check_target(flag: str, path: str) -> None:
    """Refuse a file that could not be written once all has been read."""
    if not path or os.path.isdir(path):
        raise ValueError(f"{flag} {path} is a folder; give a file" if path else f"{flag} is empty; give a file")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ValueError(f"{flag} {path}: there is no folder {folder}; make it first")


def warn_of_growth(plan: Ready) -> None:
    """Say when memory grows with the prompt, and when scores decide nothing."""
    scorer = plan.run.scorer
    if plan.policy.when == "prompt_end":
        warn_user(
            f"--when prompt_end keeps every unit until the prompt has been read, so memory grows with it (here "
            f"{plan.run.prompt_tokens:,} tokens); --when chunk bounds it"
        )
    if isinstance(scorer, Scorer) and not plan.named.keeps_all:
        warn_of_recency(scorer.name, scorer.recent, [plan.policy])


def warn_of_recency(name: str, recent: Callable[[int], int], policies: Iterable[RetentionPolicy]) -> None:
    """Say in one line with which of the budgets a method's scores decide nothing.

    `recent` gives the newest units that it keeps itself out of a budget (`Scorer.recent`).
    """
    filled: dict[int, int] = {}
    for policy in policies:
        units = policy.budget + (policy.local_len if policy.when == "prompt_end" else 0)
        if recent(units) >= units:
            filled[policy.budget] = recent(units)
    if filled:
        most = max(filled.values())
        warn_user(
            f"{name} keeps the {most} newest units whatever their scores, so that with --budget "
            f"{','.join(map(str, filled))} it keeps nothing else; raise --budget above {most}, or read its result as "
            "that of recency"
        )
