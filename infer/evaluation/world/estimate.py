"""How long a unit takes: what is read and written counted from the plan, at the rate that one core reaches.

Formula:  a read of N tokens takes 2 P N / (share x F) seconds, with P weights outside the embeddings and F operations
          a second of a matrix product; an answer takes Q seconds per layer for its question and its fork, and T for
          each of its tokens, or a share of that where answers are written side by side, as small backbones do. A press
          reads the whole text with full attention; those that repeat the text read it several times. Agnostic, a text
          is read once for all its questions; aware, and by the oracle that knows one question, once for each.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from locret.backbone.adapters import describe
from locret.infer.evaluation import methods, presses
from locret.infer.evaluation.job import Job
from locret.infer.evaluation.protocols import AGNOSTIC
from locret.infer.evaluation.runner import Run, blocks_of, texts_of
from locret.infer.evaluation.world.plan import Unit
from locret.method_spec import parse

_READING = 0.3
"""Share of a matrix product's rate that reading reaches."""
_QUESTION, _TOKEN = 5e-3, 1.2e-3
"""Seconds per layer of a question on a fork, and of a token that is written."""
_WRITTEN = 14
"""Tokens of an answer, or as many as the task allows."""
_FACTORS = {"infllm": 3.5, "omnikv": 1.5, "quest": 1.5, "kvzip": 6.0, "kvzip_plus": 6.0, "kvgrad": 6.0}
"""Reads that cost more than one."""
_PRESS, _EAGER, _LABELS = 1.3, 3.0, 2.0
"""A press; one that builds all weights of attention; an oracle, whose labels take a read of their own."""


def rate() -> float:
    """Return the operations of a matrix product in a second of one core, whatever else the core is busy with."""
    threads, size = torch.get_num_threads(), 1024
    torch.set_num_threads(1)
    try:
        left, right = torch.ones(size, size), torch.ones(size, size)
        torch.mm(left, right)  # warms up
        start = time.process_time()
        torch.mm(left, right)
        return float(2 * size**3 / max(time.process_time() - start, 1e-6))
    finally:
        torch.set_num_threads(threads)


def seconds(job: Job, operations: float) -> float:
    """Return the seconds of a unit on one core.

    Args:
        job: The unit's.
        operations: What `rate` returned.
    """
    layers, weights = _shape(job.config)
    found = 0.0
    batch = job.evaluation.batch_size
    for block in blocks_of(job.cases, batch):
        asked = len(block)
        longest = min(_WRITTEN, block[0].task.max_new_tokens)
        for run in job.runs:
            shared = run.protocol == AGNOSTIC and parse(run.method.name).name != methods.ORACLE
            reads = len(texts_of(block)) if shared else asked
            passes = math.ceil(asked / batch) if methods.writes_beside(run.method) else asked
            found += reads * _factor(run) * block[0].tokens * 2 * weights / (_READING * operations)
            found += layers * (asked * _QUESTION + passes * longest * _TOKEN)
    return found


def of_capacity(unit: Unit, config: Any, operations: float) -> dict[str, Any]:
    """Return the texts, answers and seconds of the unit that draws the capacity curve.

    Args:
        unit: The unit.
        config: The backbone's.
        operations: What `rate` returned.
    """
    layers, weights = _shape(config)
    options = unit.options
    asked = [min(facts, options["questions"]) for facts in options["facts"]]
    answers = sum(asked) * options["samples"] * len(options["methods"])
    named = [parse(name).name for name in options["methods"]]
    reads = len(asked) * options["samples"] * sum(map(_of_method, named))
    each = _QUESTION + _WRITTEN * _TOKEN / options.get("batch_size", 1)
    found = reads * options["tokens"] * 2 * weights / (_READING * operations) + answers * layers * each
    return {
        "protocol": unit.part.protocol,
        "methods": len(options["methods"]),
        "texts": len(asked) * options["samples"],
        "answers": answers,
        "seconds": round(found, 1),
    }


def _factor(run: Run) -> float:
    name = parse(run.method.name).name
    if not presses.is_press(run.method):
        return _of_method(name)
    press = name.removeprefix(presses.PREFIX)
    return _EAGER if press == "observed_attention" else _FACTORS.get(press, _PRESS)


def _of_method(name: str) -> float:
    """Return how many plain reads one of our methods costs."""
    return _LABELS if name in (methods.ORACLE, methods.ORACLE_AGNOSTIC) else _FACTORS.get(name, 1.0)


def _shape(config: Any) -> tuple[int, int]:
    """Return a backbone's layers, and its weights outside the embeddings."""
    text, backbone = config.get_text_config(), describe(config)
    shapes = [backbone.shape(layer) for layer in range(backbone.num_layers)]
    attention = sum((shape.num_heads + shape.num_kv_heads) * shape.unit_dim for shape in shapes)
    return backbone.num_layers, text.hidden_size * (attention + 3 * backbone.num_layers * text.intermediate_size)
