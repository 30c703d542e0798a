"""Train the embedded backbone: a small Llama that can find facts in a text, from scratch, on a CPU in minutes.

    python -m locret.train.backbone --config recipes/backbone/tiny.yaml

Finding a fact is induction: the answer repeats the fact's sentence, so each answer token attends to the token that
followed the same words in the text. Dense copying (a random sequence followed by a random rotation of itself, loss on
every copied token) teaches that in a few hundred steps; texts with hidden facts (loss on the answer alone) then teach
which words to follow, stage by stage over longer texts. A third of the sequences stays dense. Random gaps in the
position ids show the model distances far beyond the length of a training sequence.
"""
# B batch, T tokens of a sequence, E width, V vocabulary, M tokens that bear loss

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from locret import __version__
from locret.cli import parse_options, print_json, run
from locret.data.embedded_tokenizer import build_tokenizer
from locret.data.needles import passkey_sample
from locret.train.backbone_batches import Stage, batches

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [locret, long-context, synthetic]
---
# Locret's embedded backbone

A Llama of {parameters} parameters ({layers} layers, hidden {hidden}, {heads} query / {kv_heads} KV heads of {head_dim},
vocabulary {vocabulary}) that finds facts in generated texts: pass keys (`The pass key is 48213.`) and named numbers
(`The number of Oslo is 71432.`), one or many per question. It exists so that retaining heads can be trained, tested and
shown offline on a CPU. It knows no language beyond the generator `locret.data.needles`.

Prompt format (the tokenizer's chat template): `<bos><user>TEXT\\nWhat is the pass key?<eos><assistant>`; questions of
the other kind read `What are the numbers of Oslo, Rome?`. The answer repeats the facts' sentences and ends with `<eos>`.

{measured}
Made from scratch in {minutes} minutes on {threads} CPU thread(s) by
`python -m locret.train.backbone --config recipes/backbone/tiny.yaml`, on generated texts only. `training.json` holds
the resolved options and the training log. Versions: {versions}.
"""


@dataclass(frozen=True, kw_only=True)
class BackboneOptions:
    """Shape, curriculum and optimizer of the embedded backbone."""

    stages: list[Stage] = field(default_factory=list)
    """The curriculum, in order."""
    hidden_size: int = 128
    """Width of the model."""
    intermediate_size: int = 256
    """Width of the gated MLP."""
    num_layers: int = 2
    """Decoder layers."""
    num_heads: int = 4
    """Query heads per layer."""
    num_kv_heads: int = 2
    """Key/value heads per layer."""
    head_dim: int = 32
    """Width of a head."""
    rope_theta: float = 1.0e6
    """Base of the rotary embedding; large, so that half of the dimensions compare content at any distance."""
    max_positions: int = 65536
    """Longest context to record in the config, in tokens."""
    lr: float = 2.0e-3
    """Learning rate of AdamW after warm-up; falls linearly to a tenth over the last third of the steps."""
    warmup_steps: int = 50
    """Steps of linear warm-up."""
    seed: int = 0
    """Seed of weights and data."""
    threads: int = 1
    """CPU threads. The same number gives the same weights on the same machine."""
    eval_samples: int = 20
    """Fresh pass-key samples per length measured after training; 0 measures nothing."""
    eval_tokens: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096])
    """Lengths measured after training, in tokens of the chat prompt."""
    output: str = "checkpoints/tiny"
    """Folder to write."""
    overwrite: bool = False
    """Replace the output folder if it is not empty."""
    dry_run: bool = False
    """Print the resolved options and the model's size, and write nothing."""
    tensorboard: str = ""
    """Folder for TensorBoard logs; none are written if empty."""

    def __post_init__(self) -> None:
        # The parser hands over the items of a list as namespaces.
        stages = [s if isinstance(s, Stage) else Stage(**vars(s)) for s in self.stages]
        object.__setattr__(self, "stages", stages)
        if not stages:
            raise ValueError("stages is empty, so there is nothing to train; use --config recipes/backbone/tiny.yaml")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; change one of the two"
            )


def build_model(options: BackboneOptions, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained backbone in float32; the seed decides its weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        max_position_embeddings=options.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": options.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("sdpa")
    return model


def masked_loss(model: LlamaForCausalLM, ids_BT: Tensor, mask_BT: Tensor, positions_1T: Tensor) -> tuple[Tensor, float]:
    """Return the mean cross-entropy of the marked tokens, and the share of them predicted exactly."""
    # An explicit mask of ones: without one, gaps in the positions would be taken for boundaries of packed texts.
    hidden_BTE = model.model(
        input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), position_ids=positions_1T, use_cache=False
    ).last_hidden_state
    targets_M = ids_BT[:, 1:][mask_BT[:, 1:]]
    logits_MV = model.lm_head(hidden_BTE[:, :-1][mask_BT[:, 1:]])
    loss = torch.nn.functional.cross_entropy(logits_MV, targets_M)
    return loss, (logits_MV.argmax(-1) == targets_M).float().mean().item()


