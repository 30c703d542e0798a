"""`locret-infer`: read a prompt of any length in a fixed amount of memory, and answer it.

Order matters: what can be refused here is refused before the backbone's config is fetched, what the config shows before
weights are loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import Any

from locret.cli.command import parse_options, print_json, run, warnings_as_lines
from locret.distributed.ranks import Ranks, joined, launched
from locret.infer.infer_options import (
    SEGMENTS,
    GenerationOptions,
    OutputOptions,
    PlacedModelOptions,
    PolicyOptions,
    PromptOptions,
    QuestionOptions,
)
from locret.infer.reading_warnings import warn_of_recency
from locret.load_options import ScorerOptions

OPTION_CLASSES = (PlacedModelOptions, ScorerOptions, PolicyOptions, PromptOptions, GenerationOptions, OutputOptions)
DESCRIPTION = "Read a prompt of any length in a fixed amount of memory, and answer it."


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
        _ask_saved(options, prompt.context, asked)
        return
    if prompt.evidence and "ledger" not in options.chosen:
        policy = replace(options.policy, ledger=SEGMENTS)
        options = replace(options, policy=policy, chosen=options.chosen | {"ledger"})
    with options.ranks.together():
        plan = _plan(options, asked)
    if plan is None:
        return
    options = plan.options
    if options.ranks.size > 1:
        with options.ranks.together():
            chosen = {"what auto came to": plan.policy.to_dict()}
            options.ranks.agree(chosen, "give --chunk-size and --kv-memory as numbers")
            options.ranks.agree(_contents(plan, asked), "give all processes the same files")
    if _apart(options, asked):
        _ask_apart(options, plan, asked)
        return
    record = _answer(options, plan)
    if output.json:
        print_json({**record, **plan.setup})
    elif not output.quiet:
        sys.stderr.write(_summary(record))


def _apart(options: Options, asked: Sequence[str]) -> bool:
    """Return whether the text is read without a question, which are answered from copies then."""
    prompt = options.prompt
    several = len(asked) > 1 or prompt.questions is not None
    return several or options.output.save_context is not None or prompt.evidence


@dataclass
class _Plan:
    """What is known before weights are loaded."""

    options: Options
    config: Any
    device: Any
    dtype: Any
    scorer: Any
    policy: Any
    tokenizer: Any
    document: Any
    ids: Any
    """Tokens of the whole prompt, where the question is read with the document."""
    bar: Any
    layout: Any
    """Where the turns of that prompt are."""
    setup: dict[str, Any]
    disk: Any
    """What holds the second tier, if not host memory."""

    @property
    def where(self) -> tuple[Any, Any, Any]:
        """What a backbone is loaded with."""
        return self.config, self.device, self.dtype


def _plan(options: Options, asked: Sequence[str]) -> _Plan | None:
    """Resolve everything; None if that was all that was wanted, and has been printed."""
    from locret import loading
    from locret.cache.cache_file import check_savable
    from locret.cache.layers import checked_disk, find_store
    from locret.infer import sizing
    from locret.policy.resolve import check_no_turns
    from locret.scorers import Scorer

    dry_run = options.output.dry_run
    if options.model.store is not None:
        find_store(options.model.store)
    document = None if dry_run else _document(options.prompt)
    device = loading.device_of_source(options.model)
    heads = loading.chosen_heads(options.scorer.heads, options.model.model)
    options = replace(options, scorer=replace(options.scorer, heads=heads))
    scorer, recommended = loading.load_scorer(options.scorer)
    draft = sizing.draft_policy(options.policy, options.chosen, recommended)
    counted = sizing.must_count(options.policy, draft) or (not dry_run and options.generation.num_beams > 1)
    if dry_run and counted:
        document = _document(options.prompt)
    config = loading.load_config(options.model)
    loading.check_matches(options.scorer, scorer, config)
    dtype = loading.resolve_dtype(options.model.dtype, config, device)
    tokenizer, ids, tokens, bar, layout = _prompt(options, document, counted, asked)
    run_of = sizing.PlannedRun(
        config=config,
        scorer=scorer,
        dtype=dtype,
        device=device,
        prompt_tokens=tokens,
        on_disk=options.model.disk is not None,
        new_tokens=options.generation.max_new_tokens,
        num_beams=options.generation.num_beams,
        source=options.model,
    )
    policy, chunk_choice = sizing.final_policy(options.policy, options.chosen, recommended, run_of)
    if not _apart(options, asked):
        check_no_turns({"turns": options.policy.turns})
    sizing.check_fits(run_of, policy)
    if options.output.save_context is not None:
        check_savable(policy, options.output.save_context)
    disk = checked_disk(options.model.disk, policy)
    if policy.when == "prompt_end":
        warnings.warn(
            f"--when prompt_end keeps every unit until the prompt has been read, so memory grows with it (here "
            f"{tokens:,} tokens); --when chunk bounds it",
            stacklevel=2,
        )
    if isinstance(scorer, Scorer):
        warn_of_recency(scorer.name, scorer.recent, [policy])
    setup = _setup(options, scorer, policy, device, dtype)
    if chunk_choice:
        setup["chunk_choice"] = chunk_choice.to_dict()
    if dry_run:
        _print_plan(options, run_of, policy, setup)
        return None
    return _Plan(options, config, device, dtype, scorer, policy, tokenizer, document, ids, bar, layout, setup, disk)


def _contents(plan: _Plan, asked: Sequence[str]) -> dict[str, Any]:
    """Return what the files hold that each process has read by itself, by flag."""
    from torch import nn

    from locret import shipped
    from locret.heads.fingerprint import weight_fingerprint

    heads = weight_fingerprint(plan.scorer) if isinstance(plan.scorer, nn.Module) else None
    digest = sha256()
    with open(os.path.expanduser(shipped.find(str(plan.options.prompt.prompt_file))), "rb") as text:
        while part := text.read(2**20):
            digest.update(part)
    return {
        "the text of --prompt-file": digest.hexdigest()[:16],
        "the questions": list(asked),
        "the weights of --heads": heads,
    }


def _setup(options: Options, scorer: Any, policy: Any, device: Any, dtype: Any) -> dict[str, Any]:
    """Return what a record says about how its numbers came about."""
    return {
        "model": options.model.model,
        **options.model.given(),
        "scorer": options.scorer.label or scorer.name,
        **({"store": options.model.store} if options.model.store else {}),
        "policy": policy.to_dict(),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "versions": _versions(),
    }


def _answer(options: Options, plan: _Plan) -> dict[str, Any]:
    """Load the backbone, read, answer, print the answer unless JSON is wanted; return the measurements."""
    from locret import loading, shipped
    from locret.conversation.long_context_model import EMBEDDED_KNOWS
    from locret.conversation.turns import kept_of
    from locret.infer import answer

    output, kept = options.output, list[Any]()
    stream = not output.json and options.generation.num_beams == 1
    paint = _painter(output.picture, options.scorer)

    def on_read(cache: Any) -> None:
        if paint is not None:
            paint(cache)
        if output.kept:
            kept.extend(kept_of(cache, plan.layout.turns(cache.seen)))

    if shipped.is_embedded_backbone(options.model.model) and not shipped.is_embedded_text(options.prompt.prompt_file):
        warnings.warn(EMBEDDED_KNOWS, stacklevel=2)
    with _memory_errors(plan.device):
        model = loading.load_model(options.model, *plan.where)
        cache = answer.MeasuredCache(model, plan.scorer, plan.policy, store=options.model.store, disk=plan.disk)
        result = answer.answer(
            model,
            plan.tokenizer,
            plan.ids,
            cache,
            options.generation,
            attn=options.model.attn,
            stream=stream,
            bar=plan.bar,
            on_read=on_read,
            layout=plan.layout,
        )
    if not output.json and not stream:
        print(result.answer)
    return {**asdict(result), **_messages(options, kept)}


def _messages(options: Options, kept: Sequence[Any]) -> dict[str, Any]:
    """Return what a record says of each message, if that is wanted; print it where no record is."""
    if not options.output.kept:
        return {}
    if not options.output.json:
        from locret.conversation.turns import as_table

        print(as_table(kept), flush=True)
    return {"messages": [asdict(one) for one in kept]}


def _ask_apart(options: Options, plan: _Plan, asked: Sequence[str]) -> None:
    """Read the text without a question, keep what was read if that is wanted, and answer each question from a copy."""
    from locret import loading
    from locret.conversation.long_context_model import LongContextModel
    from locret.infer.answer import MeasuredCache

    output, prompt = options.output, options.prompt
    with _memory_errors(plan.device):
        model = loading.load_model(options.model, *plan.where)
        lm = LongContextModel(model, plan.tokenizer, plan.scorer, plan.policy, template=prompt.template)
        start = time.perf_counter()
        cache = MeasuredCache(model, lm.scorer, plan.policy, store=options.model.store, disk=plan.disk)
        context = lm.read_into(
            cache, plan.document, system=prompt.system, progress=not output.quiet, protect=prompt.protect
        )
        seconds = time.perf_counter() - start
        if output.picture:
            _painter(output.picture, options.scorer)(context.cache)
        if output.save_context is not None and (options.ranks.is_main or options.model.shard == "tp"):
            context.save(output.save_context)
        saved = {} if output.save_context is None else {"context": output.save_context}
        reading = {**saved, "prompt_tokens": cache.seen, "prefill_seconds": seconds, **context.memory().to_dict()}
        if not output.quiet and not output.json:
            sys.stderr.write(f"read {cache.seen:,} tokens in {seconds:,.1f} s: {context!r}\n")
        reading |= _messages(options, context.kept_by_message() if output.kept else ())
        records = _ask_each(options, context, asked)
    if output.json:
        print_json({"reading": reading, "answers": records, **plan.setup})


def _ask_saved(options: Options, path: str, asked: Sequence[str]) -> None:
    """Answer each question from a copy of a saved context."""
    _check_not_read(options, path)
    for record in ask_saved(options, [path], asked):
        if options.output.json:
            print_json(record)


def ask_saved(options: Options, paths: Sequence[str], asked: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Answer each question from copies of saved contexts, one after the other; yield a record of each context."""
    with loaded(options, paths) as (lm, files, setup):
        for path, file in zip(paths, files, strict=True):
            context = load_saved(lm, file, options)
            if options.output.picture:
                _painter(options.output.picture, options.scorer)(context.cache)
            if len(paths) > 1 and not options.output.json:
                print(("\n" if path is not paths[0] else "") + f"# {path}", flush=True)
            records = _ask_each(options, context, asked)
            reading = {"context": path, "prompt_tokens": context.cache.seen, **context.memory().to_dict()}
            reading |= _messages(options, context.kept_by_message() if options.output.kept else ())
            yield {"reading": reading, "answers": records, **setup, "policy": context.cache.policy.to_dict()}


