"""Generated texts with facts to find: pass keys and named numbers in filler full of look-alikes. No third-party text.

Filler holds distractors on purpose: numbers of as many digits as the facts (`The tower has 31764 steps.`) and sentences
that look like keys (`The garden key is 90412.`), so neither "keep the digits" nor "keep what follows *key is*" wins.
The question always comes after the text. Texts of the splits "train" and "eval" come from disjoint random streams,
whatever the seed.

    python -m locret.data.needles --rows 400 --tokens 1024 --seed 1 --output rows.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from locret.data.embedded_tokenizer import NAMES, build_tokenizer
from locret.data.filler import Filler, FillerOptions, Split, generator
from locret.data.hidden_facts import Fact, Sample, ask, hide_facts
from locret.data.question_rows import write_rows


def passkey_sample(
    tokenizer: Any,
    tokens: int = 2048,
    depth: float = 0.5,
    seed: int | str = 0,
    *,
    split: Split = "eval",
    options: FillerOptions | None = None,
) -> Sample:
    """Return a text that hides one pass key, the question for it, and the key.

    Args:
        tokenizer: Any tokenizer with a chat template.
        tokens: Length of the whole chat prompt; the prompt is as long as sentences allow, never longer.
        depth: Where the key is, from 0 (start of the text) to 1 (end).
        seed: Same seed, same sample.
        split: Random stream; training uses "train".
        options: The filler's options.

    Raises:
        ValueError: For a depth outside 0 to 1, or `tokens` too few for key and question.
    """
    filler = Filler(generator(seed, split, "passkey", tokens, depth), options)
    fact = Fact(None, filler.number())
    question = ask([fact])
    text = hide_facts(tokenizer, [fact], [depth], filler=filler, tokens=tokens, question=question)
    return Sample(text, question, fact.value, fact.reply)


def facts_sample(
    tokenizer: Any,
    tokens: int = 2048,
    facts: int = 8,
    asked: int = 1,
    seed: int | str = 0,
    *,
    pass_key: bool = True,
    split: Split = "eval",
    options: FillerOptions | None = None,
) -> Sample:
    """Return a text with `facts` named numbers (and the pass key) at random depths, and a question for `asked` of them.

    With `pass_key` the pass key is hidden too, and counts as the first of the asked ones in half of the samples and in
    every sample that asks for all facts.

    Raises:
        ValueError: For more facts than there are names, or more asked than there are facts.
    """
    if not 1 <= asked <= facts + pass_key:
        raise ValueError(f"asked={asked} does not fit {facts} facts; ask for 1 to {facts + pass_key}")
    if facts > len(NAMES):
        raise ValueError(f"facts={facts} is more than the {len(NAMES)} names there are; lower facts")
    filler = Filler(generator(seed, split, "facts", tokens, facts, asked), options)
    rng = filler.rng
    hidden = [Fact(name, filler.number()) for name in rng.sample(NAMES, facts)]
    wanted = list(hidden)
    if pass_key:
        hidden.insert(0, Fact(None, filler.number()))
        if asked > facts or rng.random() < 0.5:
            wanted.insert(0, hidden[0])
    wanted = wanted[:asked]
    depths = [rng.random() for _ in hidden]
    question = ask(wanted)
    text = hide_facts(tokenizer, hidden, depths, filler=filler, tokens=tokens, question=question)
    return Sample(text, question, " ".join(f.value for f in wanted), " ".join(f.reply for f in wanted))


def stream_passkey(
    depth: float = 0.5, seed: int = 0, *, sentences: int = 1_000_000, options: FillerOptions | None = None
) -> tuple[Iterator[str], Sample]:
    """Return pieces of a text of any size, in bounded memory, and its question and answer (the sample's text is empty).

    Args:
        depth: Where the key is, from 0 to 1.
        seed: Same seed, same text; the stream is that of the split "eval".
        sentences: Filler sentences in the text, about nine tokens of the embedded tokenizer each.
        options: The filler's options.

    Returns:
        An iterator of strings of about 64 sentences whose concatenation is the text, and the sample.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth} is outside the text; give a number from 0 (start) to 1 (end)")
    if sentences < 1:
        raise ValueError(f"sentences={sentences} leaves no text; give 1 or more")
    filler = Filler(generator(seed, "eval", "stream", sentences, depth), options)
    fact = Fact(None, filler.number())

    def pieces() -> Iterator[str]:
        place = round(depth * sentences)
        for start in range(0, sentences, 64):
            block = []
            for index in range(start, min(start + 64, sentences)):
                if index == place:
                    block.append(fact.statement)
                block.append(filler.sentence())
            if place == sentences <= start + 64:
                block.append(fact.statement)
            yield (" " if start else "") + " ".join(block)

    return pieces(), Sample("", ask([fact]), fact.value, fact.reply)


def question_rows(
    tokenizer: Any,
    rows: int = 400,
    tokens: int = 1024,
    seed: int = 0,
    *,
    facts: int = 16,
    asked: int | None = None,
    split: Split = "train",
    options: FillerOptions | None = None,
) -> list[dict[str, str]]:
    """Return rows in the LongAlpaca schema whose question asks for many facts of the text, the pass key among them.

    Heads learn from what answers look at. With one short question per text most facts would be labelled as not needed.

    Args:
        tokenizer: Any tokenizer with a chat template.
        rows: How many.
        tokens: Length of each row's chat prompt.
        seed: Same seed, same rows.
        facts: Named numbers hidden in each text, besides the pass key.
        asked: Facts asked for; all of them and the pass key if None.
        split: Random stream; evaluation samples use "eval".
        options: The filler's options.

    Returns:
        Dicts with the keys `instruction` (text and question), `input` (empty), `output` and `file`.
    """
    result = []
    for index in range(rows):
        wanted = facts + 1 if asked is None else asked
        sample = facts_sample(tokenizer, tokens, facts, wanted, f"{seed}/{index}", split=split, options=options)
        result.append({"instruction": sample.content, "input": "", "output": sample.reply, "file": ""})
    return result


@dataclass(frozen=True, kw_only=True)
class RowsOptions:
    """Options of `python -m locret.data.needles`: training rows as a JSON file."""

    output: str
    """JSON file to write; an existing one is replaced."""
    rows: int = 400
    """Rows to write."""
    tokens: int = 1024
    """Length of each row's chat prompt, in tokens of the tokenizer."""
    facts: int = 16
    """Named numbers hidden in each text, besides the pass key."""
    seed: int = 0
    """Seed of the texts; evaluation texts differ from these whatever the seed."""
    tokenizer: str = ""
    """Folder or hub id of the tokenizer that counts; the embedded one if empty."""

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "facts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} leaves nothing to write; give 1 or more")


def command(argv: Sequence[str] | None = None) -> int:
    """Write training rows in the LongAlpaca schema."""
    from locret.cli import parse_options

    (options,), _ = parse_options("locret.data.needles", "Write texts with facts to find.", [RowsOptions], argv)
    if options.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    else:
        tokenizer = build_tokenizer()
    rows = question_rows(tokenizer, options.rows, options.tokens, options.seed, facts=options.facts)
    write_rows(rows, options.output)
    sys.stderr.write(f"{len(rows)} rows written to {options.output}\n")
    return 0


if __name__ == "__main__":
    from locret.cli import run

    run(command)
