"""`locret-context`: what has been read, as a file: make it, look at it, ask it, join and shrink it, hand it on.

What needs no backbone loads none: `show` and `export` work from the file alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from locret.base.fields import Refusal
from locret.cli.command import chosen, parse_options, print_json, run, warnings_as_lines, with_flag
from locret.infer import command as infer
from locret.infer.infer_options import (
    GenerationOptions,
    ModelOptions,
    PolicyOptions,
    QuestionOptions,
    ReadingOutput,
    ReportOptions,
    SavedModelOptions,
    TextOptions,
)
from locret.loading.options import ScorerOptions

if TYPE_CHECKING:
    from locret import Context
    from locret.infer.reading import Ready

PROG = "locret-context"


@dataclass(frozen=True, kw_only=True)
class ContextFile:
    """The file that is written."""

    output: str
    """File of the context; one that is there is replaced, if it is a context."""


@dataclass(frozen=True, kw_only=True)
class ReadOutput(ContextFile, ReadingOutput):
    """What comes out."""


@dataclass(frozen=True, kw_only=True)
class SeveralContexts:
    """What is looked at, or asked."""

    context: list[str]
    """Saved contexts, or their repositories on the Hub."""

    def __post_init__(self) -> None:
        if not self.context or any(not context.strip() for context in self.context):
            raise ValueError("--context is empty; give a saved context")


@dataclass(frozen=True, kw_only=True)
class ShowOptions(SeveralContexts):
    """What is looked at."""

    plot: str | None = None
    """PNG or HTML file to write: the text of --text, the words that heads hold dark and forgotten ones pale. A PNG file
    needs locret[eval]."""
    text: str | None = None
    """The text file that the context was read from. Needs --plot and --model."""
    model: str | None = None
    """Backbone whose tokenizer tells the words of --text: a folder, its Hub id, a GGUF file, or smollm2."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({one is None for one in (self.plot, self.text, self.model)}) > 1:
            raise ValueError("--text draws a text with the words of --model into the file of --plot; give all three")
        if self.text is not None and len(self.context) > 1:
            raise Refusal("text", self.text, f"is that of one context, and {len(self.context)} are given; give one")


@dataclass(frozen=True, kw_only=True)
class AskOptions(QuestionOptions, SeveralContexts):
    """What is asked, and what about."""

    allow_other_scorer: bool = False
    """Accept other heads or another scorer than a context was read with: what was kept stays."""

    def __post_init__(self) -> None:
        QuestionOptions.__post_init__(self)
        SeveralContexts.__post_init__(self)
        if not self.question:
            raise ValueError(f"--context {' '.join(self.context)} waits for a question; give --question")


@dataclass(frozen=True, kw_only=True)
class ComposeOptions(SeveralContexts, ContextFile, ReportOptions):
    """What is joined."""

    budget: int | None = None
    """Units per KV head of the whole, as many for each context, chosen by their scores; all that they hold if not
    given."""
    name: str | None = None
    """What to call the whole; the names of its parts if not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.context) < 2:
            raise Refusal("context", self.context[0], "is one context; give two or more, in their order")


@dataclass(frozen=True, kw_only=True)
class ShrinkOptions(ContextFile, ReportOptions):
    """What is made smaller."""

    context: str
    """A saved context, or its repository on the Hub."""
    budget: int
    """Most units per KV head."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is written, and for which engine. vLLM and transformers take the file of a context itself."""

    context: str
    """A saved context, or its repository on the Hub."""
    to: Literal["llamacpp"]
    """llamacpp: a slot file for llama-server, and beside it a record (.json) with what a client has to know."""
    output: str
    """File to write, such as book.bin."""
    cache_type: str = "f16"
    """Form of keys and values in llama.cpp (--cache-type-k and -v): f32, f16 or bf16."""
    json: bool = False
    """Print one JSON object."""


