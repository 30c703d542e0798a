"""`locret-infer`: read a text of any length in a fixed amount of memory, and answer questions about it.

A text is read before its questions are known, as everywhere in locret, unless `--protocol aware` is given.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from locret.cli.command import parse_options, print_json, run, warnings_as_lines
from locret.distributed.ranks import Ranks, joined, launched
from locret.infer.infer_options import (
    GenerationOptions,
    OutputOptions,
    PlacedModelOptions,
    PolicyOptions,
    PromptOptions,
    QuestionOptions,
)
from locret.infer.reading_warnings import warn_of_recency
from locret.loading.options import ScorerOptions

if TYPE_CHECKING:
    from locret import Context, LongContextModel
    from locret.infer.answer import Answer
    from locret.infer.ready import Ready

OPTION_CLASSES = (PlacedModelOptions, ScorerOptions, PolicyOptions, PromptOptions, GenerationOptions, OutputOptions)
DESCRIPTION = "Read a text of any length in a fixed amount of memory, and answer questions about it."


@dataclass(frozen=True)
class Options:
    """All options of the command, and the names that the user set."""

    model: PlacedModelOptions
    scorer: ScorerOptions
    policy: PolicyOptions
    prompt: PromptOptions
    generation: GenerationOptions
    output: OutputOptions
    chosen: frozenset[str]
    ranks: Ranks = Ranks()
    """The processes that share the backbone."""


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line and its recipe.

    Raises:
        SystemExit: With code 2 for an unknown flag, an unknown YAML key or a value of the wrong type.
        ValueError: For values that make no sense.
    """
    instances, chosen = parse_options("locret-infer", DESCRIPTION, OPTION_CLASSES, argv)
    model, scorer, policy, prompt, generation, output = instances
    return Options(model, scorer, policy, prompt, generation, output, frozenset(chosen))


