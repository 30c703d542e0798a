"""Train the embedded backbone: a small Llama that can find facts in a text, from scratch, on a CPU in about an hour.

    python -m locret.train.backbone --config recipes/backbone/tiny.yaml

Finding a fact is induction: the answer repeats the fact's sentence, so each answer token attends to the token that
followed the same words in the text. Dense copying (a random sequence followed by a random rotation of itself, loss on
every copied token) teaches that in a few hundred steps; texts with hidden facts (loss on the answer alone) then teach
which words to follow, stage by stage over longer texts, a share of the batches staying dense. Random gaps in the
position ids show the model distances far beyond the length of a training sequence; in a share of the batches the first
layers see a short window only (`backbone_attention`).
"""
# B batch, T tokens of a sequence, E width, V vocabulary, M tokens that bear loss

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from locret.cli import parse_options, print_json, run
from locret.data import tasks
from locret.data.embedded_tokenizer import build_tokenizer
from locret.environment import versions
from locret.train import backbone_attention
from locret.train.backbone_batches import Batch, Stage, batches
from locret.train.backbone_folder import check_output, model_card, save
from locret.train.backbone_start import initialize


@dataclass(frozen=True, kw_only=True)
class BackboneTraining:
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
    start: Literal["random", "distances"] = "random"
    """Initial weights; "distances" makes the first layer look at the tokens just before each token."""
    silent_layers: list[int] = field(default_factory=list)
    """Layers that start by adding nothing to their input, so that the others find each other sooner."""
    local_layers: int = 2
    """First layers that see a short window only, in the batches a stage says."""
    window: int = 32
    """That window, in tokens."""
    autocast: bool = True
    """Multiply matrices in bfloat16; the weights stay float32."""
    rope_theta: float = 1.0e6
    """Base of the rotary embedding; large, so that half of the dimensions compare content at any distance."""
    max_positions: int = 65536
    """Longest context to record in the config, in tokens."""
    lr: float = 2.0e-3
    """Learning rate of AdamW after warm-up."""
    decay_share: float = 0.33
    """Share of the steps, at the end, over which the learning rate falls linearly to a tenth; 0 keeps it."""
    warmup_steps: int = 50
    """Steps of linear warm-up."""
    init: str = ""
    """Folder of a trained backbone to continue from, instead of fresh weights; its shape must be the options'."""
    seed: int = 0
    """Seed of weights and data."""
    threads: int = 1
    """CPU threads. The same number gives the same weights on the same machine."""
    eval_tasks: list[str] = field(default_factory=tasks.names)
    """Tasks measured after training."""
    eval_samples: int = 20
    """Fresh samples per task and length measured after training; 0 measures nothing."""
    eval_tokens: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192])
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
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "threads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is too small; give 1 or more")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; change one of the two"
            )


def build_model(options: BackboneTraining, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
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
    if options.start == "distances":
        initialize(model)
    for layer in options.silent_layers:
        torch.nn.init.zeros_(model.model.layers[layer].self_attn.o_proj.weight)
        torch.nn.init.zeros_(model.model.layers[layer].mlp.down_proj.weight)
    if options.init:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(options.init).state_dict())
    model.set_attn_implementation(backbone_attention.NAME)
    return model


def masked_loss(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, float, float]:
    """Return the mean cross-entropy of the marked tokens, and the shares of tokens and of whole rows that are right."""
    # Gaps in the positions would be taken for boundaries of packed texts, but our attention takes no mask.
    hidden_BTE = model.model(input_ids=batch.ids_BT, position_ids=batch.positions_1T, use_cache=False).last_hidden_state
    mask_BT = batch.mask_BT[:, 1:]
    targets_M = batch.ids_BT[:, 1:][mask_BT]
    logits_MV = model.lm_head(hidden_BTE[:, :-1][mask_BT]).float()
    loss = torch.nn.functional.cross_entropy(logits_MV, targets_M)
    right_M = logits_MV.detach().argmax(-1) == targets_M
    wrong_B = torch.zeros(len(mask_BT)).index_add_(0, mask_BT.nonzero()[:, 0], (~right_M).float())
    return loss, right_M.float().mean().item(), (wrong_B == 0).float().mean().item()


