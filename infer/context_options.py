"""The options of `locret-context` that no other command has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from locret.base.fields import Refusal
from locret.infer.infer_options import QuestionOptions, ReadingOutput, ReportOptions


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
