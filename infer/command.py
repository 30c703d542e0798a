"""`locret-infer`: read a prompt of any length in a fixed amount of memory, and answer it.

Order matters: what can be refused here is refused before the backbone's config is fetched, what the config shows before
weights are loaded.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from locret.cli import parse_options, print_json, run, warnings_as_lines
from locret.infer.infer_options import (
    GenerationOptions,
    ModelOptions,
    OutputOptions,
    PolicyOptions,
    PromptOptions,
)
from locret.infer.reading_warnings import warn_of_recency
from locret.load_options import ScorerOptions

OPTION_CLASSES = (ModelOptions, ScorerOptions, PolicyOptions, PromptOptions, GenerationOptions, OutputOptions)
DESCRIPTION = "Read a prompt of any length in a fixed amount of memory, and answer it."


@dataclass(frozen=True)
class Options:
    """All options of the command, and the names that the user set."""

    model: ModelOptions
    scorer: ScorerOptions
    policy: PolicyOptions
    prompt: PromptOptions
    generation: GenerationOptions
    output: OutputOptions
    chosen: frozenset[str]


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line and its recipe.

    Raises:
        SystemExit: With code 2 for an unknown flag, an unknown YAML key or a value of the wrong type.
        ValueError: For values that make no sense.
    """
    instances, chosen = parse_options("locret-infer", DESCRIPTION, OPTION_CLASSES, argv)
    model, scorer, policy, prompt, generation, output = instances
    return Options(model, scorer, policy, prompt, generation, output, frozenset(chosen))


