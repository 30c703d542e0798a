"""Runs the units of `--suite world`, each an evaluation in a process of its own, as many at once as there are cores.

A unit is what `locret-eval --config OUTPUT/NAME.yaml --output OUTPUT/NAME` runs, by hand as well. What was interrupted
goes on with --resume, unit by unit and answer by answer.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml
from tqdm.auto import tqdm

from locret import loading, pictures
from locret.distributed.ranks import Ranks
from locret.files import locked, visible, write_text
from locret.infer.evaluation import capacity, methods, output_folder, presses
from locret.infer.evaluation import job as jobs
from locret.infer.evaluation.eval_options import BudgetOptions, EvalOptions, ReportOptions, words
from locret.infer.evaluation.job import Job
from locret.infer.evaluation.protocols import AWARE
from locret.infer.evaluation.records import SAMPLES
from locret.infer.evaluation.world import estimate, page, plan, record
from locret.infer.evaluation.world.plan import Asked, Unit
from locret.infer.infer_options import ModelOptions
from locret.infer.speed.estimate import spoken

TIMES = "seconds.json"
_MODULE = "locret.infer.evaluation.{}"
_TEXTS = ("seed", "samples", "questions", "lengths", "tasks")
"""Options that say which texts a unit reads, and what is asked of them."""
_LOOK, _SAVE = 0.5, 15.0
"""Seconds between two looks at what the units have written, and between two records of the time they took."""


@dataclass
class World:
    """A run of the suite, resolved and checked."""

    model: ModelOptions
    evaluation: EvalOptions
    budgets: BudgetOptions
    report: ReportOptions
    chosen: set[str]
    processes: Ranks
    asked: Asked
    units: list[Unit]
    missing: dict[str, str]
    tokenizer: Any
    jobs: dict[str, Job] = field(default_factory=dict)
    """By unit; those of a part that waits for another with methods that stand for its own."""
    whole: dict[str, Job] = field(default_factory=dict)
    """By what they read, the first of the jobs, with tasks that are left out since."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Tasks that cannot be made at a length, and why."""
    out: set[str] = field(default_factory=set)
    """Their names."""

    @property
    def output(self) -> Path:
        """The folder of the suite."""
        return Path(self.report.output)

    @property
    def workers(self) -> int:
        """Units side by side, each on one core."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.report.threads or cores

    def job(self, unit: Unit) -> Job:
        """Return the unit's job, checked; tasks that cannot be made at a length go on record in `left_out`.

        Raises:
            ValueError: For anything the user must change.
        """
        known = {one.name for one in fields(EvalOptions)}
        own = {name: value for name, value in unit.options.items() if name in known and name != "tasks"}
        own = {"kvpress_python": None, "questions": None, "batch_size": 1, **own, "parts": "all", "seeds": None}
        numbers = {name: value for name, value in unit.options.items() if name not in known}
        going = bool(visible(self.output / unit.name))
        report = replace(
            self.report,
            output=str(self.output / unit.name),
            threads=0,
            figures="none",
            resume=going,
            overwrite=False,
            dry_run=True,  # what the folder holds is looked at when it is known which tasks are left out
        )
        made = jobs.prepare(
            self.model,
            replace(self.evaluation, **own),
            replace(self.budgets, **numbers),
            report,
            (self.chosen - {"parts", "seeds"}) | unit.options.keys() - {"tasks", "lengths"},
            self.processes,
        )
        texts = json.dumps([unit.options.get(name) for name in _TEXTS])
        try:
            made.check(self.tokenizer, self.whole.get(texts))
        except ValueError as error:
            if unit.part.protocol == AWARE and str(error).startswith("--protect"):
                raise ValueError(
                    f"{error}; --suite world protects every question that is known: raise the first of --budget, or "
                    "give --protocol agnostic"
                ) from error
            if "questions" not in self.chosen and str(error).startswith("--questions"):
                raise ValueError(
                    f"--lengths {self.evaluation.lengths} has no room for tasks with several questions of a text, "
                    f"which part {unit.part.name} asks; raise the shortest"
                ) from error
            raise
        self.whole.setdefault(texts, replace(made))
        self.left_out |= {f"{one.task} @ {one.tokens}": one.reason for one in made.unmade}
        self.out |= {one.task for one in made.unmade}
        return made

    def leave_out(self, job: Job) -> None:
        """Take tasks from a job that some unit cannot make at some length: means are of the same tasks everywhere.

        Raises:
            ValueError: If none is left.
        """
        job.cases = [case for case in job.cases if case.task.name not in self.out]
        job.selections = [one for one in job.selections if one.task.name not in self.out]
        if not job.cases:
            name, reason = next(iter(self.left_out.items()))
            raise ValueError(f"no task can be made at all of --lengths, {name} for one ({reason}); raise the shortest")

    def check_folder(self, unit: Unit, job: Job) -> None:
        """Refuse a unit's folder that holds something else.

        Raises:
            ValueError: Saying what is different.
        """
        if not (self.report.dry_run or self.report.overwrite):
            folder = self.output / unit.name
            output_folder.check_output(str(folder), job.settings(), resume=bool(visible(folder)), overwrite=False)


def prepare(
    model: ModelOptions,
    evaluation: EvalOptions,
    budgets: BudgetOptions,
    report: ReportOptions,
    chosen: set[str],
    processes: Ranks,
) -> World:
    """Resolve the options, make every text once, and refuse what cannot be run.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub or a disk fails.
    """
    if processes.size > 1:
        raise ValueError("--suite world runs processes of its own; start it once, without torchrun")
    for name, given in (("tiers", report.tiers), ("published", evaluation.published)):
        if given:
            raise ValueError(f"--{name} changes nothing in --suite world, which draws a page of its own; drop it")
    evaluation = replace(evaluation, heads=loading.chosen_heads(evaluation.heads, model.model))
    asked = plan.asked(evaluation, budgets, chosen)
    units, missing = plan.units(asked)
    if not units:
        named = [
            part for part in plan.PARTS if evaluation.parts == "all" or part.name in words(evaluation.parts, "--parts")
        ]
        out = f"--protocol {evaluation.protocol} leaves it out"
        reasons = {missing[part.name] if part in asked.parts else out: part.name for part in reversed(named)}
        why = "; ".join(f"{name}: {reason}" for reason, name in reversed(reasons.items()))
        raise ValueError(f"--parts {evaluation.parts} leaves nothing to ask ({why}); name other parts or methods")
    name = f"runs/{Path(model.model).name or 'backbone'}-world"
    report = report if report.output else replace(report, output=name)
    if report.figures == "all" and not pictures.can_draw("--figures all"):
        report = replace(report, figures="none")
    world = World(
        model, evaluation, budgets, report, chosen, processes, asked, units, missing, loading.load_tokenizer(model)
    )
    if not report.dry_run:
        _check_output(world)
    plan.check_heard(evaluation, units, chosen)
    if pressing := [name for unit in units if unit.part.presses for name in unit.options["methods"]]:
        presses.check([methods.get(name) for name in pressing], evaluation.kvpress_python, model)
    waiting = {unit.part.after for unit in units if unit.part.after and not asked.own_choice}
    for part in waiting - {unit.part.name for unit in units}:
        raise ValueError(f"--parts best_{part} asks the best of {part}; add {part}, or name them in --methods")
    with _once_each():
        grids = [unit for unit in units if not unit.part.capacity]
        for unit in tqdm(grids, "making texts", unit="unit", disable=True if report.quiet else None):
            world.jobs[unit.name] = world.job(unit)
        for unit in grids:
            world.leave_out(world.jobs[unit.name])
            if asked.own_choice or not unit.part.after:  # else its methods are not known yet
                world.check_folder(unit, world.jobs[unit.name])
        for unit in units:
            if unit.part.capacity:
                _check_capacity(world, unit)
    return world


def _check_capacity(world: World, unit: Unit) -> None:
    """Refuse what the command of that part would refuse.

    Raises:
        ValueError: In its words.
    """
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        write_text(recipe, _recipe(world, unit))
        # What --overwrite is going to remove is nothing to refuse.
        output = Path(folder) / "new" if world.report.overwrite or world.report.dry_run else world.output / unit.name
        try:
            capacity.check(["--config", str(recipe), "--output", str(output), "--quiet"])
        except ValueError as error:
            raise ValueError(f"--parts {unit.part.name}: {error}") from error


def _recipe(world: World, unit: Unit) -> str:
    """Return what a unit's command is given."""
    options = {**_of_model(world), **unit.options}
    if unit.part.capacity:
        options.pop("task_options", None)  # of other tasks than its own
    else:
        options["tasks"] = [one.task.name for one in world.jobs[unit.name].selections]
    return yaml.safe_dump({**options, "threads": 1, "figures": "none"}, sort_keys=False)


