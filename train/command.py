"""`locret-train`: fit retaining heads on a frozen backbone.

locret-train --config recipes/train/tiny.yaml --dataset rows.json --output runs/tiny
accelerate launch --num_processes 2 -m locret.train.command --config ...
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from locret.base.files import locked
from locret.cli.command import bars_on_terminals, print_json, run
from locret.data.training.sources import find_local
from locret.distributed.ranks import check_launcher, joined
from locret.train import run_folder, training_options

if TYPE_CHECKING:
    from accelerate import PartialState

    from locret.distributed.ranks import Ranks
    from locret.train.training_run import TrainingRun

_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_GO_ON = "--resume goes on from the last checkpoint, if there is one"


def _check_launcher() -> None:
    """Refuse a launcher that starts one process where several were asked for; the options say everything else."""
    check_launcher()
    # accelerate starts several CPU processes through MPI only; without, one runs, and the addresses are left over.
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ.get("MASTER_PORT")
    if launched and not any(os.environ.get(name) for name in (*_RANKS, "WORLD_SIZE", "LOCAL_RANK")):
        raise ValueError(
            f"MASTER_PORT={os.environ['MASTER_PORT']} says that several processes were asked for, but only one was "
            "started: accelerate launch needs MPI to start more on CPUs; use torchrun --nproc-per-node N -m "
            "locret.train.command, or --num_processes 1"
        )


def command(argv: Sequence[str] | None = None) -> int:
    """Train heads; return 0, or 128 plus the number of the signal that ended the run early."""
    main = next((os.environ[name] for name in _RANKS if os.environ.get(name)), "0") == "0"
    level = logging.WARNING if main else logging.ERROR
    logging.basicConfig(format="%(levelname)s: %(message)s", level=level, stream=sys.stderr)
    options, chosen = training_options.parse(argv)
    backbone, data, _, optimizer, _, run = options
    # What can be refused at once is, before torch is imported or the Hub is asked.
    _check_launcher()
    with ExitStack() as held:
        ranks = held.enter_context(joined(_GO_ON))
        with ranks.together():
            folder = run_folder.check(str(run.output), resume=run.resume, overwrite=run.overwrite)
            rows = find_local(data.dataset)
            local = backbone.local_folder() is not None and rows is not None
            if main and not run.dry_run:
                held.enter_context(locked(folder, f"--output {run.output}"))
        ranks.agree_on_options(options)
        held.enter_context(bars_on_terminals())
        from accelerate import PartialState

        from locret.train.training_run import TrainingRun

        process = PartialState(cpu=_on_cpu())
        training = TrainingRun(options, chosen, process)
        with ranks.together():
            training.check(process.device)
        if run.dry_run:
            return _show_plan(training, process, local) if ranks.is_main else 0
        return _train(training, process, ranks)


def _train(training: TrainingRun, process: PartialState, ranks: Ranks) -> int:
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration

    # The main process fills the output folder only when all have seen it as it was.
    with ranks.together():
        if process.is_main_process:
            sys.stderr.write("\n".join(_plan(training)) + "\n")
        training.open_rows()
    rows = {f"{name} of --dataset": value for name, value in training.stream.state().items()}
    with ranks.together():
        ranks.agree(rows, "give all processes the same rows")
    accelerator = Accelerator(
        cpu=_on_cpu(),
        mixed_precision=training.precision,
        log_with=None if training.run.report_to == "none" else training.run.report_to.split(","),
        project_config=ProjectConfiguration(logging_dir=str(training.folder / run_folder.TENSORBOARD)),
        # Given as a number, a variable of the environment would override it.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=training.optimizer.gradient_accumulation),
    )
    summary = training.train(accelerator)
    if accelerator.is_main_process:
        _report(training, summary)
    accelerator.end_training()
    return 128 + summary["stopped"] if summary["stopped"] else 0


def _plan(training: TrainingRun) -> list[str]:
    """Return what is known before anything is fetched: the bytes of a step."""
    from locret.loading.weights import name_of
    from locret.train.training_run import gibibytes

    memory = {name.replace("_", " "): count for name, count in training.plan().items()}
    places = {place: count for place, count in training.weights.places.items() if place != name_of(training.device)}
    memory |= {f"backbone on {place}": count for place, count in places.items()}
    steps, source, output = training.optimizer.steps, training.data.dataset, training.run.output
    return [
        f"plan: {steps:,} steps on {source} for {training.backbone.model}, into {output}",
        f"  memory on {training.device}, besides what rows take (--max-tokens leaves long ones out):",
        *(f"    {name:<16} {gibibytes(count):>12}" for name, count in memory.items()),
    ]


def _show_plan(training: TrainingRun, process: PartialState, local: bool) -> int:
    """Print options and plan; rows are read only where nothing has to be fetched for that."""
    if local:
        training.open_rows()
    rows = training.stream.size if local else None
    resolved = {**training.resolved_options(), "device": str(process.device)}
    if training.run.json:
        known = {"memory_bytes": training.plan(), "weight_bytes": training.weights.to_dict()}
        print_json({"config": resolved, "rows": rows, **known})
        return 0
    import yaml

    print(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), end="")
    print(f"\n# {'an unknown number of' if rows is None else rows} rows")
    print("\n".join(f"# {line}" for line in _plan(training)))
    return 0


def _report(training: TrainingRun, summary: dict[str, Any]) -> None:
    if summary["stopped"]:
        sys.stderr.write(f"stopped at step {summary['step']}; go on with --resume {training.run.output}\n")
    if training.run.json:
        print_json({"output": training.run.output, **summary})
    elif not summary["stopped"]:
        print(f"heads saved to {training.run.output} (loss {summary['total']:.4f}, {summary['outcome']})")


def _on_cpu() -> bool:
    """Say so to accelerate where there is nothing else: it would not join several CPU processes by itself."""
    import torch
    from accelerate.utils import parse_flag_from_env

    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


if __name__ == "__main__":
    run(command, prog="locret-train")
