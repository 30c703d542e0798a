"""`locret-chat`: a conversation with a document of any length, in a fixed amount of memory.

What does not begin with a slash is said to the model; `/help` lists the rest. At a terminal Ctrl-C ends an answer and
Ctrl-D leaves. From a pipe each line is a message, answers go to standard output, and the first mistake is the end.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.base.nearest import nearest
from locret.cli.command import parse_options, run, warnings_as_lines
from locret.infer.chat_options import ChatOptions
from locret.infer.infer_options import GenerationOptions, PlacedModelOptions, PolicyOptions
from locret.loading.options import ScorerOptions

if TYPE_CHECKING:
    from locret import Chat, LongContextModel

OPTION_CLASSES = (PlacedModelOptions, ScorerOptions, PolicyOptions, ChatOptions, GenerationOptions)
_ALONE = ("fork", "back", "memory", "kept", "help", "quit")
"""Commands without an argument."""
DESCRIPTION = "Talk about a document of any length in a fixed amount of memory."


def command(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub, a disk or a device's memory fails.
    """
    (model, scorer, policy, about, generation), chosen = parse_options("locret-chat", DESCRIPTION, OPTION_CLASSES, argv)
    model.refuse_shard("locret-chat")
    with warnings_as_lines("locret-chat", quiet=about.quiet):
        if about.context is not None:
            from locret import read_notes
            from locret.cache.cache_file import CONTEXT_WRITERS
            from locret.conversation.saved import find_context

            read_notes(find_context(about.context), CONTEXT_WRITERS)  # refuses a wrong file before weights are loaded
            if given := sorted({"system", "template", *(one.name for one in fields(PolicyOptions))} & chosen):
                flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
                warnings.warn(
                    f"--context {about.context} has been read already, so {flags} is for what /read reads",
                    stacklevel=2,
                )
        lm = _load(model, scorer, policy, about, generation, chosen)
        conversation = Conversation(lm, about, generation)
        conversation.begin()
        if sys.stdin.isatty():
            with _ctrl_c_raises():
                _talk(conversation, _typed())
        else:
            for line in sys.stdin:
                if not conversation.take(line.rstrip("\r\n")):
                    break
    return 0


def _load(
    model: PlacedModelOptions,
    scorer: ScorerOptions,
    policy: PolicyOptions,
    about: ChatOptions,
    generation: GenerationOptions,
    chosen: set[str],
) -> LongContextModel:
    """Resolve the options and load what they name.

    Raises:
        ValueError: If something is missing or does not match, or a budget depends on one text's length.
    """
    from locret.infer.ready import ready

    if policy.budget_share is not None:
        raise ValueError(
            f"--budget-share {policy.budget_share} depends on one text's length, but a conversation goes on; give "
            "--budget or --kv-memory"
        )
    return ready(model, scorer, policy, chosen, generation).load(about.template)


