"""docs/world.md, drawn from a record: every number of the page comes from there.

python -m locret.infer.evaluation.world.page runs/world/world.json docs
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from locret.cli.command import warnings_as_lines
from locret.files import read_json, write_text
from locret.infer.evaluation import methods, presses
from locret.infer.evaluation.methods import ORACLE, ORACLE_AGNOSTIC
from locret.infer.evaluation.protocols import AGNOSTIC, AWARE
from locret.infer.evaluation.summary import size, with_error
from locret.infer.evaluation.world import figures
from locret.infer.evaluation.world import record as records
from locret.infer.evaluation.world.ordering import TOLD_APART
from locret.infer.evaluation.world.plan import PLACED, POLICY, SHARED, SHARES
from locret.infer.methods import FULL, LOCRET
from locret.infer.speed.peers.environments import PEERS
from locret.pictures import can_draw
from locret.tables import markdown

_Cell = tuple[str, str, int]
"""A method, a task and a length."""
PAGE = "world.md"
FILES = (PAGE, figures.FRONTIER, figures.CAPACITY, *(figures.MAP.format(name) for name in figures.PARTS))
"""All that `write` may write."""
_BOUND = 0.9
"""Kendall's tau that the order of the methods should reach between any two seeds."""
_AHEAD = (LOCRET, SHARES, f"{SHARES}{PLACED}")
"""Methods that are compared with the best others."""
_AGNOSTIC = tuple(f"{ORACLE_AGNOSTIC}{change}" for change in ("", SHARED, PLACED, f"{SHARED}{PLACED}"))
"""What trained heads are measured by: the same units for all questions, in equal or in measured layers."""
_YARDSTICKS = (FULL, ORACLE, *_AGNOSTIC, *_AHEAD, "random")
"""Methods that stand beside the best others."""
_RIVALS = 4
"""Best others that stand beside them."""
_OF_ORACLE = 0.95
"""Share of the agnostic oracle's score that trained heads should reach on every task."""
_INTRODUCTION = """\
# The table of the field

Methods of this package, and presses of kvpress on the same weights, on the tasks that are made here: the generated
ones, their look-alikes, and those of the world. The suite asks every method and every task; what this record holds is
at the end. The page is drawn from [it](world.json) by the last command:

```bash
python -m venv kvpress-env && kvpress-env/bin/pip install {kvpress} torch
locret-eval --config recipes/eval/world.yaml --kvpress-python kvpress-env/bin/python --output runs/world
python -m locret.infer.evaluation.world.page runs/world/world.json docs
```

`--dry-run` shows the plan with its parts and an estimate of the time (it makes every text, which takes minutes),
`--parts` takes some of them, `--resume` goes on. Without `--kvpress-python` kvpress's parts are missing, and the page
says so. `--methods`, `--lengths`, `--budget` (the table's first, then those of the frontier; of both protocols),
`--samples`, `--questions`, `--protocol`, `--seed` and `--seeds` (how many, of the field) change the parts. Texts are
read with `--chunk-size {chunk_size} --stabilizers {stabilizers} --local-len {local_len}` if nothing else is given.
"""
_PROTOCOLS = """\
**agnostic**: a document is read and evicted to the budget, then questions about it come, each on a fork. **aware**:
the question stands in the prompt while that is read, and methods that evict keep its units, which count to their
budget (`--protect question`). `oracle` keeps what the labels of the one answer say,
`oracle_agnostic` what those of the answers to all questions of the text say: what it loses, the budget loses, as a rule
(a ceiling to compare with, not a proof); what heads lose against the one with the same layers and positions is theirs.
With `+shares` layers hold as many units as the heads' training has measured, as many in all as uniform ones."""
_POSITIONS = """\
{} turn their keys to the ranks that units have among those kept: the default, which reads texts of any length and
fits every engine. The others, and kvpress's but `rerotated_snapkv`, turn them to their positions in the text, and so do
heads and oracles with `+original`; InfLLM has a rule of its own. Which of the two finds the newest of several
statements is to be asked of each backbone ([of this one](heads.md#what-order-in-time-needs))."""
_KVPRESS = """\
A press prunes once, after it has read the document in one pass (agnostic), or the prompt but its last `local_len`
tokens (aware). It keeps as many units per KV head as ours hold then; presses with a window get one of `local_len`
tokens, all else is as kvpress ships it, which protects nothing by name. A press that shares units out over heads or
layers masks what goes: its bytes are those that it holds. Seconds are of a median answer, reading included, with
other work on the machine; ours are written side by side and count a share of that, a press writes one at a time: they
compare no speeds."""


