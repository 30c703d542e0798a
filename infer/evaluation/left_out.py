"""Which kinds of pictures an evaluation has not got, and what each would have needed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from locret.infer.evaluation.insight import MOST_TOKENS
from locret.infer.evaluation.protocols import AGNOSTIC, AWARE
from locret.infer.evaluation.runner import Case, Run
from locret.method_spec import file_name

_READ = ("", *(f", {protocol}" for protocol in (AWARE, AGNOSTIC)))
"""What may stand behind a method's name where several protocols were asked, or another than the usual one."""
_NO_BUDGET = "a method with a budget, such as --methods random"
_NO_STEPS = "a method that evicts, such as --methods random"
_NO_TEXTS = "a task whose texts are generated here, such as --tasks passkey"
_ONE_CHUNK = "a prompt longer than --chunk-size and --local-len together; lower --chunk-size or raise --lengths"


def left_out(drawn: Collection[str], cases: Sequence[Case], runs: Sequence[Run]) -> list[str]:
    """Return a sentence for each reason why pictures are missing, with the way out.

    Args:
        drawn: Names of the pictures there are.
        cases: The samples of the evaluation.
        runs: Its methods and policies.
    """
    bounded = list(dict.fromkeys(run.method.name for run in runs if run.policy is not None))
    generated = any(case.task.pictured for case in cases)
    needed = None if bounded and generated else _NO_TEXTS if bounded else _NO_BUDGET
    reasons: dict[str, list[str]] = {}

    def missing(names: Sequence[str], reason: str) -> None:
        reasons.setdefault(reason, []).extend(names)

    if not any(name.startswith("accuracy_by_") for name in drawn):
        missing(["accuracy_by_budget.png"], "several budgets, such as --budget 64,128" if bounded else _NO_BUDGET)
    if not any(name.startswith("heat_map_") for name in drawn):
        missing(["heat_map_*.png"], "a task with a single needle, such as --tasks passkey")
    # A policy of its own (quest, infllm) makes of the budget something that steps of the first tier do not show.
    shown = dict.fromkeys(run.method.name for run in runs if run.policy is not None and run.method.adapt is None)
    steps = [
        f"retention_steps_{file_name(method)}.png"
        for method in shown
        if not {f"retention_steps_{file_name(f'{method}{read}')}.png" for read in _READ} & set(drawn)
    ]
    if steps or not shown:
        reason = needed or (_ONE_CHUNK if shown else _NO_STEPS)
        missing(["retention_steps_*.png"] if len(steps) == len(shown) else steps, reason)
    if "consistency.png" not in drawn:
        missing(["consistency.png"], needed or f"a length of at most {MOST_TOKENS:,} tokens")
    return [
        f"no {', '.join(names)}: {'it needs' if len(names) == 1 else 'they need'} {reason}"
        for reason, names in reasons.items()
    ]
