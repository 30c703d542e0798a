"""The file of a context: what it says of its source, that damage of that is refused, and that earlier files load."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import locret
from locret import LongContextModel, RetentionPolicy, read_notes
from locret.cache.schema import checksum
from locret.engines.prefix import Prefix
from locret.infer.context_command import command

POLICY = RetentionPolicy(budget=32, chunk_size=64, stabilizers=8, local_len=8)
TEXT = "The grass is green. " * 8 + "The pass key is 71432. Remember it. " + "The sky is blue. " * 8
FOLDER = Path(__file__).with_name("saved_caches")


@pytest.fixture(scope="module")
def lm() -> LongContextModel:
    pair = {"model": "checkpoints/tiny", "heads": "checkpoints/tiny-heads"}
    loaded = LongContextModel.from_pretrained(**pair, policy=POLICY, device="cpu", dtype="float32")
    return loaded


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_context_says_what_it_was_read_from(lm: LongContextModel, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes("\ufeff".encode() + TEXT.replace(". ", ".\r\n").encode())
    ids = lm.tokenizer(TEXT).input_ids
    pieces = (TEXT[at : at + 7] for at in range(0, len(TEXT), 7))
    for given_, name, of, digest in (
        (TEXT, "text", "text", sha256(TEXT)),
        (pieces, "text", "text", sha256(TEXT)),
        (tmp_path / "book.txt", "book.txt", "text", sha256(TEXT.replace(". ", ".\n"))),
        (ids, "ids", "ids", sha256("".join(f"{one}\n" for one in ids))),
        (iter([ids[:9], torch.tensor(ids[9:])]), "ids", "ids", sha256("".join(f"{one}\n" for one in ids))),
    ):
        context = lm.read(given_)
        (source,) = context.sources
        assert (source.name, source.of, source.sha256, source.tokens) == (name, of, digest, context.cache.seen)
        context.save(tmp_path / "a.ctx")
        assert lm.load(tmp_path / "a.ctx").sources == context.sources == context.fork().sources
    chat = context.chat()
    chat.say("Who?", max_new_tokens=3)
    chat.fork().save(tmp_path / "a.chat")
    assert lm.load_chat(tmp_path / "a.chat").sources == context.sources
    other = lm.read(TEXT + "More.", name="other")
    both = locret.compose([context, other.shrink(20)])
    assert [source.name for source in both.sources] == ["ids", "other"]
    both.save(tmp_path / "b.ctx")
    assert [one["sha256"] for one in read_notes(tmp_path / "b.ctx")["conversation"]["sources"]] == [
        context.sources[0].sha256,
        sha256(TEXT + "More."),
    ]


def test_a_context_of_an_earlier_version_does_what_every_context_does(lm: LongContextModel, tmp_path: Path) -> None:
    """Written by commit 024abd6."""
    context = lm.load(FOLDER / "context.ctx")
    answer = context.ask("What is the pass key?", max_new_tokens=8)
    then = context.fork()
    then.cache.policy = RetentionPolicy(**{**then.cache.policy.to_dict(), "turns": "text"})  # as it was then
    assert then.ask("What is the pass key?", max_new_tokens=8) == "712."
    assert context.sources == ()
    assert context.shrink(6).memory().units == 6
    both = locret.compose([context, lm.read(TEXT)])
    assert both.ask("What is the pass key?", max_new_tokens=8)
    context.save(tmp_path / "a.ctx")
    assert lm.load(tmp_path / "a.ctx").ask("What is the pass key?", max_new_tokens=8) == answer
    with pytest.raises(ValueError, match="it was written by an earlier version; load it with its backbone, and save"):
        Prefix.from_file(FOLDER / "context.ctx")
    assert Prefix.from_file(tmp_path / "a.ctx").digest == Prefix.of(context).digest


# -- damage -----------------------------------------------------------------------------------------------------------


def content(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def saved(lm: LongContextModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("contexts") / "a.ctx"
    locret.compose([lm.read(TEXT), lm.read(TEXT + "More.")], 30).save(path)
    return path


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ("x", "is damaged: sources='x' is not a mapping"),
        ([3], "is damaged: sources=3 is not a mapping"),
        ([{}], "is damaged: "),
        (7, "is damaged: "),
        ([{"name": "a", "sha256": "z" * 64, "of": "text", "tokens": 3}], "is no SHA-256 in hexadecimal digits"),
        ([{"name": "a", "sha256": "0" * 64, "of": "picture", "tokens": 3}], "of 'picture' is no source"),
        ([{"name": "a", "sha256": "0" * 64, "of": "text", "tokens": 0}], "tokens=0 is no number of tokens"),
        ([{"name": "a", "sha256": "0" * 64, "of": "text", "tokens": 3, "b": 1}], "sources has an unknown key 'b'"),
    ],
)
def test_sources_that_cannot_be_right_are_refused(lm: LongContextModel, saved: Path, sources: Any, said: str) -> None:
    metadata, tensors = content(saved)
    notes = json.loads(metadata["notes"])
    notes["conversation"]["sources"] = sources
    save_file(tensors, saved.with_suffix(".changed"), metadata={**metadata, "notes": json.dumps(notes)})
    with pytest.raises(ValueError, match=said):
        lm.load(saved.with_suffix(".changed"))


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", '"\\ud800"'])
def test_what_is_shown_of_any_file_is_json(
    saved: Path, number: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, tensors = content(saved)
    state = {**json.loads(metadata["state"]), "scorer": {"name": "a", "options": {"b": "here"}}, "toolkit_version": "é"}
    metadata["state"] = json.dumps(state).replace('"here"', number)
    metadata["checksum"] = checksum(metadata["state"], tensors)
    save_file(tensors, path := saved.with_suffix(".changed"), metadata=metadata)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for encoding in ("utf-8", "ascii"):
        with open(1, "w", encoding=encoding, closefd=False) as stdout:
            monkeypatch.setattr("sys.stdout", stdout)
            assert command(["show", str(path), "--json"]) == 0
            stdout.flush()
            shown = json.loads(capfdbinary.readouterr().out, parse_constant=refuse)
            assert shown["contexts"][0]["written_by"] == "é"
