"""Rows of tables as papers print them, to stand beside ours. Nothing here was measured with this toolkit.

Papers:   Locret (arXiv 2410.01805), Tables 1, 3, 6, 7, 9, 10 and appendix; OmniKV (ICLR 2025), Tables 1, 2, 4; NACL
          (arXiv 2408.03675), released results; RULER (arXiv 2404.06654).
Deviates: a cell that contradicts its own table's average is corrected, and `note` says what is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PHI, LLAMA = "Phi-3-mini-128K", "Llama-3.1-8B-Instruct"
_LOCRET, _OMNIKV = "Locret, arXiv 2410.01805", "OmniKV, ICLR 2025"


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One row of a published table, in the order of its suite's tasks."""

    source: str
    model: str
    method: str
    precision: str = "not stated"
    """Of weights or cache, where the paper gives it."""
    scores: tuple[float | None, ...]
    """0 to 100; None where the paper has no cell. Empty where it prints the average alone."""
    average: float
    """As printed."""
    note: str = ""


def _rows(source: str, model: str, text: str) -> Iterator[PublishedRow]:
    """Read lines of `method: cell ... | average | precision | note`; a cell that is not there is a dash."""
    for line in text.strip().splitlines():
        method, _, rest = line.partition(":")
        cells, average, precision, note, *_ = [*(part.strip() for part in rest.split("|")), "", "", ""]
        yield PublishedRow(
            source=source,
            model=model,
            method=method.strip(),
            precision=precision or "not stated",
            scores=tuple(None if cell == "-" else float(cell) for cell in cells.split()),
            average=float(average),
            note=note,
        )


# R.PassKey R.Number E.Sum E.QA E.MC Z.QA E.Dia C.Debug M.Find
INFINITEBENCH_LOCRET = (
    *_rows(
        f"{_LOCRET}, Table 3",
        PHI,
        """
        full:       98.64 97.12 17.92 11.16 55.46 14.83 8.00 23.10 17.43 | 38.18
        InfLLM:     100.00 97.12 14.35 4.97 38.86 11.04 3.50 25.38 15.14 | 34.48
        HF-2BITS:   0.00 0.00 13.80 1.44 1.75 0.20 0.50 0.00 0.57 | 2.03 | 2-bit cache
        SirLLM:     3.39 3.39 21.06 6.32 44.98 11.99 5.00 22.34 21.71 | 15.58
        MInference: 99.32 95.93 14.44 8.11 40.61 10.60 9.00 15.48 15.43 | 32.25
        Locret:     100.00 97.46 16.82 7.61 46.29 11.31 10.00 27.92 29.71 | 34.73
        """,
    ),
    *_rows(
        f"{_LOCRET}, Table 6",
        PHI,
        """
        Locret, random heads: 0.00 0.34 5.09 2.68 18.34 1.54 0.00 13.71 2.57 | 4.92 || R.Number is printed as 34.00
        """,
    ),
    *_rows(
        f"{_LOCRET}, Table 3",
        LLAMA,
        """
        full:       100.00 99.32 26.79 15.06 68.12 13.40 17.00 20.56 34.00 | 43.81
        InfLLM:     100.00 100.00 24.24 14.21 51.97 10.76 11.00 26.25 35.71 | 41.57
        HF-2BITS:   36.78 6.95 8.77 4.05 27.95 3.09 5.50 13.20 22.00 | 14.25 | 2-bit cache
        SirLLM:     1.69 1.69 25.60 8.95 55.46 10.38 9.50 23.10 3.71 | 15.56
        MInference: 100.00 98.47 20.64 14.35 59.83 12.20 20.50 25.89 35.43 | 43.03
        Locret:     100.00 99.49 27.28 20.90 58.82 11.85 13.00 27.16 32.86 | 43.48
        """,
    ),
)