def text(record: Mapping[str, Any], *, figures: bool = True) -> str:
    """Return the page, with its pictures or without."""
    parts = [
        _INTRODUCTION.format(kvpress=presses_version(record), **POLICY),
        *_table(record),
        *_frontier(record),
        *_maps(record),
        *_leaders(record),
        *_capacity(record),
        *_order(record),
        *_asked(record),
        *_missing(record),
    ]
    shown = [part for part in parts if figures or not part.startswith("![")]
    return "\n".join(shown).rstrip("\n") + "\n"


def presses_version(record: Mapping[str, Any]) -> str:
    """Return what pip installs of kvpress: the version of the record, or the one that is known to work."""
    found = (record["config"].get("kvpress") or {}).get("kvpress")
    return f"kvpress=={found}" if found else PEERS["kvpress"]


def _table(record: Mapping[str, Any]) -> Iterator[str]:
    """The table: a row per method, the best first; means over the tasks that the full cache answers."""
    agnostic, aware = (_of_protocol(record, protocol) for protocol in (AGNOSTIC, AWARE))
    shown = agnostic or aware
    if not shown:
        return
    out = records.unanswerable(record)
    families = _families(record, out)
    by_family = _family_means(record, families, AGNOSTIC if agnostic else AWARE)
    all_tasks = _of_protocol(record, AGNOSTIC if agnostic else AWARE, every_task=True) if out else {}
    rows = []
    for method, one in sorted(shown.items(), key=lambda item: -item[1]["score"]):
        other = aware.get(method) if agnostic else None
        rows.append(
            [
                method,
                with_error(one["score"], one["error"]),
                *(_score(by_family.get((method, family))) for family in families),
                *([with_error(other["score"], other["error"]) if other else ""] if agnostic and aware else []),
                *([_score(all_tasks[method]["score"] if method in all_tasks else None)] if out else []),
                f"{one['units']:,}",
                size(one["kept"]),
                size(one["peak_bytes"] + one["host_bytes"]),
                f"{one['seconds']:.2f}",
                f"{one['texts']:,}",
            ]
        )
    first, budgets = AGNOSTIC if agnostic else AWARE, _budgets(record)
    other_head = AWARE if len(set(budgets.values())) == 1 else f"{AWARE}, budget {budgets[AWARE]:,}"
    heads = ["method", first, *families, *([other_head] if agnostic and aware else [])]
    heads += [f"{first}, all tasks"] if out else []
    yield f"## The table\n\n{_setting(record)}\n\n{_PROTOCOLS}\n"
    if ranked := _ranked(shown):
        yield _POSITIONS.format(", ".join(f"`{name}`" for name in ranked)) + "\n"
    yield "\n".join(markdown([*heads, "units / KV head", "bytes kept", "peak bytes", "seconds", "texts"], rows)) + "\n"
    yield (
        "±: one standard error. Bytes kept: of the units that stay when the document has been read, in all tiers; peak "
        "bytes: the most that was allocated for the cache, what is being read included. Units, bytes, seconds and "
        f"texts are {first}.\n"
    )
    if out:
        named = ", ".join(f"`{task}` ({score:.0f})" for task, score in sorted(out.items(), key=lambda item: item[1]))
        yield (
            f"Means leave out tasks of which the full cache answers less than {records.ANSWERABLE:g} %, where the "
            f"backbone fails before any method can: {named}. `all tasks` and the maps have them.\n"
        )
    if any(name.startswith(presses.PREFIX) for name in shown):
        yield f"{_KVPRESS}\n"


