"""What the engine computes, recorded before its house is rebuilt, and compared with what it computes afterwards.

    python -m tests.baseline record FOLDER
    python -m tests.baseline check FOLDER            # bit for bit, on the machine that recorded
    python -m tests.baseline check FOLDER --close    # with a tolerance, where other kernels compute

Of every case of `tests/baseline_cases.py`: what stays in each layer and KV head with its scores, the logits and ids of
the answer, and the tensors of the file that the cache is saved in. A record is two files: plain data, and numbers.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.baseline_cases import CASES, RECORD, Found, computed, jobs

TOLERANCE = 1e-4
"""Of the largest number of a tensor, with --close."""


def record(folder: Path) -> None:
    """Write what all cases come to: tensors, flat, in one file, and everything else in another."""
    plain: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "cases": {}}
    numbers: dict[str, Tensor] = {}
    for name, make in jobs():
        held = plain["cases"][name] = {}
        for what, value in computed(make).items():
            parts = [value] if isinstance(value, Tensor) else value
            if not (isinstance(parts, list) and parts and all(isinstance(part, Tensor) for part in parts)):
                held[what] = value
                continue
            held[what] = {"shapes": [list(part.shape) for part in parts]}
            flat = torch.cat([part.flatten() for part in parts])
            numbers[f"{name}/{what}"] = flat.float() if flat.is_floating_point() else flat.to(torch.int16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(numbers, folder / "numbers.safetensors")
    lines = [
        f"  {json.dumps(name)}: {json.dumps(held, ensure_ascii=False)}" for name, held in plain.pop("cases").items()
    ]
    text = f'{json.dumps(plain)[:-1]}, "cases": {{\n' + ",\n".join(lines) + "\n}}\n"
    (folder / "record.json").write_text(text, encoding="utf-8")


def differences(folder: Path, close: bool = False, only: Sequence[str] = ()) -> Iterator[tuple[str, str | None]]:
    """Yield every case that was recorded and can be computed here, and what differs first, if anything does."""
    plain, numbers = json.loads((folder / "record.json").read_text("utf-8")), load_file(folder / "numbers.safetensors")
    for name, make in jobs():
        if name in plain["cases"] and (not only or name in only):
            rough = CASES[name].rough if name in CASES else 1.0
            own = {key.removeprefix(f"{name}/"): held for key, held in numbers.items() if key.startswith(f"{name}/")}
            try:
                now = computed(make)
            except Exception as error:  # whatever a change has broken; the other cases say more
                yield name, f"stops with {type(error).__name__}: {error}"
                continue
            yield name, difference(plain["cases"][name], own, now, TOLERANCE * rough if close else 0.0)


def difference(before: Found, numbers: dict[str, Tensor], now: Found, tolerance: float) -> str | None:
    """Say what of a case differs first; within a tolerance nothing does where a near tie fell otherwise."""
    if before.keys() != now.keys():
        return f"recorded are {', '.join(before)}; computed {', '.join(now)}"
    was = {what: _parts(flat, before[what]["shapes"]) for what, flat in numbers.items()}
    for what, value in now.items():
        if what in was:
            parts = value if isinstance(value, list) else [value]
            if (shapes := [list(part.shape) for part in parts]) != before[what]["shapes"]:
                return f"{what}: of shapes {before[what]['shapes']} when recorded, {shapes} now"
            for nth, (one, other) in enumerate(zip(was[what], parts, strict=True)):
                if text := _apart(one, other, tolerance):
                    if tolerance and what.endswith("positions"):
                        scores = what.replace("positions", "scores")
                        if _tied(was[what], was[scores], parts, now[scores], tolerance):
                            return None
                    return f"{what}: {f'{nth + 1} of {len(parts)} tensors, ' if len(parts) > 1 else ''}{text}"
        elif tolerance and what.endswith("file"):
            forms = [{name: text.rpartition(" ")[0] for name, text in held.items()} for held in (before[what], value)]
            if forms[0] != forms[1]:
                return f"{what}: {_first(*forms)}"
        elif not (tolerance and what.endswith("whole")) and json.loads(json.dumps(value)) != before[what]:
            return f"{what}: {_first(before[what], value)}"
    return None


def _parts(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    sizes = [int(torch.tensor(shape).prod()) for shape in shapes]
    return [part.view(*shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _apart(before: Tensor, now: Tensor, tolerance: float) -> str | None:
    """Say where two tensors differ first, by more than a share of their largest number."""
    now = now.to(before.dtype)
    finite = before[before.isfinite()].abs().double()
    most = tolerance * max(1.0, float(finite.max()) if finite.numel() else 0.0)
    same = (before == now) | (before.isnan() & now.isnan())
    if before.is_floating_point() and tolerance:
        same |= (before - now).abs() <= most
    if same.all():
        return None
    where, apart = (~same).nonzero()[0].tolist(), (before.double() - now.double()).abs()
    return (
        f"{where}: {before[tuple(where)].item()} when recorded, {now[tuple(where)].item()} now "
        f"({int((~same).sum())} of {same.numel()} differ, by {float(apart[~same].max()):.3g} at most)"
    )


def _tied(
    before: list[Tensor], scores_before: list[Tensor], now: list[Tensor], scores_now: list[Tensor], tolerance: float
) -> bool:
    """Return whether units that stay instead of others have, but for rounding, the scores of those."""
    rows = zip(
        *([row for held in kind for row in held.flatten(0, -2)] for kind in (before, scores_before, now, scores_now)),
        strict=True,
    )
    for was, was_scores, here, here_scores in rows:
        lost, gained = was_scores[~torch.isin(was, here)], here_scores[~torch.isin(here.to(was.dtype), was)]
        if len(lost) != len(gained) or _apart(lost.sort().values, gained.float().sort().values, tolerance):
            return False
    return True


def _first(before: Any, now: Any) -> str:
    """Say where two pieces of plain data differ first."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                return f"{name}: {_first(before.get(name, 'nothing'), now.get(name, 'nothing'))}"
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for nth, (one, other) in enumerate(zip(before, now, strict=True)):
            if one != other:
                return f"[{nth}] {_first(one, other)}"
    return f"{before} when recorded, {now} now"


def main() -> int:
    """Record, or check and say what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("folder", type=Path, nargs="?", default=RECORD)
    parser.add_argument("--close", action="store_true", help="with a tolerance, for another machine's kernels")
    parser.add_argument("--only", nargs="*", default=[], metavar="CASE", help="check these cases alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    if given.what == "record":
        record(given.folder)
        return 0
    count = different = 0
    for name, text in differences(given.folder, given.close, given.only):
        count, different = count + 1, different + (text is not None)
        if text is not None:
            sys.stdout.write(f"{name}: {text}\n")
    sys.stdout.write(f"{different} of {count} cases differ\n")
    return int(different > 0)


def quiet() -> None:
    """Let libraries say nothing beside what differs."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
