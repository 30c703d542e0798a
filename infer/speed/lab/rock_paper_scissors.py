"""Plays Rock-Paper-Scissors, 2,000 turns in one session, and says what constant answers would have scored.

    python -m locret.infer.speed.lab.rock_paper_scissors --model checkpoints/tiny --heads checkpoints/tiny-heads \
        --budget 1024 --chunk-size 512 --stabilizers 0

With --data-dir the turns are the published ones (rock_paper_scissors/*.jsonl); without, moves drawn with their shares.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from locret import RetentionCache, RetentionPolicy, loading
from locret.cli import parse_options, print_json, run
from locret.data.tasks.published import rock_paper_scissors as game
from locret.data.tasks.published.game_session import ModelPlayer
from locret.data.tasks.published.records import read_records
from locret.environment import versions
from locret.infer.options import ModelOptions
from locret.load_options import ScorerOptions


@dataclass(frozen=True, kw_only=True)
class GameOptions:
    """What is played."""

    dominant: str = "rock,paper,scissors"
    """Moves that the other side prefers, one session each."""
    turns: int = game.TURNS
    """Turns of a session."""
    data_dir: str | None = None
    """Folder of the published turns; drawn ones if none."""
    template: str = "vicuna"
    """vicuna (USER and ASSISTANT around each question) or none."""
    full_cache: bool = False
    """Play with the plain cache of transformers, which grows with every turn."""
    turns_seed: int = 0
    """Seed of drawn turns."""
    threads: int = 1
    """CPU threads."""

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"--turns {self.turns} is no game; give 1 or more")

    def moves(self, dominant: str) -> list[int]:
        """Return the other side's moves.

        Raises:
            ValueError: If there is no such move or file, or a row that cannot be played.
        """
        if self.data_dir is None:
            return game.drawn_turns(dominant, self.turns, self.turns_seed)
        if dominant not in game.FILES:
            raise ValueError(f"--dominant {dominant} is no move; choose from {', '.join(game.MOVES)}")
        folder = Path(self.data_dir).expanduser()
        places = [folder / name for name in (game.FILES[dominant], f"sirllm/{game.FILES[dominant]}")]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise ValueError(f"--data-dir {folder} has no {game.FILES[dominant]}; leave it out to play drawn turns")
        return game.read_turns(read_records(path), self.turns)


def command(argv: Sequence[str] | None = None) -> int:
    """Play each session and print one JSON object.

    Raises:
        ValueError: If an option does not fit.
    """
    import torch
    from transformers import DynamicCache

    classes = [GameOptions, ModelOptions, ScorerOptions, RetentionPolicy]
    name = "locret.infer.speed.lab.rock_paper_scissors"
    (options, model_options, scorer_options, flags), chosen = parse_options(
        name, (__doc__ or "").split("\n")[0], classes, argv
    )
    torch.set_num_threads(options.threads)
    sessions = {dominant: options.moves(dominant) for dominant in options.dominant.split(",")}
    config = loading.load_config(model_options)
    tokenizer = loading.load_tokenizer(model_options)
    scorer, recommended = loading.load_scorer(scorer_options)
    loading.check_matches(scorer_options, scorer, config)
    policy = loading.resolve_policy(flags, chosen, recommended)
    device = loading.resolve_device(model_options.device)
    model = loading.load_model(
        model_options, config, device, loading.resolve_dtype(model_options.dtype, config, device)
    )
    results: dict[str, Any] = {}
    for dominant, turns in sessions.items():
        cache = DynamicCache() if options.full_cache else RetentionCache(model, scorer, policy)
        player, start = ModelPlayer(model, tokenizer, cache), time.perf_counter()
        result = game.report(turns, game.play(turns, player, options.template))
        took = {"seconds": time.perf_counter() - start, "most_units": player.most_units}
        results[dominant] = {**result, "sentence": game.sentence(result), **took}
        if isinstance(cache, RetentionCache):
            results[dominant] |= {"tokens": cache.seen, "peak_cache_bytes": cache.memory().peak}
    mean = {key: sum(result[key] for result in results.values()) / len(results) for key in ("win", "tie", "lose")}
    held = None if options.full_cache else policy.to_dict()
    print_json(
        {
            **asdict(options),
            "model": model_options.model,
            "policy": held,
            "sessions": results,
            "mean": mean,
            "versions": versions(),
        }
    )
    return 0


if __name__ == "__main__":
    run(command)
