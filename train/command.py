"""`locret-train`: fit retaining heads on a frozen backbone.

locret-train --config recipes/train/tiny.yaml --dataset rows.json --output runs/tiny
accelerate launch --num_processes 2 -m locret.train.command --config ...
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from locret.cli import print_json, run
from locret.data.training import sources
from locret.files import locked
from locret.train import training_options
from locret.train.training_options import DataOptions

if TYPE_CHECKING:
    from accelerate import PartialState

    from locret.train.training_run import TrainingRun


def command(argv: Sequence[str] | None = None) -> int:
    """Train heads; return 0, or 128 plus the number of the signal that ended the run early.

    Raises:
        ValueError: For what the user must change.
        OSError: If a file cannot be read or written.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    options, chosen = training_options.parse(argv)
    data: DataOptions = options[1]
    sources.check_name(data.dataset, data.data_dir)
    from locret.train.training_run import TrainingRun  # imports torch

    training = TrainingRun(options, chosen)
    training.check()
    from accelerate import PartialState

    process = PartialState(cpu=_on_cpu())
    if training.run.dry_run:
        training.open_rows(process)
        return _show_plan(training, str(process.device))
    setting = f"--output {training.run.output}"
    with locked(training.folder, setting) if process.is_main_process else nullcontext():
        return _train(training, process)


def _train(training: TrainingRun, process: PartialState) -> int:
    from accelerate import Accelerator

    training.open_rows(process)
    training.check_space()
    # The main process fills the output folder only when all have seen it as it was.
    process.wait_for_everyone()
    accelerator = Accelerator(
        cpu=_on_cpu(),
        mixed_precision=training.precision,
        gradient_accumulation_steps=training.optimizer.gradient_accumulation,
    )
    summary = training.train(accelerator)
    if accelerator.is_main_process:
        _report(training, summary)
    accelerator.end_training()
    return 128 + summary["stopped"] if summary["stopped"] else 0


def _show_plan(training: TrainingRun, device: str) -> int:
    resolved, plan = {**training.resolved_options(), "device": device}, training.plan()
    if training.run.json:
        print_json({"config": resolved, "rows": training.stream.size, "memory_bytes": plan})
        return 0
    import yaml

    print(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), end="")
    print(f"\n# {training.stream.size or 'streamed'} rows; memory plan:")
    for name, count in plan.items():
        print(f"#   {name.replace('_', ' '):<10} {count / 2**20:>12,.1f} MiB")
    return 0


def _report(training: TrainingRun, summary: dict[str, Any]) -> None:
    if summary["stopped"]:
        sys.stderr.write(f"stopped at step {summary['step']}; go on with --resume\n")
    elif training.run.push_to_hub is not None:
        from locret.heads.push import PushOptions, push

        options = PushOptions(heads=str(training.folder), repo=training.run.push_to_hub, private=training.run.private)
        summary["pushed"] = push(options)["url"]
    if training.run.json:
        print_json({"output": training.run.output, **summary})
    elif not summary["stopped"]:
        print(f"heads saved to {training.run.output} (loss {summary['total']:.4f}, overlap {summary['overlap']:.3f})")


def _on_cpu() -> bool:
    """Say so to accelerate where there is nothing else: it would not join several CPU processes by itself."""
    import torch
    from accelerate.utils import parse_flag_from_env

    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def main() -> None:
    """Entry point of `locret-train`."""
    run(command, prog="locret-train")


if __name__ == "__main__":
    main()
