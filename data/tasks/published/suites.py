"""Suites: the tasks of a published table, in its order, with its average and the rows that papers print for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from locret.data.tasks.published import published_rows
from locret.data.tasks.published.published_rows import RULER_LENGTHS, PublishedRow
from locret.nearest import nearest


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A table to reproduce."""

    name: str
    title: str
    tasks: tuple[str, ...]
    """In the order of the table's columns."""
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Groups of tasks whose means are averaged; without them the average is that of the tasks."""
    tokens: int | None = None
    """Length of the prompts, where it belongs to the suite; 0 for rows of the published sizes."""
    published: tuple[PublishedRow, ...] = ()
    remark: str = ""
    """What else published rows do otherwise."""

    @property
    def average_rule(self) -> str:
        """How the average is taken, in words."""
        if len(self.tasks) == 1:
            return "the task's score"
        return f"mean of {len(self.groups)} groups' means" if self.groups else f"mean of {len(self.tasks)} tasks"

    def average(self, scores: Mapping[str, float]) -> float | None:
        """Return the average of what is there; None if nothing is. Whoever shows it says what is missing.

        Args:
            scores: Scores by task; tasks may be missing.
        """
        parts = [names for _, names in self.groups] or [(name,) for name in self.tasks]
        means = [_mean([scores[name] for name in names if name in scores]) for names in parts]
        return _mean([mean for mean in means if mean is not None])

    def group_means(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the means of the groups all of whose tasks are there."""
        whole = {title: names for title, names in self.groups if all(name in scores for name in names)}
        return {title: math.fsum(scores[name] for name in names) / len(names) for title, names in whole.items()}

    def cells_average(self, row: PublishedRow) -> float | None:
        """Return the average of a published row's cells by this suite's rule; None if cells are missing."""
        known = {name: score for name, score in zip(self.tasks, row.scores, strict=False) if score is not None}
        return self.average(known) if len(known) == len(self.tasks) else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _named(family: str, text: str) -> tuple[str, ...]:
    return tuple(f"{family}/{name}" for name in text.split())


_SINGLE, _MULTI, _SUMMARY = "single-document QA", "multi-document QA", "summarisation"
_FEW, _SYNTHETIC, _CODE = "few-shot", "synthetic", "code"