@contextmanager
def loaded(options: Options, paths: Sequence[str]) -> Iterator[tuple[Any, list[Any], dict[str, Any]]]:
    """Give a model for saved contexts, their files, and what a record says of the model; wrong files come first."""
    from locret import loading, read_notes
    from locret.cache.cache_file import CONTEXT_WRITERS
    from locret.conversation.long_context_model import LongContextModel
    from locret.conversation.published import find_context

    files = [find_context(path) for path in paths]
    for file in files:
        read_notes(file, CONTEXT_WRITERS)  # refuses a wrong file before weights are loaded
    device = loading.device_of_source(options.model)
    heads = loading.chosen_heads(options.scorer.heads, options.model.model)
    options = replace(options, scorer=replace(options.scorer, heads=heads))
    scorer, _ = loading.load_scorer(options.scorer)
    config = loading.load_config(options.model)
    loading.check_matches(options.scorer, scorer, config)
    dtype = loading.resolve_dtype(options.model.dtype, config, device)
    tokenizer = loading.load_tokenizer(options.model)
    with _memory_errors(device):
        model = loading.load_model(options.model, config, device, dtype)
        lm = LongContextModel(model, tokenizer, scorer)
        yield lm, files, _setup(options, scorer, lm.policy, device, dtype)


def load_saved(lm: Any, file: Any, options: Options) -> Any:
    """Return a saved context; a refusal names flags."""
    try:
        return lm.load(file, allow_other_scorer=options.prompt.allow_other_scorer, disk=options.model.disk)
    except ValueError as error:
        raise ValueError(str(error).replace("allow_other_scorer=True", "--allow-other-scorer")) from error