def train(options: BackboneTraining) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, list[dict[str, float]]]:
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
        for step, batch in enumerate(bar, start=1):
            rate = options.lr * learning_rate_factor(step, total, options.warmup_steps, options.decay_share)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with (
                backbone_attention.local_layers(options.local_layers if batch.local else 0, options.window),
                torch.autocast("cpu", torch.bfloat16, enabled=options.autocast),
            ):
                loss, exact, whole = masked_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            entry = sums.setdefault("dense" if batch.dense else "fact", [0.0, 0.0, 0.0, 0.0])
            for index, value in enumerate((loss.item(), exact, whole, 1.0)):
                entry[index] += value
            if step % 50 == 0 or step == total:
                record = {"step": step, "stage": batch.stage, "lr": rate} | _means(sums)
                sums.clear()
                bar.set_postfix(record)
                for name, value in record.items():
                    write_scalar(name, value, step)
                log.append(record | {"seconds": round(time.monotonic() - started, 1)})
    return model.eval(), tokenizer, log


def _means(sums: dict[str, list[float]]) -> dict[str, float]:
    means: dict[str, float] = {}
    for kind, (*totals, count) in sorted(sums.items()):
        for name, value in zip(("loss", "exact", "rows"), totals, strict=True):
            means[f"{kind}_{name}"] = round(value / count, 4)
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


def learning_rate_factor(step: int, total: int, warmup: int, decay_share: float) -> float:
    """Return the share of the peak rate at `step` (from 1): linear warm-up, flat, then a linear fall to a tenth."""
    fall = (total - step) / (total * decay_share) if decay_share else 1.0
    return min(1.0, step / max(warmup, 1)) * min(1.0, 0.1 + 0.9 * fall)


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    names: Sequence[str],
    lengths: Sequence[int],
    samples: int,
) -> dict[str, dict[str, float]]:
    """Return per task and length the share of fresh samples, at even depths, that greedy decoding answers exactly."""
    model.set_attn_implementation("sdpa")
    result: dict[str, dict[str, float]] = {}
    for name in names:
        task = tasks.get(name)
        for tokens in lengths:
            right = 0
            for index in tqdm(range(samples), desc=f"{name} in {tokens} tokens", file=sys.stderr, leave=False):
                sample = task.sample(tokenizer, tokens, depth=(index + 0.5) / samples, seed=index)
                right += task.score(answer(model, tokenizer, sample.content, task.max_new_tokens), sample) == 1
            result.setdefault(name, {})[str(tokens)] = round(right / samples, 4)
    return result


def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, content: str, new_tokens: int) -> str:
    """Return what the model says to one user turn: plain `generate`, greedy, full attention."""
    messages = [{"role": "user", "content": content}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids_BT = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(ids_BT[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def command(argv: Sequence[str] | None = None) -> int:
    """Train the embedded backbone, measure it, and write its folder."""
    (options,), _ = parse_options("locret.train.backbone", "Train the embedded backbone.", [BackboneTraining], argv)
    if options.dry_run:
        parameters = build_model(options, build_tokenizer(options.max_positions)).num_parameters()
        print_json({"options": asdict(options), "parameters": parameters, "bytes": 4 * parameters})
        return 0
    check_output(options.output, options.overwrite)
    started = time.monotonic()
    model, tokenizer, log = train(options)
    seconds = round(time.monotonic() - started, 1)
    found = (
        measure(model, tokenizer, options.eval_tasks, options.eval_tokens, options.eval_samples)
        if options.eval_samples
        else {}
    )
    settings = {
        name: value for name, value in asdict(options).items() if name not in ("output", "overwrite", "dry_run")
    }
    record = {
        "options": settings,
        "versions": versions(),
        "seconds": seconds,
        "exact": found,
        "log": log,
    }
    save(options.output, model, tokenizer, record, model_card(model, record))
    print_json({"output": options.output, "seconds": seconds, "exact": found})
    return 0


if __name__ == "__main__":
    run(command)
