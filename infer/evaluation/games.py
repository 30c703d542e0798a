"""Games: an item that is played turn by turn in one session, and what its score must be seen beside."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from transformers import DynamicCache

from locret import RetentionCache
from locret.backbone.adapters import unwrap
from locret.data.tasks.published import rock_paper_scissors as game
from locret.data.tasks.published.game_session import ModelPlayer
from locret.data.tasks.published.sirllm import GameTask
from locret.infer.evaluation.methods import Method, Prompt
from locret.policy.policy import RetentionPolicy


def played(prompt: Prompt, method: Method, policy: RetentionPolicy | None, task: GameTask) -> dict[str, Any]:
    """Play one game in one cache that is never emptied; return the letters, units, bytes and seconds.

    Raises:
        ValueError: If the method rates the units of one prompt only, or the tokenizer cannot tell the letters apart.
    """
    model, tokenizer = prompt.setup.model, prompt.setup.tokenizer
    if method.name.split("+")[0] == "oracle":
        raise ValueError(f"method oracle knows the answer to one prompt, and {task.name} is a session; leave one out")
    cache: Any
    if method.make is None:
        cache = DynamicCache(config=unwrap(model).config)
    else:
        cache = RetentionCache(model, method.make(prompt), policy)
    player, start = ModelPlayer(model, tokenizer, cache), time.perf_counter()
    turns = task.moves(prompt.sample)  # type: ignore[arg-type]
    moves = game.play(turns, player, task.template)
    seconds = time.perf_counter() - start
    if isinstance(cache, RetentionCache):
        memory = cache.memory()
        held, peak, read = memory.actual, memory.peak, cache.seen
    else:
        held = peak = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        read = cache.get_seq_length()
    return {
        "prediction": "".join(game.LETTERS[move] for move in moves),
        "prompt_tokens": read,
        "generated_tokens": len(moves),
        "kept_units": player.most_units,
        "peak_units": player.most_units,
        "cache_bytes": held,
        "peak_bytes": peak,
        "prefill_seconds": seconds,
        "decode_seconds": 0.0,
        "game": game.report(turns, moves),
    }


def results(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what results.json says of each game: rates, the share of each answer, and the constant policies' rates."""
    return [
        {name: record[name] for name in ("task", "method", "budget")} | record["game"]
        for record in records
        if "game" in record
    ]


def sentences(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each game, which says what its score must not be mistaken for."""
    lines = []
    for one in found:
        budget = "" if one["budget"] is None else f" {one['budget']:,}"
        lines.append(f"{one['task']}, {one['method']}{budget}: {game.sentence(one)}")
    return lines
