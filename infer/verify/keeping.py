"""Does what is kept, and where, follow from the policy and the scores?"""

from __future__ import annotations

from collections.abc import Iterator

from locret.cache.limits import Limits
from locret.infer.verify.findings import Finding, exact
from locret.infer.verify.subject import Read, Subject, kept_by_head


def budget(subject: Subject) -> Iterator[Finding]:
    """Count what every layer holds after every chunk."""
    read, policy = subject.read(), subject.policy
    plan = Limits(policy, subject.rates, len(subject.backbone.layers)).plan(subject.tokens)
    wrong, most = [], 0.0
    for step, planned in zip(read.steps, plan.steps, strict=True):
        means = [sum(map(len, heads)) / len(heads) for heads in step.kept]
        most = max(most, sum(means) / len(means)) if policy.when == "chunk" else most
        if not plan.shared and means != list(planned.kept):
            wrong.append(f"{means[0]:g} instead of {planned.kept[0]:,} after {step.seen:,} tokens")
    yield exact(
        f"units per KV head and layer after each of {len(read.steps)} chunks, and the plan",
        not wrong,
        wrong[0] if wrong else "as planned",
        "as planned",
        "exact",
    )
    yield exact(
        "most units per KV head after a chunk, and the budget",
        most <= policy.budget,
        f"{most:,.0f}",
        f"at most {policy.budget:,}",
        "exact",
    )
    gone = evicted(read, subject)
    yield exact(
        f"units evicted of {subject.tokens:,} per KV head",
        gone > 0,
        f"{gone:,.0f}",
        "more than 0",
        "a text longer than the budget must lose units",
    )


def evicted(read: Read, subject: Subject) -> float:
    """Return how many units of the text are not held any more, per governed layer and KV head."""
    held = [len(head) for heads in kept_by_head(read.cache) for head in heads]
    return subject.tokens - sum(held) / len(held)
