"""Commands of the documentation parse, the tutorial runs, links have a target, the site builds without warnings."""

from __future__ import annotations

import importlib
import io
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
REPOSITORY = "https://github.com/locret/locret/blob/main/"
MODULES = {
    "locret-train": "locret.train.command",
    "locret-infer": "locret.infer.command",
    "locret-chat": "locret.infer.chat_command",
    "locret-context": "locret.infer.context_command",
    "locret-serve": "locret.infer.serve.command",
    "locret-eval": "locret.infer.evaluation.command",
    "locret-bench": "locret.infer.speed.command",
    "locret-verify": "locret.infer.verify.command",
    "locret-push": "locret.heads.push",
}
HARNESS = "locret.infer.evaluation.harness"
"""Its flags are lm-evaluation-harness's own."""
QUICK = {
    "locret.infer.command": ("recipes/infer/pass_key.txt",),
    "locret.infer.chat_command": ("recipes/infer/pass_key.txt",),
    "locret.infer.evaluation.command": ("--list",),
    "locret.heads.push": ("checkpoints/tiny-heads", "--dry-run"),
}
"""Words of commands that read what is shipped: offline, on a CPU, in seconds."""


def commands_of(page: Path) -> list[tuple[str, ...]]:
    """Return the commands of ours on a page, in blocks and in running text, as module and arguments."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    found = []
    for line in lines:
        ours = re.match(r"(locret-\w+ -|locret-context \w|python |accelerate |torchrun )", line)
        words = shlex.split(line, comments=True) if ours else []
        words = words[: words.index(">")] if ">" in words else words
        if words and words[0] in MODULES:
            found.append((MODULES[words[0]], *words[1:]))
        elif "-m" in words and words[words.index("-m") + 1].split(".")[0] == "locret":
            found.append(tuple(words[words.index("-m") + 1 :]))
    return found


COMMANDS = sorted({words for page in PAGES for words in commands_of(page) if words[0] not in (HARNESS, "locret")})


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.slow
def test_every_command_runs_if_it_is_quick_and_parses(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # not the checkout, whose runs/ may hold anything
    module, arguments = importlib.import_module(words[0]), list(words[1:])
    if words[0] in QUICK and set(QUICK[words[0]]) <= set(arguments) and not any("runs/" in word for word in arguments):
        monkeypatch.setattr("sys.stdin", io.StringIO("What is the pass key?\n"))
        assert module.command(arguments) == 0, capsys.readouterr().err
        if "recipes/infer/pass_key.txt" in arguments and "--dry-run" not in arguments:
            assert "The pass key is 43600." in capsys.readouterr().out
        return
    if not hasattr(module, "command"):  # a program of measurements, with options of argparse
        with pytest.raises(SystemExit):
            module.main(["--help"])
        told = capsys.readouterr().out
        assert all(f"{word} " in told for word in arguments if word.startswith("--"))
        return
    if "--resume" in arguments and "--output" not in arguments:  # takes its options from a run, which is not here
        with pytest.raises(ValueError, match="there is no such folder"):
            module.command(arguments)
        return
    with pytest.raises(SystemExit) as end:
        module.command([*arguments, "--print_config"])
    assert end.value.code in (0, None), capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_tutorial_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8").replace("runs", str(tmp_path / "runs"))
    names: dict[str, object] = {}
    for kind, block in re.findall(r"```(python|bash)\n(.*?)```", text, re.DOTALL):
        if kind == "python":
            exec(compile(block, "docs/tutorial.md", "exec"), names)
            continue
        for line in block.splitlines():
            words = shlex.split(line)
            module, arguments = (MODULES[words[0]], words[1:]) if words[0] in MODULES else (words[2], words[3:])
            assert importlib.import_module(module).command(arguments) == 0, line
    answers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("The pass key")]
    assert answers == ["The pass key is 71432."] * 3
    assert "| locret | 128 |" in (tmp_path / "runs" / "evaluation" / "results.md").read_text()


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            if link.startswith("http") and not link.startswith(REPOSITORY):
                continue
            path, _, heading = link.removeprefix(REPOSITORY).partition("#")
            target = ROOT / path if link.startswith(REPOSITORY) else page.parent / path if path else page
            if not target.exists() or (heading and heading not in _headings(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_path_named_in_the_text_exists() -> None:
    named = re.compile(r"`((?:locret|train|infer|data|recipes|tests|checkpoints|docs)/[\w./-]*)`")
    paths = {(page.name, path) for page in PAGES for path in named.findall(page.read_text(encoding="utf-8"))}
    paths.discard(("training.md", "data/train-00000-of-00001.parquet"))  # a file of a published set
    assert [f"{page}: {path}" for page, path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra 'docs' is not installed")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    pages = [page.read_text(encoding="utf-8") for page in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > 15
    fetched = re.compile(
        r"<(?:script|img|iframe)[^>]*src=.https?:|<link[^>]*rel=.(?:stylesheet|preconnect)[^>]*https?:"
    )
    assert not any(fetched.search(page) for page in pages)


def _headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}
