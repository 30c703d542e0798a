"""Where the time goes: a profile of reading a prompt, of generating, or of a training step, by stage and by operation.

    python -m locret.infer.speed.lab.profile --what prefill --output infer/speed/records/profile_prefill_cpu
    python -m locret.infer.speed.lab.profile --what training --trace step.json      # open it in ui.perfetto.dev

Everything runs once to warm up and once under torch.profiler. Times are a thing's own, without what it calls; on a GPU
they are the device's. A profiled run is slower than a plain one: shares are what a profile is good for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from locret.cli.command import run
from locret.infer.speed.allocations import silent
from locret.infer.speed.lab.harness import ReadingOptions, program, where
from locret.infer.speed.lab.stages import MARK, by_stage, marked_stages
from locret.infer.speed.lab.training_setup import training_setup
from locret.infer.speed.machine import now
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.runs import BenchSetup, make_setup, new_run
from locret.tables import markdown


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(ReadingOptions):
    """What is profiled."""

    what: Literal["prefill", "decode", "training"] = "prefill"
    """prefill (reading a prompt), decode (generating after it) or training (one optimizer step)."""
    method: str = "locret"
    """For prefill and decode: full, floor, locret or a scorer, as for locret-bench."""
    answer_tokens: int = 64
    """For training: answer tokens of the row. For decode: tokens generated."""
    top: int = 15
    """Operations to list."""
    by_shape: bool = False
    """Tell operations on tensors of different shapes apart."""
    trace: str | None = None
    """Write a Chrome trace to this file."""
    threads: int | None = None
    """CPU threads; as many as PyTorch takes if not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace is not None and not Path(self.trace).absolute().parent.is_dir():
            raise ValueError(f"--trace {self.trace}: there is no folder {Path(self.trace).parent}; make it first")


def measure(options: ProfileOptions, chosen: set[str]) -> dict[str, Any]:
    """Return the profile: milliseconds and shares by stage and by operation, and where it was taken.

    Raises:
        ValueError: For anything that cannot be measured as asked.
        OSError: If a Hub refuses or cannot be reached, or the trace cannot be written.
    """
    trains = options.what == "training"
    length = options.tokens + (options.answer_tokens if trains else 0)
    method = "locret" if trains else options.method
    plan = options.plan(chosen, method, length, new_tokens=options.answer_tokens)
    setup = make_setup(plan)
    prepare = _sides(options, setup, plan)
    prepare()()
    side, device = prepare(), setup.prompt_1N.device
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    taken = profile(activities=activities, record_shapes=options.by_shape)
    with marked_stages(setup.model, trains):
        with silent():
            taken.start()
        side()
        now(device)
        with silent():
            taken.stop()
    if options.trace is not None:
        taken.export_chrome_trace(options.trace)
    name = "self_device_time_total" if cuda else "self_cpu_time_total"
    return {
        "what": options.what,
        "device_time": cuda,
        "stages": _shares(by_stage(taken.events(), lambda event: getattr(event, name))),
        "operations": _operations(taken, name, options),
        "where": where(options, plan),
    }


def _sides(options: ProfileOptions, setup: BenchSetup, plan: BenchPlan) -> Callable[[], Callable[[], object]]:
    """Return what makes ready a run and returns the part of it to be profiled."""
    if options.what == "training":
        row = training_setup(setup, options.answer_tokens, "logit")
        return lambda: row.step

    def prepare() -> Callable[[], object]:
        run_ = new_run(setup, plan.methods[0], options.tokens)
        if options.what == "prefill":
            return run_.read
        first = run_.read()
        return lambda: run_.write(first)

    return prepare


def _operations(taken: profile, name: str, options: ProfileOptions) -> list[dict[str, Any]]:
    averages = taken.key_averages(group_by_input_shape=options.by_shape)
    # Kernels count as part of the operation that launched them.
    rows = [row for row in averages if row.device_type == DeviceType.CPU and not row.key.startswith(MARK)]
    total = sum(getattr(row, name) for row in rows)
    rows.sort(key=lambda row: getattr(row, name), reverse=True)
    return [
        {
            "name": row.key,
            **({"shapes": str(row.input_shapes)} if options.by_shape else {}),
            "calls": row.count,
            "milliseconds": round(getattr(row, name) / 1000, 3),
            "share": round(getattr(row, name) / total, 4),
        }
        for row in rows[: options.top]
    ]


def _shares(times: dict[str, float]) -> list[dict[str, Any]]:
    total = sum(times.values())
    ranked = sorted(times.items(), key=lambda pair: pair[1], reverse=True)
    return [{"name": n, "milliseconds": round(t / 1000, 3), "share": round(t / total, 4)} for n, t in ranked]


def body(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page."""
    time = f"own {'device' if record['device_time'] else 'CPU'} ms"
    stages = ([row["name"], f"{row['milliseconds']:,.1f}", f"{row['share']:.1%}"] for row in record["stages"])
    operations = (
        [
            f"`{row['name']} {row['shapes']}`" if "shapes" in row else f"`{row['name']}`",
            f"{row['calls']:,}",
            f"{row['milliseconds']:,.1f}",
            f"{row['share']:.1%}",
        ]
        for row in record["operations"]
    )
    return [
        f"Profiled: {record['what']}.",
        "",
        *markdown(("stage", time, "share"), stages),
        "",
        *markdown(("operation", "calls", time, "share"), operations),
    ]


command = program("profile", "Where the time goes", ProfileOptions, measure, body)

if __name__ == "__main__":
    run(command)
