"""A random backbone with a real tokenizer, and untrained heads for it, as folders that the commands read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from embedded import SIZES, tiny_tokenizer, write_text

from locret import RetainingHeads
from locret.cli.command import run

POLICY = {"budget": 64, "chunk_size": 32, "stabilizers": 16, "local_len": 8, "positions": "compact"}


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _slow_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every machine choose float32 for the backbone in bfloat16, so that answers can be compared."""
    monkeypatch.setattr("locret.loading.backbone._cpu_multiplies_bfloat16", lambda: False)


@pytest.fixture(scope="session")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Llama of random weights, large enough that its answers vary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **SIZES,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("infer") / "backbone"
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    # What a published backbone often recommends; locret-infer must not follow it.
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def heads(backbone: Path) -> Path:
    """Return a folder of untrained heads that recommend a small policy."""
    from transformers import AutoConfig

    folder = backbone.with_name("heads")
    made = RetainingHeads.for_model(AutoConfig.from_pretrained(backbone), hidden_dim=8, seed=0)
    made.annotate(policy=POLICY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(backbone: Path) -> Path:
    """Return a text of some 2,000 tokens."""
    return write_text(backbone.with_name("text.txt"), 6_700)


def _calling(module: str) -> Any:
    """Return a fixture: a function that runs a command in this process."""

    @pytest.fixture
    def called(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
        command = import_module(module).command
        return lambda *arguments: _call(command, list(map(str, arguments)), capsys)

    return called


infer, context = _calling("locret.infer.command"), _calling("locret.infer.context_command")


@pytest.fixture
def evaluate_with(capsys: pytest.CaptureFixture[str], backbone: Path) -> Callable[..., Callable[..., Outcome]]:
    """Return a function that takes what is usual, and returns one that runs `locret-eval` with it in this process."""
    from locret.infer.evaluation.command import command

    return lambda *line: (
        lambda *arguments, model=backbone: _call(command, ["--model", *map(str, (model, *line, *arguments))], capsys)
    )


def _call(command: Callable[..., int], arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> Outcome:
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        run(command, arguments)
    out, err = capsys.readouterr()
    return Outcome(int(leaving.value.code or 0), out, err)