@dataclass
class Conversation:
    """What `locret-chat` does with a line."""

    lm: LongContextModel
    about: ChatOptions
    generation: GenerationOptions
    chat: Chat | None = None
    source: Path | None = None
    """The file the conversation is about, where it is known."""

    def __post_init__(self) -> None:
        from locret.infer.answer import generation_settings

        self._settings = generation_settings(self.generation, self.lm)
        self._points: list[Chat] = []
        self._commands: dict[str, Callable[[str], None]] = {
            name.removeprefix("_do_"): getattr(self, name) for name in dir(self) if name.startswith("_do_")
        }

    def begin(self) -> None:
        """Read or load what the options name."""
        import torch

        torch.manual_seed(self.generation.seed)
        if self.about.prompt_file is not None:
            self._do_read(self.about.prompt_file)
        elif self.about.context is not None:
            self._do_load(self.about.context)
        else:
            self._tell("nothing has been read yet; /read FILE reads a text, /help lists what else there is")

    def take(self, line: str) -> bool:
        """Do what a line says; return whether to go on.

        Raises:
            ValueError: For what the user must change.
            OSError: If a file or the device's memory fails.
        """
        import torch

        word, _, rest = line.strip().partition(" ")
        try:
            if rest.strip() and word.removeprefix("/") in _ALONE and word.startswith("/"):
                raise ValueError(f'{word} takes nothing, and "{rest.strip()}" is given; say {word} alone')
            if word == "/quit":
                return False
            if word.startswith("/"):
                self._command(word.removeprefix("/"))(rest.strip())
            elif word:
                self._say(line)
        except torch.OutOfMemoryError as error:
            raise OSError("the device is out of memory; start with a lower --budget or --chunk-size") from error
        return True

    def _command(self, name: str) -> Callable[[str], None]:
        if name not in self._commands:
            near = [f"/{one}" for one in nearest(name, [*self._commands, "quit"])]
            raise ValueError(f"/{name} is unknown; " + (f"did you mean {' or '.join(near)}?" if near else "try /help"))
        return self._commands[name]

    def _say(self, text: str) -> None:
        """Print the answer as it is written."""
        chat = self._current()
        try:
            with closing(chat.stream(text, **self._settings)) as parts:  # type: ignore[type-var]
                for part in parts:
                    print(part, end="", flush=True)
        finally:
            print(flush=True)

    def _do_read(self, given: str) -> None:
        """/read FILE: read a text and talk about it."""
        from locret.conversation.text import open_document

        path = _path(given, "/read")
        if not path.exists():
            raise ValueError(f"{path}: no such file; write /read and the path of a text file")
        document = open_document(path)
        cache = self.lm.new_cache()
        context = self.lm.read_into(
            cache,
            document,
            system=self.about.system,
            progress=not self.about.quiet,
            protect=self.about.protect,
        )
        self.chat, self.source, self._points = context.chat(cache), document.source, []
        self._tell(repr(self.chat))

    def _do_save(self, given: str) -> None:
        """/save FILE: write the conversation to a file."""
        path = _path(given, "/save")
        self._current().save(path)
        self._tell(f"saved; go on with /load {path}, or with --context {path}")

    def _do_load(self, given: str) -> None:
        """/load FILE: go on with a conversation, or a context, that has been saved."""
        from locret.cache.cache_file import OTHER_SCORER

        path = _path(given, "/load")
        try:
            chat = self.lm.load_chat(path)
        except ValueError as error:
            raise ValueError(
                str(error).replace(f"give that scorer, or {OTHER_SCORER}", "start locret-chat with that scorer")
            ) from error
        self.chat, self.source, self._points = chat, None, []
        self._tell(repr(self.chat))

    def _do_fork(self, _: str) -> None:
        """/fork: remember this point of the conversation; /back returns to it."""
        self._points.append(self._current().fork())
        self._tell(f"{len(self._points)} to go /back to")

    def _do_back(self, _: str) -> None:
        """/back: return to where /fork was said last."""
        if not self._points:
            raise ValueError("/back has nowhere to go; say /fork at the point first")
        self.chat = self._points.pop()
        self._tell(repr(self.chat))

    def _do_memory(self, _: str) -> None:
        """/memory: say what the cache holds and takes."""
        from locret.conversation.chat import second_tier

        chat = self._current()
        memory, policy = chat.memory(), chat.cache.policy
        print(
            f"{chat.cache.seen:,} tokens read, {memory.units:,} units per KV head held with a budget of "
            f"{policy.budget:,}; {memory.actual:,} bytes now, {memory.peak:,} at most, {memory.planned:,} planned"
            f"{second_tier(memory)}",
            flush=True,
        )

    def _do_kept(self, _: str) -> None:
        """/kept: show how much of each tenth of the text stayed, and the passages that most heads hold."""
        from locret.conversation.protect import as_table
        from locret.conversation.text import open_document
        from locret.infer import kept_text

        chat = self._current()
        share = kept_text.share_of_heads(chat.cache)
        print(f"units held, by tenths of what was read: [{kept_text.by_tenths(share)}]")
        if chat.protection.turns is not None:
            print(as_table(chat.kept_by_message()))
        if self.source is None:
            self._tell("the text itself is not saved; /read FILE shows its passages too")
            return
        blocks = self.lm.tokens(open_document(self.source), system=self.about.system)
        print("\n".join(kept_text.passages(share, self.lm.tokenizer, blocks)), flush=True)

    def _do_protect(self, given: str) -> None:
        """/protect NAME ...: say what stays from now on, such as question or user=0.1; nothing, without a name."""
        chat = self._current()
        chat.protect(*given.split())
        names = ", ".join(map(str, chat.protection.rules))
        self._tell(f"protected: {names}" if names else "nothing is protected any more")

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
    from locret import shipped

    return Path(os.path.expanduser(shipped.find(given)))


def _talk(conversation: Conversation, lines: Iterator[str]) -> None:
    """Go on until the user leaves; a mistake is one line."""
    for line in lines:
        try:
            if not conversation.take(line):
                return
        except KeyboardInterrupt:
            sys.stderr.write("(stopped)\n")
        except (ValueError, OSError) as error:
            sys.stderr.write(f"{error}\n")


def _typed() -> Iterator[str]:
    """Yield what is typed, with history and editing; Ctrl-C drops a line, Ctrl-D ends."""
    try:
        from prompt_toolkit import PromptSession

        ask: Callable[[str], str] = PromptSession().prompt
    except ImportError:
        with suppress(ImportError):  # there is none on Windows; it edits what `input` reads
            import readline  # noqa: F401
        ask = input
    while True:
        try:
            yield ask("> ")
        except KeyboardInterrupt:
            sys.stderr.write("\n")
        except EOFError:
            sys.stderr.write("\n")
            return


@contextmanager
def _ctrl_c_raises() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, whatever it does elsewhere: it ends an answer, not the command."""
    before: Any = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """Entry point of `locret-chat`."""
    run(command, prog="locret-chat")


if __name__ == "__main__":
    main()