# CodeU NQ CUAD NarrativeQA QMSum SPACE
LEVAL_LOCRET = (
    *_rows(
        f"{_LOCRET}, Table 3",
        PHI,
        """
        full:       8.89 59.14 30.34 17.59 16.05 14.51 | 24.42
        InfLLM:     5.56 34.32 14.53 14.80 13.31 14.81 | 16.22
        HF-2BITS:   0.00 1.69 6.40 2.04 2.73 3.34 | 2.70 | 2-bit cache
        SirLLM:     8.89 37.92 20.89 14.51 13.70 14.46 | 18.40
        MInference: 7.78 25.21 26.64 15.14 15.78 14.87 | 17.57
        Locret:     8.89 51.49 22.23 16.42 14.86 14.06 | 21.33
        """,
    ),
    *_rows(
        f"{_LOCRET}, Table 1 and appendix",
        PHI,
        """
        Locret, heads from LongAlign:     10.00 55.13 21.34 16.40 15.01 14.09 | 22.00
        Locret, heads from Anti-Haystack: 8.89 52.91 20.87 13.73 13.84 14.10 | 20.72
        """,
    ),
    *_rows(
        f"{_LOCRET}, Table 3",
        LLAMA,
        """
        full:       10.00 66.84 38.91 23.11 18.76 16.86 | 29.08
        InfLLM:     6.67 54.77 33.76 20.35 17.62 16.73 | 24.98
        HF-2BITS:   1.11 29.79 18.98 9.46 14.02 13.73 | 14.52 | 2-bit cache
        SirLLM:     5.56 58.00 35.41 21.21 17.32 16.44 | 25.66
        MInference: 7.78 31.80 36.93 19.44 18.14 16.76 | 21.81
        Locret:     8.89 63.03 37.21 23.59 18.17 16.87 | 27.96
        """,
    ),
    *_rows(
        f"{_LOCRET}, Table 9 and appendix",
        LLAMA,
        """
        full:   7.78 66.64 38.25 22.76 18.85 16.84 | 28.52 | 4-bit cache
        Locret: 4.44 63.22 36.95 22.80 18.43 16.81 | 27.11 | 4-bit cache
        """,
    ),
    *_rows(
        f"{_LOCRET}, Table 10 and appendix",
        LLAMA,
        """
        LoCoCo:            4.44 61.10 35.84 19.83 18.15 16.71 | 26.01
        LoCoCo and Locret: 7.78 66.33 38.01 24.85 18.31 16.92 | 28.70
        """,
    ),
)

# gov_report triviaqa narrativeqa qmsum musique 2wikimqa multifieldqa_en repobench-p qasper hotpotqa multi_news trec
# passage_retrieval_en passage_count samsum lcc
LONGBENCH_EN = tuple(
    _rows(
        f"{_LOCRET}, Table 7",
        PHI,
        """
    full: 33.35 86.38 18.21 19.51 19.82 33.37 49.82 58.02 41.07 43.06 26.57 67.00 93.50 2.97 23.15 51.86 | 41.73
    MInference: 32.94 86.87 19.46 19.57 18.85 33.30 49.14 58.98 40.31 43.56 26.35 68.00 89.00 2.10 25.58 53.68 | 41.73
    SirLLM: 32.92 85.61 21.08 21.59 24.32 34.97 48.52 59.15 40.17 47.00 26.44 65.50 63.00 3.00 23.11 51.83 | 40.51
    InfLLM: 25.96 84.87 20.83 19.61 13.63 27.43 41.29 55.73 30.51 38.05 25.36 64.50 10.00 7.50 0.28 61.59 | 32.95
    Locret: 33.46 82.39 24.56 23.35 25.12 35.93 52.77 57.16 40.17 48.70 26.41 62.00 83.00 3.00 26.37 52.61 | 42.31
        """,
    )
)

