"""What the training tests share: random backbones, reference cases, and a backbone with tokenizer and rows on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config

from locret import RetainingHeads
from locret.cli.command import run
from locret.train.training_options import PAPER, Loss

GOLDEN = Path(__file__).parents[1] / "golden"
# Case, and the labels to compare with: for Phi-3 the consistent ones (golden/README.md, "Phi-3 labels").
CASES = [("A_llama_gqa", "official"), ("B_llama_mha", "official"), ("C_phi3_mha", "consistent_rope")]
_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}


@dataclass(frozen=True)
class Golden:
    """One reference case of the original implementation."""

    model: PreTrainedModel
    heads: RetainingHeads
    prompt_ids: Tensor
    answer_ids: Tensor
    outputs: dict[str, Tensor]
    loss: dict[str, float]


def golden(case: str, labels: str) -> Golden:
    folder = GOLDEN / case
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    heads = RetainingHeads.from_official(folder / "heads.safetensors", model.config)
    inputs = load_file(folder / "inputs.safetensors")
    loss = json.loads((folder / "meta.json").read_text())["loss"][labels]
    outputs = load_file(folder / "outputs.safetensors")
    return Golden(model, heads, inputs["prompt_ids"], inputs["answer_ids"], outputs, loss)


def backbone(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A frozen random backbone in float32: llama (2 query heads per KV head), llama-mha, qwen3 or gemma2 (softcap)."""
    config: Any = {
        "llama": lambda: LlamaConfig(**{**_SHAPE, **changes}),
        "llama-mha": lambda: LlamaConfig(**{**_SHAPE, "num_key_value_heads": 4, **changes}),
        "qwen3": lambda: Qwen3Config(**{**_SHAPE, **changes}),
        "gemma2": lambda: Gemma2Config(
            **{**_SHAPE, **_SLIDING, **changes}, query_pre_attn_scalar=8, attn_logit_softcapping=3.0
        ),
    }[family]()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def token_ids(length: int, seed: int = 0, vocabulary: int = 97) -> Tensor:
    return torch.randint(3, vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))


def write_backbone(folder: Path, weights: bool = True, **changes: Any) -> Path:
    """Write a random one-head-wide Llama with the embedded tokenizer, as a folder that from_pretrained reads."""
    from embedded import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    shape = {**_SHAPE, "max_position_embeddings": 2048, "num_hidden_layers": 2, **changes, "vocab_size": len(tokenizer)}
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(**shape))
    if weights:
        model.save_pretrained(folder)
    else:
        model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: int = 6) -> Path:
    """Write short rows in the LongAlpaca schema."""
    texts = [
        {
            "instruction": f"The number of Oslo is {n}314. The tower has {n} steps. What is it?",
            "output": f"It is {n}314.",
        }
        for n in range(10, 10 + rows)
    ]
    path.write_text(json.dumps(texts))
    return path


def records(output: Path) -> list[dict[str, Any]]:
    """Return the log of a run."""
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, Tensor]:
    return RetainingHeads.from_pretrained(folder).state_dict()


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(weight, other[name]) for name, weight in one.items())


def loss_of(kind: str = "logit", **more: Any) -> Loss:
    """What `answer_labels` calls kind, and what `retention_loss` takes, as one object."""
    return replace(PAPER, label_kind=kind, **more)


def train_arguments(paths: tuple[Path, Path], output: Path, *more: str) -> list[str]:
    """The command line of six short steps on the backbone and rows at `paths`; `more` comes last and wins."""
    small = ["--steps=6", "--hidden-dim=8", "--log-every=1"]
    warmup = [] if any(given.startswith("--steps") for given in more) else ["--warmup-steps=2"]
    return [f"--model={paths[0]}", f"--dataset={paths[1]}", f"--output={output}", *small, *warmup, *more]


def train_again(arguments: list[str]) -> int:
    """Run `locret-train` in this process and return its exit code."""
    from accelerate.state import AcceleratorState

    from locret.train.command import command

    AcceleratorState._reset_state(reset_partial_state=True)  # one process means one run, outside of tests
    return command(arguments)


def train(paths: tuple[Path, Path], output: Path, *more: str) -> int:
    """Run it with six short steps, or what `more` says."""
    return train_again(train_arguments(paths, output, *more))


def refused(capsys: Any, arguments: list[str]) -> tuple[int, str]:
    """Run the command as the console script does; return exit code and the last line on standard error."""
    with pytest.raises(SystemExit) as stop:
        run(train_again, arguments)
    return int(stop.value.code or 0), capsys.readouterr().err.strip().splitlines()[-1]
