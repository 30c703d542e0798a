"""`locret-context`: read, show, ask, compose, shrink, export, as a user types them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from embedded import write_text

from locret import LongContextModel, save_cache
from locret.infer import context_command

ASKED = "What is the number of Oslo?"
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def lm(backbone: Path, heads: Path) -> LongContextModel:
    return LongContextModel.from_pretrained(backbone, heads=heads, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("short") / "oslo.txt", 2_000)


@pytest.fixture(scope="module")
def file(lm: LongContextModel, short: Path) -> Path:
    lm.read(short, progress=False).save(short.with_name("oslo.ctx"))
    return short.with_name("oslo.ctx")


@pytest.fixture
def pair(backbone: Path, heads: Path) -> list[object]:
    return ["--model", backbone, "--heads", heads]


def test_a_text_is_read_shown_and_asked(context: Run, infer: Run, pair: list, short: Path, tmp_path: Path) -> None:
    made = context("read", short, "--output", tmp_path / "a.ctx", *pair)
    assert (made.code, made.out) == (0, "")
    assert "tokens read, 72 units per KV head" in made.err
    few = ["--question", ASKED, "--max-new-tokens", 6]
    assert context("ask", tmp_path / "a.ctx", *pair, *few).out == infer(*pair, "--prompt-file", short, *few).out


def test_a_file_knows_what_it_is_asked_with(
    context: Run, pair: list, lm: LongContextModel, short: Path, file: Path, tmp_path: Path
) -> None:
    few = ["--question", ASKED, "--max-new-tokens", 6]
    alone, named = context("ask", file, *few, "--json"), context("ask", file, *pair, *few, "--json")
    assert f"names the backbone {pair[1]}, which is taken; --model names another" in alone.err
    alone, named = (json.loads(one.out)["contexts"][0] for one in (alone, named))
    assert alone["answers"][0]["answer"] == named["answers"][0]["answer"]
    assert alone["scorer"] == named["scorer"]
    assert alone["scorer"].startswith("retaining_heads (weights=")
    other = ("ask", file, *pair[:2], "--scorer", "streaming", *few)
    refused = context(*other)
    assert (refused.code, "allow_other_scorer" in refused.err.replace("-", "_")) == (2, True), refused.err
    assert context(*other, "--allow-other-scorer").code == 0
    save_cache(lm.read(short, progress=False).cache, tmp_path / "bare.ctx")
    evicting = LongContextModel(lm.model, lm.tokenizer, lm.scorer.heads, {"budget": 32, "turns": "text"})
    evicting.read(short, progress=False).save(tmp_path / "evicts.ctx")
    for path, message in [
        ("bare.ctx", "--model is missing, and no one backbone is named in"),
        ("evicts.ctx", "lets units go while it is asked; give the --heads or --scorer that read it"),
    ]:
        refused = context("ask", tmp_path / path, *few)
        assert (refused.code, message in refused.err) == (2, True), refused.err


def test_a_text_is_drawn_with_what_was_kept_of_it(
    context: Run, backbone: Path, short: Path, file: Path, tmp_path: Path
) -> None:
    drawn = ["--text", short, "--model", backbone, "--plot", tmp_path / "kept.html"]
    assert context("show", file, *drawn).code == 0
    page = (tmp_path / "kept.html").read_text()
    assert "opacity:1.00" in page
    assert "opacity:0.12" in page, "nothing is pale, so nothing was evicted"
    (tmp_path / "other.txt").write_text("Oslo has no number. " * 9)
    for more, message in [
        (["--text", tmp_path / "other.txt", *drawn[2:]], "so it is another one; give that one"),
        (drawn[:4], "--text draws a text with the words of --model into the file of --plot; give all three"),
        ([file, *drawn], "is that of one context, and 2 are given; give one"),
    ]:
        refused = context("show", file, *more)
        assert (refused.code, message in refused.err) == (2, True), refused.err


def test_what_is_shown_is_what_the_context_holds(
    context: Run, lm: LongContextModel, file: Path, short: Path, tmp_path: Path
) -> None:
    held = lm.load(file)
    (facts,) = json.loads(context("show", file, "--json").out)["contexts"]
    assert (facts["name"], facts["tokens"]) == ("oslo.txt", held.cache.seen)
    assert facts["units"] == [held.memory().units] * 2
    assert facts["policy"] == held.cache.policy.to_dict()
    assert facts["scorer"]["name"] == "retaining_heads"
    assert (facts["template"], facts["turns"], facts["host_bytes"]) == ("chat", 0, 0)
    lines = context("show", file).out.splitlines()
    assert f"read          {held.cache.seen:,} tokens, template chat, no system message" in lines
    assert [line[-2] for line in lines if line.endswith("|")] == ["█"] * 2, "the local tokens are all there"


def test_several_contexts_each_answer_every_question(
    context: Run, lm: LongContextModel, file: Path, pair: list, tmp_path: Path
) -> None:
    shutil.copy(file, tmp_path / "b.ctx")
    asked = ["--question", ASKED, "--question", "Where?", "--max-new-tokens", 4]
    printed = context("ask", file, tmp_path / "b.ctx", *pair, *asked).out
    expected = [lm.load(file).ask(one, max_new_tokens=4) for one in (ASKED, "Where?")]
    block = f"> {ASKED}\n{expected[0]}\n\n> Where?\n{expected[1]}\n"
    assert printed == f"# {file}\n{block}\n# {tmp_path / 'b.ctx'}\n{block}"
    record = json.loads(context("ask", file, tmp_path / "b.ctx", *pair, *asked, "--json").out)
    answers = [[one["answer"] for one in context["answers"]] for context in record["contexts"]]
    assert answers == [expected, expected]


def test_contexts_are_joined_and_made_smaller(
    context: Run, lm: LongContextModel, file: Path, pair: list, tmp_path: Path
) -> None:
    from locret import compose

    made = context("compose", file, file, "--output", tmp_path / "two.ctx", *pair, "--budget", 90, "--name", "both")
    assert made.code == 0, made
    joined = compose([lm.load(file), lm.load(file)], 90)
    two = lm.load(tmp_path / "two.ctx")
    assert (two.name, two.ask(ASKED, max_new_tokens=4)) == ("both", joined.ask(ASKED, max_new_tokens=4))
    made = context("shrink", file, "--budget", 40, "--output", tmp_path / "small.ctx", *pair, "--json")
    record = json.loads(made.out)
    assert (record["units"], record["context"]) == (40, str(tmp_path / "small.ctx"))
    small = lm.load(tmp_path / "small.ctx")
    assert small.ask(ASKED, max_new_tokens=4) == lm.load(file).shrink(40).ask(ASKED, max_new_tokens=4)


def test_a_context_is_exported_without_its_backbone(context: Run, file: Path, tmp_path: Path) -> None:
    from locret.engines import llamacpp
    from locret.engines.prefix import Prefix

    done = context("export", file, "--to", "llamacpp", "--output", tmp_path / "a.bin")
    assert (done.code, str(tmp_path / "a.bin") in done.out) == (0, True), done
    prefix = Prefix.from_file(file)
    for kind in ("f16", "bf16"):
        llamacpp.export(prefix, tmp_path / f"{kind}.bin", kind)
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "f16.bin").read_bytes()
    options = ["--cache-type", "bf16", "--json"]
    record = json.loads(context("export", file, "--to", "llamacpp", "--output", tmp_path / "b.bin", *options).out)
    assert (tmp_path / "b.bin").read_bytes() == (tmp_path / "bf16.bin").read_bytes()
    assert record["placeholders"] == prefix.placeholders
    assert record["record"] == str(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", None),
        ("raed", "there is no command 'raed'; did you mean read?"),
        ("show no.ctx", "no.ctx does not exist; give a file written by context.save"),
        ("show {file} --context {file}", "and --context set the same; drop one of them"),
        ("show {file} --text t --model m --plot no/such/a.png", "--plot no/such/a.png: there is no folder"),
        ("ask {file} --model m", "waits for a question; give --question"),
        ("read {text} {pair}", "--output is missing: "),
        ("read {text} {pair} --output {text}", "is there already and is not a saved cache"),
        ("read {text} {pair} --output no/such/a.ctx", "--output no/such/a.ctx: there is no folder"),
        ("compose {file} --output a.ctx {pair}", "is one context; give two or more"),
        ("compose {file} {file} --output a.ctx {pair} --budget 9 --shares 1,2", "each context has as many units"),
        ("shrink {file} --output a.ctx {pair} --budget 99999", "--budget 99,999 lets nothing go of"),
        ("export {file} --to vllm --output a.bin", "--to vllm is not one of llamacpp"),
        ("export {file} --to llamacpp --output {text}", "is there already and is no slot file"),
        ("push {file} --repo org/book", '"push" was retired: hf upload org/name FILE context.safetensors'),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    context: Run,
    file: Path,
    short: Path,
    pair: list,
    line: str,
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = line.format(text=short, file=file, pair=" ".join(map(str, pair))).split()
    done = context(*words)
    if message is None:
        assert done.code == 0
        assert all(f"locret-context {name} " in done.out for name in context_command.COMMANDS)
        return
    assert (done.code, done.out) == (2, ""), done
    assert message in done.err
    assert done.err.count("\n") == 1, done.err
    assert list(tmp_path.iterdir()) == []