# multifieldqa_en narrativeqa qasper | 2wikimqa dureader hotpotqa musique | gov_report qmsum vcsum
# lsht trec triviaqa | passage_count passage_retrieval_en | lcc repobench-p
LONGBENCH_OMNIKV = tuple(
    _rows(
        f"{_OMNIKV}, Tables 1 and 4",
        "Llama-3-8B-262K",
        """
        full:              43.6 16.0 28.2 21.7 28.3 27.5 14.3 34.5 25.3 15.1 44.5 69.5 83.7 0.0 87.0 52.5 45.4 | 39.2
        H2O, 30 %:         39.8 16.8 26.5 19.3 23.9 24.5 13.2 31.2 25.3 15.2 35.0 68.5 85.5 0.0 85.5 42.8 43.8 | 36.8
        StreamingLLM, 30 %: 22.1 13.4 22.5 20.1 12.9 24.1 12.3 26.5 21.4 8.1 20.5 60.0 68.7 1.7 21.8 55.8 48.8 | 28.1
        InfLLM, about 30 %: 41.2 16.8 26.2 16.5 19.8 16.5 8.4 33.1 24.2 0.2 37.0 68.5 82.7 6.5 66.5 52.3 44.8 | 35.0
        OmniKV, 30 %:      43.0 17.0 28.6 21.8 28.2 27.0 14.6 34.2 24.9 14.1 44.5 69.5 80.9 0.0 82.5 51.4 45.4 | 38.5
        """,
    )
)

# E.Sum E.QA E.MC E.Dia Z.QA C.Debug M.Find R.PassKey R.Number R.KV
INFINITEBENCH_OMNIKV = (
    *_rows(
        f"{_OMNIKV}, Table 2",
        "Llama-3-8B-262K",
        """
        full:               22.0 13.3 65.9 6.0 12.8 20.8 26.5 100 100 14.4 | 38.1
        H2O, 30 %:          21.8 13.8 65.5 7.0 12.5 23.0 30.5 98.4 74.0 5.2 | 35.2
        InfLLM, about 30 %: 17.3 9.3 44.5 4.0 17.7 29.1 24.5 100 100 0 | 34.6
        OmniKV, 30 %:       22.5 12.7 65.5 5.0 12.6 20.0 26.5 100 100 9.6 | 37.4
        """,
    ),
    *_rows(
        f"{_OMNIKV}, Table 2",
        "Yi-9B-200K",
        """
        full:               19.3 11.1 66.3 2.0 15.6 24.1 24.8 100 100 20.2 | 38.3
        H2O, 30 %:          21.6 10.8 66.3 1.0 15.8 23.3 24.0 100 92.7 6.0 | 36.1
        InfLLM, about 30 %: 6.7 12.1 37.1 3.5 14.8 21.5 34.0 100 100 0 | 32.9
        OmniKV, 30 %:       20.0 11.1 66.8 1.0 15.5 23.8 23.8 100 100 19.8 | 38.2
        """,
    ),
)

# R.PassKey R.Number R.KV E.Sum E.QA E.MC E.Dia Z.QA C.Debug C.Run M.Find
INFINITEBENCH_NACL = tuple(
    _rows(
        "NACL, released results of arXiv 2408.03675",
        "Llama-3.1-8B",
        """
        full:                  100 99.49 59.20 27.61 13.03 66.37 17.0 13.03 0.76 1.25 32.85 | 39.14
        NACL, 80 % evicted:    100 96.61 3.60 26.53 14.41 66.38 15.5 12.57 1.02 1.75 32.86 | 33.75
        """,
    )
)

_RULER = {
    "Llama-3.1-8B": (95.5, 93.8, 91.6, 87.4, 84.7, 77.0),
    PHI: (92.2, 91.5, 90.7, 87.5, 80.6, 66.7),
}
RULER_LENGTHS = {"4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768, "64k": 65536, "128k": 131072}


def ruler(length: str) -> tuple[PublishedRow, ...]:
    """Return the averages that RULER's report gives for a length such as "4k"; its cells by task are not held here."""
    place = list(RULER_LENGTHS).index(length)
    return tuple(
        PublishedRow(source="RULER, arXiv 2404.06654", model=model, method="full", scores=(), average=averages[place])
        for model, averages in _RULER.items()
    )