def _ranked(names: Iterable[str]) -> list[str]:
    """Return the methods of ours whose keys turn to their ranks."""
    found = []
    for name in names:
        if name.startswith(presses.PREFIX):
            continue
        method = methods.get(name)
        positions = method.changes.get("positions", method.positions)
        if not method.plain and method.adapt is None and positions in (None, "compact"):
            found.append(name)
    return found


def _of_protocol(record: Mapping[str, Any], protocol: str, *, every_task: bool = False) -> dict[str, dict[str, Any]]:
    """Return the means of each method at the table's budget."""
    return {
        method: one
        for part in figures.PARTS[protocol]
        for (method, _), one in records.means(record, [part], every_task=every_task).items()
    }


def _families(record: Mapping[str, Any], out: Collection[str]) -> dict[str, list[str]]:
    names = list(dict.fromkeys(row["task"] for row in records.table(record) if row["task"] not in out))
    found: dict[str, list[str]] = {}
    for name in names:
        family = name.split("/")[0] if "/" in name else "generated"
        found.setdefault(family, []).append(name)
    return found if len(found) > 1 else {}


def _family_means(
    record: Mapping[str, Any], families: Mapping[str, Sequence[str]], protocol: str
) -> dict[tuple[str, str], float]:
    """Return the mean score by method and family."""
    family_of = {task: family for family, tasks in families.items() for task in tasks}
    found: dict[tuple[str, str], list[float]] = {}
    for row in records.last_rows(record, figures.PARTS[protocol]):
        if row["task"] in family_of:
            found.setdefault((row["method"], family_of[row["task"]]), []).append(row["score"])
    return {key: fmean(scores) for key, scores in found.items()}


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _budgets(record: Mapping[str, Any]) -> dict[str, int]:
    """Return the budget of each protocol that the table has."""
    parts = [part for part in record["parts"] if part["name"] in figures.PARTS[part["protocol"]] and part["answers"]]
    return {part["protocol"]: part["budgets"][0] for part in reversed(parts)}


def _setting(record: Mapping[str, Any]) -> str:
    lengths = " and ".join(f"{tokens:,}" for tokens in record["parts"][0]["lengths"])
    found = _budgets(record)
    budgets = " and ".join(f"{found[name]:,} ({name})" for name in (AGNOSTIC, AWARE) if name in found)
    if len(set(found.values())) == 1:
        budgets = f"{next(iter(found.values())):,}"
    return (
        f"{lengths} tokens, budget {budgets} per KV head, {len(record['config'].get('tasks', ()))} tasks; "
        f"backbone `{record['config'].get('model', '')}`, heads `{record['config'].get('heads', '')}`."
    )


def _frontier(record: Mapping[str, Any]) -> Iterator[str]:
    points = figures.of_bytes(record)
    if not points:
        return
    yield "## Accuracy against bytes\n"
    yield f"![Score against bytes]({figures.FRONTIER})\n"
    yield (
        "Not beaten: no method but the oracles answers as well with fewer bytes, or better with as many. Agnostic, the "
        "table's tasks, the texts and questions that every method was asked at every budget.\n"
    )
    for what, own in points.items():
        rows = [
            [one.method, one.amount, size(one.total), with_error(one.score, one.error)] for one in figures.best_of(own)
        ]
        yield "\n".join(markdown(["method", "budget", what, "mean score"], rows)) + "\n"


def _maps(record: Mapping[str, Any]) -> Iterator[str]:
    shown = [
        protocol
        for protocol, parts in figures.PARTS.items()
        if any(part["name"] in parts and part["answers"] for part in record["parts"])
    ]
    if shown:
        yield "## Methods and tasks\n"
        yield from (f"![Score of every method on every task, {one}]({figures.MAP.format(one)})\n" for one in shown)