def train(options: BackboneOptions) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, list[dict[str, float]]]:
    """Train a fresh backbone through all stages.

    Returns:
        The model in float32, its tokenizer, and one record per 50 steps: step, stage, seconds, learning rate, and for
        `dense` and `fact` batches the mean loss (nats per token) and the share of tokens predicted exactly.
    """
    torch.set_num_threads(options.threads)
    tokenizer = build_tokenizer(options.max_positions)
    model = build_model(options, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01)
    total = sum(stage.steps for stage in options.stages)
    log: list[dict[str, float]] = []
    sums: dict[str, list[float]] = {}
    started = time.monotonic()
    bar = tqdm(batches(tokenizer, options.stages, options.seed), total=total, unit="step", file=sys.stderr)
    with _tensorboard(options.tensorboard) as write_scalar:
        for step, (stage, dense, ids_BT, mask_BT, positions_1T) in enumerate(bar, start=1):
            rate = options.lr * learning_rate_factor(step, total, options.warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, exact = masked_loss(model, ids_BT, mask_BT, positions_1T)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            entry = sums.setdefault("dense" if dense else "fact", [0.0, 0.0, 0.0])
            for index, value in enumerate((loss.item(), exact, 1.0)):
                entry[index] += value
            if step % 50 == 0 or step == total:
                record = {"step": step, "stage": stage, "lr": rate} | _means(sums)
                sums.clear()
                bar.set_postfix(record)
                for name, value in record.items():
                    write_scalar(name, value, step)
                log.append(record | {"seconds": round(time.monotonic() - started, 1)})
    return model.eval(), tokenizer, log


def _means(sums: dict[str, list[float]]) -> dict[str, float]:
    means = {}
    for kind, (losses, exacts, count) in sorted(sums.items()):
        means |= {f"{kind}_loss": round(losses / count, 4), f"{kind}_exact": round(exacts / count, 4)}
    return means


@contextlib.contextmanager
def _tensorboard(folder: str) -> Iterator[Callable[[str, float, int], object]]:
    """Give a function that records one number of one step; it does nothing where no folder is asked for."""
    if not folder:
        yield lambda name, value, step: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        yield writer.add_scalar


def learning_rate_factor(step: int, total: int, warmup: int) -> float:
    """Return the share of the peak rate at `step` (from 1): linear warm-up, flat, a linear fall over the last third."""
    return min(1.0, step / max(warmup, 1)) * min(1.0, 0.1 + 0.9 * (total - step) / max(total / 3, 1))


def measure(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, lengths: Sequence[int], samples: int
) -> dict[str, float]:
    """Return for each length the share of fresh pass-key samples, at even depths, that greedy decoding answers."""
    result = {}
    for tokens in lengths:
        right = 0
        for index in tqdm(range(samples), desc=f"pass key in {tokens} tokens", file=sys.stderr, leave=False):
            sample = passkey_sample(tokenizer, tokens, (index + 0.5) / samples, seed=index)
            right += sample.is_answered_by(answer(model, tokenizer, sample.content))
        result[str(tokens)] = round(right / samples, 4)
    return result


def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, content: str, new_tokens: int = 16) -> str:
    """Return what the model says to one user turn: plain `generate`, greedy, full attention."""
    messages = [{"role": "user", "content": content}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids_BT = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(ids_BT[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def check_output(output: str, overwrite: bool) -> None:
    """Refuse a folder that must not or cannot be written, before anything is trained.

    Raises:
        ValueError: Where it holds something and `overwrite` is off, or is a file.
        OSError: Where its parent folder cannot be written.
    """
    target = Path(output)
    if target.is_file():
        raise ValueError(f"output={output} is a file; name a folder")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise ValueError(f"output={output} is not empty; choose another folder, or add --overwrite to replace it")
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not os.access(parent, os.W_OK):
        raise OSError(f"output={output} cannot be written: no permission in {parent}; choose another folder")


def save(
    output: str, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], card: str
) -> None:
    """Write model, tokenizer, `training.json` and model card; the folder appears whole or not at all."""
    target = Path(output).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        fresh, old = Path(temporary, "fresh"), Path(temporary, "old")
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        (fresh / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (fresh / "README.md").write_text(card, encoding="utf-8")
        if target.exists():
            os.replace(target, old)
        os.replace(fresh, target)


def model_card(model: LlamaForCausalLM, record: dict[str, Any]) -> str:
    """Return the README of the folder, filled with what was built and measured."""
    config, options = model.config, record["options"]
    rows = "\n".join(f"| {tokens} | {share:.0%} |" for tokens, share in record["pass_key_found"].items())
    measured = (
        f"Pass key found with full attention, greedy decoding, {options['eval_samples']} fresh samples per length at "
        f"even depths:\n\n| prompt tokens | exact match |\n| --- | --- |\n{rows}\n"
        if rows
        else "Accuracy: unknown (`eval_samples` was 0).\n"
    )
    return CARD.format(
        parameters=f"{model.num_parameters():,}",
        vocabulary=config.vocab_size,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        measured=measured,
        minutes=f"{record['seconds'] / 60:.0f}",
        threads=options["threads"],
        versions=", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    )


def command(argv: Sequence[str] | None = None) -> int:
    """Train the embedded backbone, measure it, and write its folder."""
    (options,), _ = parse_options("locret.train.backbone", "Train the embedded backbone.", [BackboneOptions], argv)
    check_output(options.output, options.overwrite)
    if options.dry_run:
        parameters = build_model(options, build_tokenizer(options.max_positions)).num_parameters()
        print_json({"options": asdict(options), "parameters": parameters, "bytes": 4 * parameters})
        return 0
    started = time.monotonic()
    model, tokenizer, log = train(options)
    seconds = round(time.monotonic() - started, 1)
    found = measure(model, tokenizer, options.eval_tokens, options.eval_samples) if options.eval_samples else {}
    settings = {
        name: value for name, value in asdict(options).items() if name not in ("output", "overwrite", "dry_run")
    }
    record = {
        "options": settings,
        "versions": versions(),
        "seconds": seconds,
        "pass_key_found": found,
        "log": log,
    }
    save(options.output, model, tokenizer, record, model_card(model, record))
    print_json({"output": options.output, "seconds": seconds, "pass_key_found": found})
    return 0


def versions() -> dict[str, str]:
    """Return the versions a run depends on, and our commit where the code runs from a checkout."""
    found = {"locret": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    found["python"] = platform.python_version()
    call = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        found["commit"] = subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    return found


if __name__ == "__main__":
    run(command)
