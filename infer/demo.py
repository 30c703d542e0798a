"""A demonstration in a few minutes on a CPU: train retaining heads, then read texts far longer than the cache.

    python -m locret.infer.demo

Trains heads on the embedded backbone with `locret-train`, hides a pass key in texts of 16 times the budget, and asks
for it: with the full cache, with the trained heads and with untrained ones. Prints a table, and saves a picture of the
positions that the heads kept. Exits 1 if the trained heads do not find the keys.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill
from locret.cli import parse_options, run
from locret.data.hidden_facts import Sample
from locret.data.needles import passkey_sample, question_rows, write_rows

TRAINED, UNTRAINED = "trained heads", "untrained heads"
NEW_TOKENS = 16
"""The answer is a sentence of about ten tokens."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the demonstration trains and reads."""

    model: str = "checkpoints/tiny"
    """Backbone that finds pass keys; the embedded one, from the repository's root."""
    output: str = "runs/demo"
    """Folder for rows, heads, logs and the picture; an earlier demonstration in it is replaced."""
    recipe: str = "recipes/train/tiny.yaml"
    """How to train; its policy is the one that texts are read with."""
    heads: str | None = None
    """Heads to use instead of training some; they must recommend a policy."""
    rows: int = 1200
    """Generated texts to train on."""
    steps: int = 1200
    """Training steps; fewer than the recipe's, to show results in minutes."""
    row_tokens: int = 1024
    """Length of each of them."""
    times: int = 16
    """Length of the texts to read, as a multiple of the budget."""
    samples: int = 10
    """Texts to read."""
    required: float = 0.5
    """Share of the answers that trained heads must get right; also more than untrained ones do."""
    threads: int = 1
    """CPU threads; a backbone this small gains nothing from more."""

    def __post_init__(self) -> None:
        for name in ("rows", "steps", "samples", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} is too small; give 1 or more")
        if self.times < 16:
            raise ValueError(f"--times {self.times} shows little; give 16 or more, so that most of the text must go")


@dataclass
class Result:
    """What one way of reading made of all texts."""

    method: str
    right: list[bool]
    texts: list[str]
    units: int
    cache_bytes: int
    seconds: float