def _leaders(record: Mapping[str, Any]) -> Iterator[str]:
    """Whether trained heads are ahead: for each protocol a table, a row per task, and what it comes to."""
    shown = [protocol for protocol in records.COMPARED if any(one["protocol"] == protocol for one in record["ahead"])]
    if shown:
        yield (
            "## Is it ahead?\n\nTrained heads beside the best without training that hold no more bytes, of kvpress's "
            "those that were asked on all these texts; to the right how far they are ahead of each task's best.\n"
        )
    for protocol in shown:
        rows = [row for row in records.table(record) if row["part"] in records.COMPARED[protocol]]
        ahead = {
            (one["method"], one["task"], one["tokens"]): one for one in record["ahead"] if one["protocol"] == protocol
        }
        budget = next((f", {row['budget']:,} units" for row in rows if row["budget"] is not None), "")
        yield f"### {protocol}{budget}: {max(row['texts'] for row in rows)} texts per cell\n"
        yield "\n".join(_leaders_table(rows, ahead)) + "\n"
        yield from _leads(ahead, records.unanswerable(record))
        yield from _of_oracle(rows, ahead, records.unanswerable(record))


def _leaders_table(rows: Sequence[Mapping[str, Any]], ahead: Mapping[_Cell, Mapping[str, Any]]) -> list[str]:
    known = {row["method"] for row in rows}
    best = records.untrained(dict.fromkeys(row["method"] for row in rows if row["method"] not in _YARDSTICKS))
    scores = {name: fmean(row["score"] for row in rows if row["method"] == name) for name in best}
    named = [name for name in _YARDSTICKS if name in known] + sorted(best, key=lambda name: -scores[name])[:_RIVALS]
    cells = {(row["method"], row["task"], row["tokens"]): row for row in rows}
    asked, lines = list(dict.fromkeys(method for method, *_ in ahead)), []
    several = len({row["tokens"] for row in rows}) > 1
    for task, tokens in dict.fromkeys((row["task"], row["tokens"]) for row in rows):
        own = [cells.get((name, task, tokens)) for name in named]
        lines.append([f"{task} @ {tokens:,}" if several else task])
        lines[-1] += ["" if one is None else with_error(one["score"], one["error"], 0) for one in own]
        lines[-1] += [_ahead(ahead.get((method, task, tokens))) for method in asked]
    return markdown(["task", *named, *(f"{method} − best other" for method in asked)], lines)


def _leads(ahead: Mapping[_Cell, Mapping[str, Any]], out: Collection[str]) -> Iterator[str]:
    for method in dict.fromkeys(name for name, *_ in ahead):
        own = [one for (name, task, _), one in ahead.items() if name == method and task not in out]
        if own:
            clear = sum(_clearly(one) for one in own)
            behind = sum(_clearly({**one, "difference": -one["difference"]}) for one in own)
            what = "tasks" if len({one["tokens"] for one in own}) == 1 else "tasks and lengths"
            yield (
                f"`{method}` is ahead of the best of the others (each task's own) by more than {TOLD_APART:g} standard "
                f"errors of the difference on the same texts on {clear} of {len(own)} {what}"
                f"{' that the means of the table have' if out else ''}, and as far behind it on {behind}.\n"
            )


def _of_oracle(
    rows: Sequence[Mapping[str, Any]], ahead: Mapping[_Cell, Mapping[str, Any]], out: Collection[str]
) -> Iterator[str]:
    cells = {(row["method"], row["task"], row["tokens"]): row["score"] for row in rows if row["task"] not in out}
    for method, oracle in product(dict.fromkeys(name for name, *_ in ahead), _AGNOSTIC):
        if method.endswith(PLACED) != oracle.endswith(PLACED) or (SHARED in oracle and SHARED not in method):
            continue
        pairs = {
            (task, tokens): (cells[method, task, tokens], top)
            for (name, task, tokens), top in cells.items()
            if name == oracle and top and (method, task, tokens) in cells
        }
        if pairs:
            share = sum(own for own, _ in pairs.values()) / sum(top for _, top in pairs.values())
            short = [f"`{task}` ({own / top:.2f})" for (task, _), (own, top) in pairs.items() if own < _OF_ORACLE * top]
            yield (
                f"Of what `{oracle}` answers of these tasks, `{method}` answers {100 * share:.0f} % as much; "
                f"on {len(pairs) - len(short)} of {len(pairs)} at least {100 * _OF_ORACLE:.0f} %"
                f"{', less on ' + ', '.join(short) if short else ''}.\n"
            )