def _check_not_read(options: Options, path: str) -> None:
    """Refuse what has no effect on a text that has been read.

    Raises:
        ValueError: Naming the option.
    """
    reading = {field.name for field in fields(PolicyOptions)}
    reading |= {"system", "template", "save_context", "dry_run", "store", "protect"}
    if given := sorted(reading & options.chosen):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--context {path} has been read already, so {flags} would do nothing; leave that out")


def _ask_each(options: Options, context: Any, asked: Sequence[str]) -> list[dict[str, Any]]:
    """Answer each question from a copy of what has been read, print the answers unless JSON is wanted."""
    from locret.infer import answer

    output, records = options.output, []
    if options.prompt.evidence:
        return [_ask_with_evidence(options, context, question) for question in asked]
    stream = not output.json and options.generation.num_beams == 1
    for number, question in enumerate(asked):
        if not output.json and len(asked) > 1:
            print(("\n" if number else "") + f"> {question}", flush=True)
        cache = answer.MeasuredCache.of(context.cache)
        result = answer.answer_turn(
            context.chat(cache), cache, question, options.generation, attn=options.model.attn, stream=stream
        )
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
    from locret.conversation.text_stream import read_text

    if not asked and not options.output.dry_run:
        raise ValueError("--evidence is about an answer, but nothing is asked; give --question or --questions")
    if "ledger" in options.chosen and not options.policy.ledger:
        raise ValueError("--evidence needs a ledger of what was read, but --ledger 0 keeps none; leave --ledger out")
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

    from locret.infer import answer

    generation, source = options.generation, options.prompt.reread
    settings = answer.generation_settings(generation, context.lm.model, context.lm.tokenizer)
    # do_sample=False and top_k=0 are choices, too.
    chosen = {name: value for name, value in settings.items() if value is not None}
    torch.manual_seed(generation.seed)
    try:
        found = context.ask(question, evidence=True, source=None if source is None else Path(source), **chosen)
    except ValueError as error:
        raise ValueError(_with_flags(str(error))) from error
    if not options.output.json:
        print(f"> {question}\n{found}\n{_evidence_line(found)}", flush=True)
    return {"question": question, "answer": found.text, "evidence": found.to_dict()}


