"""What a backbone can do with full attention: the share of fresh samples it answers exactly.

    python -m checkpoints.build.measure --model checkpoints/tiny

prints the table of the embedded backbone's card, as JSON; it takes over an hour on one CPU thread.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from locret.cli.command import parse_options, print_json, run
from locret.data import tasks
from locret.infer.evaluation.eval_options import Names, Numbers, numbers, words
from locret.loading import resolve_device


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
            tasks.get(name)
        if min(numbers(self.tokens, "--tokens")) < 1:
            raise ValueError(f"--tokens {self.tokens} holds a prompt without tokens; give 1 or more")
        if self.samples < 1:
            raise ValueError(f"--samples {self.samples} is too small; give 1 or more")


def command(argv: Sequence[str] | None = None) -> int:
    """Measure a trained backbone and print the shares by task and length."""
    purpose = "Measure what a backbone answers exactly with full attention."
    (options,), _ = parse_options("checkpoints.build.measure", purpose, [MeasureOptions], argv)
    device = resolve_device(options.device)
    model = AutoModelForCausalLM.from_pretrained(options.model).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    names, lengths = words(options.tasks, "--tasks"), numbers(options.tokens, "--tokens")
    print_json(measure(model, tokenizer, names, lengths, options.samples))
    return 0


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
                said = answer(model, tokenizer, sample.content, task.max_new_tokens, sample.system)
                right += task.score(said, sample) == 1
            result.setdefault(name, {})[str(tokens)] = round(right / samples, 4)
    return result


def answer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, content: str, new_tokens: int, system: str = ""
) -> str:
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