def _clearly(one: Mapping[str, Any]) -> bool:
    return one["error"] is not None and one["difference"] > TOLD_APART * one["error"]


def _ahead(one: Mapping[str, Any] | None) -> str:
    return "" if one is None else f"{with_error(one['difference'], one['error'], 0)} ({one['rival']})"


def _capacity(record: Mapping[str, Any]) -> Iterator[str]:
    if record.get("capacity"):
        from locret.infer.evaluation.capacity import table

        yield "## Capacity\n"
        yield f"![Facts recalled as a text states more of them]({figures.CAPACITY})\n"
        yield table(record["capacity"])
        if any(SHARED in row["method"] for row in record["capacity"]["rows"]):
            yield (
                f"What is possible counts the mean layer: with `{SHARED}` the layers that find the facts hold more of "
                "them than that.\n"
            )


def _order(record: Mapping[str, Any]) -> Iterator[str]:
    if not record["order"]:
        return
    yield "## Is the order real?\n"
    rows = []
    for protocol, one in record["order"].items():
        good = "" if one["lowest"] is None else " (yes)" if one["lowest"] > _BOUND else " (no)"
        top, chance = one["top"], one["chance"]
        above = "not asked" if top["above"] is None else ", ".join(top["above"]) or "none"
        rows.append(
            [
                protocol,
                f"{_taus(one, 'tau')}{good}",
                _taus(one, "tau_with_ceilings"),
                f"{one['told_apart']} of {one['pairs']}",
                len(one["swapped"]),
                "not known" if chance is None else _chance(chance),
                f"{top['oracle']}: {above}",
            ]
        )
    heads = ["protocol", f"tau of two seeds (> {_BOUND:g}?)", "with the oracles", "pairs told apart"]
    heads += ["of them swapped by a seed"]
    yield "\n".join(markdown([*heads, "random − chance", "above the oracle"], rows)) + "\n"
    yield (
        "Tau: Kendall's, of the methods; oracles are ceilings, of which several answer everything, and their column "
        f"counts them too. Told apart: the mean difference on the same texts exceeds {TOLD_APART:g} standard errors. "
        "Chance: what the answers of `random` score on another text's questions of the same task; its own questions "
        "are about texts of which it keeps a share, in each head other units, and where what a fact needs is among "
        "them it knows the answer, the more of it the more it keeps. Above the oracle: methods that keep no more than "
        "the budget and are ahead of it by that much.\n"
    )


def _taus(order: Mapping[str, Any], name: str) -> str:
    if len(order["seeds"]) < 2:
        return "one seed"
    return ", ".join("none" if tau is None else f"{tau:.2f}" for tau in order[name]) or "oracles alone"


def _chance(found: Mapping[str, Any]) -> str:
    gap = found["random"] - found["chance"]
    kept = f", keeps {found['kept']:.1f} %" if "kept" in found else ""
    return f"{found['random']:.1f} − {found['chance']:.1f} = {with_error(gap, found['error'])}{kept}"


