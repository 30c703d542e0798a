"""Names that other tools have for our options, and what to do about options that we cannot have.

A name that an option of a command has itself is that option, whatever this table says.
"""

from __future__ import annotations

from collections.abc import Collection

_ALIASES: dict[str, tuple[str, ...]] = {
    # transformers, TRL
    "model_name_or_path": ("model",),
    "model_revision": ("revision",),
    "torch_dtype": ("dtype",),
    "attn_implementation": ("attn",),
    "adapter_name_or_path": ("adapter",),
    "dataset_name": ("dataset",),
    "dataset_path": ("dataset",),
    "dataset_split": ("split",),
    "max_steps": ("steps",),
    "learning_rate": ("lr",),
    "adam_epsilon": ("eps",),
    "gradient_accumulation_steps": ("gradient_accumulation",),
    "output_dir": ("output",),
    "overwrite_output_dir": ("overwrite",),
    "save_steps": ("save_every",),
    "save_total_limit": ("keep_checkpoints",),
    "logging_steps": ("log_every",),
    "resume_from_checkpoint": ("resume",),
    "hub_model_id": ("repo", "push_to_hub"),
    "hub_private_repo": ("private",),
    # huggingface_hub
    "repo_id": ("repo", "push_to_hub"),
    # lm-evaluation-harness
    "pretrained": ("model",),
    "peft": ("adapter",),
    "output_path": ("output",),
    "limit": ("samples",),
    # vLLM and other servers
    "max_tokens": ("max_new_tokens",),
    "system_prompt": ("system",),
    "served_model_name": ("name",),
    # methods that bound the cache
    "max_capacity_prompt": ("budget",),
    "cache_budget": ("budget",),
}
_ADVICE: dict[str, str] = {
    "num_train_epochs": "training is counted in optimizer steps; give --steps, rows times epochs over rows of a step",
    "max_grad_norm": "gradients are clipped by value unless told otherwise; give --clip norm --clip-limit X",
    "per_device_train_batch_size": "a process trains on one row at a time; give --gradient-accumulation N",
    "train_batch_size": "a process trains on one row at a time; give --gradient-accumulation N",
    "per_device_eval_batch_size": "one prompt is read at a time; drop it",
    "batch_size": "one prompt is read at a time; drop it",
    "warmup_ratio": "the warm-up is counted in steps; give --warmup-steps",
    "lr_scheduler_type": "the learning rate falls linearly to 0, as in the paper; drop it",
    "optim": "the optimizer is AdamW, as in the paper; drop it",
    "adam_beta1": "give both decay rates, as --betas 0.9,0.95",
    "adam_beta2": "give both decay rates, as --betas 0.9,0.95",
    "gradient_checkpointing": "nothing flows back through the backbone, so there is nothing to recompute; drop it",
    "bf16": "give --dtype bfloat16, or --mixed-precision bf16 of locret-train",
    "fp16": "give --dtype float16, or --mixed-precision fp16 of locret-train",
    "deepspeed": "the frozen backbone alone is spread; give --shard zero3",
    "fsdp": "the frozen backbone alone is spread; give --shard fsdp",
    "bnb_4bit_quant_type": "--load-in-4bit is NF4; for others give --quantization-config",
    "use_bnb_nested_quant": "--load-in-4bit quantises twice; for others give --quantization-config",
    "bnb_4bit_compute_dtype": "it is --dtype; drop it",
    "max_length": "prompt and answer have limits of their own; give --max-new-tokens, --max-prompt or --max-tokens, "
    "whichever --help lists",
    "max_seq_length": "give --max-tokens to leave longer rows out, or --max-prompt-tokens to train on their beginning",
    "do_sample": "give --temperature above 0",
    "num_fewshot": "tasks have the examples of their own protocols; drop it",
    "model_args": "give each as an option of its own, such as --model and --dtype",
    "gen_kwargs": "give each as an option of its own, such as --max-new-tokens",
    "compression_ratio": "it says what goes; give what stays, as --budget, or --budget-share (1 minus the ratio)",
    "press_name": "give --scorer, or --methods",
    "max_model_len": "texts may have any length, and --budget says how much of them stays; drop it",
    "gpu_memory_utilization": "memory is given in bytes, as --kv-memory",
    "max_num_seqs": "as many answers go on as --kv-memory has room for; drop it",
    "tensor_parallel_size": "the backbone is loaded on one device; vLLM answers from several (docs/engines.md)",
    "cache_dir": "set HF_HOME, as for any tool of the Hub",
    "token": "set HF_TOKEN, as for any tool of the Hub",
    "hub_token": "set HF_TOKEN, as for any tool of the Hub",
    "tokenizer": "the tokenizer is the one in the folder of --model; drop it",
}


def meant(name: str, options: Collection[str]) -> str | None:
    """Return the option of a command that another tool's name stands for; None if there is none."""
    if name in options:
        return None
    return next((option for option in _ALIASES.get(name, ()) if option in options), None)


def advice(name: str) -> str | None:
    """Return what to do instead of giving an option that we cannot have; None if nothing is known about it."""
    return _ADVICE.get(name)


def others(option: str, options: Collection[str]) -> list[str]:
    """Return the names that other tools have for an option of a command, for its help."""
    return [name for name in _ALIASES if meant(name, options) == option]
