"""Where the time goes: a profile of reading a prompt, of generating, or of a training step, by stage and by operation.

    python -m locret.infer.speed.lab.profile --what prefill --output infer/speed/records/profile_prefill_cpu
    python -m locret.infer.speed.lab.profile --what training --trace step.json      # open it in ui.perfetto.dev

Everything runs once to warm up and once under torch.profiler. Times are a thing's own, without what it calls; on a GPU
they are the device's. A profiled run is slower than a plain one: shares are what a profile is good for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from locret.cli import parse_options, run
from locret.infer.speed.allocations import silent
from locret.infer.speed.lab.stages import MARK, by_stage, marked_stages
from locret.infer.speed.lab.training_cost import plan_of, where_taken
from locret.infer.speed.lab.training_setup import training_setup
from locret.infer.speed.machine import now
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.runs import Setup, make_setup, new_run
from locret.infer.speed.side_by_side import write
from locret.tables import markdown


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What is profiled."""

    what: Literal["prefill", "decode", "training"] = "prefill"
    """prefill (reading a prompt), decode (generating after it) or training (one optimizer step)."""
    method: str = "locret"
    """For prefill and decode: full, floor, locret or a scorer, as for locret-bench."""
    shape: str = "cpu-512"
    """Backbone of random weights: cpu-512, cpu-deep, tiny, llama-3.1-8b, phi-3-mini-128k or qwen3-8b."""
    model: str | None = None
    """Instead of --shape: folder of a backbone, or its Hub id."""
    hidden_dim: int | None = None
    """Width between a fresh head's two layers, d_R; the shape's if not given."""
    tokens: int = 4096
    """Prompt tokens."""
    answer_tokens: int = 64
    """For training: answer tokens of the row. For decode: tokens generated."""
    budget: int | None = None
    """Cache units kept per KV head; the shape's if not given, as the next three."""
    chunk_size: int | None = None
    """Prompt tokens per forward pass."""
    stabilizers: int | None = None
    """Newest units kept after every chunk but the last."""
    local_len: int | None = None
    """Last tokens, never evicted."""
    top: int = 15
    """Operations to list."""
    by_shape: bool = False
    """Tell operations on tensors of different shapes apart."""
    trace: str | None = None
    """Write a Chrome trace to this file."""
    threads: int | None = None
    """CPU threads; as many as PyTorch takes if not given."""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes the first CUDA device, else the CPU (for the larger shapes: nothing)."""
    dtype: str = "auto"
    """bfloat16, float16 or float32; auto takes the backbone's own on a GPU and what suits the CPU there."""
    output: str | None = None
    """Write the profile to this path, once as .json and once as .md."""

    def __post_init__(self) -> None:
        for name in ("tokens", "answer_tokens", "top"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} is too small; give 1 or more")
        if self.trace is not None and not Path(self.trace).absolute().parent.is_dir():
            raise ValueError(f"--trace {self.trace}: there is no folder {Path(self.trace).parent}; make it first")


def measure(options: ProfileOptions, chosen: set[str]) -> dict[str, Any]:
    """Return the profile: milliseconds and shares by stage and by operation, and where it was taken.

    Raises:
        ValueError: For anything that cannot be measured as asked.
        OSError: If a Hub refuses or cannot be reached, or the trace cannot be written.
    """
    trains = options.what == "training"
    numbers = {name: getattr(options, name) for name in ("budget", "chunk_size", "stabilizers", "local_len")}
    length = options.tokens + (options.answer_tokens if trains else 0)
    method = "locret" if trains else options.method
    plan = plan_of(options, chosen, method, length, new_tokens=options.answer_tokens, **numbers)
    resolved = {name: getattr(plan.policy, name) for name in numbers}
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
        "where": where_taken(replace(options, **resolved), plan, setup.model),
    }


def _sides(options: ProfileOptions, setup: Setup, plan: BenchPlan) -> Callable[[], Callable[[], object]]:
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


def to_markdown(record: dict[str, Any]) -> str:
    """Return the profile as a page for people."""
    side = "device" if record["device_time"] else "CPU"
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
    lines = [f"# Where the time goes: {record['what']}", ""]
    lines += [*markdown(("stage", f"own {side} ms", "share"), stages), ""]
    lines += markdown(("operation", "calls", f"own {side} ms", "share"), operations)
    place = record["where"]
    flags = " ".join(
        f"--{name.replace('_', '-')} {value}"
        for name, value in place["options"].items()
        if value is not None and name not in ("output", "trace")
    )
    versions = f"Commit {place['commit']}, torch {place['torch']}, transformers {place['transformers']}"
    lines += ["", f"`python -m locret.infer.speed.lab.profile {flags}`", "", f"{versions}, {place['device']}.", ""]
    return "\n".join(lines)


def command(argv: Sequence[str] | None = None) -> int:
    """Profile, print, and write the record if asked to."""
    (options,), chosen = parse_options("profile", "Profile reading, generating or training.", [ProfileOptions], argv)
    record = measure(options, chosen)
    write(record, to_markdown(record), options.output)
    return 0


if __name__ == "__main__":
    run(command)
