"""Is what is computed through our cache what the backbone computes by itself?"""

# N tokens, E hidden size

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from locret.infer.verify.findings import Finding, exact
from locret.infer.verify.noise import FACTOR, Difference
from locret.infer.verify.position_modes import refusal
from locret.infer.verify.subject import NEW_TOKENS, Read, Subject, positions_held


def because(found: Difference) -> str:
    """Return why a difference may be as large as its tolerance."""
    return f"{FACTOR:.0f} times what rounding alone changes in this backbone ({found.noise:.1e})"


def close(compared: str, found: Difference, means: str = "") -> Finding:
    """Return the finding of a comparison in which rounding may differ."""
    return Finding(
        compared=compared,
        ok=found.ok,
        measured=found.relative,
        tolerance=found.tolerance,
        why=because(found),
        means=means,
    )


def backbone(subject: Subject) -> Iterator[Finding]:
    """Compute the text by the backbone alone, more than once."""
    finite = bool(torch.isfinite(subject.expected).all())
    yield exact("its hidden states are numbers", finite, "finite" if finite else "NaN or infinite", "finite", "exact")
    typical = subject.noise.typical
    limit = 0.3
    yield Finding(
        compared="equal runs of its own: more rounding, its own cache in pieces",
        ok=typical <= limit,
        measured=typical,
        tolerance=limit,
        why="the noise that tolerances below are multiples of; above this nothing could be told from rounding",
        means="rounding alone changes most of what this backbone computes, so nothing can be compared; load it in "
        "another --dtype, such as float32",
    )


def full_budget(subject: Subject) -> Iterator[Finding]:
    """Read with room for everything."""
    for positions in ("compact", "original"):
        policy = subject.roomy(positions=positions)
        try:
            read = subject.read(policy)
        except ValueError as error:
            yield refusal(subject, policy, error)
            continue
        yield close(
            f"hidden states of {subject.tokens:,} tokens, positions {positions}",
            subject.noise.of(read.states, subject.expected),
        )


def answer(subject: Subject) -> Iterator[Finding]:
    """Answer with room for everything."""
    ours, logits = subject.answer(subject.read(subject.roomy(), new_tokens=NEW_TOKENS).cache)
    own, expected = _own_answer(subject)
    yield same_answer(f"{NEW_TOKENS} greedy tokens", ours, own, logits, expected, subject)


def _own_answer(subject: Subject) -> tuple[Tensor, Tensor]:
    """Return the (tokens,) greedy answer of the backbone's own generate, and its logits."""
    model: Any = subject.model
    ids = subject.on_device(subject.ids)
    with subject.alone():
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            return_dict_in_generate=True,
            output_logits=True,
            **subject.answer_options(),
        )
    return found.sequences[0, ids.shape[1] :].cpu(), torch.stack([step[0].float().cpu() for step in found.logits])


def same_answer(
    compared: str, ours: Tensor, own: Tensor, logits: Tensor, expected: Tensor, subject: Subject
) -> Finding:
    """Compare two greedy answers up to where the backbone itself is undecided between two tokens.

    Args:
        compared: What with what.
        ours: (tokens,).
        own: (tokens,).
        logits: (tokens, vocabulary) of ours.
        expected: (tokens, vocabulary) of its own.
        subject: For its noise.
    """
    apart = (ours != own).nonzero()
    first = int(apart[0]) if len(apart) else len(own)
    if first == len(own):
        return exact(compared, True, "equal", "equal", "greedy tokens are exact where no two are tied")
    margin = float(expected[first, own[first]] - expected[first, ours[first]])
    spread = float((expected[first] - expected[first].mean()).norm() / expected.shape[1] ** 0.5)
    tolerance = FACTOR * subject.noise.typical * spread * 4
    return Finding(
        compared=f"{compared}; apart at token {first + 1} by a margin of logits",
        ok=margin <= tolerance,
        measured=margin,
        tolerance=tolerance,
        why=f"a tie within rounding: {FACTOR:.0f} noises times 4 deviations of the logits",
    )


def chunks(subject: Subject) -> Iterator[Finding]:
    """Cut one text in several ways."""
    for size in chunk_sizes(subject.tokens):
        read = subject.read(subject.roomy(chunk_size=size, local_len=size // 3 + 1))
        yield close(
            f"hidden states in chunks of {size}, and the backbone's own",
            subject.noise.of(read.states, subject.expected),
        )
        yield _all_there(read, subject, size)


def chunk_sizes(tokens: int) -> tuple[int, ...]:
    """Return sizes that cut a text unevenly, and one that does not cut it at all."""
    return max(5, tokens // 11), tokens // 3 + 1, tokens


def _all_there(read: Read, subject: Subject, size: int) -> Finding:
    """Say whether every token is held once, by every KV head."""
    everything = torch.arange(subject.tokens)
    heads = [head for index in subject.backbone.layers for head in positions_held(read.cache, index)[0]]
    wrong = sum(not torch.equal(head, everything) for head in heads)
    return exact(
        f"positions held after chunks of {size}",
        not wrong,
        f"{wrong} of {len(heads)} heads miss or repeat tokens" if wrong else f"0 .. {subject.tokens - 1:,}",
        "every token once",
        "exact: nothing was evicted",
    )
