"""Training rows for retaining heads from ordinary texts: pieces of them, and what may be asked of each.

Two rows of three ask for sentences of their piece by a few of their words, and what people asked whose answer stands in
it; the third asks for the whole piece again (KVzip, arXiv 2505.23416). Heads that learn from both kinds in turns hold
better at large budgets than those of questions alone, and better at small ones than those of repetition. The rows are
in the shared-document schema, for `locret-train --answers each`, whose label is the largest of a row's answers.

    python -m locret.data.training.text_rows --texts manuals --output rows.jsonl
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locret import shipped
from locret.base.files import write_text
from locret.cli.command import parse_options

CUES = (
    'What does the text say about "{}"?',
    "What does the text say about {}?",
    'Which sentence mentions "{}"?',
    "What is said about {}?",
)
_SENTENCE = (40, 320)
"""Characters of a sentence that is asked for: shorter ones are headings, longer ones tables."""
_SENTENCES = 3
"""Of each piece that are asked for."""
_LONG = 7000
"""Characters of a piece that is asked for again at most. Of longer ones more sentences are asked for, all but one at
once: an answer costs a pass through the text."""
_LEAST = 200
"""Characters of a file that is read."""
_MOST_ASKED = 6
"""Questions of people in a row."""
_MARKS = re.compile(r":\w+:`[~!]?([^`<]*?)(?:\s*<[^`]*>)?`|``([^`]*)``|\*")
"""reStructuredText's marks, which an answer may be without."""


@dataclass(frozen=True, kw_only=True)
class TextRowsOptions:
    """Options of `python -m locret.data.training.text_rows`."""

    texts: str
    """Folder of texts, read with its folders: every .txt, .md and .rst file."""
    output: str
    """JSONL file to write; an existing one is replaced."""
    questions: str | list[str] = ""
    """JSONL files of people's questions, with context (a path in --texts), question and answer."""
    until: float = 1.0
    """Of a file with questions, the share from its beginning that rows are made of; the rest is for evaluation."""
    leave_out: str | list[str] = ""
    """Files of --texts that no row is made of."""
    rows: int = 1000
    """Rows to write."""
    characters: str = "1600-7000"
    """Least and most characters of a piece, drawn evenly on a logarithmic scale."""
    seed: int = 0
    """Same seed and texts, same rows."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"--rows {self.rows} is too small; give 1 or more")
        if not 0 < self.until <= 1:
            raise ValueError(f"--until {self.until} is not a share of a file; give more than 0, up to 1")
        if not Path(shipped.find(self.texts)).is_dir():
            raise ValueError(f"--texts {self.texts} is not a folder; give one with .txt, .md or .rst files")
        self.lengths()

    def lengths(self) -> tuple[int, int]:
        """Return the least and most characters of a piece."""
        found = re.fullmatch(r"(\d+)-(\d+)", self.characters)
        if not found or not _LEAST <= int(found[1]) <= int(found[2]):
            raise ValueError(
                f"--characters {self.characters} is not a range of {_LEAST} or more; give such as 1600-7000"
            )
        return int(found[1]), int(found[2])


def _names(given: str | list[str]) -> list[str]:
    return [name.strip() for name in (given.split(",") if isinstance(given, str) else given) if name.strip()]


def flat(text: str) -> str:
    """Return a text with one space for all white space."""
    return re.sub(r"\s+", " ", text).strip()


def unmarked(text: str) -> str:
    """Return a text without reStructuredText's marks, its white space folded."""
    return flat(_MARKS.sub(lambda found: found[1] or found[2] or "", text))


def _sentences(text: str) -> list[str]:
    """Return the sentences of a text that can be asked for."""
    parts = (flat(part) for part in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])", text))
    return [part for part in parts if _SENTENCE[0] <= len(part) <= _SENTENCE[1] and part[0].isalpha()]


def _asked_for(sentence: str, draw: random.Random) -> dict[str, str]:
    """Return a question that names two to four words of a sentence, with the sentence as its answer."""
    words, count = sentence.split(), draw.randint(2, 4)
    first = draw.randrange(max(1, len(words) - count))
    cue = " ".join(words[first : first + count]).strip(",.;:()\"'")
    return {"question": draw.choice(CUES).format(cue), "answer": sentence}