def train(options: DemoOptions, tokenizer: Any) -> str:
    """Train heads on generated rows with the `locret-train` command and return their folder.

    Raises:
        ValueError: If the command fails; it has said why.
    """
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    rows, heads = folder / "rows.json", folder / "training"
    write_rows(question_rows(tokenizer, options.rows, options.row_tokens, seed=1), rows)
    flags = ("--model", options.model, "--dataset", str(rows), "--steps", str(options.steps), "--output", str(heads))
    line = [sys.executable, "-m", "locret.train.command", "--config", options.recipe, *flags, "--overwrite"]
    print("$ locret-train " + " ".join(line[3:]), flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    if subprocess.run(line, env=environment, check=False).returncode:
        raise ValueError("locret-train failed, so there are no heads to show; see above")
    return str(heads)


def prompt_tensor(tokenizer: Any, sample: Sample) -> torch.Tensor:
    """Return (1, N) ids of a text with its question in the chat template."""
    messages = [{"role": "user", "content": sample.content}]
    ids: torch.Tensor = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    return ids


def read_with_full_cache(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Answer with transformers alone; return new ids, units per KV head and cache bytes."""
    from transformers import DynamicCache

    cache = DynamicCache()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=NEW_TOKENS, do_sample=False
    )
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return out[0, ids.shape[1] :], cache.get_seq_length(), size


def read_with_heads(
    model: Any, heads: RetainingHeads, policy: RetentionPolicy, ids: torch.Tensor
) -> tuple[torch.Tensor, int, int]:
    """Answer from a bounded cache; return new ids, units per KV head and the most bytes the cache ever took."""
    cache = RetentionCache(model, heads, policy)
    out = generate(model, ids, cache=cache, max_new_tokens=NEW_TOKENS, do_sample=False)
    memory = cache.memory()
    return out[0, ids.shape[1] :], memory.units, memory.peak


def evaluate(
    method: str,
    tokenizer: Any,
    samples: Sequence[Sample],
    read: Callable[[torch.Tensor], tuple[torch.Tensor, int, int]],
) -> Result:
    """Read all texts one way."""
    result = Result(method, [], [], 0, 0, 0.0)
    start = time.perf_counter()
    for sample in samples:
        new, result.units, result.cache_bytes = read(prompt_tensor(tokenizer, sample))
        text = tokenizer.decode(new, skip_special_tokens=True)
        result.right.append(sample.is_answered_by(text))
        result.texts.append(text)
    result.seconds = (time.perf_counter() - start) / len(samples)
    return result


def draw(
    path: Path,
    model: Any,
    tokenizer: Any,
    policy: RetentionPolicy,
    sample: Sample,
    sets: dict[str, RetainingHeads],
) -> Path | None:
    """Save a picture of what each set of heads kept of one text; return its path, or None without matplotlib."""
    from locret.infer import pictures

    try:
        pictures.require_matplotlib("the picture")
    except ValueError as error:
        print(f"no picture: {error}")
        return None
    ids = prompt_tensor(tokenizer, sample)
    retentions = []
    for name, heads in sets.items():
        cache = RetentionCache(model, heads, policy)
        prefill(model, ids, cache)
        retentions.append(pictures.retention_of(cache, name))
    path.parent.mkdir(parents=True, exist_ok=True)
    heading = f"What retaining heads keep of {ids.shape[1]:,} tokens with a budget of {policy.budget:,}"
    pictures.retention_map(retentions, path, needle=find_fact(tokenizer, sample, ids), heading=heading)
    return path


def find_fact(tokenizer: Any, sample: Sample, ids: torch.Tensor) -> tuple[int, int]:
    """Return the first and last position of the sentence that the question asks for."""
    fact = tokenizer(sample.reply, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    windows = ids[0].unfold(0, len(fact), 1)
    first = int((windows == fact).all(dim=1).nonzero()[0])
    return first, first + len(fact) - 1


def table(results: Sequence[Result]) -> str:
    """Return the results as lines of text."""
    lines = [
        f"{'method':<16} {'found':>7}   {'units per KV head':>17}   {'cache bytes':>12}   {'s/text':>6}   first answer"
    ]
    for result in results:
        found = f"{sum(result.right)}/{len(result.right)}"
        first = f"{'right' if result.right[0] else 'wrong'}: {result.texts[0].strip()!r}"
        lines.append(
            f"{result.method:<16} {found:>7}   {result.units:>17,}   {result.cache_bytes:>12,}   "
            f"{result.seconds:>6.2f}   {first}"
        )
    return "\n".join(lines)


def command(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration and return its exit code: 1 if the trained heads do not find the keys.

    Raises:
        ValueError: If the backbone or the heads are missing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    (options,), _ = parse_options("locret.infer.demo", (__doc__ or "").split("\n")[0], [DemoOptions], argv)
    if not Path(options.model, "config.json").is_file():
        raise ValueError(f"--model {options.model} holds no backbone; run this from the repository's root")
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    heads = options.heads or train(options, tokenizer)
    trained = RetainingHeads.from_pretrained(heads)
    sets = {TRAINED: trained, UNTRAINED: RetainingHeads.for_model(model, trained.config.hidden_dim, seed=0)}
    policy = recommended_policy(trained, heads)
    tokens = options.times * policy.budget
    depths = [(index + 0.5) / options.samples for index in range(options.samples)]
    samples = [passkey_sample(tokenizer, tokens, depth, seed) for seed, depth in enumerate(depths)]
    print(
        f"\n{options.samples} texts of {tokens:,} tokens, {options.times} times the budget of {policy.budget:,} units"
    )
    results = compare(model, tokenizer, policy, samples, sets)
    print(table(results))
    picture = Path(options.output) / "kept_positions.png"
    if path := draw(picture, model, tokenizer, policy, samples[options.samples // 3], sets):
        print(f"positions kept by each layer and KV head: {path}")
    text = Path(options.output) / "text.txt"
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(samples[0].text + "\n", encoding="utf-8")
    print(
        f"ask it yourself: locret-infer --model {options.model} --heads {heads} --prompt-file {text} "
        f'--question "{samples[0].question}"'
    )
    return verdict(options, results)


def recommended_policy(heads: RetainingHeads, name: str) -> RetentionPolicy:
    """Return the policy that heads were trained for.

    Raises:
        ValueError: If they recommend none.
    """
    if not heads.config.policy:
        raise ValueError(f"--heads {name} recommend no policy; give heads trained with a recipe that states one")
    return RetentionPolicy(**heads.config.policy)


def compare(
    model: Any, tokenizer: Any, policy: RetentionPolicy, samples: Sequence[Sample], sets: dict[str, RetainingHeads]
) -> list[Result]:
    """Read all texts with the full cache and with each set of heads."""
    results = [evaluate("full cache", tokenizer, samples, lambda ids: read_with_full_cache(model, ids))]
    for name, heads in sets.items():
        read = partial(read_with_heads, model, heads, policy)
        results.append(evaluate(name, tokenizer, samples, read))
    return results


def verdict(options: DemoOptions, results: Sequence[Result]) -> int:
    """Return the exit code, and say why if it is not 0."""
    share = {result.method: sum(result.right) / len(result.right) for result in results}
    if share[TRAINED] >= options.required and share[TRAINED] > share[UNTRAINED]:
        return 0
    print(f"the trained heads should find at least {options.required:.0%} of the keys, and more than untrained ones")
    return 1


if __name__ == "__main__":
    run(command)