def _groups(**texts: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    titles = (_SINGLE, _MULTI, _SUMMARY, _FEW, _SYNTHETIC, _CODE)
    return tuple((title, _named("longbench", text)) for title, text in zip(titles, texts.values(), strict=True))


_ALL_GROUPS = _groups(
    single="narrativeqa qasper multifieldqa_en multifieldqa_zh",
    multi="hotpotqa 2wikimqa musique dureader",
    summary="gov_report qmsum multi_news vcsum",
    few="trec triviaqa samsum lsht",
    synthetic="passage_count passage_retrieval_en passage_retrieval_zh",
    code="lcc repobench-p",
)
_OMNIKV_GROUPS = _groups(
    single="multifieldqa_en narrativeqa qasper",
    multi="2wikimqa dureader hotpotqa musique",
    summary="gov_report qmsum vcsum",
    few="lsht trec triviaqa",
    synthetic="passage_count passage_retrieval_en",
    code="lcc repobench-p",
)

_SUITES: tuple[Suite, ...] = (
    Suite(
        name="infinitebench-locret",
        title="InfiniteBench, the nine tasks of Locret's Table 3",
        tasks=_named(
            "infinitebench",
            "passkey number_string longbook_sum_eng longbook_qa_eng longbook_choice_eng longbook_qa_chn "
            "longdialogue_qa_eng code_debug math_find",
        ),
        published=published_rows.INFINITEBENCH_LOCRET,
    ),
    Suite(
        name="infinitebench-omnikv",
        title="InfiniteBench, the ten tasks of OmniKV's Table 2",
        tasks=_named(
            "infinitebench",
            "longbook_sum_eng longbook_qa_eng longbook_choice_eng longdialogue_qa_eng longbook_qa_chn code_debug "
            "math_find passkey number_string kv_retrieval",
        ),
        published=published_rows.INFINITEBENCH_OMNIKV,
    ),
    Suite(
        name="infinitebench-nacl",
        title="InfiniteBench, the eleven tasks that NACL's release reports",
        tasks=_named(
            "infinitebench",
            "passkey number_string kv_retrieval longbook_sum_eng longbook_qa_eng longbook_choice_eng "
            "longdialogue_qa_eng longbook_qa_chn code_debug code_run math_find",
        ),
        published=published_rows.INFINITEBENCH_NACL,
    ),
    Suite(
        name="infinitebench",
        title="InfiniteBench, all twelve tasks",
        tasks=_named(
            "infinitebench",
            "passkey number_string kv_retrieval longbook_sum_eng longbook_qa_eng longbook_choice_eng "
            "longdialogue_qa_eng longbook_qa_chn code_debug code_run math_find math_calc",
        ),
    ),
    Suite(
        name="leval-locret",
        title="L-Eval, the six tasks of Locret's Table 3",
        tasks=_named("leval", "codeU natural_question legal_contract_qa narrative_qa meeting_summ review_summ"),
        published=published_rows.LEVAL_LOCRET,
        remark="Published rows were asked in the malformed turns of the official runs; the task option prompt_style: "
        "official repeats them, for Llama-3 and Phi-3 tokenizers.",
    ),
    Suite(
        name="longbench-en",
        title="LongBench, the sixteen English tasks of Locret's Table 7",
        tasks=_named(
            "longbench",
            "gov_report triviaqa narrativeqa qmsum musique 2wikimqa multifieldqa_en repobench-p qasper hotpotqa "
            "multi_news trec passage_retrieval_en passage_count samsum lcc",
        ),
        published=published_rows.LONGBENCH_EN,
    ),
    Suite(
        name="longbench-omnikv",
        title="LongBench, the seventeen tasks that OmniKV lists",
        tasks=tuple(name for _, names in _OMNIKV_GROUPS for name in names),
        groups=_OMNIKV_GROUPS,
        published=published_rows.LONGBENCH_OMNIKV,
    ),
    Suite(
        name="longbench",
        title="LongBench, all twenty-one tasks",
        tasks=tuple(name for _, names in _ALL_GROUPS for name in names),
        groups=_ALL_GROUPS,
    ),
    *(
        Suite(
            name=f"ruler-{length}",
            title=f"RULER, all thirteen tasks at {tokens:,} tokens",
            tasks=_named(
                "ruler",
                "niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multikey_2 niah_multikey_3 "
                "niah_multivalue niah_multiquery vt cwe fwe qa_1 qa_2",
            ),
            tokens=tokens,
            published=published_rows.ruler(length),
        )
        for length, tokens in RULER_LENGTHS.items()
    ),
    Suite(
        name="infinitebench-generated",
        title="InfiniteBench's retrieval tasks, rows generated at the published size",
        tasks=_named("infinitebench_generated", "passkey number_string kv_retrieval"),
        tokens=0,
    ),
    Suite(
        name="niah",
        title="needle in a haystack and pass key in essays, at every one of --lengths; samples are depths",
        tasks=_named("niah", "needle passkey"),
    ),
    Suite(
        name="twostage",
        title="2StageRetr at the published sizes, 40 to 200 entries",
        tasks=_named("twostage", "2stage"),
        tokens=0,
    ),
)


def names() -> list[str]:
    """Return the names of the suites."""
    return [suite.name for suite in _SUITES]


def get(name: str) -> Suite:
    """Return the suite called `name`.

    Raises:
        ValueError: If there is none; the message lists the nearest names.
    """
    for suite in _SUITES:
        if suite.name == name:
            return suite
    near = nearest(name, names()) or names()
    raise ValueError(f'--suite "{name}" is unknown; did you mean {" or ".join(near)}?')
