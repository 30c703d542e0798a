"""Questions about long texts to any server of OpenAI's API, locret-serve or another: seconds and answers per second.

    python -m locret.infer.speed.served --url http://127.0.0.1:8000/v1 --model smollm2 --contexts

A number is planted at a third of every text, and asked for. With `--contexts` texts are uploaded first, and
questions name them; without, each question brings its whole text, which the server may find in a cache of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

from locret.base.plugins import install
from locret.cli.command import parse_options, print_json, run
from locret.data.real import texts
from locret.loading.backbone import tokenizer_of

_FACT, _QUESTION = "The bridge has {} bolts.", "How many bolts does the bridge have?"
_ALONE, _ANSWER = 3, 16
"""Texts that are asked about one after the other, and tokens of an answer."""


@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    """Which server is asked, and about what."""

    url: str = "http://127.0.0.1:8000/v1"
    """Of the server's API."""
    model: str = "smollm2"
    """As the server calls it."""
    tokenizer: str = "smollm2"
    """Counts tokens: a backbone."""
    contexts: bool = False
    """Upload the texts to locret-serve, and ask about its contexts."""
    texts: list[int] = field(default_factory=lambda: [4, 16])
    """How many texts are asked about at once."""
    tokens: int = 7500
    """Of a text."""

    def __post_init__(self) -> None:
        if not self.texts or min(*self.texts, self.tokens) < 1:
            raise ValueError(f"--texts {self.texts} and --tokens {self.tokens}: give 1 or more")


class Planted(NamedTuple):
    """A text, and the number in it that is asked for."""

    name: str
    text: str
    key: str


def _texts(options: ServedOptions) -> list[Planted]:
    """Return pieces of the real texts, which begin at different places, each with a number of its own."""
    tokenizer, rng = tokenizer_of(options.tokenizer), random.Random(0)
    whole = "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(texts().rglob("*.txt")))
    ids, found = tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"], []
    for nth in range(max(options.texts) + 1):  # one more, which is fresh
        begin = nth * len(ids) // (max(options.texts) + 1)
        words = tokenizer.decode((ids + ids)[begin : begin + options.tokens]).split(" ")
        key = f"{rng.randrange(10**4, 10**5)}"
        words.insert(len(words) // 3, _FACT.format(key))
        found.append(Planted(f"text{nth}-{key}", " ".join(words), key))
    return found


def measure(options: ServedOptions) -> dict[str, Any]:
    """Ask a running server; return seconds and answers per second."""
    from openai import OpenAI

    client = OpenAI(base_url=options.url, api_key="unused", timeout=3600, max_retries=0)
    *about, fresh = _texts(options)
    record = dict[str, Any](options=asdict(options))

    def answer(text: Planted, named: bool = options.contexts) -> tuple[bool, float]:
        """Return whether the number was found, and the seconds to the answer's first words."""
        model, asked = options.model, f"{text.text}\n\n{_QUESTION}"
        if named:
            model, asked = f"{model}:{text.name}", _QUESTION
        start, first, said = time.perf_counter(), 0.0, ""
        for part in client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": asked}], max_tokens=_ANSWER, temperature=0, stream=True
        ):
            if part.choices and (new := part.choices[0].delta.content):
                first, said = first or time.perf_counter() - start, said + new
        if not first:
            raise ValueError(f"{options.url} answers {text.name} without a word, so there is no time to its first")
        return text.key in said, first

    def together(count: int) -> dict[str, Any]:
        start = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            found = list(pool.map(answer, about[:count]))
        seconds, firsts = time.perf_counter() - start, [first for _, first in found]
        return {
            "texts": count,
            "right": sum(right for right, _ in found),
            "per_second": count / seconds,
            "first_words": median(firsts),
            "last_first_words": max(firsts),
        }

    if options.contexts:
        start, plain = time.perf_counter(), {"Content-Type": "text/plain"}
        for text in about:
            path = f"/contexts?name={text.name}&wait=true"
            client.post(path, cast_to=object, content=text.text.encode(), options={"headers": plain})
        record["read_seconds"] = (time.perf_counter() - start) / len(about)
    record["fresh"] = answer(fresh, named=False)[1]
    record["first"], record["again"] = (median(answer(text)[1] for text in about[:_ALONE]) for _ in range(2))
    record["at_once"] = [together(count) for count in options.texts for _ in range(2)]
    return record


def command(argv: Sequence[str] | None = None) -> int:
    (options,), _ = parse_options("locret.infer.speed.served", "Ask a server about texts.", [ServedOptions], argv)
    try:
        from openai import OpenAIError
    except ImportError as error:
        raise ValueError(f"questions are asked with the package openai; {install('serve')}") from error
    try:
        print_json(measure(options))
    except OpenAIError as error:
        way = "start the server, check --model, or delete its contexts"
        raise OSError(f"--url {options.url}: {error}; {way}") from error
    return 0


if __name__ == "__main__":
    run(command, prog="python -m locret.infer.speed.served")