def read(
    model: ModelOptions,
    scorer: ScorerOptions,
    policy: PolicyOptions,
    text: TextOptions,
    output: ReadOutput,
    given: frozenset[str],
) -> int:
    """Read a text of any size into a context, a file that can be asked later."""
    from locret.cache.cache_file import check_savable
    from locret.infer.reading import counted, opened, ready, warn_of_growth

    text.check_files()
    _check_output(output.output)
    with warnings_as_lines(f"{PROG} read", quiet=output.quiet):
        document = None if output.dry_run else opened(text)
        groups = (model, scorer, policy, given, GenerationOptions())
        foresee = output.dry_run and text.again
        plan = ready(*groups, partial(counted, model, text, document, None), foresee=foresee)
        check_savable(plan.policy, output.output)
        warn_of_growth(plan)
        if document is None:
            print_json(plan.foreseen((model, scorer, policy, text, output), quiet=output.quiet))
            return 0
        with plan.loaded(text.template) as lm:
            how: dict[str, Any] = {"system": text.system, "progress": not output.quiet, "protect": text.protect}
            _write(lm.read_into(lm.new_cache(), document, **how), output, plan)
    return 0


def show(options: ShowOptions, given: frozenset[str]) -> int:
    """Show what a context is, and what it kept of its text."""
    from locret import loading
    from locret.conversation.saved import SavedContext, find_context, shown_text
    from locret.infer import kept_page
    from locret.infer.reading import check_target, open_all

    if options.plot is not None:
        check_target("--plot", options.plot)
    found = [SavedContext.open(find_context(path)) for path in options.context]
    retentions = [one.retention() for one in found]
    if options.plot is not None:
        with warnings_as_lines(f"{PROG} show", quiet=False):
            words, notes = "".join(open_all([str(options.text)], "--text ").pieces or ()), found[0].conversation
        tokenizer, template = loading.tokenizer_of(str(options.model)), str(notes.get("template", "none"))
        share = kept_page.share_of_heads(retentions[0])
        pieces = kept_page.marked(words, share, tokenizer, template, notes.get("system"))
        title = f"What {found[0].path.name} kept of {shown_text(found[0].name)}"
        kept_page.write(options.plot, pieces, title, "The darker a word, the more KV heads hold it.")
    if options.json:
        print_json({"contexts": [one.facts() for one in found]})
        return 0
    for number, (one, retention) in enumerate(zip(found, retentions, strict=True)):
        print("\n" if number else "", end="")
        print("\n".join(f"{what:<14}{text}" for what, text in [("context", str(one.path)), *one.lines()]))
        print(f"\n{kept_page.as_text(retention, one.kept_by_message())}")
    return 0


def ask(
    model: SavedModelOptions,
    scorer: ScorerOptions,
    about: AskOptions,
    generation: GenerationOptions,
    output: ReportOptions,
    given: frozenset[str],
) -> int:
    """Ask contexts about their texts."""
    from locret.cache.cache_file import CONTEXT_WRITERS, read_scorer
    from locret.conversation.saved import find_context

    records = list[dict[str, Any]]()
    how = {"allow_other_scorer": about.allow_other_scorer}
    if about.engine != "transformers":
        from locret.engines.llamacpp import check_options

        check_options(generation.given())
    with _loaded(model, scorer, "ask", about.context, output.quiet, **how) as (contexts, plan):
        writer = infer.writer_of(plan.model, about, generation)
        for path, context in zip(about.context, contexts, strict=True):
            if len(about.context) > 1 and not output.json:
                print(f"{chr(10) if records else ''}# {path}", flush=True)
            answers = infer.answer_each(context, about.question, about, generation, json=output.json, writer=writer)
            reading = {"context": path, "prompt_tokens": context.cache.seen, **context.memory().to_dict()}
            how_read = {
                "scorer": read_scorer(find_context(path), CONTEXT_WRITERS),
                "policy": context.cache.policy.to_dict(),
            }
            records.append({"reading": reading, "answers": answers, **plan.record(), **how_read})
    if output.json:
        print_json({"contexts": records})
    return 0


