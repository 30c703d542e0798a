"""Options: what a command line and a recipe say, and how they are refused."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from locret import __version__
from locret.__main__ import COMMANDS
from locret.cli import help as help_text
from locret.cli.command import parse_options, run
from locret.cli.options import ALIASES, options_of
from locret.infer.context_command import COMMANDS as CONTEXT_COMMANDS
from locret.policy.policy import RetentionPolicy

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Things:
    """What is tried here, and more."""

    model: str
    """The one that must be given."""
    budget: int = 6000
    """Units."""
    memory: str | None = None
    """Bytes instead."""
    rate: float = 0.5
    """A share of 100 % of what there is."""
    size: int | Literal["auto"] = 3
    """A number, or auto."""
    kind: Literal["red", "blue"] = "red"
    """Colour."""
    quiet: bool = False
    """Say nothing."""
    stop: list[str] = field(default_factory=list)
    """Texts."""
    names: str | list[str] = "a,b"
    """Names."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Two numbers."""
    inner: dict[str, Any] = field(default_factory=dict)
    """Anything."""
    policy: RetentionPolicy = field(default_factory=RetentionPolicy)
    """A field with fields."""
    exclusive: ClassVar = (("budget", "memory"),)


def parse(*arguments: str) -> tuple[Things, set[str]]:
    (things,), chosen = parse_options("tool", "Try.", [Things], ["--model", "m", *arguments])
    return things, chosen


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--budget", "5"), {"budget": 5}),
        (("--size", "auto"), {"size": "auto"}),
        (("--quiet",), {"quiet": True}),
        (("--stop", "a", "--stop", "#"), {"stop": ["a", "#"]}),
        (("--names", "a,b"), {"names": "a,b"}),
        (("--names", "a", "--names", "b"), {"names": "b"}),
        (("--betas", "0.8,0.9"), {"betas": (0.8, 0.9)}),
        (("--inner.window", "32", "--inner.deep.er", "x"), {"inner": {"window": 32, "deep": {"er": "x"}}}),
        (("--policy.budget", "64"), {"policy": RetentionPolicy(budget=64)}),
    ],
)
def test_flags_become_values_of_the_fields(arguments: tuple[str, ...], expected: dict[str, Any]) -> None:
    things, chosen = parse(*arguments)
    assert {name: getattr(things, name) for name in expected} == expected
    assert chosen == {"model", *expected}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bugdet", "5"), "--bugdet is unknown; did you mean --budget?"),
        (("--policy.bugdet", "5"), "--policy: 'bugdet' is unknown; did you mean budget?"),
        (("--budget", "1K"), "--budget 1K is not a whole number (write 1024); give one such as 6000"),
        (("--budget", "9" * 30), "is not a whole number of 64 bits"),
        (("--rate", "nan"), "--rate nan is not a finite number; give one such as 0.5"),
        (("--kind", "green"), "--kind green is not one of red, blue"),
        (("--quiet=perhaps",), "--quiet perhaps is not true or false"),
        (("--model", "--x", "--budget", "2"), "--model needs a value before --x"),
        (("--budget", "1", "--cache-budget", "2"), "--budget 1 and --cache-budget 2 set the same; drop one of them"),
        (("--budget",), "--budget needs a value; write --budget VALUE"),
        (("--memory", "2G", "--budget", "2"), "--budget 2 and --memory 2G exclude each other; drop one of them"),
        (("--model", ""), "--model is empty; give a value, or leave it out"),
        (("--model", "\udcff"), r"--model \udcff is not a text in UTF-8"),
        (("--policy.budget", "0"), "--policy: budget=0 is too small"),
    ],
)
def test_a_refusal_is_one_sentence_about_the_flag_as_typed(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=r"(?s).*") as refusal:
        parse(*arguments)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("bugdet: 5", "bugdet in {file} is unknown; did you mean budget?"),
        ("budget: 1\nbudget: 2", "--config {file}: line 2: the key budget stands twice"),
        ("budget: 1\nmax_capacity_prompt: 2", "max_capacity_prompt in {file} sets the same as budget"),
        ("rate: '0.5'", "rate: 0.5 in {file} is not a finite number"),
        ("inner: " + "[" * 5000, "nested too deeply"),
        ("inner: !!python/object/apply:os.system [true]", "line 1"),
        ("policy: {bugdet: 5}", "policy in {file}: 'bugdet' is unknown; did you mean budget?"),
    ],
)
def test_a_recipe_is_refused_by_key_and_file(tmp_path: Path, recipe: str, message: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe)
    with pytest.raises(ValueError, match=r"(?s).*") as refusal:
        parse("--config", str(file))
    assert message.format(file=file) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_flags_override_a_recipe_wherever_they_stand_and_null_unsets_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "budget: 5\nrate: 1e-3\nstop: '#'\nmemory: null\ninner: {a: 1, b: 2}\npolicy: {budget: 9}\nquiet: null\n"
    )
    things, chosen = parse("--rate", "2", "--config", str(file), "--inner.b", "3", "--policy.local-len", "1")
    assert (things.budget, things.rate, things.stop, things.inner) == (5, 2.0, ["#"], {"a": 1, "b": 3})
    assert (things.policy.budget, things.policy.local_len) == (9, 1)
    assert chosen == {"model", "budget", "rate", "stop", "inner", "policy"}
    things, chosen = parse("--config", str(file), "--budget", "null", "--stop", "x", "--inner", "{c: 4}")
    assert (things.budget, things.stop, things.inner) == (6000, ["x"], {"c": 4})
    assert "budget" not in chosen
    things, chosen = parse("--config", str(file), "--memory", "2GiB")
    assert (things.budget, things.memory, "budget" in chosen) == (6000, "2GiB", False), "they exclude each other"