def command(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub, a disk or a device's memory fails.
    """
    options = parse(argv)
    with together("locret-infer", options) as options, warnings_as_lines("locret-infer", quiet=options.output.quiet):
        execute(options)
    return 0


@contextmanager
def together(prog: str, options: Options) -> Iterator[Options]:
    """Join the processes that share a backbone, of which the first alone speaks; give the options of this one.

    Raises:
        ValueError: If there are several processes, and nothing that they share.
        OSError: If one of them cannot be reached, or has died.
    """
    count, shard = launched()[1], options.model.shard
    if count > 1 and shard is None:
        raise ValueError(
            f"{count} processes were started, but each would read and answer the same; share the backbone with --shard "
            "fsdp or --shard tp, or start one process"
        )
    if (
        count > 1
        and not options.output.dry_run
        and options.prompt.context is None
        and options.prompt.prompt_file in (None, "-")
    ):
        raise ValueError("a text on standard input reaches one process alone; give it to all with --prompt-file FILE")
    with joined(prog) as ranks:
        with ranks.together():
            ranks.agree({f"--{name}": value for name, value in _agreed(options).items()})
        if ranks.is_main:
            yield replace(options, ranks=ranks)
            return
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            yield replace(options, ranks=ranks, output=replace(options.output, quiet=True))


def _agreed(options: Options) -> dict[str, Any]:
    """Return all options by flag: processes that share a backbone do the same, or wait for each other for ever."""
    groups = (options.model, options.scorer, options.policy, options.prompt, options.generation, options.output)
    return {name.replace("_", "-"): value for group in groups for name, value in asdict(group).items()}


def execute(options: Options) -> None:
    """Do what the options say; `locret-context read` does it too."""
    output, prompt = options.output, options.prompt
    if output.picture:
        check_picture("--picture", output.picture)
    if output.save_context is not None:
        from locret.cache.cache_file import check_replaceable

        check_target("--save-context", output.save_context)
        check_replaceable(output.save_context)
    asked = questions_of(prompt)
    check_evidence(options, asked)
    if prompt.context is not None:
        _check_not_read(options, prompt.context)
        for record in ask_saved(options, [prompt.context], asked):
            if output.json:
                print_json(record)
        return
    _check_together(options, asked)
    document = None if output.dry_run else _document(prompt)
    with options.ranks.together():
        plan = _plan(options, document, asked)
    if output.dry_run:
        _print_plan(options, plan)
        return
    if options.ranks.size > 1:
        with options.ranks.together():
            chosen = {"what auto came to": plan.policy.to_dict()}
            options.ranks.agree(chosen, "give --chunk-size and --kv-memory as numbers")
            options.ranks.agree(_contents(options, plan, asked), "give all processes the same files")
    from locret.infer.ready import refusals_with_flags

    with refusals_with_flags(plan.device):
        _read_and_ask(options, plan, document, asked)


def _check_together(options: Options, asked: Sequence[str]) -> None:
    """Refuse ways of asking that do not go together.

    Raises:
        ValueError: Naming the options.
    """
    prompt, output = options.prompt, options.output
    alone = len(asked) == 1 and prompt.questions is None
    if prompt.protocol == "aware" and (not alone or prompt.evidence or output.save_context is not None):
        raise ValueError(
            "--protocol aware reads the text with its question, so it needs one --question, and neither --evidence nor "
            "--save-context; leave it out"
        )
    if output.compare_full and (
        len(asked) > 1 or prompt.questions is not None or prompt.evidence or output.save_context is not None
    ):
        raise ValueError(
            "--compare-full compares one answer; give one --question, without --evidence or --save-context"
        )
    if output.compare_full and prompt.prompt_file in (None, "-"):
        raise ValueError("--compare-full reads the text twice, which standard input is not; give --prompt-file FILE")
    if output.compare_full and options.ranks.size > 1:
        raise ValueError("--compare-full holds all units in one process; leave it out, or leave out --shard")


def _plan(options: Options, document: Any, asked: Sequence[str]) -> Ready:
    """Resolve everything, and say what the user should know of it."""
    from locret import loading
    from locret.cache.cache_file import check_savable
    from locret.conversation.text import encode, leading_special_ids
    from locret.conversation.turns import Transcript
    from locret.infer.ready import ready
    from locret.policy.resolve import check_no_turns
    from locret.scorers import Scorer

    def count() -> int:
        """Return the tokens of the text, of the longest question and of what the template writes around them."""
        tokenizer, text, prompt = loading.load_tokenizer(options.model), document, options.prompt
        text = _document(prompt) if text is None else text
        text.count(tokenizer)
        around = Transcript(tokenizer, prompt.template, prompt.system).around(max(asked, key=len, default=None))
        special = leading_special_ids(tokenizer) if prompt.template != "chat" else []
        return int(text.size) + len(special) + sum(len(encode(tokenizer, part)) for part in around if part)

    groups = (options.model, options.scorer, options.policy, options.chosen, options.generation)
    plan = ready(*groups, count, dry_run=options.output.dry_run)
    assert plan.run is not None
    if options.prompt.protocol == "aware":
        check_no_turns({"turns": options.policy.turns})
    if options.output.save_context is not None:
        check_savable(plan.policy, options.output.save_context)
    if plan.policy.when == "prompt_end":
        warnings.warn(
            f"--when prompt_end keeps every unit until the prompt has been read, so memory grows with it (here "
            f"{plan.run.prompt_tokens:,} tokens); --when chunk bounds it",
            stacklevel=2,
        )
    if isinstance(plan.scorer, Scorer):
        warn_of_recency(plan.scorer.name, plan.scorer.recent, [plan.policy])
    return plan


def _contents(options: Options, plan: Ready, asked: Sequence[str]) -> dict[str, Any]:
    """Return what the files hold that each process has read by itself, by flag."""
    from torch import nn

    from locret import shipped
    from locret.heads.fingerprint import weight_fingerprint

    heads = weight_fingerprint(plan.scorer) if isinstance(plan.scorer, nn.Module) else None
    digest = sha256()
    with open(os.path.expanduser(shipped.find(str(options.prompt.prompt_file))), "rb") as text:
        while part := text.read(2**20):
            digest.update(part)
    return {
        "the text of --prompt-file": digest.hexdigest()[:16],
        "the questions": list(asked),
        "the weights of --heads": heads,
    }


def _read_and_ask(options: Options, plan: Ready, document: Any, asked: Sequence[str]) -> None:
    """Read the text, keep what was read if that is wanted, and answer each question from a copy.

    The question is not known while the text is read, unless the protocol says so; a question alone needs no copy.
    """
    import torch

    from locret import Chat
    from locret.infer.answer import answer, kernels, now

    output, prompt, generation = options.output, options.prompt, options.generation
    alone = len(asked) < 2 and prompt.questions is None and output.save_context is None and not prompt.evidence
    lm = plan.load(prompt.template)
    if plan.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(plan.device)
    torch.manual_seed(generation.seed)
    with kernels(options.model.attn):
        start, cache = now(plan.device), lm.new_cache()
        how: dict[str, Any] = {"system": prompt.system, "progress": not output.quiet, "protect": prompt.protect}
        new_tokens = generation.max_new_tokens if alone else 0
        question = asked[0] if asked else None
        if prompt.protocol == "aware" or (alone and question is None):
            about: Chat | Context = lm.converse(document, question, cache=cache, new_tokens=new_tokens, **how)
        else:
            about = context = lm.read_into(cache, document, **how, new_tokens=new_tokens)
            if alone:
                about = context.chat(cache)
                about.read_turn(question, new_tokens)
        kept = about.kept_by_message() if output.kept else ()
        read, seconds = cache.seen, now(plan.device) - start
        if output.picture:
            _paint(cache, output.picture, options.scorer)
        if isinstance(about, Chat):
            stream = not output.json and generation.num_beams == 1
            result = answer(about, question, generation, stream=stream, read_tokens=read, read_seconds=seconds)
            if not output.json and not stream:
                print(result.answer)
            record = {**asdict(result), **_messages(options, kept)}
            if output.compare_full:
                record["full"] = asdict(_answer_in_full(options, plan, lm, read, question))
            if output.json:
                print_json({**record, **plan.record()})
            elif not output.quiet:
                sys.stderr.write(_summary(record))
            return
        if output.save_context is not None and (options.ranks.is_main or options.model.shard == "tp"):
            context.save(output.save_context)
        saved = {} if output.save_context is None else {"context": output.save_context}
        reading = {**saved, "prompt_tokens": read, "prefill_seconds": seconds, **context.memory().to_dict()}
        if not output.quiet and not output.json:
            sys.stderr.write(f"read {read:,} tokens in {seconds:,.1f} s: {context!r}\n")
        reading |= _messages(options, kept)
        records = _ask_each(options, context, asked)
    if output.json:
        print_json({"reading": reading, "answers": records, **plan.record()})


def _answer_in_full(options: Options, plan: Ready, lm: LongContextModel, tokens: int, question: str | None) -> Answer:
    """Answer once more with every unit kept, and print it: whether the model or the eviction is to blame.

    Raises:
        ValueError: If all units do not fit in the memory that is free.
    """
    from locret import LongContextModel, RetentionPolicy
    from locret.infer import chunk_size
    from locret.infer.answer import answer, now
    from locret.scorers.streaming import StreamingScorer

    assert plan.run is not None
    output, every = options.output, StreamingScorer()
    policy = RetentionPolicy(budget=2 * tokens, chunk_size=plan.policy.chunk_size, positions=plan.policy.positions)
    needed = replace(plan.run, scorer=every, prompt_tokens=tokens).cache_bytes(policy)
    free = chunk_size.free_bytes(plan.device)
    if free is not None and needed > free:
        raise ValueError(
            f"--compare-full needs {needed:,} bytes for all units of {tokens:,} tokens, but {free:,} are free on "
            f"{plan.device}; leave it out"
        )
    whole = LongContextModel(lm.model, lm.tokenizer, every, policy, template=options.prompt.template)
    start = now(plan.device)
    context = whole.read(
        _document(options.prompt).pieces, system=options.prompt.system, progress=not output.quiet, name="text"
    )
    seconds, read = now(plan.device) - start, context.cache.seen
    chat = context.chat(context.cache)
    result = answer(chat, question, options.generation, read_tokens=read, read_seconds=seconds)
    if not output.json:
        size = result.peak_cache_bytes / 2**20
        print(f"\nwith everything kept ({result.kept_units:,} units, {size:,.1f} MiB):\n{result.answer}", flush=True)
    return result


def _messages(options: Options, kept: Sequence[Any]) -> dict[str, Any]:
    """Return what a record says of each message, if that is wanted; print it where no record is."""
    if not options.output.kept:
        return {}
    if not options.output.json:
        from locret.conversation.protect import as_table

        print(as_table(kept), flush=True)
    return {"messages": [asdict(one) for one in kept]}


def ask_saved(options: Options, paths: Sequence[str], asked: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Answer each question from copies of saved contexts, one after the other; yield a record of each context."""
    from locret.infer.answer import kernels

    with loaded(options, paths) as (lm, files, setup), kernels(options.model.attn):
        for path, file in zip(paths, files, strict=True):
            context = load_saved(lm, file, options)
            if options.output.picture:
                _paint(context.cache, options.output.picture, options.scorer)
            if len(paths) > 1 and not options.output.json:
                print(("\n" if path is not paths[0] else "") + f"# {path}", flush=True)
            records = _ask_each(options, context, asked)
            reading = {"context": path, "prompt_tokens": context.cache.seen, **context.memory().to_dict()}
            reading |= _messages(options, context.kept_by_message() if options.output.kept else ())
            yield {"reading": reading, "answers": records, **setup, "policy": context.cache.policy.to_dict()}


@contextmanager
def loaded(options: Options, paths: Sequence[str]) -> Iterator[tuple[Any, list[Any], dict[str, Any]]]:
    """Give a model for saved contexts, their files, and what a record says of the model; wrong files come first."""
    from locret import read_notes
    from locret.cache.cache_file import CONTEXT_WRITERS
    from locret.conversation.saved import find_context
    from locret.infer.ready import ready_for_saved, refusals_with_flags

    files = [find_context(path) for path in paths]
    for file in files:
        read_notes(file, CONTEXT_WRITERS)  # refuses a wrong file before weights are loaded
    plan = ready_for_saved(options.model, options.scorer)
    with refusals_with_flags(plan.device):
        yield plan.load(), files, plan.record()


def load_saved(lm: Any, file: Any, options: Options) -> Any:
    """Return a saved context."""
    return lm.load(file, allow_other_scorer=options.prompt.allow_other_scorer, disk=options.model.disk)


def _check_not_read(options: Options, path: str) -> None:
    """Refuse what has no effect on a text that has been read.

    Raises:
        ValueError: Naming the option.
    """
    reading = {field.name for field in fields(PolicyOptions)}
    reading |= {"system", "template", "save_context", "dry_run", "store", "protect", "protocol", "compare_full"}
    if given := sorted(reading & options.chosen):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--context {path} has been read already, so {flags} would do nothing; leave that out")


def _ask_each(options: Options, context: Any, asked: Sequence[str]) -> list[dict[str, Any]]:
    """Answer each question from a copy of what has been read, print the answers unless JSON is wanted."""
    from locret.infer.answer import answer

    output, records = options.output, []
    if options.prompt.evidence:
        return [_ask_with_evidence(options, context, question) for question in asked]
    stream = not output.json and options.generation.num_beams == 1
    for number, question in enumerate(asked):
        if not output.json and len(asked) > 1:
            print(("\n" if number else "") + f"> {question}", flush=True)
        result = answer(context.chat(), question, options.generation, stream=stream)
        if not output.json and not stream:
            print(result.answer)
        records.append({"question": question, **asdict(result)})
    return records


def check_evidence(options: Options, asked: Sequence[str]) -> None:
    """Refuse evidence of nothing, of an answer that cannot be watched, or from a file that is not there.

    Raises:
        ValueError: Naming the option.
    """
    prompt, generation = options.prompt, options.generation
    if not prompt.evidence:
        return
    from locret.conversation.text import read_text

    if not asked and not options.output.dry_run:
        raise ValueError("--evidence is about an answer, but nothing is asked; give --question or --questions")
    if generation.num_beams > 1:
        raise ValueError(
            f"--evidence watches one answer, but --num-beams {generation.num_beams} are searched; drop one of them"
        )
    if prompt.reread is not None:
        if options.policy.turns == "text":
            raise ValueError(
                "--reread reads passages in the room of a turn, which --turns text does not leave; drop one of them"
            )
        if prompt.reread == "-":
            raise ValueError("--reread - is standard input, which is read once; give the file")
        for _ in read_text(prompt.reread, 1, "--reread "):
            break


def _ask_with_evidence(options: Options, context: Any, question: str) -> dict[str, Any]:
    """Answer a question and say what the answer may lack; print both unless JSON is wanted."""
    import torch

    from locret.infer.answer import generation_settings

    generation, source = options.generation, options.prompt.reread
    settings = generation_settings(generation, context.lm)
    chosen = {name: value for name, value in settings.items() if value is not None}  # False and 0 are choices, too
    torch.manual_seed(generation.seed)
    found = context.ask(question, evidence=True, source=None if source is None else Path(source), **chosen)
    if not options.output.json:
        print(f"> {question}\n{found}\n{_evidence_line(found)}", flush=True)
    return {"question": question, "answer": found.text, "evidence": found.to_dict()}


def _evidence_line(found: Any) -> str:
    """Return what is known about the evidence for an answer, in one line."""
    places = ", ".join(f"{one.start:,}-{one.end:,}" for one in found.passages)
    sure = f"  evidence: the least certain token leads by {found.margin:.2f}"
    where = f"; looked most at tokens {places}" if places else ""
    verdict = "; evidence may be gone" if found.flagged else "; not flagged"
    if found.before is not None:
        before = shorten(found.before, 80, placeholder=" ...")
        verdict = f"; these were read again, and {f'before the answer was {before!r}' if found.changed else 'it stays'}"
    return f"{sure}{where}{verdict}"


def questions_of(prompt: QuestionOptions) -> list[str]:
    """Return the questions of the command line or of a file.

    Raises:
        ValueError: If the file cannot be read, or holds no questions.
    """
    from locret.conversation.text import read_text

    if prompt.questions is None:
        return list(prompt.question)
    name = prompt.questions
    lines = "".join(read_text(name, setting="--questions ")).splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_json_question(line, f"{name}, line {number}") if name.endswith(".jsonl") else line.strip())
    if not found:
        raise ValueError(f"--questions {name} holds no questions; write one per line")
    return found


