"""Ours and others on the same backbone and prompt, in turns: one process per side, only one of which works at a time.

Before anything is timed, all sides must compute the same logits. Then one round counts bytes and warms up, and the
timed rounds run every method of every side once, one after the other, so that a machine whose speed drifts slows all
alike; ratios are taken within a round.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from locret.infer.speed.peers.backbone_files import PROMPT, write_files
from locret.infer.speed.peers.environments import advice, find_pythons
from locret.infer.speed.peers.process import SideFailed, SideProcess
from locret.infer.speed.peers.tasks import BASELINE, OURS, Row, job, rows
from locret.infer.speed.side_by_side import quantiles

if TYPE_CHECKING:
    from locret.infer.speed.plan import BenchPlan

_GATE_TOKENS = 512
_TOLERANCE = {"float32": 1e-3}
_COARSE = 0.05
"""For shorter dtypes: largest difference of two sides' logits, over their standard deviation."""


def compare(plan: BenchPlan, pythons: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run ours and every peer of a plan, and return versions and one row per side, method and length.

    Args:
        plan: What every side does; its device must be there, and free of other models.
        pythons: The interpreter of each peer's environment; `transformers` may be missing and is then run by ours.

    Returns:
        Plain data. Rows hold p20, p50 and p80 of seconds (to the first token, of a later token, end to end), peak bytes
        beyond the weights and all else that a process held before, and the ratio of each to our retaining heads', round
        by round; or the error that they ended with.

    Raises:
        ValueError: For a peer without an environment, one that cannot load the backbone, or one that computes other
            logits than ours.
        OSError: If the temporary folder cannot take the weights.
    """
    programs = {OURS: sys.executable, **find_pythons(plan.peers, pythons or {})}
    with ExitStack() as stack, TemporaryDirectory(prefix="locret-bench-") as folder:
        sides = {
            side: stack.enter_context(SideProcess(side, python, plan.threads, plan.peer_timeout))
            for side, python in programs.items()
        }
        # Environments are looked at before weights are written.
        versions = {side: _first_answer(process) for side, process in sides.items()}
        backbone = write_files(Path(folder), plan)
        _load_all(sides, backbone, str(Path(folder) / PROMPT), plan)
        tasks = rows(plan)
        _count_bytes(sides, tasks.values(), plan)
        _time(sides, tasks.values(), plan)
    for (_, _, tokens), row in tasks.items():
        _summarise(row, tasks[OURS, BASELINE, tokens])
    return {"job": job(plan), "versions": versions, "rows": [*tasks.values()]}


def _first_answer(process: SideProcess) -> dict[str, Any]:
    try:
        return process.ask("hello")
    except SideFailed as error:
        if process.side == OURS:
            raise ValueError(f"{process.python} cannot run this package for a comparison: {error}") from None
        raise ValueError(
            f"--peer-python {process.side}={process.python} cannot run {process.side} ({error}); {advice(process.side)}"
        ) from None


def _load_all(sides: Mapping[str, SideProcess], backbone: str, prompt: str, plan: BenchPlan) -> None:
    """Let every side load the same files, and refuse to compare what computes something else."""
    tokens, logits = min(_GATE_TOKENS, *plan.lengths), {}
    with tqdm(total=len(sides), desc="loading", disable=None) as bar:
        for side, process in sides.items():
            bar.set_postfix_str(side)
            try:
                process.ask("load", backbone=backbone, prompt=prompt, job=job(plan))
                logits[side] = torch.tensor(process.ask("logits", tokens=tokens)["logits"])
            except SideFailed as error:
                raise ValueError(f"--vs {side} cannot load the backbone: {error}") from None
            bar.update()
    check_same(logits, plan.dtype_name, tokens)


def check_same(logits: Mapping[str, Tensor], dtype: str, tokens: int) -> None:
    """Refuse sides whose logits, of the last of a prompt's first tokens, are not ours.

    Raises:
        ValueError: Naming the side, and how far it is.
    """
    for side, theirs in logits.items():
        apart = float((theirs - logits[OURS]).abs().max() / logits[OURS].std())
        if not apart <= _TOLERANCE.get(dtype, _COARSE):
            raise ValueError(
                f"--vs {side} computes another model from the same files: its logits after {tokens} tokens are "
                f"{apart:.3g} standard deviations from ours; use a transformers that reads this configuration"
            )


def _count_bytes(sides: Mapping[str, SideProcess], tasks: Iterable[Row], plan: BenchPlan) -> None:
    # Long enough to evict once, so that all that is set up only once is there.
    enough = plan.policy.budget + plan.policy.chunk_size + plan.policy.local_len
    for row in _shown(tasks, 1, "counting bytes"):
        peaks = _ask(sides[row["side"]], row, "memory", warm_up=min(row["tokens"], enough))
        row["peak_bytes"] = peaks or row["peak_bytes"]


def _time(sides: Mapping[str, SideProcess], tasks: Iterable[Row], plan: BenchPlan) -> None:
    fed = plan.new_tokens - 1
    for row in _shown(tasks, plan.repeats, "measuring"):
        answer = _ask(sides[row["side"]], row, "time")
        if answer is None:
            continue
        row["held"] = answer["held"]
        if row["held"] != row["expected"]:
            row["error"] = f"holds {row['held']} units, not the {row['expected']} that all must hold"
        first, total = answer["first_token"], answer["seconds"]
        row["rounds"].append({"first_token": first, "later": (total - first) / fed if fed else None, "total": total})


def _shown(tasks: Iterable[Row], rounds: int, what: str) -> Iterator[Row]:
    """Yield every row once per round, while a progress bar says which side is running."""
    every = [*tasks] * rounds
    with tqdm(total=len(every), desc=what, disable=None) as bar:
        for row in every:
            bar.set_postfix_str(f"{row['side']} {row['method']}, {row['tokens']:,} tokens")
            yield row
            bar.update()


def _ask(process: SideProcess, row: Row, do: str, **more: Any) -> dict[str, Any] | None:
    """Return an answer, or None where this row has failed, now or before."""
    if row["error"] is None:
        try:
            return process.ask(do, method=row["method"], tokens=row["tokens"], **more)
        except SideFailed as error:
            row["error"] = str(error)
    return None


def _summarise(row: Row, baseline: Row) -> None:
    row["seconds"], row["ratios"] = {}, {}
    if row["error"] is not None:
        return
    for name in ("first_token", "later", "total"):
        values = [one[name] for one in row["rounds"]]
        if None in values:
            continue
        row["seconds"][name] = quantiles(values)
        if baseline["error"] is None:
            pairs = zip(values, baseline["rounds"], strict=True)
            row["ratios"][name] = quantiles([value / one[name] for value, one in pairs])
    for name, peak in row["peak_bytes"].items():
        if peak is not None and baseline["peak_bytes"][name]:
            row["ratios"][name] = round(peak / baseline["peak_bytes"][name], 4)
