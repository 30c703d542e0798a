"""The options of `locret-chat` that no other command has."""

from __future__ import annotations

from dataclasses import dataclass, field

from locret.conversation.protect import TEMPLATES
from locret.infer.infer_options import check_protect


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What the conversation is about."""

    prompt_file: str | None = None
    """Text file of any size, UTF-8, that is read first; /read FILE reads one later."""
    context: str | None = None
    """Instead of a text: a conversation or a context that has been saved, or a context on the Hub, to go on with."""
    system: str | None = None
    """System message of what is read."""
    template: str = "chat"
    """chat: the tokenizer's chat template; original: the one the original heads were trained on; none: plain text."""
    protect: list[str] = field(default_factory=list)
    """What stays whatever its scores, each with a --protect of its own: system, document, question (the last turn of
    the user), user, assistant, message:N, tokens:A-B, or chars:A-B of the document; with a least share of the budget,
    as user=0.1, instead of all its units; each=0.05 gives every turn a share."""
    quiet: bool = False
    """No progress, warnings or hints on standard error."""

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise ValueError(f"--template {self.template} is unknown; choose one of {', '.join(TEMPLATES)}")
        check_protect(self.protect, self.system)
        if self.protect and self.context is not None:
            raise ValueError(
                f"--context {self.context} has been read already, so --protect {self.protect[0]} comes too late; leave "
                "it out, and say /protect for what follows"
            )
        if self.prompt_file == "-":
            raise ValueError("--prompt-file - is standard input, which holds what you say; give a file")
        if self.prompt_file is not None and self.context is not None:
            raise ValueError(
                f"--prompt-file {self.prompt_file} and --context {self.context} exclude each other; drop one of them"
            )
