"""What a backbone can do with full attention: the share of fresh samples it answers exactly.

    python -m checkpoints.build.measure --model checkpoints/tiny

prints the table of the embedded backbone's card, as JSON; it takes over an hour on one CPU thread.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from tqdm import tqdm

from locret.cli.command import parse_options, print_json, run
from locret.data import tasks
from locret.data.tasks import Sample
from locret.data.tasks.generated.base import GeneratedTask
from locret.infer.evaluation.composing import generated
from locret.infer.evaluation.eval_options import Names, Numbers, numbers, words
from locret.infer.infer_options import ModelOptions
from locret.loading import load_config, load_model, load_tokenizer, resolve_device


def learnt() -> list[str]:
    """Return the names of the tasks that the embedded backbone is trained on."""
    return [*tasks.names(), *tasks.names("world")]


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What is measured."""

    model: str
    """Backbone: a folder in the Hugging Face format, or a Hub id."""
    tasks: Names = field(default_factory=learnt)
    """Tasks to ask; those that the embedded backbone learns if not given."""
    tokens: Numbers = "1024,2048,4096,8192"
    """Lengths of the chat prompts."""
    samples: int = 100
    """Fresh samples per task and length."""
    device: str = "auto"
    """cpu, cuda, cuda:N or mps; auto takes the first CUDA device, else mps, else cpu."""

    def __post_init__(self) -> None:
        for name in words(self.tasks, "--tasks"):
            generated(name)
        if min(numbers(self.tokens, "--tokens")) < 1:
            raise ValueError(f"--tokens {self.tokens} holds a prompt without tokens; give 1 or more")
        if self.samples < 1:
            raise ValueError(f"--samples {self.samples} is too small; give 1 or more")


def command(argv: Sequence[str] | None = None) -> int:
    """Measure a trained backbone and print the shares by task and length."""
    purpose = "Measure what a backbone answers exactly with full attention."
    (options,), _ = parse_options("checkpoints.build.measure", purpose, [MeasureOptions], argv)
    source, device = ModelOptions(model=options.model, device=options.device), resolve_device(options.device)
    config, tokenizer = load_config(source), load_tokenizer(source)
    names, lengths = words(options.tasks, "--tasks"), numbers(options.tokens, "--tokens")
    for name in names:  # what cannot be made is refused before the first is asked; longer texts have more room
        deque(_samples(generated(name), tokenizer, min(lengths), options.samples), maxlen=0)
    model = load_model(source, config, device, torch.float32)
    print_json(measure(model, tokenizer, names, lengths, options.samples))
    return 0


def measure(
    model: Any,
    tokenizer: Any,
    names: Sequence[str],
    lengths: Sequence[int],
    samples: int,
) -> dict[str, dict[str, float]]:
    """Return per task and length the share of fresh samples, at even depths, that greedy decoding answers exactly."""
    model.set_attn_implementation("sdpa")
    result: dict[str, dict[str, float]] = {}
    for name, tokens in product(names, lengths):
        task, right = generated(name), 0
        made = _samples(task, tokenizer, tokens, samples)
        for sample in tqdm(made, f"{name} in {tokens} tokens", samples, file=sys.stderr, leave=False):
            said = answer(model, tokenizer, sample.content, task.max_new_tokens, sample.system)
            right += task.score(said, sample) == 1
        result.setdefault(name, {})[str(tokens)] = round(right / samples, 4)
    return result


def _samples(task: GeneratedTask, tokenizer: Any, tokens: int, count: int) -> Iterator[Sample]:
    """Yield fresh samples at even depths.

    Raises:
        ValueError: If one cannot be made at that length.
    """
    for index in range(count):
        try:
            yield task.sample(tokenizer, tokens, depth=(index + 0.5) / count, seed=index)
        except ValueError as error:
            raise ValueError(
                f"sample {index + 1} of {count} of {task.name} cannot be made of --tokens {tokens} ({error})"
            ) from error


def answer(model: Any, tokenizer: Any, content: str, new_tokens: int, system: str = "") -> str:
    """Return what the model says to one user turn, after a system turn if any: plain `generate`, greedy."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    ids_BT = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(ids_BT[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    run(command)
