"""Every command answers every command line and recipe: 0, 1 or 2, one line that names it, and nothing left behind."""

from __future__ import annotations

import io
import json
import resource
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locret.__main__ import COMMANDS
from locret.cli import command as cli

TINY = {"model": "checkpoints/tiny", "heads": "checkpoints/tiny-heads"}
BASES: dict[str, dict[str, Any]] = {
    "infer": {**TINY, "prompt_file": "text.txt", "dry_run": True, "quiet": True},
    "train": {"model": "checkpoints/tiny", "dataset": "rows.json", "output": "out", "dry_run": True},
    "eval": {**TINY, "tasks": "passkey", "methods": "full,locret", "samples": 2, "dry_run": True, "quiet": True},
    "bench": {"shape": "tiny", "methods": "full,locret", "lengths": 512, "dry_run": True, "quiet": True},
    "verify": {**TINY, "dry_run": True, "quiet": True},
    "push": {"heads": "checkpoints/tiny-heads", "repo": "org/name", "dry_run": True},
    "serve": {**TINY, "kv_memory": "2GiB", "dry_run": True, "quiet": True},
    "context read": {**TINY, "prompt_file": "text.txt", "output": "a.ctx", "dry_run": True, "quiet": True},
}
"""A command line of each command that is fine, and ends before anything is loaded or written."""
KEPT = ("dry_run", "help", "print_config", "version", "list")
"""What is not taken away, so that a draw stays a matter of options."""
MEBIBYTES = 512
ODD = st.one_of(
    st.sampled_from(
        [
            *("0", "-1", "1e9", "1e400", "nan", "-inf", "1" + "0" * 18, "9" * 5000, "0x10", "1.5", "", " ", "\t"),
            *("null", "none", "true", "auto", "~", "[]", "[1, 2]", "{}", "{a: 1}", "[", "{", "&a [*a]", "*x", "- 1"),
            *(",", "a,b", "1,,2", "all", "full", "passkey", "x" * 10_000, "数", "\U0001f600", "\udcff"),
            *("a\nb", "a\0b", "%s%n", "--", "-", "--model", "../..", "/", "/etc/passwd", ".", "no/such", "a/b"),
            *("!!python/name:os.system", "file.py:Class", "a.b:C", "snapkv", "2GiB", "-5GB", "1e30GiB", "8K,16K"),
        ]
    ),
    st.integers().map(str),
    st.text(max_size=12),
)


@cache
def options_of(name: str) -> tuple[str, ...]:
    """Return the names of a command's options."""
    out, (first, *word) = io.StringIO(), name.split()
    with redirect_stdout(out), pytest.raises(SystemExit):
        import_module(COMMANDS[first][0]).command([*word, "--help", "all"])
    flags = {line.split()[0] for line in out.getvalue().splitlines() if line.startswith("  --")}
    return tuple(sorted(flag[2:].replace("-", "_") for flag in flags))


def call(name: str, arguments: list[str]) -> tuple[Any, str]:
    """Run a command as its script does, and return its code and errors; other exceptions fail the test."""
    err, (first, *word) = io.StringIO(), name.split()
    run = partial(cli.run, import_module(COMMANDS[first][0]).command, prog=f"locret-{name}")
    with redirect_stdout(io.StringIO()), redirect_stderr(err), warnings.catch_warnings():
        end = pytest.raises(SystemExit, run, [*word, *arguments])
    return end.value.code, err.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder where commands run, with a text and rows."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "text.txt").write_text("Snow fell on the long road. " * 100)
    rows = [{"instruction": f"The number of Oslo is {n}. What is it?", "output": f"It is {n}."} for n in range(3)]
    (folder / "rows.json").write_text(json.dumps(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in BASES:  # what is imported and cached counts for no draw
            assert call(name, as_flags(BASES[name]))[0] == 0
        yield folder


def as_flags(options: dict[str, Any]) -> list[str]:
    said = {name: str(value).lower() if value is True else value for name, value in options.items()}
    return [f"--{name.replace('_', '-')}={value}" for name, value in said.items()]


@st.composite
def flags(draw: Any, name: str) -> list[str]:
    """Draw a command line with one to four things that are odd."""
    options = dict(BASES[name])
    changed = st.sampled_from([option for option in options_of(name) if option not in KEPT])
    for _ in range(draw(st.integers(1, 3))):
        options[draw(changed)] = draw(ODD)
    one, odd, member = draw(changed), draw(ODD), draw(st.sampled_from(["budget", "a.b", "."]))
    more = [[], [], [f"--{one}x=1"], [odd], [f"--{one}"], [f"--{one}.{member}={odd}"], ["--config", odd]]
    more, line = draw(st.sampled_from(more)), as_flags(options)
    return [*more, *line] if draw(st.booleans()) else [*line, *more]


@pytest.mark.parametrize("name", BASES)
@given(st.data())
def test_any_command_line_is_answered(name: str, folder: Path, data: st.DataObject) -> None:
    before, held = sorted(folder.rglob("*")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arguments = data.draw(flags(name))
    code, err = call(name, arguments)
    assert code in (0, 1, 2), err
    said = [line for line in err.splitlines() if "warning: " not in line]
    if code:
        assert len(said) == 1, err
        assert said[0].startswith(f"locret-{name}: "), err
        assert len(said[0]) < 3000
    assert sorted(folder.rglob("*")) == before, "something was left behind"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held
    assert grown < MEBIBYTES * 1024, f"{grown / 1024:,.0f} MiB more, for {arguments}"