def _with_flags(text: str) -> str:
    """Name the settings of an answer with evidence as flags."""
    flags = {
        "evidence=True": "--evidence",
        'policy={"ledger": 256, ...}': "--ledger 256",
        "source ": "--reread ",
    }
    for name, flag in flags.items():
        text = text.replace(name, flag)
    return text


def _evidence_line(found: Any) -> str:
    """Return what is known about the evidence for an answer, in one line."""
    places = ", ".join(f"{one.start:,}-{one.end:,}" for one in found.passages)
    lost = f"  evidence: {100 * found.lost:.0f} % of the attention may be lost"
    where = f", likeliest what it needs at tokens {places}" if places else ""
    verdict = "; evidence may be gone" if found.flagged else "; not flagged"
    if found.before is not None:
        before = shorten(found.before, 80, placeholder=" ...")
        verdict = f"; these were read again, and {f'before the answer was {before!r}' if found.changed else 'it stays'}"
    return f"{lost}{where}; least certain token leads by {found.margin:.2f}{verdict}"


def questions_of(prompt: QuestionOptions) -> list[str]:
    """Return the questions of the command line or of a file.

    Raises:
        ValueError: If the file cannot be read, or holds no questions.
    """
    from locret.conversation.text_stream import read_text

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


@contextmanager
def _memory_errors(device: Any) -> Iterator[None]:
    """Say of what fails with a backbone on a device which flags would change that."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OSError(
            f"{device} is out of memory; lower --budget or --chunk-size (--dry-run prints the cache's bytes), or take "
            "a smaller --dtype"
        ) from error
    except ValueError as error:
        raise ValueError(str(error).replace("protect=", "--protect ")) from error


def _prompt(
    options: Options, document: Any, counted: bool, asked: Sequence[str]
) -> tuple[Any, Any, int | None, Any, Any]:
    """Return the tokenizer, the prompt's ids, their number if it is `counted`, a bar, and where the turns are."""
    from locret import loading
    from locret.conversation.document import ReadingBar, whole
    from locret.conversation.rules import rules_of
    from locret.conversation.templates import leading_special_ids
    from locret.conversation.text_stream import TokenStream
    from locret.conversation.turns import Layout
    from locret.infer import answer

    if document is None:
        return None, None, None, None, None
    tokenizer = loading.load_tokenizer(options.model)
    if _apart(options, asked):
        if counted:
            document.count(tokenizer)
        return tokenizer, None, document.size if counted else None, None, None
    bar = ReadingBar(document, not options.output.quiet)
    question = asked[0] if asked else None
    special = [] if options.prompt.template == "chat" else leading_special_ids(tokenizer)
    layout = Layout(rules_of(options.prompt.protect), TokenStream(tokenizer), len(special))
    ids = bar.blocks(answer.prompt_ids(tokenizer, bar.pieces(document.pieces), options.prompt, question, layout))
    if not counted:
        return tokenizer, ids, None, bar, layout
    counted_ids = whole(ids)
    return tokenizer, counted_ids, counted_ids.shape[1], bar, layout


