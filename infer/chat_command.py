"""`locret-chat`: a conversation with a document of any length, in a fixed amount of memory.

What does not begin with a slash is said to the model; `/help` lists the rest. At a terminal Ctrl-C ends an answer and
Ctrl-D leaves. From a pipe each line is a message, answers go to standard output, and the first mistake is the end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret import shipped
from locret.base.fields import Refusal
from locret.base.nearest import check_retired, nearest
from locret.base.warned import warn_user
from locret.cli.command import parse_options, run, warnings_as_lines
from locret.cli.options import flag_of
from locret.infer.fetch import is_address
from locret.infer.infer_options import ChatOptions, GenerationOptions, PolicyOptions, SavedModelOptions
from locret.loading.options import ScorerOptions

if TYPE_CHECKING:
    from locret import Chat, LongContextModel
    from locret.infer.reading import Saved

OPTION_CLASSES = (SavedModelOptions, ScorerOptions, PolicyOptions, ChatOptions, GenerationOptions)
DESCRIPTION = "Talk about a document of any length in a fixed amount of memory."
_ALONE = ("memory", "kept", "help", "quit")
"""Commands without an argument."""


def command(argv: Sequence[str] | None = None) -> int:
    (model, scorer, policy, about, generation), chosen = parse_options("locret-chat", DESCRIPTION, OPTION_CLASSES, argv)
    about.check_files()
    with warnings_as_lines("locret-chat", quiet=about.quiet):
        if model.model is None and about.context is None:
            raise ValueError("--model is missing; give a backbone, or --context FILE, which names its own")
        if policy.keep is not None:
            rule = "depends on one text's length, but a conversation goes on; give --budget or --kv-memory"
            raise Refusal("keep", policy.keep, rule)
        from locret.infer.reading import ready, saved_in

        saved = None if about.context is None else saved_in([about.context], model, scorer, answers=True)
        if saved is not None:
            model, scorer = replace(model, model=saved.model.model), saved.scorer
            if later := sorted({"system", "template", *(one.name for one in fields(PolicyOptions))} & chosen):
                flags = ", ".join(map(flag_of, later))
                warn_user(f"--context {about.context} has been read already, so {flags} is for what /read reads")
        plan = ready(model, scorer, policy, chosen, generation)
        with plan.loaded(about.template) as lm:
            conversation = Conversation(lm, about, generation, saved)
            conversation.begin()
            if sys.stdin.isatty():
                _talk(conversation)
            else:
                for nth, line in enumerate(sys.stdin, 1):
                    try:
                        if not conversation.take(line.rstrip("\r\n")):
                            break
                    except ValueError as error:  # what follows would be said to another text, or to none
                        raise ValueError(f"line {nth} ends the chat: {error}") from error
    return 0


@dataclass
class Conversation:
    """What `locret-chat` does with a line."""

    lm: LongContextModel
    about: ChatOptions
    generation: GenerationOptions
    saved: Saved | None = None
    """How what has been saved is loaded, if --context names some."""
    chat: Chat | None = None

    def __post_init__(self) -> None:
        self._commands: dict[str, Callable[[str], None]] = {
            name.removeprefix("_do_"): getattr(self, name) for name in dir(self) if name.startswith("_do_")
        }

    def begin(self) -> None:
        """Read or load what the options name."""
        import torch

        torch.manual_seed(self.generation.seed)
        if self.about.prompt_file:
            self._read(self.about.prompt_file)
        elif self.about.context is not None:
            self._do_load(self.about.context)
        else:
            self._tell("nothing has been read yet; /read FILE reads a text, /help lists what else there is")

    def take(self, line: str) -> bool:
        """Do what a line says; return whether to go on."""
        word, _, rest = line.strip().partition(" ")
        if rest.strip() and word.removeprefix("/") in _ALONE and word.startswith("/"):
            raise ValueError(f'{word} takes nothing, and "{rest.strip()}" is given; say {word} alone')
        if word == "/quit":
            return False
        if word.startswith("/"):
            name = word.removeprefix("/")
            if name not in self._commands:
                check_retired("locret-chat", word)
                near = [f"/{one}" for one in nearest(name, [*self._commands, "quit"])]
                raise ValueError(
                    f"{word} is unknown; " + (f"did you mean {' or '.join(near)}?" if near else "try /help")
                )
            self._commands[name](rest.strip())
        elif word:
            self._say(line)
        return True

    def _say(self, text: str) -> None:
        chat = self._current()
        try:
            chat.say(text, write=partial(print, end="", flush=True), **self.generation.given())
        finally:
            print(flush=True)

    def _do_read(self, given: str) -> None:
        """/read FILE: read a text and talk about it."""
        self._read([given if is_address(given) else str(_path(given, "/read"))])

    def _read(self, names: Sequence[str]) -> None:
        from locret.infer.reading import open_all

        if self.saved is not None and self.saved.unrated:
            raise ValueError(f"nothing rates what is read here; begin with --context {self.about.context} and --heads")
        document, cache = open_all(names, ""), self.lm.new_cache()
        how: dict[str, Any] = {"system": self.about.system, "protect": self.about.protect}
        context = self.lm.read_into(cache, document, progress=not self.about.quiet, **how)
        self._go_on(context.chat(cache))

    def _do_load(self, given: str) -> None:
        """/load FILE: go on with a conversation, or a context, that has been saved."""
        path, load = _path(given, "/load"), self.lm.load_chat
        self._go_on(load(path) if self.saved is None else self.saved.loaded(load, path))

    def _go_on(self, chat: Chat) -> None:
        self.chat = chat
        self._tell(repr(chat))

    def _do_save(self, given: str) -> None:
        """/save FILE: write the conversation to a file."""
        path = _path(given, "/save")
        self._current().save(path)
        self._tell(f"saved; go on with /load {path}, or with locret-chat --context {path}")

    def _do_memory(self, _: str) -> None:
        """/memory: say what the cache holds and takes."""
        from locret.conversation.chat import second_tier
        from locret.scorers.chosen import told

        chat = self._current()
        memory, kept = chat.memory(), told(chat.cache.scorer, chat.cache.policy)
        print(
            f"{chat.cache.seen:,} tokens read, {memory.units:,} units per KV head held ({kept}); "
            f"{chat.kept_bytes:,} bytes kept; cache and workspace {memory.actual:,} bytes now, "
            f"{memory.peak:,} at most, {memory.planned:,} planned{second_tier(memory)}",
            flush=True,
        )

    def _do_kept(self, _: str) -> None:
        """/kept: show what each layer kept of what was read, and what stayed of each turn."""
        from locret.infer import kept_page
        from locret.pictures import retention_of

        chat = self._current()
        turns = None if chat.protection.turns is None else chat.kept_by_message()
        print(kept_page.as_text(retention_of(chat.cache), turns), flush=True)

    def _do_help(self, _: str) -> None:
        """/help: list what can be said."""
        texts = [str(one.__doc__).strip().splitlines()[0] for one in self._commands.values()]
        print("\n".join([*texts, "/quit: leave, as Ctrl-D does", "Ctrl-C ends an answer."]), flush=True)

    def _current(self) -> Chat:
        if self.chat is None:
            raise ValueError("nothing has been read yet; read a text with /read FILE, or --prompt-file FILE")
        return self.chat

    def _tell(self, text: str) -> None:
        if not self.about.quiet:
            sys.stderr.write(text + "\n")


def _path(given: str, name: str) -> Path:
    if not given:
        raise ValueError(f"{name} needs a file; write {name} FILE")
    return Path(os.path.expanduser(shipped.find(given)))


def _talk(conversation: Conversation) -> None:
    """Go on until the user leaves; a mistake is one line, and Ctrl-C ends an answer, not the command."""
    before: Any = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for line in _typed():
            try:
                if not conversation.take(line):
                    return
            except KeyboardInterrupt:
                sys.stderr.write("(stopped)\n")
            except (ValueError, OSError) as error:
                sys.stderr.write(f"{error}\n")
    finally:
        signal.signal(signal.SIGINT, before)


def _typed() -> Iterator[str]:
    """Yield what is typed, with history and editing; Ctrl-C drops a line, Ctrl-D ends."""
    with suppress(ImportError):  # there is none on Windows; it edits what `input` reads
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            sys.stderr.write("\n")
        except EOFError:
            sys.stderr.write("\n")
            return


if __name__ == "__main__":
    run(command, prog="locret-chat")
