"""Plants the faults of `tests/planted_faults.yaml`, one after another: what a thinner suite is measured by.

    python -m tests.planted_faults                             # all of them, by the tests that the table names
    python -m tests.planted_faults ties stale-scores           # these alone
    python -m tests.planted_faults --tests tests/core          # by other tests
    python -m tests.planted_faults --write                     # and note what catches them in planted_faults.json

A fault is planted in a copy of the tree, by a text that occurs in its file exactly once: where code has moved, the
fault has to move with it, and `tests/test_planted_faults.py` says so.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
CAUGHT = ROOT / "tests" / "planted_faults.json"
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")


class Fault(NamedTuple):
    """A change of one file, what goes wrong in public then, and the test files that are to catch it."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: str


_TABLE = yaml.safe_load(CAUGHT.with_suffix(".yaml").read_text(encoding="utf-8"))
FAULTS = tuple(Fault(name, **change) for name, change in _TABLE.items())


def plant(fault: Fault, tree: Path) -> None:
    """Change one text of a tree.

    Raises:
        ValueError: If the file does not hold the old text exactly once.
    """
    file = tree / fault.file
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.name}: {fault.file} holds {fault.old!r} {count} times; mend the table")
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def caught_by(fault: Fault, tests: list[str], options: list[str]) -> tuple[list[str], float, str]:
    """Return the tests that fail with a fault in a copy of the tree, the seconds that took, and what they printed."""
    with tempfile.TemporaryDirectory() as folder:
        tree, log = Path(folder) / "tree", Path(folder) / "log"
        shutil.copytree(ROOT, tree, ignore=_LEFT_OUT, symlinks=True)
        plant(fault, tree)
        line = ["-n", "0", "-p", "no:cacheprovider", "-m", "not long", "--tb=line", *options, *tests]
        began = time.monotonic()
        # A fork of this process has torch and transformers, which take most of the time, and none of the package.
        run = multiprocessing.get_context("fork").Process(target=_run, args=(tree, log, line))
        run.start()
        run.join()
        out = log.read_text(encoding="utf-8", errors="replace")
    found = re.findall(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", out, re.MULTILINE)
    return list(dict.fromkeys(found)), time.monotonic() - began, out


def _run(tree: Path, log: Path, line: list[str]) -> None:
    """Run tests in a tree, in a process of its own."""
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "tests"))]
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        os._exit(pytest.main(line))


def main() -> int:
    """Plant faults, one after another, and say what catches them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *(fault.name for fault in FAULTS)], metavar="NAME")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="instead of those that the table names")
    parser.add_argument("--all", action="store_true", help="go on after the first test that fails")
    parser.add_argument("--write", action="store_true", help=f"note what caught them in {CAUGHT.name}")
    given = parser.parse_args()
    for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}.items():
        os.environ.setdefault(name, value)
    __import__("transformers.modeling_utils")  # before the forks
    missed = 0
    for fault in FAULTS:
        if given.names and fault.name not in given.names:
            continue
        tests, seconds, out = caught_by(fault, given.tests or fault.tests.split(), [] if given.all else ["-x"])
        missed += not tests
        said = f"caught by {tests[0]}" if tests else f"NOT CAUGHT\n{out[-600:]}"
        sys.stdout.write(f"{fault.name}: {said} ({seconds:.0f} s)\n")
        sys.stdout.flush()
        if given.write and tests:
            noted = (json.loads(CAUGHT.read_text()) if CAUGHT.is_file() else {}) | {fault.name: tests}
            CAUGHT.write_text(json.dumps(dict(sorted(noted.items())), indent=1) + "\n")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