def people_asked(piece: str, questions: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the questions whose answers stand in a piece of their text, from beginning to end."""
    text, found = unmarked(piece), []
    for one in questions:
        answer = unmarked(one["answer"])
        if len(answer.split()) > 3 and answer in text:
            found.append({"question": one["question"], "answer": one["answer"]})
    return found


def text_rows(options: TextRowsOptions) -> Iterator[dict[str, Any]]:
    """Yield rows with the keys `document` and `questions`, a list of `question` and `answer`.

    A third of the rows are of files with questions, where there are any; every other row has its white space folded.

    Raises:
        ValueError: If there is no text long enough, or a file of questions is not what it should be.
    """
    from locret.conversation.head_shares import REQUEST  # imports torch, which help does not need

    draw, root = random.Random(options.seed), Path(shipped.find(options.texts))
    files = {
        path.relative_to(root).as_posix(): path
        for path in sorted(root.rglob("*"))
        if path.suffix in (".txt", ".md", ".rst") and path.stat().st_size >= _LEAST
    }
    left_out = set(_names(options.leave_out))
    if unknown := sorted(left_out - set(files)):
        raise ValueError(f"--leave-out {unknown[0]} is not a file of --texts {options.texts}; give its path in it")
    questions = _questions(options, files)
    folders: dict[str, list[str]] = {}
    for name in files:
        if name not in left_out:
            folders.setdefault(str(Path(name).parent), []).append(name)
    if not folders:
        raise ValueError(f"--texts {options.texts} holds no text of {_LEAST} bytes or more; give another folder")
    with_questions = [name for name in questions if name not in left_out]
    for index in range(options.rows):
        if with_questions and index % 3 == 0:
            name = draw.choices(with_questions, [len(questions[name]) for name in with_questions])[0]
        else:
            name = draw.choice(draw.choice(list(folders.values())))
        text = files[name].read_text(encoding="utf-8", errors="replace")
        if name in questions:
            text = text[: int(options.until * len(text))]
        least, most = options.lengths()
        size = round(math.exp(draw.uniform(math.log(least), math.log(most))))
        start = draw.randint(0, max(0, len(text) - size))
        piece = text[start : start + size].strip()
        if index % 3 == 2:
            piece = piece[:_LONG]
        people = people_asked(piece, questions.get(name, ()))
        draw.shuffle(people)
        told = _sentences(piece)
        draw.shuffle(told)
        piece = flat(piece) if index % 2 else piece
        if not piece:
            continue
        asked = [_asked_for(sentence, draw) for sentence in told[: _SENTENCES if len(piece) <= _LONG else 8]]
        if len(asked) > _SENTENCES:
            asked[1:] = [{key: "\n".join(one[key] for one in asked[1:]) for key in asked[0]}]
        asked = [*people[: _MOST_ASKED if len(piece) <= _LONG else 2], *asked]
        if index % 3 == 2 or not asked:
            asked = [{"question": REQUEST, "answer": piece}]
        yield {"document": piece, "questions": asked}


def _questions(options: TextRowsOptions, files: dict[str, Path]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for file in _names(options.questions):
        for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), start=1):
            try:
                one = json.loads(line)
                if not all(isinstance(one[key], str) for key in ("context", "question", "answer")):
                    raise TypeError("they are not all text")
                if one["context"] not in files:
                    raise ValueError(f"{one['context']} is not in --texts {options.texts}")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"--questions {file}:{number} is not an object with context, question and answer ({error}); mend it"
                ) from None
            found.setdefault(one["context"], []).append(one)
    return found


def command(argv: Sequence[str] | None = None) -> int:
    (options,), _ = parse_options("locret rows", (__doc__ or "").split("\n")[0], [TextRowsOptions], argv)
    rows = list(text_rows(options))
    write_text(options.output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), parents=True)
    asked = sum(len(row["questions"]) for row in rows)
    sys.stderr.write(f"wrote {len(rows):,} rows with {asked:,} questions to {options.output}\n")
    return 0


if __name__ == "__main__":
    from locret.cli.command import run

    run(command, prog="locret rows")
