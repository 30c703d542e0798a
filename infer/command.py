"""`locret-infer`: read a text of any length in a fixed amount of memory, and answer questions about it.

A text is read before its questions are known, as everywhere in locret, unless `--protocol aware` is given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from locret.base.fields import Refusal
from locret.base.warned import note_user
from locret.cli.command import parse_options, print_json, run, warnings_as_lines
from locret.distributed.ranks import Ranks, joined, launched
from locret.infer.fetch import is_address
from locret.infer.infer_options import (
    GenerationOptions,
    ModelOptions,
    OutputOptions,
    PolicyOptions,
    PromptOptions,
    QuestionOptions,
    ShardedModelOptions,
)
from locret.loading.options import ScorerOptions
from locret.policy.resolve import check_no_turns

if TYPE_CHECKING:
    from locret import Chat, Context, LongContextModel
    from locret.conversation.chat import Measured
    from locret.infer.reading import Ready

OPTION_CLASSES = (ShardedModelOptions, ScorerOptions, PolicyOptions, PromptOptions, GenerationOptions, OutputOptions)
DESCRIPTION = "Read a text of any length in a fixed amount of memory, and answer questions about it."


class Options(NamedTuple):
    """All options of the command, and the names that the user set."""

    model: ModelOptions
    scorer: ScorerOptions
    policy: PolicyOptions
    prompt: PromptOptions
    generation: GenerationOptions
    output: OutputOptions
    chosen: frozenset[str]


def command(argv: Sequence[str] | None = None) -> int:
    instances, chosen = parse_options("locret-infer", DESCRIPTION, OPTION_CLASSES, argv)
    options = Options._make([*instances, frozenset(chosen)])
    options.model.local_folder()  # a misspelt one is refused before torch is imported
    options.prompt.check_files()
    with together(options) as (options, ranks), warnings_as_lines("locret-infer", quiet=options.output.quiet):
        execute(options, ranks)
    return 0


@contextmanager
def together(options: Options) -> Iterator[tuple[Options, Ranks]]:
    """Join the processes that share a backbone, of which the first alone speaks; give the options of this one."""
    count, output = launched()[1], options.output
    if count > 1 and options.model.shard is None:
        raise ValueError(
            f"{count} processes were started, but each would read and answer the same; share the backbone with --shard "
            "fsdp or --shard tp, or start one process"
        )
    if count > 1 and not output.dry_run and not options.prompt.again:
        raise ValueError("a text on standard input reaches one process alone; give it to all with --prompt-file FILE")
    if count > 1 and any(map(is_address, options.prompt.prompt_file)):
        raise ValueError("each process would fetch a page of its own; save it, and give it with --prompt-file FILE")
    with joined() as ranks:
        ranks.agree_on_options(options[:-1])
        if ranks.is_main:
            yield options, ranks
            return
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            yield options._replace(output=replace(output, quiet=True)), ranks


def execute(options: Options, ranks: Ranks) -> None:
    """Do what the options say, in one of the processes that share the backbone."""
    import torch

    from locret.infer.reading import counted, opened, ready, warn_of_growth

    output, prompt, asked = options.output, options.prompt, options.prompt.question
    _check_together(options, asked, ranks)
    document = None if output.dry_run else opened(prompt)
    with ranks.together():
        count = partial(counted, options.model, prompt, document, max(asked, key=len, default=None))
        groups = (options.model, options.scorer, options.policy, options.chosen, options.generation)
        equal = prompt.engine != "transformers"
        plan = ready(*groups, count, foresee=output.dry_run and prompt.again, equal=equal)
        if (writer := writer_of(options.model, prompt, options.generation)) is not None:
            from locret.engines.llamacpp import check_policy

            if options.policy.kv_memory is not None:
                raise Refusal(
                    "kv_memory", options.policy.kv_memory, "does not bound llama.cpp; give --budget or --keep"
                )
            check_policy(plan.policy)
    with ranks.together():
        ranks.agree({"what auto came to": plan.policy.to_dict()}, "give --kv-memory as a number")
        if ranks.size > 1 and not output.dry_run:
            ranks.agree(contents(options, plan), "give all processes the same files")
    warn_of_growth(plan)
    if output.dry_run:
        record = plan.foreseen(options[:-1], quiet=output.quiet)
    else:
        torch.manual_seed(options.generation.seed)
        with plan.loaded(prompt.template) as lm:
            record = {**_read_and_ask(options, plan, lm, document, asked, writer), **plan.record()}
    if output.dry_run or output.json:
        print_json(record)


def contents(options: Options, plan: Ready) -> dict[str, Any]:
    """Return what tells a text and the heads from those of a process on another machine."""
    from locret import RetainingHeads
    from locret.infer.reading import opened

    digest, scorer = sha256(), plan.run.scorer
    for piece in opened(options.prompt).pieces or ():
        digest.update(piece.encode("utf-8", "surrogatepass"))
    return {
        "the text of --prompt-file": digest.hexdigest()[:16],
        "the weights of --heads": scorer.fingerprint() if isinstance(scorer, RetainingHeads) else None,
    }


def _check_together(options: Options, asked: Sequence[str], ranks: Ranks) -> None:
    """Refuse ways of asking that do not go together."""
    prompt, output = options.prompt, options.output
    if prompt.protocol == "aware":
        check_no_turns({"turns": options.policy.turns})
    if prompt.evidence and not asked and not output.dry_run:
        raise ValueError("--evidence is about an answer, but nothing is asked; give --question")
    if output.compare_full and ranks.size > 1:
        raise ValueError("--compare-full compares answers in one process; leave it, or start one")
    if output.compare_full and not prompt.again:
        raise ValueError("--compare-full reads the text twice, which standard input is not; give --prompt-file FILE")


def _read_and_ask(
    options: Options, plan: Ready, lm: LongContextModel, document: Any, asked: Sequence[str], writer: Any = None
) -> dict[str, Any]:
    """Read the text and answer each question: one alone from what was read, several from copies of it."""
    from locret.conversation.chat import input_device, now

    output, prompt, generation = options.output, options.prompt, options.generation
    alone = len(asked) < 2 and not prompt.evidence and writer is None
    device, question = input_device(lm.model), asked[0] if asked else None
    start, cache = now(device), lm.new_cache()
    how: dict[str, Any] = {"system": prompt.system, "progress": not output.quiet, "protect": prompt.protect}
    how["new_tokens"] = generation.max_new_tokens if alone else 0
    if question is None or prompt.protocol == "aware":
        about: Any = lm.converse(document, question, cache=cache, **how)
    else:
        about = lm.read_into(cache, document, **how)
    read, seconds = cache.seen, now(device) - start
    if not alone:
        if not output.quiet and not output.json:
            sys.stderr.write(_reading_line(about, read, seconds))
        reading = {"prompt_tokens": read, "prefill_seconds": seconds, **about.memory().to_dict()}
        full = _read_in_full(options, plan, lm, read, copies=2)[0] if output.compare_full else None
        return {
            "reading": reading,
            "answers": answer_each(about, asked, prompt, generation, json=output.json, full=full, writer=writer),
        }
    chat = about.chat(cache) if hasattr(about, "chat") else about
    result = answered(chat, question, generation, json=output.json, read_seconds=seconds)
    record = asdict(result)
    if output.compare_full:
        whole, took = _read_in_full(options, plan, lm, read)
        chat = whole.chat(whole.cache)
        record["full"] = _answer_in_full(chat, question, generation, json=output.json, read_seconds=took)
    if not output.json and not output.quiet:
        sys.stderr.write(_summary(result))
    return record


def answered(chat: Chat, question: str | None, generation: GenerationOptions, *, json: bool, **read: Any) -> Measured:
    """Answer a question, print the answer as it is written unless JSON is wanted, and return what it took."""
    given = generation.given()
    settings = chat.lm.settings(given.pop("max_new_tokens"), given)
    result = chat.measured(question, settings, write=None if json else partial(print, end="", flush=True), **read)
    if not json:
        print(flush=True)
    return result


def writer_of(
    model: ModelOptions, how: QuestionOptions, generation: GenerationOptions
) -> Callable[..., Measured] | None:
    """Return what writes an answer, if another engine does; refuse what it could not do."""
    if how.engine == "transformers":
        return None
    from locret.engines import llamacpp

    given = generation.given()
    file = llamacpp.writer_of(model, given)
    note_user("llama.cpp holds units and weights once more; planned bytes are those of reading alone")
    return partial(llamacpp.ask, file=file, seed=generation.seed, **given)


def answer_each(
    context: Context,
    asked: Sequence[str],
    how: QuestionOptions,
    generation: GenerationOptions,
    *,
    json: bool,
    full: Context | None = None,
    writer: Callable[..., Measured] | None = None,
) -> list[dict[str, Any]]:
    """Answer each question from a copy of what has been read, and of `full`; print the answers without `json`."""
    import torch

    records = list[dict[str, Any]]()
    for question in asked:
        torch.manual_seed(generation.seed)
        if not json and (len(asked) > 1 or how.evidence):
            print(f"{chr(10) if records else ''}> {question}", flush=True)
        if how.evidence:
            found = context.ask(question, evidence=True, **generation.given())
            if not json:
                print(f"{found}\n{_evidence_line(found)}", flush=True)
            records.append({"question": question, "answer": found.text, "evidence": found.to_dict()})
        elif writer is not None:
            result = writer(context, question, write=None if json else partial(print, end="", flush=True))
            if not json:
                print(flush=True)
            records.append({"question": question, **asdict(result)})
        else:
            records.append({"question": question, **asdict(answered(context.chat(), question, generation, json=json))})
        if full is not None:
            torch.manual_seed(generation.seed)
            records[-1]["full"] = _answer_in_full(full.chat(), question, generation, json=json)
    return records


def _read_in_full(
    options: Options, plan: Ready, lm: LongContextModel, tokens: int, copies: int = 1
) -> tuple[Context, float]:
    """Read the text once more with every unit kept; return it and how long that took."""
    from locret import LongContextModel
    from locret.conversation.chat import input_device, now
    from locret.infer import sizing
    from locret.infer.reading import opened

    prompt, shown = options.prompt, not options.output.quiet and "reading for --compare-full"
    whole = LongContextModel(
        lm.model, lm.tokenizer, "full", {"chunk_size": int(plan.policy.chunk_size)}, template=lm.template
    )
    needed = copies * replace(plan.run, scorer=whole.scorer, prompt_tokens=tokens).cache_bytes(whole.policy)
    device = plan.run.device
    if (free := sizing.free_bytes(device)) is not None and needed > free:
        rule = f"needs {needed:,} bytes for all units of {tokens:,} tokens, but {free:,} are free on {device}"
        raise Refusal("compare_full", True, f"{rule}; leave it out")
    start = now(device := input_device(lm.model))
    context = whole.read_into(whole.new_cache(), opened(prompt), system=prompt.system, progress=shown)
    return context, now(device) - start


def _answer_in_full(
    chat: Chat, question: str | None, generation: GenerationOptions, *, json: bool, **read: Any
) -> dict[str, Any]:
    """Answer with every unit kept, and print it: whether the model or the eviction is to blame."""
    result = answered(chat, question, generation, json=True, **read)
    if not json:
        size = result.peak_cache_bytes / 2**20
        print(
            f"\nwith everything kept ({result.kept_units:,} units, {size:,.1f} MiB):\n{result.answer or '(nothing)'}",
            flush=True,
        )
    return asdict(result)


def _evidence_line(found: Any) -> str:
    """Return what is known about the evidence for an answer, and the passages that it looked at most."""
    verdict = "evidence may be gone" if found.flagged else "not flagged"
    lines = [f"  evidence: the least certain token leads by {found.margin:.2f}; {verdict}"]
    for one in found.passages:
        said = "" if one.text is None else f": {shorten(one.text, 160, placeholder=' ...')}"
        lines.append(f"  looked at tokens {one.start:,}-{one.end:,} ({one.attention:.0%}){said}")
    return "\n".join(lines)


def _reading_line(context: Context, tokens: int, seconds: float) -> str:
    from locret.conversation.chat import second_tier

    memory = context.memory()
    return (
        f"read {tokens:,} tokens in {seconds:,.1f} s, kept {memory.units:,} units per KV head "
        f"({min(1, memory.units / tokens):.0%}) in {context.kept_bytes / 2**20:,.1f} MiB{second_tier(memory)}\n"
    )


def _summary(result: Measured) -> str:
    tier, fetched = (f"{size / 2**20:,.1f} MiB" for size in (result.host_bytes, result.moved_bytes))
    second = f", beside {tier} in host memory; {fetched} fetched from there" if result.host_bytes else ""
    share = min(1, result.kept_units / result.prompt_tokens)
    return (
        f"read {result.prompt_tokens:,} tokens at {result.prefill_tokens_per_second:,.0f}/s, kept "
        f"{result.kept_units:,} units per KV head ({share:.0%}); wrote {result.new_tokens:,} tokens at "
        f"{result.decode_tokens_per_second:,.0f}/s; cache and workspace {result.peak_cache_bytes / 2**20:,.1f} MiB at "
        f"most{second} (everything: {result.full_cache_bytes / 2**20:,.1f} MiB)"
        f"{'' if result.finished else '; cut off at --max-new-tokens'}\n"
    )


if __name__ == "__main__":
    run(command, prog="locret-infer")