def command(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub, a disk or a device's memory fails.
    """
    options = parse(argv)
    with warnings_as_lines("locret-infer", quiet=options.output.quiet):
        _execute(options)
    return 0


def _execute(options: Options) -> None:
    """Do what the options say."""
    from locret import loading
    from locret.infer import sizing
    from locret.scorers import Scorer

    if options.output.picture:
        _check_picture(options.output.picture)
    dry_run = options.output.dry_run
    pieces = None if dry_run else _document(options.prompt)
    device = loading.resolve_device(options.model.device)
    scorer, recommended = loading.load_scorer(options.scorer)
    draft = sizing.draft_policy(options.policy, options.chosen, recommended)
    counted = sizing.must_count(options.policy, draft) or (not dry_run and options.generation.num_beams > 1)
    if dry_run and counted:
        pieces = _document(options.prompt)
    config = loading.load_config(options.model)
    loading.check_matches(options.scorer, scorer, config)
    dtype = loading.resolve_dtype(options.model.dtype, config, device)
    tokenizer, ids, tokens = _prompt(options, pieces, counted)
    run_of = sizing.PlannedRun(
        config=config,
        scorer=scorer,
        dtype=dtype,
        device=device,
        prompt_tokens=tokens,
        new_tokens=options.generation.max_new_tokens,
        num_beams=options.generation.num_beams,
        trust_remote_code=options.model.trust_remote_code,
    )
    policy, chunk_choice = sizing.final_policy(options.policy, options.chosen, recommended, run_of)
    sizing.check_fits(run_of, policy)
    if policy.when == "prompt_end":
        warnings.warn(
            f"--when prompt_end keeps every unit until the prompt has been read, so memory grows with it (here "
            f"{tokens:,} tokens); --when chunk bounds it",
            stacklevel=2,
        )
    if isinstance(scorer, Scorer):
        warn_of_recency(scorer.name, scorer.recent, [policy])
    setup: dict[str, Any] = {
        "model": options.model.model,
        "scorer": options.scorer.label or scorer.name,
        "policy": policy.to_dict(),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "versions": _versions(),
        **({"chunk_choice": chunk_choice.to_dict()} if chunk_choice else {}),
    }
    if dry_run:
        _print_plan(options, config, dtype, scorer, policy, tokens, setup)
        return
    record = _answer(options, tokenizer, ids, (config, device, dtype), scorer, policy)
    if options.output.json:
        print_json({**record, **setup})
    elif not options.output.quiet:
        sys.stderr.write(_summary(record))


def _answer(
    options: Options, tokenizer: Any, ids: Any, where: tuple[Any, Any, Any], scorer: Any, policy: Any
) -> dict[str, Any]:
    """Load the backbone, read, answer, print the answer unless JSON is wanted; return the measurements."""
    import torch

    from locret import loading
    from locret.infer import answer

    output = options.output
    stream = not output.json and options.generation.num_beams == 1
    try:
        model = loading.load_model(options.model, *where)
        cache = answer.MeasuredCache(model, scorer, policy)
        result = answer.answer(
            model,
            tokenizer,
            ids,
            cache,
            options.generation,
            attn=options.model.attn,
            stream=stream,
            progress=not output.quiet and sys.stderr.isatty(),
            on_read=_painter(output.picture, options.scorer),
        )
    except torch.OutOfMemoryError as error:
        raise OSError(
            f"{where[1]} is out of memory; lower --budget or --chunk-size (--dry-run prints the cache's bytes), "
            "or take a smaller --dtype"
        ) from error
    if not output.json and not stream:
        print(result.answer)
    return asdict(result)


def _prompt(options: Options, pieces: Iterator[str] | None, counted: bool) -> tuple[Any, Any, int | None]:
    """Return the tokenizer, the prompt's ids, and their number if it is `counted`; nothing where nothing is read."""
    from locret import loading
    from locret.document import whole
    from locret.infer import answer

    if pieces is None:
        return None, None, None
    tokenizer = loading.load_tokenizer(options.model)
    ids = answer.prompt_ids(tokenizer, pieces, options.prompt)
    if not counted:
        return tokenizer, ids, None
    counted_ids = whole(ids)
    return tokenizer, counted_ids, counted_ids.shape[1]


def _print_plan(
    options: Options, config: Any, dtype: Any, scorer: Any, policy: Any, tokens: int | None, setup: dict[str, Any]
) -> None:
    """Print what a run would do and take."""
    from locret import loading
    from locret.infer import sizing

    steps, generation = sizing.steps(config, scorer, policy, tokens), options.generation
    planned = loading.planned_bytes(
        options.model, config, dtype, scorer, policy, generation.max_new_tokens, generation.num_beams, tokens
    )
    plan = {
        "planned_cache_bytes": planned,
        "prompt_tokens": tokens,
        "not_given": policy.following(),
        "steps": steps,
    }
    print_json({**plan, **setup, "options": _resolved(options)})
    if not options.output.quiet:
        sys.stderr.write(sizing.follow_line(policy) + sizing.step_lines(steps, adaptive=policy.memory == "adaptive"))


def _document(options: PromptOptions) -> Iterator[str]:
    from locret.text_stream import read_text

    name = options.prompt_file
    if name is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("there is nothing to read; give a text with --prompt-file, or pipe one in")
        name = "-"
    return read_text(name)


def _check_picture(path: str) -> None:
    from locret.infer import pictures

    pictures.require_matplotlib("--picture")
    if os.path.isdir(path):
        raise ValueError(f"--picture {path} is a folder; give a PNG file")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ValueError(f"--picture {path}: there is no folder {folder}; make it first")


def _painter(path: str | None, scorer: ScorerOptions) -> Any:
    """Return what draws the cache once the prompt has been read; None if no picture is wanted."""
    if path is None:
        return None

    def paint(cache: Any) -> None:
        from locret.infer import pictures
        from locret.scorers import FALLBACK

        name = scorer.label or FALLBACK
        title = f"{name}, budget {cache.policy.budget:,}"
        pictures.retention_map([pictures.retention_of(cache, title)], path)

    return paint


def _summary(record: dict[str, Any]) -> str:
    return (
        f"read {record['prompt_tokens']:,} tokens at {record['prefill_tokens_per_second']:,.0f}/s, kept "
        f"{record['kept_units']:,} units per KV head; wrote {record['new_tokens']:,} tokens at "
        f"{record['decode_tokens_per_second']:,.0f}/s; cache {record['peak_cache_bytes'] / 2**20:,.1f} MiB at most"
        f"{'' if record['finished'] else '; cut off at --max-new-tokens'}\n"
    )


def _resolved(options: Options) -> dict[str, Any]:
    parts = (options.model, options.scorer, options.prompt, options.generation)
    given = {"kv_memory": options.policy.kv_memory, "budget_share": options.policy.budget_share}
    return {**{name: value for part in parts for name, value in asdict(part).items()}, **given}


def _versions() -> dict[str, str]:
    import torch
    import transformers

    from locret import __version__

    return {"locret": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def main() -> None:
    """Entry point of `locret-infer`."""
    run(command, prog="locret-infer")


if __name__ == "__main__":
    main()
