"""`python -m checkpoints.build`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from checkpoints.build.folder import check_output, model_card, save
from checkpoints.build.measure import measure
from checkpoints.build.model import build_model
from checkpoints.build.options import BackboneTraining
from checkpoints.build.training import train
from locret.cli.command import parse_options, print_json
from locret.data.text.embedded_tokenizer import build_tokenizer
from locret.environment import versions
from locret.files import locked
from locret.train import checkpointing


def command(argv: Sequence[str] | None = None) -> int:
    """Train the embedded backbone, measure it, and write its folder."""
    (options,), _ = parse_options("checkpoints.build", "Train the embedded backbone.", [BackboneTraining], argv)
    if options.dry_run:
        parameters = build_model(options, build_tokenizer(options.max_positions)).num_parameters()
        print_json({"options": asdict(options), "parameters": parameters, "bytes": 4 * parameters})
        return 0
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={options.device} is not here: torch finds no GPU; add --device cpu")
    check_output(options.output, options.overwrite)
    if options.checkpoints and not options.resume and checkpointing.complete(Path(options.checkpoints)):
        raise ValueError(
            f"checkpoints={options.checkpoints} holds those of an earlier run; go on with --resume auto, "
            "or name another folder"
        )
    with ExitStack() as held:
        for name in ("output", "checkpoints"):
            if folder := getattr(options, name):
                held.enter_context(locked(folder, f"{name}={folder}"))
        return _build(options)


def _machine(options: BackboneTraining) -> str:
    if torch.device(options.device).type == "cuda":
        return f"one {torch.cuda.get_device_name(options.device)}"
    return f"{options.threads} CPU thread(s)"


def _build(options: BackboneTraining) -> int:
    model, tokenizer, log = train(options)
    seconds = log[-1]["seconds"]  # those before the run was resumed, too
    found = (
        measure(model, tokenizer, options.eval_tasks, options.eval_tokens, options.eval_samples)
        if options.eval_samples
        else {}
    )
    places = ("output", "overwrite", "dry_run", "checkpoints", "resume")
    settings = {name: value for name, value in asdict(options).items() if name not in places}
    record = {
        "options": settings,
        "versions": versions(),
        "machine": _machine(options),
        "seconds": seconds,
        "exact": found,
        "log": log,
    }
    save(options.output, model, tokenizer, record, model_card(model, record))
    print_json({"output": options.output, "seconds": seconds, "exact": found})
    return 0