@contextmanager
def _once_each() -> Iterator[None]:
    """Show what the units warn of once, not once per unit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for message in dict.fromkeys(str(one.message) for one in caught):
        warnings.warn(message, stacklevel=2)


def _check_output(world: World) -> None:
    """Refuse a folder that holds something else, or a run that is not to go on."""
    output, report = world.output, world.report
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file; name a folder")
    if not visible(output):
        return
    if not (output / TIMES).is_file():
        raise ValueError(f"--output {output} holds something else than --suite world; choose another folder")
    if not (report.resume or report.overwrite):
        raise ValueError(f"--output {output} holds this suite already; --resume goes on, --overwrite starts again")
    if report.resume and (others := _other_units(world)):
        seeds = {f"{unit.part.name}-{unit.seed}" for unit in world.units}
        if divided := [name for name in others if name.partition(".")[0] in seeds]:
            raise ValueError(
                f"--output {output} holds {', '.join(divided)}, and the methods that are asked now are shared out over "
                "other units; name those that it was begun with, choose another folder, or --overwrite"
            )
        raise ValueError(
            f"--output {output} holds {', '.join(others)} too, which would be lost to its record; name their parts in "
            "--parts (and --protocol, --seeds), choose another folder, or --overwrite"
        )


def _other_units(world: World) -> list[str]:
    """Return the folders of units that this run does not ask."""
    named = "|".join(part.name for part in plan.PARTS)
    found = {name for name in visible(world.output) if re.fullmatch(rf"({named})-(-?\d+)(\.\d+)?", name)}
    return sorted(found - {unit.name for unit in world.units})


def described(world: World) -> dict[str, Any]:
    """Return what would be done, with an estimate of the time."""
    operations = estimate.rate()
    found: list[dict[str, Any]] = []
    for unit in world.units:
        if unit.part.capacity:
            found.append(
                {"unit": unit.name, **estimate.of_capacity(unit, loading.load_config(world.model), operations)}
            )
            continue
        job = world.jobs[unit.name]
        seconds = estimate.seconds(job, operations)
        found.append(
            {
                "unit": unit.name,
                "protocol": unit.part.protocol,
                "methods": len(job.runs),
                "texts": len({(case.text, case.index) for case in job.cases}),
                "answers": len(job.cases) * len(job.runs),
                "seconds": round(seconds, 1),
            }
        )
    total, workers = sum(one["seconds"] for one in found), min(world.workers, len(found))
    wall = max(total / workers, *(one["seconds"] for one in found))
    return {
        "units": found,
        "answers": sum(one["answers"] for one in found),
        "core_seconds": round(total, 1),
        "workers": workers,
        "estimate": f"about {spoken(wall)} on {workers} {'cores' if workers > 1 else 'core'}",
        "tasks": sorted({case.task.name for job in world.jobs.values() for case in job.cases}),
        "missing": world.missing,
        "left_out": world.left_out,
        "output": str(world.output),
    }


def run(world: World) -> dict[str, Any]:
    """Run what is missing, and return the record, which is on disk then, with its page.

    Raises:
        ValueError: If a unit refuses something.
        OSError: If a disk fails, or a unit ends otherwise.
    """
    with locked(world.output, f"--output {world.output}"):
        if world.report.overwrite:
            _clear(world)
        _Runner(world).run()
        return write(world)


def _clear(world: World) -> None:
    import shutil

    for name in visible(world.output):
        path = world.output / name
        if not re.fullmatch(rf"({'|'.join(part.name for part in plan.PARTS)})-(-?\d+)(\.\d+)?(\.yaml|\.log)?", name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for name in (TIMES, record.RECORD, *page.FILES):
        (world.output / name).unlink(missing_ok=True)


class _Runner:
    """Keeps as many units running as there are cores."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.running: dict[str, tuple[subprocess.Popen[bytes], float, int]] = {}
        """The process, when it began, and the answers that were there."""
        self.seconds, self.saved = _times(world.output), 0.0
        self.finished: set[str] = set()
        self.counted: dict[Path, tuple[int, int]] = {}
        """Of each file of answers, the bytes that have been looked at and the lines in them."""

    def run(self) -> None:
        """Run all units.

        Raises:
            ValueError: If one refuses something.
            OSError: If one ends otherwise.
        """
        world, waiting = self.world, list(self.world.units)
        self._save()
        with self._bar() as bar:
            try:
                while waiting or self.running:
                    for unit in list(waiting):
                        if len(self.running) < world.workers and self._ready(unit):
                            waiting.remove(unit)
                            self._start(unit)
                    time.sleep(_LOOK)
                    bar.n = min(bar.total, self._answers())
                    bar.refresh()
                    self._collect()
                    if time.perf_counter() - self.saved > _SAVE:
                        self._save()
            except BaseException as error:
                if not isinstance(error, Exception):  # an interrupt; a unit that failed says so itself
                    sys.stderr.write(f"the answers are in {world.output}; the same command with --resume goes on\n")
                raise
            finally:
                self._end_all()

    def _bar(self) -> Any:
        world = self.world
        total = sum(len(job.cases) * len(job.runs) for job in world.jobs.values())
        return tqdm(total=total, initial=self._answers(), unit="answer", disable=True if world.report.quiet else None)

    def _answers(self) -> int:
        return sum(self._answers_of(unit.name) for unit in self.world.units if not unit.part.capacity)

    def _answers_of(self, name: str) -> int:
        return sum(map(self._lines_of, (self.world.output / name).rglob(SAMPLES)))

    def _lines_of(self, path: Path) -> int:
        """Return the lines of a file that grows, of which only what is new is read."""
        seen, lines = self.counted.get(path, (0, 0))
        if path.stat().st_size < seen:  # written anew, in the order of the plan
            seen, lines = 0, 0
        with path.open("rb") as file:
            file.seek(seen)
            new = file.read()
        self.counted[path] = seen + len(new), lines + new.count(b"\n")
        return self.counted[path][1]

    def _ready(self, unit: Unit) -> bool:
        first = [one.name for one in self.world.units if one.part.name == unit.part.after]
        return all(name in self.finished for name in first)

    def _start(self, unit: Unit) -> None:
        world = self.world
        if unit.part.after and not world.asked.own_choice:
            unit = _of_the_best(world, unit)
        recipe = world.output / f"{unit.name}.yaml"
        write_text(recipe, _recipe(world, unit))
        folder = world.output / unit.name
        going = ["--resume"] if visible(folder) and not unit.part.capacity else []
        module = _MODULE.format("capacity" if unit.part.capacity else "command")
        log = (world.output / f"{unit.name}.log").open("wb")
        command = [sys.executable, "-m", module, "--config", str(recipe), "--output", str(folder), "--quiet", *going]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        self.running[unit.name] = process, time.perf_counter(), self._answers_of(unit.name)

    def _collect(self) -> None:
        for name, (process, start, answers) in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[name]
            self._took(name, start, answers)
            if process.returncode:
                raise _failure(self.world.output / f"{name}.log", name, process.returncode)
            self.finished.add(name)

    def _end_all(self) -> None:
        """End what still runs; it leaves its answers on disk, and the time it took."""
        for process, *_ in self.running.values():
            with suppress(ProcessLookupError):
                process.terminate()  # not SIGINT, which what a shell starts in the background ignores
        for name, (process, start, answers) in list(self.running.items()):
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            del self.running[name]
            self._took(name, start, answers)

    def _took(self, name: str, start: float, answers: int) -> None:
        """Count the time of a unit, unless all of its answers were there."""
        if name in self.seconds and self._answers_of(name) == answers:
            return
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 1)
        self._save()

    def _save(self) -> None:
        """Write the times, those of units that still run included: a run that is killed leaves them."""
        self.saved = time.perf_counter()
        so_far = {
            name: self.seconds.get(name, 0.0) + self.saved - start for name, (_, start, _) in self.running.items()
        }
        found = {**self.seconds, **{name: round(seconds, 1) for name, seconds in so_far.items()}}
        write_text(self.world.output / TIMES, json.dumps(found) + "\n")


