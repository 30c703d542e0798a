"""From records to the cells of results.json: one per task, length and way of reading."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from locret.data.tasks.task import SampleSet, Task
from locret.infer.evaluation.records import protocol_of

CELL = ("task", "tokens", "method", "budget", "chunk_size", "stabilizers", "budget_share", "protocol")
_OPTIONAL = ("host_bytes", "moved_bytes", "kv_ranks")


def cells(
    records: Sequence[dict[str, Any]], sets: Mapping[tuple[str, int], SampleSet] | None = None
) -> list[dict[str, Any]]:
    """Return one cell per task, length, method, policy and protocol, in the order of the records.

    A cell holds `n` texts, where several questions were asked of each the number of `questions` in all, `score` (mean
    x 100 over texts, of each the mean over its questions), its `standard_error`, per KV head `kept_units` (mean of the
    layers) and `peak_units` (of the fullest layer), both the largest of the samples, `cache_bytes` after reading,
    `peak_bytes`, with a second tier `host_bytes` and `moved_bytes` (fetched from it per sample, the largest), where
    processes share the KV heads their number `kv_ranks` (bytes are those of one), and `prefill_tokens_per_second` and
    `decode_tokens_per_second` (all tokens / all seconds). The `task` of a published set says how much of it was asked;
    its plain name is `set`, its size `of` (None: unknown), and its score follows its protocol where that is not a mean.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record.get(name) for name in CELL[:-1]) + (protocol_of(record),), []).append(record)
    found = []
    for group, members in groups.items():
        axes = dict(zip(CELL, group, strict=True))
        if axes["budget_share"] is None:
            del axes["budget_share"]
        cell = axes | _summary(members)
        whole = (sets or {}).get((cell["task"], cell["tokens"]))
        if whole is not None and "item" in members[0]:
            cell |= {"set": cell["task"], "task": whole.label(cell["n"])}
            cell |= {} if whole.made else {"of": whole.of}
            cell |= task_score(whole.task, members)
            cell["tokens_before"], cell["tokens_after"] = (
                round(statistics.fmean(record[name] for record in members), 1)
                for name in ("tokens_before", "tokens_after")
            )
        found.append(cell)
    return found


def task_score(task: Task, records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the `score` of a task from 0 to 100 by its own rule, and its `standard_error`.

    The error of a mean is the samples' standard deviation over the root of n; that of any other rule (L-Eval's ROUGE)
    is the jackknife's, which for a mean is the same. Several questions of one text count as one sample: they stand or
    fall together.
    """
    texts = by_text(records)

    def summarised(some: Sequence[list[dict[str, Any]]]) -> float:
        own = [record for text in some for record in text]
        answers = [(record["prediction"], tuple(record["targets"])) for record in own]
        return 100 * task.summarise([record["score"] for record in own], answers)

    if type(task).summarise is Task.summarise:
        scores = text_scores(texts)
        score, error = statistics.fmean(scores), standard_error(scores)
    elif len(texts) < 2:
        score, error = summarised(texts), None
    else:
        without = [summarised([*texts[:out], *texts[out + 1 :]]) for out in range(len(texts))]
        score, error = summarised(texts), (len(texts) - 1) / len(texts) ** 0.5 * statistics.stdev(without)
    return {"score": round(score, 4), "standard_error": None if error is None else round(error, 4)}


def by_text(records: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the records of each text, of one task, length and way of reading."""
    texts: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        texts.setdefault(record["index"] if "question" in record else len(texts), []).append(record)
    return list(texts.values())


def text_scores(texts: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    """Return the mean score of each text's questions, from 0 to 100."""
    return [statistics.fmean(100 * record["score"] for record in text) for text in texts]


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean, the values' standard deviation over the root of n; None below two values."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    texts = by_text(records)
    scores = text_scores(texts)
    error = standard_error(scores)
    return {
        "n": len(texts),
        **({"questions": len(records)} if any("question" in record for record in records) else {}),
        "score": round(statistics.fmean(scores), 4),
        "standard_error": None if error is None else round(error, 4),
        **{name: max(r[name] for r in records) for name in ("kept_units", "peak_units", "cache_bytes", "peak_bytes")},
        **{n: max(r.get(n, 0) for r in records) for n in _OPTIONAL if any(n in r for r in records)},
        "prefill_tokens_per_second": _rate(records, "prompt_tokens", "prefill_seconds"),
        "decode_tokens_per_second": _rate(records, "generated_tokens", "decode_seconds"),
    }


def _rate(records: Sequence[dict[str, Any]], tokens: str, seconds: str) -> float | None:
    total: float = sum(record[seconds] for record in records)
    return round(sum(record[tokens] for record in records) / total, 1) if total else None