def _json_question(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--questions {where}: not JSON ({error}); write a text or an object per line") from None
    question = value.get("question") if isinstance(value, dict) else value
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f'--questions {where} holds no question; write "TEXT" or {{"question": "TEXT"}}')
    return question


def _print_plan(options: Options, plan: Ready) -> None:
    """Print what a run would do and take."""
    from locret.infer import sizing

    assert plan.run is not None
    run, policy = plan.run, plan.policy
    steps = run.schedule(policy).table()
    record = {
        **run.plan(policy),
        "planned_weights": run.weights.to_dict(),
        "prompt_tokens": run.prompt_tokens,
        "not_given": policy.following(),
        "steps": steps,
    }
    print_json({**record, **plan.record(), "options": _resolved(options)})
    if not options.output.quiet:
        sys.stderr.write(sizing.follow_line(policy) + sizing.step_lines(steps, adaptive=policy.memory == "adaptive"))


def _document(options: PromptOptions) -> Any:
    from locret import shipped
    from locret.conversation.text import Document, read_text

    name = options.prompt_file
    if name is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("there is nothing to read; give a text with --prompt-file, or pipe one in")
        name = "-"
    path = os.path.expanduser(shipped.find(name))
    size = os.path.getsize(path) if os.path.isfile(path) else None
    shown = "standard input" if name == "-" else os.path.basename(name)
    return Document(shown, read_text(name), size=size, unit="bytes")