def _times(output: Path) -> dict[str, float]:
    path = output / TIMES
    try:
        found = {str(name): float(value) for name, value in json.loads(path.read_text(encoding="utf-8")).items()}
        if not all(0 <= value < math.inf for value in found.values()):
            raise ValueError
        return found
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"{path} is broken; write {{}} into it to go on without times, or --overwrite") from None


def _failure(log: Path, name: str, code: int) -> Exception:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = lines[-1].removeprefix("locret-eval: ") if lines else "nothing"
    said = f"unit {name} ended with code {code}: {last} (all of it: {log})"
    return ValueError(said) if code == 2 else OSError(f"{said}; --resume goes on")


def _of_the_best(world: World, unit: Unit) -> Unit:
    """Return a unit with the best of the part it waited for, and put its job in the place of the earlier one."""
    before = [one for one in world.units if one.part.name == unit.part.after]
    found = [answer for one in before for answer in record.answers_of(world.output, one)]
    unit = replace(unit, options={**unit.options, "methods": record.best(found, plan.BEST)})
    world.units[:] = [unit if one.name == unit.name else one for one in world.units]
    with _once_each():
        job = world.job(unit)
    world.leave_out(job)
    world.check_folder(unit, job)
    world.jobs[unit.name] = job
    return unit


def _of_model(world: World) -> dict[str, Any]:
    """Return what a recipe says of the backbone and the heads: what is not the default."""
    own = {one.name: getattr(world.model, one.name) for one in fields(world.model)}
    given = {name: value for name, value in own.items() if value != _default(ModelOptions, name)}
    more = ("heads", "allow_other_base", "task_options", "max_new_tokens")
    return given | {name: value for name in more if (value := getattr(world.evaluation, name))}


def _default(kind: Any, name: str) -> Any:
    return next(one.default for one in fields(kind) if one.name == name)


def write(world: World) -> dict[str, Any]:
    """Write the record and its page from what the units have found, and return the record.

    Raises:
        ValueError: If a unit's record is damaged.
        OSError: If a file cannot be written.
    """
    facts = {"seconds": _times(world.output), "left_out": world.left_out}
    pairs = [(unit, world.jobs[unit.name]) for unit in world.units if unit.part.name.startswith("field")]
    chance = record.chance_of(pairs, world.output, world.tokenizer)
    found = record.compiled(world.output, world.units, world.missing, facts, chance)
    record.save(found, world.output / record.RECORD)
    page.write(found, world.output, figures=world.report.figures == "all")
    return found
