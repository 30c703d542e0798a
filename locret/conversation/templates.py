"""How a conversation becomes text and tokens: one definition for training rows, prompts and chats.

Three templates:
    chat      the tokenizer's own chat template, which writes its special tokens itself
    original  the one-shot format the original heads were trained on, whatever the backbone (fastchat's `one_shot`)
    none      the texts as they are, one after the other
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = ("chat", "original", "none")
ORIGINAL_SYSTEM = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions."
)
ORIGINAL_ROLES = {"user": "Human", "assistant": "Assistant"}
_NEXT = "\n### "


class Message(NamedTuple):
    """One turn of a chat; `role` is user, assistant or system."""

    role: str
    content: str


def check_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Refuse a template that does not exist or that the tokenizer does not have.

    Raises:
        ValueError: For an unknown name, or `chat` with a tokenizer that has no chat template.
    """
    if template not in TEMPLATES:
        raise ValueError(f"--template {template}: no template of that name; choose one of {', '.join(TEMPLATES)}")
    if template == "chat" and not tokenizer.chat_template:
        raise ValueError(
            "--template chat: the tokenizer has no chat template; use --template original or --template none"
        )


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template: str, answer: str | None = None
) -> str:
    """Render messages up to where the assistant answers, or with that answer and what ends its turn.

    Args:
        tokenizer: Gives the chat template.
        messages: The conversation before the answer.
        template: One of `TEMPLATES`.
        answer: The last assistant turn; None renders the prompt alone.

    Raises:
        ValueError: If the tokenizer's chat template refuses the messages.
    """
    if template == "chat":
        return _render_chat(tokenizer, messages, answer)
    begun = beginning(messages, template)
    if template == "original":
        opened = f"{begun}{_NEXT}Assistant:"
        return opened if answer is None else f"{opened} {answer}{_NEXT}"
    return begun + (answer or "")


def beginning(messages: Sequence[Message], template: str) -> str:
    """Return what a template that is not the tokenizer's own writes of the first messages of a conversation.

    Args:
        messages: The first messages.
        template: "original" or "none".
    """
    if template == "none":
        return "\n".join(message.content for message in messages)
    # `one_shot` of fastchat 0.2.36 without its example, as the original label script falls back to.
    system = "\n".join(message.content for message in messages if message.role == "system") or ORIGINAL_SYSTEM
    return _NEXT.join([system, *(f"{ORIGINAL_ROLES[m.role]}: {m.content}" for m in messages if m.role != "system")])


def _render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], answer: str | None) -> str:
    chat = [message._asdict() for message in messages]
    if answer is not None:
        chat.append({"role": "assistant", "content": answer})
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answer is None)
    except Exception as error:  # whatever a stranger's template does
        roles = ", ".join(message.role for message in messages)
        raise ValueError(
            f"--template chat: the tokenizer's chat template refuses turns of {roles} ({error}); "
            "use --template original or --template none"
        ) from None
    return str(text)


def leading_special_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that the tokenizer puts before a text by default (bos), found by asking it."""
    plain = encode(tokenizer, "a")
    special = list(tokenizer.encode("a", add_special_tokens=True))
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return special[:start]
    return []


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text without added special tokens; no warning about the model's maximum length."""
    arguments: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    return list(tokenizer(text, **arguments)["input_ids"])


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a CRC-32 of which text each token stands for: ids mean the same to tokenizers that share it."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    return f"{zlib.crc32(json.dumps(vocabulary).encode()):08x}"


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of generated ids, as the model wrote it: no clean-up that would differ from word to word."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
