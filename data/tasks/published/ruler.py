"""RULER's thirteen tasks (arXiv 2404.06654), generated for any tokenizer and any length, or read as published.

Needles: keys with magic values in noise, in essays, or among other needles. Lists: variable tracking (a chain of
assignments in noise), most common words of a list, most frequent words of a coded text. Questions: one of SQuAD or
HotpotQA, its paragraphs, and as many others as fit.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import count, product
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from locret.data.tasks.made import NOISE_LINE, Words, random_uuid, sentences
from locret.data.tasks.metrics.retrieval import all_contained, any_contained
from locret.data.tasks.published.base import Making, RowMaker, prompts_of
from locret.data.tasks.rows import Row
from locret.data.tasks.task import Sample

_SYLLABLES = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]


class Vocabulary(NamedTuple):
    """Parts of keys (`calm-river`), and words that stand alone."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    words: tuple[str, ...]

    def key(self, rng: random.Random) -> str:
        """Return an adjective and a noun joined by a hyphen."""
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"

    def distinct(self, rng: random.Random, count: int) -> list[str]:
        """Return that many different words; invented ones of four syllables if there are not enough real ones.

        RULER turns to a longer list of English words in that case; 24 million words can be invented.
        """
        if count <= len(self.words):
            return rng.sample(self.words, count)
        # Numbers written in base 70 are all different words.
        size = len(_SYLLABLES)
        return [
            "".join(_SYLLABLES[number // size**place % size] for place in range(4))
            for number in rng.sample(range(size**4), count)
        ]


@lru_cache
def vocabulary(source: str) -> Vocabulary:
    """Return the words of a source: "own" or "wonderwords"."""
    if source == "own":
        own = json.loads(Path(__file__).with_name("ruler_words.json").read_text(encoding="utf-8"))
        adjectives, nouns = (tuple(" ".join(own[kind]).split()) for kind in ("adjectives", "nouns"))
        return Vocabulary(adjectives, nouns, tuple(sorted({*adjectives, *nouns})))
    try:
        folder = resources.files("wonderwords") / "assets"
    except ModuleNotFoundError:
        raise ValueError(
            'words="wonderwords" needs the package of that name; install it with `pip install wonderwords`, '
            'or use words="own"'
        ) from None
    texts = [(folder / f"{kind}list.txt").read_text(encoding="utf-8") for kind in ("adjective", "noun", "verb")]
    adjectives, nouns, verbs = (tuple(sorted({word.strip() for word in text.split("\n")} - {""})) for text in texts)
    return Vocabulary(adjectives, nouns, tuple(sorted({*adjectives, *nouns, *verbs})))


PROMPTS: dict[str, list[str]] = prompts_of("ruler")
"""RULER's templates, and how answers begin."""

Maker = Callable[[random.Random, int, int], dict[str, Any]]
"""From a random stream, a row's number and a size to a row."""


def _row(index: int, prompt: str, prefix: str, outputs: Sequence[str], depths: Sequence[float] = ()) -> dict[str, Any]:
    """Return a row: `prefix` is how the answer begins, `depths` where facts are, 0 to 1 of sentences or lines."""
    row = {"index": index, "input": prompt, "outputs": list(outputs), "answer_prefix": prefix}
    return row | ({"depths": list(depths)} if depths else {})


@dataclass(frozen=True, kw_only=True)
class RulerTask(RowMaker):
    """One of the thirteen tasks. Fields of a row: index, input, outputs, answer_prefix, and depths of ours.

    Deviations from RULER's generator, which say nothing about the task: own random streams; sentences end at
    punctuation before white space (RULER asks NLTK); the prompt fills its length to the last unit (RULER: to the last
    25 lines or 500 words); a key that is asked for stands in no other needle of a needle haystack.
    """

    settable: ClassVar[tuple[str, ...]] = (*RowMaker.settable, "chat", "words")
    needs_length: ClassVar[bool] = True

    source: str = "RULER (arXiv 2404.06654), NVIDIA/RULER"
    words: Literal["own", "wonderwords"] = "own"
    """Where keys and words come from: ours, or RULER's lists (of the package of that name)."""
    drafter: Callable[[RulerTask, Making], Maker]
    """Makes what writes a prompt of a size; `maker` looks for the size that fills the length."""
    unit: int
    """Tokens that size 1 costs, roughly: where to look first."""
    least: int = 1
    """The smallest size that makes sense."""
    every: bool = True
    """Whether all references count, or any is enough."""
    own: str = ""
    """What stands in for RULER's texts unless they are given: "filler" or "own words"."""

    def stand_in(self, data_dir: Path | None) -> str:
        """Return "filler" where essays are missing, or "own words"; words of keys say too little to count."""
        there = data_dir is not None if self.own == "filler" else self.words != "own"
        return "" if there else self.own

    def maker(self, of: Making) -> Callable[[int], dict[str, Any]]:
        guess = max(1, (of.tokens or 0) // self.unit)
        return self.filled(of, self.drafter(self, of), guess=guess, least=self.least)

    def read(self, row: Row) -> list[Sample]:
        """Return the sample of a row. `index` of the row is no row number: RULER writes a character offset there."""
        content, lead, outputs = row.text("input"), row.text("answer_prefix"), row.texts("outputs")
        said = outputs if self.every else outputs[:1]
        document, line, question = content.rpartition("\n")  # in all thirteen the last line asks
        more = {"depths": tuple(row.fields.get("depths", ())), "lead": lead, "question": question}
        return [self.sample_of(row, "", document + line, question, outputs, reply=", ".join(said), **more)]

    def score(self, prediction: str, sample: Sample) -> float:
        return (all_contained if self.every else any_contained)(prediction, sample.targets)


DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Where needles may stand in essays, in per cent of the sentences."""


def needles(
    haystack: Literal["noise", "essay", "needle"],
    *,
    key: Literal["word", "uuid"] = "word",
    value: Literal["number", "uuid"] = "number",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Callable[[RulerTask, Making], Maker]:
    """Return what makes prompts whose haystack has so many lines (noise, needles) or words (essays).

    `values` are those of each key, and `queries` the keys asked for.
    """

    def drafter(task: RulerTask, of: Making) -> Maker:
        words = vocabulary(task.words)
        source = Words(of.data_dir if haystack == "essay" else None, of.seed)

        def new_key(rng: random.Random) -> str:
            return words.key(rng) if key == "word" else random_uuid(rng)

        def new_value(rng: random.Random) -> str:
            return str(rng.randint(10**6, 10**7 - 1)) if value == "number" else random_uuid(rng)

        def sentence(own: str, its: str) -> str:
            return f"One of the special magic {value}s for {own} is: {its}."

        def other(rng: random.Random, taken: dict[str, list[str]]) -> str:
            # A line of the haystack with a key that is asked for would make the answer ambiguous.
            while (own := new_key(rng)) in taken:
                pass
            return sentence(own, new_value(rng))

        def draft(rng: random.Random, index: int, size: int) -> dict[str, Any]:
            all_keys = [new_key(rng) for _ in range(max(keys, queries))]
            facts = {own: [new_value(rng) for _ in range(values)] for own in all_keys}
            hidden = [sentence(own, its) for own, found in facts.items() for its in found]
            rng.shuffle(hidden)
            asked = rng.sample(all_keys, queries)
            outputs = tuple(its for own in asked for its in facts[own])
            if haystack == "essay":
                text, depths = _in_essay(rng, hidden, source.first(size))
            else:
                lines = [NOISE_LINE if haystack == "noise" else other(rng, facts) for _ in range(size)]
                places = sorted(rng.sample(range(size), len(hidden)), reverse=True)
                for place, needle in zip(places, hidden, strict=True):
                    lines.insert(place, needle)
                text, depths = "\n".join(lines), tuple(place / size for place in places)
            query = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
            prompt, prefix = PROMPTS["needle" if len(outputs) == 1 else "needles"]
            about = {"kind": value, "query": query}
            return _row(index, prompt.format(text=text, **about), prefix.format(**about), outputs, depths)

        return draft

    return drafter


def _in_essay(rng: random.Random, needles: list[str], words: list[str]) -> tuple[str, tuple[float, ...]]:
    lines = sentences(" ".join(words))
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    pieces, last = [], 0
    for depth, needle in zip(depths, needles, strict=True):
        place = len(lines) * depth // 100
        pieces += [*lines[last:place], needle]
        last = place
    return " ".join([*pieces, *lines[last:]]), tuple(depth / 100 for depth in depths)


HOPS = 4
_EXAMPLE_TOKENS = 500
"""Length of the worked example of variable tracking, room for its answer included."""
SHORT, COMMON = 4096, 10
"""Below this length RULER repeats words less often; words that appear often."""
_PROBES, LEAST = 8, 12
"""Smallest prompts that are looked at: words have as many tokens as a tokenizer gives them; their different words."""
ALPHA, LETTERS, ASKED = 2.0, 6, 3
"""Of the Zipf law; of a coded word; coded words that are asked for."""


def tracking(task: RulerTask, of: Making) -> Maker:
    """Return what makes prompts with so many lines of noise; all begin with the same worked example.

    Its names have three letters, so that none occurs in the task.
    """
    example = ""
    for size in range(HOPS + 2, 100, 5):
        prompt, prefix, names, _ = _chain(random.Random(f"example/{of.seed}"), size, letters=3)
        longer = f"{prompt}{prefix} {' '.join(names)}\n\n"
        if example and of.count(longer) + task.max_new_tokens > _EXAMPLE_TOKENS:
            break
        example = longer

    def draft(rng: random.Random, index: int, size: int) -> dict[str, Any]:
        prompt, prefix, names, shares = _chain(rng, size, letters=5)
        return _row(index, example + prompt, prefix, names, shares)

    return draft


def _chain(rng: random.Random, size: int, letters: int) -> tuple[str, str, list[str], list[float]]:
    names: list[str] = []
    while len(names) < HOPS + 1:
        if (name := "".join(rng.choices(string.ascii_uppercase, k=letters))) not in names:
            names.append(name)
    lines, value = [NOISE_LINE] * size, str(rng.randint(10000, 99999))
    statements = [f"VAR {names[0]} = {value}"]
    statements += [f"VAR {name} = VAR {before} " for before, name in zip(names, names[1:], strict=False)]
    places = sorted(rng.sample(range(size), len(statements)))
    for shift, (place, statement) in enumerate(zip(places, statements, strict=True)):
        lines.insert(place + shift, statement)
    prompt, prefix = PROMPTS["vt"]
    shares = [place / size for place in places]
    said = prefix.format(count=HOPS + 1, value=value)
    return prompt.format(text="\n".join(lines), value=value), said, names, shares


def common_words(task: RulerTask, of: Making) -> Maker:
    """Return what makes prompts about so many different words, of which ten appear often and all others rarely, after
    one worked example of 40 words, or 20 where a length or tokenizer leaves little room.
    """
    words, tokens, (form, prefix) = vocabulary(task.words), of.tokens or 0, PROMPTS["cwe"]

    def listed(rng: random.Random, size: int, often: int, rarely: int) -> tuple[str, list[str]]:
        drawn = words.distinct(rng, size)
        entries = drawn[:COMMON] * often + drawn[COMMON:] * rarely
        rng.shuffle(entries)
        return _numbered(entries), drawn[:COMMON]

    def draft(rng: random.Random, index: int, size: int, *, short: bool = False) -> dict[str, Any]:
        shown, said = listed(rng, *((20, 3, 1) if short else (40, 10, 3)))
        asked, outputs = listed(rng, size, *((6, 1) if short else (30, 3)))
        prompt = f"{form.format(list=shown)}{prefix} {_numbered(said)}\n{form.format(list=asked)}"
        return _row(index, prompt, prefix, outputs)

    probes = [draft(random.Random(number), 0, LEAST)["input"] for number in range(_PROBES)]
    short = tokens < SHORT or max(map(of.count, probes)) >= 0.9 * tokens
    return lambda rng, index, size: draft(rng, index, size, short=short)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))


def frequent_words(task: RulerTask, of: Making) -> Maker:
    """Return what makes prompts whose coded text has about so many words, the most frequent one noise shown as dots.

    Word k appears size / (k^alpha zeta(alpha)) times; each count is rounded down, and words that would not appear are
    left out.
    """
    from torch import float64, special, tensor

    total, (form, prefix) = float(special.zeta(tensor(ALPHA, dtype=float64), 1)), PROMPTS["fwe"]

    def draft(rng: random.Random, index: int, size: int) -> dict[str, Any]:
        names, text = ["..."], list[str]()
        for rank in count(1):
            times = int(size / (rank**ALPHA * total))
            if not times:
                break
            while rank > len(names):
                if (name := "".join(rng.choices(string.ascii_lowercase, k=LETTERS))) not in names:
                    names.append(name)
            text += [names[rank - 1]] * times
        rng.shuffle(text)
        return _row(index, form.format(text=" ".join(text)), prefix, names[1 : ASKED + 1])

    return draft


FILES = {
    "squad": ("squad.json", "dev-v2.0.json", "dev-v1.1.json"),
    "hotpotqa": ("hotpotqa.json", "hotpot_dev_distractor_v1.json"),
}


class Asked(NamedTuple):
    """A question, its answers, the numbers of its documents, and of documents about the same article."""

    question: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


QuestionSet = tuple[list[Asked], list[str]]
"""Questions in the order of their file, and all documents in alphabetical order."""


def questions(dataset: Literal["squad", "hotpotqa"]) -> Callable[[RulerTask, Making], Maker]:
    """Return what makes prompts with so many documents (all there are, if that is fewer; never fewer than the
    question's); row i asks question i of the file, and starts over at its end.
    """

    def drafter(task: RulerTask, of: Making) -> Maker:
        (every, documents), (form, prefix) = load(task.name, dataset, of.data_dir), PROMPTS["qa"]

        def draft(rng: random.Random, index: int, size: int) -> dict[str, Any]:
            asked = every[index % len(every)]
            room, near = max(0, size - len(asked.own)), [*asked.near]
            if size >= len(documents):
                chosen = [*range(len(documents))]
            elif room <= len(near):
                chosen = [*asked.own, *rng.sample(near, room)]
            else:
                held = {*asked.own, *near}
                others = [number for number in range(len(documents)) if number not in held]
                chosen = [*asked.own, *near, *rng.sample(others, min(room - len(near), len(others)))]
            rng.shuffle(chosen)
            text = "\n\n".join(f"Document {place}:\n{documents[number]}" for place, number in enumerate(chosen, 1))
            return _row(index, form.format(documents=text, question=asked.question), prefix, asked.answers)

        return draft

    return drafter


def load(task: str, dataset: str, data_dir: Path | None) -> QuestionSet:
    """Read one of `FILES`, from a folder itself, from `ruler` in it, or from a folder named as the data set."""
    names = FILES[dataset]
    folders = [data_dir, data_dir / "ruler", data_dir / dataset] if data_dir is not None else []
    path = next((folder / name for folder in folders for name in names if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(
            f"{task} is made from questions of {dataset}, which cannot be generated; pass --data-dir with a folder "
            f"that holds {' or '.join(names)}, or leave the task out"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        every, documents = _squad(data) if dataset == "squad" else _hotpotqa(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no {dataset} file ({type(error).__name__}: {error}); get it anew") from None
    if not every or not all(asked.answers for asked in every):
        raise ValueError(f"{path} has no questions, or questions without an answer; get it anew")
    return every, documents


def _squad(data: Any) -> QuestionSet:
    paragraphs = [[part["context"] for part in article["paragraphs"]] for article in data["data"]]
    documents = sorted({text for article in paragraphs for text in article})
    number = {text: place for place, text in enumerate(documents)}
    found = []
    for article, texts in zip(data["data"], paragraphs, strict=True):
        for part in article["paragraphs"]:
            own = number[part["context"]]
            near = tuple(dict.fromkeys(number[text] for text in texts if number[text] != own))
            for asked in part["qas"]:
                if not asked.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    found.append(Asked(asked["question"], answers, (own,), near))
    return found, documents


def _hotpotqa(data: Any) -> QuestionSet:
    def paragraphs(context: Any) -> Any:  # pairs of title and sentences in the original file, two lists on the Hub
        return zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context

    rows = [(row, [f"{title}\n{''.join(lines)}" for title, lines in paragraphs(row["context"])]) for row in data]
    documents = sorted({text for _, texts in rows for text in texts})
    number = {text: place for place, text in enumerate(documents)}
    found = [
        Asked(row["question"], (row["answer"],), tuple(dict.fromkeys(number[text] for text in texts)))
        for row, texts in rows
    ]
    return found, documents


_NIAH: dict[str, Any] = {"max_new_tokens": 128, "unit": 25}
_ESSAY: dict[str, Any] = {**_NIAH, "own": "filler"}
_QA: dict[str, Any] = {"max_new_tokens": 32, "unit": 150, "every": False, "metric": "string match, part"}
# In the order of the report.
_TASKS: dict[str, dict[str, Any]] = {
    "niah_single_1": {**_NIAH, "drafter": needles("noise")},
    "niah_single_2": {**_ESSAY, "drafter": needles("essay")},
    "niah_single_3": {**_ESSAY, "drafter": needles("essay", value="uuid")},
    "niah_multikey_1": {**_ESSAY, "drafter": needles("essay", keys=4)},
    "niah_multikey_2": {**_NIAH, "drafter": needles("needle")},
    "niah_multikey_3": {**_NIAH, "drafter": needles("needle", key="uuid", value="uuid")},
    "niah_multivalue": {**_ESSAY, "drafter": needles("essay", values=4)},
    "niah_multiquery": {**_ESSAY, "drafter": needles("essay", queries=4)},
    "vt": {"max_new_tokens": 30, "unit": 25, "least": HOPS + 2, "drafter": tracking},
    "cwe": {**{"max_new_tokens": 120, "unit": 15, "least": LEAST, "drafter": common_words}, "own": "own words"},
    "fwe": {"max_new_tokens": 50, "unit": 5, "least": 60, "drafter": frequent_words},
    "qa_1": {**_QA, "drafter": questions("squad")},
    "qa_2": {**_QA, "drafter": questions("hotpotqa")},
}
TASKS: tuple[RulerTask, ...] = tuple(
    RulerTask(name=f"ruler/{name}", file=f"4096/{name}.jsonl", **{"metric": "string match, all", **facts})
    for name, facts in _TASKS.items()
)