def check_picture(flag: str, path: str) -> None:
    """Refuse a picture that could not be drawn or written."""
    from locret import pictures

    pictures.require_matplotlib(flag)
    check_target(flag, path)


def check_target(flag: str, path: str) -> None:
    """Refuse a file that could not be written once all has been read."""
    if not path or os.path.isdir(path):
        raise ValueError(f"{flag} {path} is a folder; give a file" if path else f"{flag} is empty; give a file")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ValueError(f"{flag} {path}: there is no folder {folder}; make it first")


def _paint(cache: Any, path: str, scorer: ScorerOptions) -> None:
    """Draw what a cache has kept."""
    from locret import pictures
    from locret.backbone.adapters import sharers_of
    from locret.scorers import FALLBACK

    title = f"{scorer.label or FALLBACK}, budget {cache.policy.budget:,}"
    kept, sharers = pictures.retention_of(cache, title), sharers_of(cache.model)
    if sharers is None or sharers.rank == 0:
        pictures.retention_map([kept], path)


def _summary(record: dict[str, Any]) -> str:
    return (
        f"read {record['prompt_tokens']:,} tokens at {record['prefill_tokens_per_second']:,.0f}/s, kept "
        f"{record['kept_units']:,} units per KV head; wrote {record['new_tokens']:,} tokens at "
        f"{record['decode_tokens_per_second']:,.0f}/s; cache {record['peak_cache_bytes'] / 2**20:,.1f} MiB at most"
        f"{_second_tier(record)}"
        f"{'' if record['finished'] else '; cut off at --max-new-tokens'}\n"
    )


def _second_tier(record: dict[str, Any]) -> str:
    held = {"in host memory": record["host_bytes"], "on disk": record["disk_bytes"]}
    shown = [f"{size / 2**20:,.1f} MiB {where}" for where, size in held.items() if size]
    fetched = f"; {record['moved_bytes'] / 2**20:,.1f} MiB fetched from there"
    return f", beside {' and '.join(shown)}{fetched}" if shown else ""


def _resolved(options: Options) -> dict[str, Any]:
    parts = (options.model, options.scorer, options.prompt, options.generation)
    given = {"kv_memory": options.policy.kv_memory, "budget_share": options.policy.budget_share}
    return {**{name: value for part in parts for name, value in asdict(part).items()}, **given}


def main() -> None:
    """Entry point of `locret-infer`."""
    run(command, prog="locret-infer")


if __name__ == "__main__":
    main()
