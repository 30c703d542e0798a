"""What a backbone can do with full attention: the share of fresh samples it answers exactly."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from locret.data import tasks


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
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    ids_BT = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(ids_BT[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
