"""The file of a context: what it says, and that earlier files load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import locret
from locret import LongContextModel, RetentionPolicy
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


def test_a_context_of_an_earlier_version_does_what_every_context_does(lm: LongContextModel, tmp_path: Path) -> None:
    """Written by commit 024abd6."""
    context = lm.load(FOLDER / "context.ctx")
    answer = context.ask("What is the pass key?", max_new_tokens=8)
    then = context.fork()
    then.cache.policy = RetentionPolicy(**{**then.cache.policy.to_dict(), "turns": "text"})  # as it was then
    assert then.ask("What is the pass key?", max_new_tokens=8) == "712."
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