def _print_plan(options: Options, run_of: Any, policy: Any, setup: dict[str, Any]) -> None:
    """Print what a run would do and take."""
    from locret.infer import sizing

    steps = run_of.schedule(policy).table()
    plan = {
        **run_of.plan(policy),
        "planned_weights": run_of.weights.to_dict(),
        "prompt_tokens": run_of.prompt_tokens,
        "not_given": policy.following(),
        "steps": steps,
    }
    print_json({**plan, **setup, "options": _resolved(options)})
    if not options.output.quiet:
        sys.stderr.write(sizing.follow_line(policy) + sizing.step_lines(steps, adaptive=policy.memory == "adaptive"))


def _document(options: PromptOptions) -> Any:
    from locret import shipped
    from locret.conversation.document import Document
    from locret.conversation.text_stream import read_text

    name = options.prompt_file
    if name is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("there is nothing to read; give a text with --prompt-file, or pipe one in")
        name = "-"
    path = os.path.expanduser(shipped.find(name))
    size = os.path.getsize(path) if os.path.isfile(path) else None
    return Document(os.path.basename(name), read_text(name), size=size, unit="bytes")


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


def _painter(path: str | None, scorer: ScorerOptions) -> Any:
    """Return what draws the cache once the prompt has been read; None if no picture is wanted."""
    if path is None:
        return None

    def paint(cache: Any) -> None:
        from locret import pictures
        from locret.backbone.adapters import sharers_of
        from locret.scorers import FALLBACK

        name = scorer.label or FALLBACK
        title = f"{name}, budget {cache.policy.budget:,}"
        kept, sharers = pictures.retention_of(cache, title), sharers_of(cache.model)
        if sharers is None or sharers.rank == 0:
            pictures.retention_map([kept], path)

    return paint


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


def _versions() -> dict[str, str]:
    import torch
    import transformers

    from locret import __version__

    return {"locret": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def main() -> None:
    """Entry point of `locret-infer`."""
    run(command, prog="locret-infer")


if __name__ == "__main__":
    main()