PRINTED = {
    "infer": ["--config", "recipes/infer/llama_3.1_8b.yaml", "--stop", "\n###", "--kv-memory", "2GiB"],
    "chat": ["--model", "checkpoints/tiny"],
    "serve": ["--model", "checkpoints/tiny", "--kv-memory", "1GiB", "--budget", "256"],
    "train": ["--config", "recipes/train/tiny.yaml", "--output", "out", "--betas", "0.8,0.9"],
    "eval": ["--config", "recipes/eval/embedded.yaml", "--output", "out", "--lengths", "512,1024"],
    "verify": ["--model", "checkpoints/tiny", "--only", "budget,bytes", "--tokens", "600"],
    "bench": ["--config", "recipes/bench/cpu_512.yaml", "--lengths", "8K", "16K"],
    "push": ["--heads", "checkpoints/tiny-heads", "--repo", "org/name", "--private"],
    "rows": ["--texts", "recipes", "--output", "rows.jsonl", "--characters", "300-900"],
    "kernels": ["--model=checkpoints/tiny", "--heads=checkpoints/tiny-heads", "--dataset=rows.json", "--output=out"],
    "demo": [],
    "env": [],
    "context read": ["--model", "checkpoints/tiny", "--prompt-file", "book.txt", "--output", "a.ctx"],
    "context show": ["--context", "a.ctx", "b,c.ctx", "--json"],
    "context ask": ["--model", "checkpoints/tiny", "--context", "a.ctx", "--question", "Why, and who?"],
    "context compose": ["--model", "m", "--context", "a.ctx", "b.ctx", "--output", "c.ctx", "--budget", "9"],
    "context shrink": ["--model", "m", "--context", "a.ctx", "--output", "b.ctx", "--budget", "9"],
    "context export": ["--context", "a.ctx", "--to", "llamacpp", "--output", "a.bin", "--json"],
}
EVERY = [*(name for name in COMMANDS if name != "context"), *(f"context {word}" for word in CONTEXT_COMMANDS)]
"""Commands that have options of their own."""


def asked(name: str, *arguments: str) -> tuple[int, str, str]:
    """Return the exit code of a command, and what it prints on both streams."""
    out, err = io.StringIO(), io.StringIO()
    first, *word = name.split()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        run(import_module(COMMANDS[first][0]).command, [*word, *arguments], prog=f"locret {name}")
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


@pytest.mark.parametrize("name", EVERY)
def test_every_command_has_version_help_and_a_recipe_that_is_taken_and_printed_again(name: str, tmp_path: Path) -> None:
    assert asked(name, "--version")[1].endswith(f" {__version__}\n")
    code, text, _ = asked(name, "--help")
    assert code == 0
    assert text.startswith((f"usage: locret {name} ", f"usage: locret-{name} "))
    assert not [line for line in text.splitlines() if line.lstrip().startswith("--") and "_" in line.split()[0]]
    code, recipe, err = asked(name, *PRINTED[name], "--print-config")
    assert code == 0, err
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe)
    assert asked(name, "--config", str(file), "--print-config") == (0, recipe, "")


def test_names_of_other_tools_work_as_flags_and_keys_and_each_is_of_use_to_a_command(tmp_path: Path) -> None:
    things, chosen = parse("--cache_budget", "7")
    assert (things.budget, "budget" in chosen) == (7, True)
    (file := tmp_path / "recipe.yaml").write_text("pretrained: x\ncache_budget: 8\n")
    (things,), _ = parse_options("tool", "Try.", [Things], ["--config", str(file)])
    assert (things.model, things.budget) == ("x", 8)
    shown = " ".join(asked(name, "--help", "all")[1] for name in ("infer", "serve", "train", "eval", "bench", "push"))
    assert not [alias for alias in sum(ALIASES.values(), ()) if "--" + alias.replace("_", "-") not in shown]


@pytest.mark.slow
def test_locret_lists_and_runs_every_command(tmp_path: Path) -> None:
    def call(*given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "locret", *given], capture_output=True, text=True, cwd=ROOT)

    listing = call().stdout
    assert all(f"locret {name} " in listing for name in COMMANDS)
    assert call("--version").stdout == call("infer", "--version").stdout.replace("-infer", "")
    assert call("infr").stderr == "locret: there is no command 'infr'; did you mean infer?\n"
    assert call("compare").stderr.startswith('locret: locret "compare" was retired; release 0.1.0 (git tag lab-frozen)')
    assert call("bench", "--repeets", "1").stderr == "locret bench: --repeets is unknown; did you mean --repeats?\n"
    assert {"locret", "torch", "transformers", "python", "gpus"} <= json.loads(call("env").stdout).keys()
    config = shutil.copytree(ROOT / "checkpoints/tiny", tmp_path / "deeper") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 6}))
    said = call("infer", "--model", str(config.parent), "--scorer", "h2o", "--prompt-file", "README.md").stderr
    assert (said.count("\n"), "weights are missing, such as" in said) == (1, True), said


def test_help_shows_what_is_usual_and_all_of_it_where_that_is_asked() -> None:
    short, whole = (asked("infer", "--help", *more)[1].splitlines() for more in ((), ("all",)))
    few, every = (sum(line.startswith("  --") for line in lines) for lines in (short, whole))
    assert few <= 28
    assert f"--help all lists {every - few} more options." == short[-1]
    shown = help_text.text(options_of([Things]), "tool", "Try.", [Things])
    assert "A share of 100 % of what there is. (default: 0.5)" in shown
