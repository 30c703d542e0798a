"""`locret-context`: what has been read, as a file: make it, look at it, ask it, join and shrink it, hand it on.

What needs no backbone loads none: `show`, `export`, `push` and `pull` work from the file alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.cli.command import print_json, run, warnings_as_lines
from locret.cli.subcommands import Subcommand, run_subcommand
from locret.heads.push import print_pushed
from locret.infer import command as infer
from locret.infer.context_options import (
    AskOptions,
    ComposeOptions,
    ExportOptions,
    LlamacppOptions,
    PullOptions,
    ReadOutput,
    ShowOptions,
    ShrinkOptions,
)
from locret.infer.infer_options import (
    GenerationOptions,
    ModelOptions,
    OutputOptions,
    PlacedModelOptions,
    PolicyOptions,
    PromptOptions,
    ReportOptions,
    TextOptions,
)
from locret.loading.options import ScorerOptions
from locret.publish_options import ContextPushOptions

if TYPE_CHECKING:
    from locret import Context
    from locret.conversation.saved import SavedContext
    from locret.pictures import Retention

PROG = "locret-context"


def read(
    model: PlacedModelOptions,
    scorer: ScorerOptions,
    policy: PolicyOptions,
    text: TextOptions,
    output: ReadOutput,
    given: frozenset[str],
) -> int:
    """Read a text into a file, as `locret-infer --save-context` does."""
    model.refuse_shard("locret-context")
    _check_output(output.output)
    options = infer.Options(
        model,
        scorer,
        policy,
        PromptOptions(**_values(text)),
        GenerationOptions(),
        OutputOptions(
            json=output.json,
            quiet=output.quiet,
            dry_run=output.dry_run,
            picture=output.picture,
            kept=output.kept,
            save_context=output.output,
        ),
        given,
    )
    with warnings_as_lines(f"{PROG} read", quiet=output.quiet):
        infer.execute(options)
    return 0


def show(options: ShowOptions, given: frozenset[str]) -> int:
    """Print what saved contexts are, and what they kept of their texts."""
    from locret import pictures
    from locret.conversation.protect import as_table
    from locret.conversation.saved import SavedContext, find_context

    if options.plot is not None and not (options.text and options.plot.endswith(".html")):
        infer.check_picture("--plot", options.plot)
    found = [SavedContext.open(find_context(path)) for path in options.context]
    retentions = [one.retention(one.path.name) for one in found]
    if options.plot is not None and options.text is not None:
        _draw_text(found[0], retentions[0], options)
    elif options.plot is not None:
        pictures.retention_map(retentions, options.plot)
    if options.json:
        print_json({"contexts": [one.facts() for one in found]})
        return 0
    for number, (one, retention) in enumerate(zip(found, retentions, strict=True)):
        lines = [("context", str(one.path)), *one.lines()]
        print("\n" if number else "", end="")
        print("\n".join(f"{what:<14}{text}" for what, text in lines))
        print(
            "\nkept by each layer, from the beginning of the text to its end\n"
            + "\n".join(pictures.as_lines(retention))
        )
        if (kept := one.kept_by_message()) is not None:
            print(f"\nunits per KV head that stayed of each message\n{as_table(kept)}")
    return 0


def _draw_text(context: SavedContext, retention: Retention, options: ShowOptions) -> None:
    """Draw the text of a context, kept words dark and forgotten ones pale.

    Raises:
        ValueError: If it is another text than the one that was read.
        OSError: If a file cannot be read or written.
    """
    from locret import shipped
    from locret.infer import kept_page
    from locret.infer.kept_text import share_of_positions
    from locret.loading import tokenizer_of

    words = Path(shipped.find(str(options.text))).read_text(encoding="utf-8")
    notes, tokenizer = context.conversation, tokenizer_of(str(options.model))
    share = share_of_positions(retention)
    template, system = str(notes.get("template", "none")), notes.get("system")
    pieces = kept_page.marked(words, share, tokenizer, template, system)
    note = "The darker a word, the more KV heads hold it."
    kept_page.write(str(options.plot), pieces, f"What {context.path.name} kept of {context.shown_name}", note)


def ask(
    model: ModelOptions,
    scorer: ScorerOptions,
    about: AskOptions,
    generation: GenerationOptions,
    output: ReportOptions,
    given: frozenset[str],
) -> int:
    """Answer questions, each from copies of saved contexts."""
    asked = infer.questions_of(about)
    options = _loading(model, scorer, output, given, about, generation)
    infer.check_evidence(options, asked)
    with warnings_as_lines(f"{PROG} ask", quiet=output.quiet):
        records = list(infer.ask_saved(options, about.context, asked))
    if output.json:
        print_json({"contexts": records})
    return 0


def compose(model: ModelOptions, scorer: ScorerOptions, output: ComposeOptions, given: frozenset[str]) -> int:
    """Join saved contexts in one file."""
    weights = output.weights
    with _made(model, scorer, output, output.context, given) as contexts:
        from locret import compose as joined

        parts = list(contexts)
        _write(joined(parts, output.budget, weights, name=output.name), output)
    return 0


def shrink(model: ModelOptions, scorer: ScorerOptions, output: ShrinkOptions, given: frozenset[str]) -> int:
    """Write a smaller context, from the scores that units have."""
    with _made(model, scorer, output, [output.context], given) as contexts:
        (context,) = contexts
        held = context.memory().units
        if output.budget >= held:
            raise ValueError(
                f"--budget {output.budget:,} lets nothing go of {output.context}, which holds {held:,} units per KV "
                "head; lower it"
            )
        _write(context.shrink(output.budget), output)
    return 0


def export(options: ExportOptions, llamacpp: LlamacppOptions, given: frozenset[str]) -> int:
    """Write a saved context as another engine holds it."""
    from locret.conversation.saved import find_context
    from locret.engines import llamacpp as engine
    from locret.engines.prefix import Prefix

    infer.check_target("--output", options.output)
    chosen = {name: value for name, value in _values(llamacpp).items() if value is not None}
    try:
        layout = engine.Layout(**chosen)
        prefix = Prefix.from_file(find_context(options.context))
        slot, record = engine.export(prefix, options.output, layout)
    except ValueError as error:
        raise ValueError(_with_flags(str(error), [*chosen, "cache_type_v"])) from None
    if options.json:
        print_json(
            {"output": str(slot), "record": str(record), "bytes": slot.stat().st_size, **json.loads(record.read_text())}
        )
    else:
        for file in (slot, record):
            print(f"{file.stat().st_size:>14,} bytes  {file}")
    return 0


def push(options: ContextPushOptions, given: frozenset[str]) -> int:
    """Publish a saved context."""
    from locret.conversation.saved import publish

    with warnings_as_lines(f"{PROG} push", quiet=False):
        print_pushed(publish(options), options)
    return 0


def pull(options: PullOptions, given: frozenset[str]) -> int:
    """Fetch a published context, check it, and write it to a file."""
    import shutil

    from locret.base.files import written_whole
    from locret.conversation.saved import SavedContext, download

    _check_output(options.output)
    file = download(options.repo, revision=options.revision)
    saved = SavedContext.open(file)
    with written_whole(options.output) as fresh:
        shutil.copyfile(file, fresh)
    if options.json:
        print_json({**saved.facts(), "context": options.output, "repo": options.repo})
    else:
        print(f"{options.output}: {saved.shown_name}, {saved.tokens:,} tokens, {file.stat().st_size:,} bytes")
    return 0


@contextmanager
def _made(
    model: ModelOptions, scorer: ScorerOptions, output: Any, paths: Sequence[str], given: frozenset[str]
) -> Iterator[Iterator[Context]]:
    """Give the contexts that something is made of."""
    _check_output(output.output)
    options = _loading(model, scorer, output, given)
    with (
        warnings_as_lines(f"{PROG} {type(output).__name__.removesuffix('Options').lower()}", quiet=output.quiet),
        infer.loaded(options, paths) as (lm, files, _),
    ):
        yield (infer.load_saved(lm, file, options) for file in files)


def _loading(
    model: ModelOptions,
    scorer: ScorerOptions,
    output: ReportOptions,
    given: frozenset[str],
    about: AskOptions | None = None,
    generation: GenerationOptions | None = None,
) -> infer.Options:
    """Return what `locret-infer --context` would be called with."""
    model.refuse_shard("locret-context")
    placed, prompt = PlacedModelOptions(**_values(model)), PromptOptions()
    if about is not None:
        placed = replace(placed, disk=about.disk)
        prompt = PromptOptions(
            context=about.context[0],
            question=about.question,
            questions=about.questions,
            evidence=about.evidence,
            reread=about.reread,
            allow_other_scorer=about.allow_other_scorer,
        )
    report = OutputOptions(json=output.json, quiet=output.quiet)
    return infer.Options(placed, scorer, PolicyOptions(), prompt, generation or GenerationOptions(), report, given)


def _with_flags(text: str, names: Iterable[str]) -> str:
    """Name settings in a message as flags."""
    for name in names:
        text = re.sub(rf'\b{name}="?([\w.]+)"?', rf"--{name.replace('_', '-')} \1", text)
    return text


def _write(context: Context, output: Any) -> None:
    context.save(output.output)
    if output.json:
        print_json({"context": output.output, "tokens": context.cache.seen, **context.memory().to_dict()})
    elif not output.quiet:
        sys.stderr.write(f"wrote {output.output}: {context!r}\n")


def _check_output(path: str) -> None:
    """Refuse a file that could not be written, or is something else, before anything is loaded."""
    from locret.cache.cache_file import check_replaceable

    infer.check_target("--output", path)
    check_replaceable(Path(path))


def _values(options: Any) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(options)}


MODEL = (ModelOptions, ScorerOptions)
COMMANDS = {
    "read": Subcommand(
        about="Read a text of any size into a context, a file that can be asked later.",
        classes=(PlacedModelOptions, ScorerOptions, PolicyOptions, TextOptions, ReadOutput),
        words="prompt_file",
        act=read,
    ),
    "show": Subcommand(
        about="Show what a context is, and what it kept of its text.", classes=(ShowOptions,), words="context", act=show
    ),
    "ask": Subcommand(
        about="Ask contexts about their texts.",
        classes=(*MODEL, AskOptions, GenerationOptions, ReportOptions),
        words="context",
        act=ask,
    ),
    "compose": Subcommand(
        about="Join contexts that were read apart, so that they are asked together.",
        classes=(*MODEL, ComposeOptions),
        words="context",
        act=compose,
    ),
    "shrink": Subcommand(
        about="Make a smaller context of one, without reading again.",
        classes=(*MODEL, ShrinkOptions),
        words="context",
        act=shrink,
    ),
    "export": Subcommand(
        about="Write a context as another engine holds it.",
        classes=(ExportOptions, LlamacppOptions),
        words="context",
        act=export,
    ),
    "push": Subcommand(
        about="Publish a context on the Hugging Face Hub, with a card and a picture.",
        classes=(ContextPushOptions,),
        words="context",
        act=push,
    ),
    "pull": Subcommand(
        about="Fetch a context from the Hugging Face Hub.", classes=(PullOptions,), words="repo", act=pull
    ),
}
"""What may follow `locret-context`."""


def command(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub, a disk or a device's memory fails.
    """
    return run_subcommand(PROG, COMMANDS, argv)


def main() -> None:
    """Entry point of `locret-context`."""
    run(command, prog=" ".join([PROG, *(word for word in sys.argv[1:2] if word in COMMANDS)]))


if __name__ == "__main__":
    main()