def _asked(record: Mapping[str, Any]) -> Iterator[str]:
    yield "## What was asked\n"
    rows = []
    for part in record["parts"]:
        seconds = sum(record["seconds"].get(name, 0.0) for name in part["units"])
        budgets = ", ".join(f"{budget:,}" for budget in part["budgets"])
        rows.append(
            [
                part["name"],
                part["protocol"],
                part["methods"],
                budgets,
                f"{part['texts']} × {part['seeds']}",
                part["questions"] or 1,
                f"{part['answers']:,}",
                f"{seconds / 60:.1f}",
            ]
        )
    if capacity := record.get("capacity"):
        own, seconds = capacity["rows"], record["seconds"]
        taken = sum(value for name, value in seconds.items() if name.startswith("capacity-"))
        kept = dict.fromkeys(f"{row['budget']:,}" for row in own if row["budget"] is not None)
        rows.append(
            [
                "capacity",
                AGNOSTIC,
                len({row["method"] for row in own}),
                ", ".join(kept),
                f"{max(row['texts'] for row in own)} × 1",
                capacity["questions"] or max(row["facts"] for row in own),
                "",
                f"{taken / 60:.1f}",
            ]
        )
    heads = [
        "part",
        "protocol",
        "methods",
        "budgets",
        "texts per task × seeds",
        "questions at most",
        "answers",
        "minutes of a core",
    ]
    yield "\n".join(markdown(heads, rows)) + "\n"
    minutes = sum(record["seconds"].values()) / 60
    if minutes > 60:
        longest = max(record["seconds"].values()) / 60
        yield (
            f"In all {minutes:,.0f} minutes of a core. Units run side by side, one on each core, the longest for "
            f"{longest:,.0f} minutes, and with {math.ceil(minutes / longest)} cores or more all take little more.\n"
        )
    found = {**record["versions"], **(record["config"].get("kvpress") or {})}
    kvpress = record["config"].get("kvpress") or {}
    named = [f"{name} {record['versions'][name]}" for name in ("locret", "torch", "transformers") if name in found]
    if kvpress:
        named.append(
            f"kvpress {kvpress['kvpress']} with transformers {kvpress['transformers']} and torch {kvpress['torch']}"
        )
    yield f"Versions: {', '.join(named)}.\n"


def _missing(record: Mapping[str, Any]) -> Iterator[str]:
    lines = [f"* {name}: {reason}" for name, reason in {**record["missing"], **record["left_out"]}.items()]
    lines += [f"* {names} of kvpress: {reason}" for names, reason in presses.LEFT_OUT.items()]
    yield "## What is not here\n\n" + "\n".join(lines) + "\n"


def write(record: Mapping[str, Any], folder: Path, *, figures: bool = True) -> list[str]:
    """Write the page and its pictures into a folder, and return the names of the files.

    Raises:
        OSError: If a file cannot be written.
    """
    from locret.infer.evaluation.world import figures as pictures

    write_text(folder / PAGE, text(record, figures=figures))
    return [PAGE, *(pictures.write(record, folder) if figures else [])]


def _check(record: Any, path: Path) -> None:
    """Draw the page once, before anything is written, and refuse what no page can be drawn of."""
    unfit = ValueError(f"{path} is no whole record of a suite; give the world.json of `locret-eval --suite world`")
    if not isinstance(record, dict) or record.get("suite") != "world" or not _finite(record):
        raise unfit
    try:
        text(record)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise unfit from error


def _finite(value: Any) -> bool:
    """Return whether all numbers of plain data are finite."""
    if isinstance(value, (dict, list)):
        return all(map(_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the page of a record into a folder, with the record beside it; print the files and return 0.

    Raises:
        ValueError: If it is missing, or no record of the suite.
        OSError: If a file cannot be read or written.
    """
    parser = argparse.ArgumentParser("locret.infer.evaluation.world.page", description="Draw the page of a record.")
    parser.add_argument("record", type=Path, help="The world.json that `locret-eval --suite world` writes.")
    parser.add_argument("folder", type=Path, help="Gets the page, its pictures and the record.")
    options = parser.parse_args(argv)
    if not options.record.exists():
        raise ValueError(
            f"{options.record} does not exist; `locret-eval --suite world` writes it when its last part has ended, and "
            "--resume goes on with a run that was interrupted"
        )
    record = read_json(options.record, "the world.json that `locret-eval --suite world` writes")
    _check(record, options.record)
    if options.folder.exists() and not options.folder.is_dir():
        raise ValueError(f"{options.folder} is a file; name a folder for the page")
    with warnings_as_lines("locret.infer.evaluation.world.page", quiet=False):
        draws = can_draw("the pictures")
    options.folder.mkdir(parents=True, exist_ok=True)
    records.save(record, options.folder / records.RECORD)
    names = write(record, options.folder, figures=draws)
    sys.stdout.write("".join(f"{options.folder / name}\n" for name in names))
    return 0


if __name__ == "__main__":
    from locret.cli.command import run

    run(main, prog="locret.infer.evaluation.world.page")