def compose(model: SavedModelOptions, scorer: ScorerOptions, output: ComposeOptions, given: frozenset[str]) -> int:
    """Join contexts that were read apart, so that they are asked together."""
    _check_output(output.output)
    with _loaded(model, scorer, "compose", output.context, output.quiet) as (contexts, _):
        from locret import compose as joined

        _write(joined(list(contexts), output.budget, name=output.name), output)
    return 0


def shrink(model: SavedModelOptions, scorer: ScorerOptions, output: ShrinkOptions, given: frozenset[str]) -> int:
    """Make a smaller context of one, without reading again."""
    _check_output(output.output)
    with _loaded(model, scorer, "shrink", [output.context], output.quiet) as (contexts, _):
        (context,) = contexts
        held = context.memory().units
        if output.budget >= held:
            rule = f"lets nothing go of {output.context}, which holds {held:,} units per KV head; lower it"
            raise Refusal("budget", f"{output.budget:,}", rule)
        _write(context.shrink(output.budget), output)
    return 0


def export(options: ExportOptions, given: frozenset[str]) -> int:
    """Write a context as another engine holds it."""
    from locret.conversation.saved import find_context
    from locret.engines import llamacpp as engine
    from locret.engines.prefix import Prefix
    from locret.infer.reading import check_target

    check_target("--output", options.output)
    prefix = Prefix.from_file(find_context(options.context))
    slot, record = engine.export(prefix, options.output, options.cache_type)
    if options.json:
        written = {"output": str(slot), "record": str(record), "bytes": slot.stat().st_size}
        print_json({**written, **json.loads(record.read_text())})
    else:
        for file in (slot, record):
            print(f"{file.stat().st_size:>14,} bytes  {file}")
    return 0


@contextmanager
def _loaded(
    model: ModelOptions, scorer: ScorerOptions, what: str, paths: Sequence[str], quiet: bool, **how: Any
) -> Iterator[tuple[Iterator[Context], Ready]]:
    """Give saved contexts, one after the other, and what a record says of their model; wrong files come first."""
    from locret.infer.reading import ready_without_policy, saved_in

    with warnings_as_lines(f"{PROG} {what}", quiet=quiet):
        saved = saved_in(paths, model, scorer, answers=what == "ask")
        plan = ready_without_policy(saved.model, saved.scorer)
        with plan.loaded() as lm:
            yield (saved.loaded(lm.load, file, **how) for file in saved.files), plan


def _write(context: Context, output: Any, plan: Ready | None = None) -> None:
    context.save(output.output)
    if output.json:
        read = {"context": output.output, "tokens": context.cache.seen, "bytes": context.kept_bytes}
        print_json({**read, **context.memory().to_dict(), **({} if plan is None else plan.record())})
    elif not output.quiet:
        sys.stderr.write(f"wrote {output.output}: {context!r}\n")


def _check_output(path: str) -> None:
    """Refuse a file that could not be written, or is something else, before anything is loaded."""
    from locret.cache.cache_file import check_replaceable
    from locret.infer.reading import check_target

    check_target("--output", path)
    check_replaceable(Path(path))


COMMANDS: dict[str, Callable[..., int]] = {act.__name__: act for act in (read, show, ask, compose, shrink, export)}
"""What may follow `locret-context`: its help is what the function says of itself, its options those that it takes."""


def command(argv: Sequence[str] | None = None) -> int:
    about = {name: str(act.__doc__) for name, act in COMMANDS.items()}
    name, rest = chosen(PROG, about, list(sys.argv[1:] if argv is None else argv))
    act = COMMANDS[name]
    line = with_flag(rest, "--prompt-file" if act is read else "--context")
    classes = [kind for kind in get_type_hints(act).values() if isinstance(kind, type) and is_dataclass(kind)]
    instances, given = parse_options(f"{PROG} {name}", about[name], classes, line)
    return act(*instances, frozenset(given))


if __name__ == "__main__":
    run(command, prog=" ".join([PROG, *(word for word in sys.argv[1:2] if word in COMMANDS)]))
