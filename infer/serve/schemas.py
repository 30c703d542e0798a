"""The bodies of OpenAI's routes: what is taken, exactly.

A field of OpenAI's that has no effect here is taken with the value that asks for nothing, as its clients send it, and
with no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from locret.base.fields import shown
from locret.base.nearest import nearest
from locret.conversation.document import is_text

MOST_CHOICES, MOST_STOPS, MOST_TOP_LOGPROBS = 128, 16, 20
MOST_PARTS = 1 << 14
"""Messages of a request, and parts of one."""


_T = TypeVar("_T")
Name = Annotated[str, Field(min_length=1, max_length=200)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES)]
TopLogprobs = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)]
# A request is refused for one reason; to note a million of them, each with its value, takes gigabytes.
Few = Annotated[list[_T], Field(fail_fast=True, max_length=MOST_PARTS)]
Several = Annotated[list[_T], Field(fail_fast=True, min_length=1, max_length=MOST_CHOICES)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True, min_length=1)]


_FILES = ("file", "file_id", "file_data", "file_url")
_INSTEAD = {
    **dict.fromkeys(_FILES, "upload it (POST /v1/files), and give its file_id"),
    **dict.fromkeys(("response_format", "text"), "leave it out, ask for JSON in a message, and check the answer"),
    **dict.fromkeys(("previous_response_id", "conversation"), "nothing is stored; send all turns so far as input"),
    "tools": "ask /v1/chat/completions, which hands them to the chat template",
}
"""What to do without a field."""


class _Body(BaseModel):
    """A body that is refused for one field that it does not have, however many it has."""

    model_config = ConfigDict(
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_extra={"additionalProperties": False},
    )
    idle: ClassVar[Mapping[str, Sequence[Any] | None]] = {}
    """Fields that have no effect: the values that ask for nothing, beside null; None: whatever it says."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        for name, given in value.items() if isinstance(value, dict) else ():
            if name in cls.idle:
                allowed = cls.idle[name]
                if given is not None and allowed is not None and given not in allowed:
                    raise ValueError(f"{name} {shown(given)} has no effect here; {_INSTEAD.get(name, 'leave it out')}")
            elif name not in cls.model_fields:
                near = nearest(str(name), list(cls.model_fields))
                hint = f"did you mean {' or '.join(near)}?" if near else "leave it out"
                raise ValueError(f"{shown(name)[1:-1]} is not a field here; {hint}")
        return value


class StreamOptions(_Body):
    """What a stream carries besides the answer."""

    idle = {"include_obfuscation": (False,)}
    include_usage: bool | None = None
    """End with a chunk that counts the tokens."""


class _Asked(_Body):
    """What chats and completions share."""

    idle = {"user": None, "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},)}
    limits: ClassVar[Sequence[str]] = ("max_tokens",)
    """Fields that say how long an answer may be."""
    model: Name | None = None
    """Name of the model, as `/v1/models` lists it."""
    context: Name | None = None
    """A context that has been read: what is asked follows it."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    """Longest answer in tokens."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0, and what is below 0.001, takes the likeliest token; so does a request that says nothing, unless its top_p,
    top_k or n ask for drawing."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Draw from this many likeliest tokens; 0 is all."""
    n: Choices | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    """Texts that end the answer and are not part of it."""

    @model_validator(mode="before")
    @classmethod
    def _whole_characters(cls, value: Any) -> Any:
        parts = [value]
        for part in parts:  # which grows
            if isinstance(part, dict):
                parts += [*part, *part.values()]
            elif isinstance(part, list):
                parts += part
            elif isinstance(part, str) and not is_text(part):
                raise ValueError("half characters (lone surrogates) are no text; send whole ones")
        return value

    @property
    def stops(self) -> list[str]:
        """The texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def choices(self) -> int:
        """How many answers there are to be."""
        return self.n or 1

    @property
    def limit(self) -> str:
        """The field that says how long an answer may be, or could."""
        return next((name for name in self.limits if getattr(self, name) is not None), self.limits[0])


class TextPart(_Body):
    idle = {"annotations": ([],), "logprobs": ([],), **dict.fromkeys(_FILES, ())}
    type: Literal["text", "input_text", "output_text"]
    text: str


class FileName(_Body):
    idle = {**dict.fromkeys(("file_data", "file_url"), ()), "filename": None}
    file_id: Name
    """A file that has been uploaded (`/v1/files`): what is asked is about it."""


class FilePart(_Body):
    type: Literal["file"]
    file: FileName


class InputFilePart(FileName):
    type: Literal["input_file"]


class FunctionCall(_Body):
    name: str
    arguments: str


class ToolCall(_Body):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(_Body):
    """A turn of the conversation."""

    idle = {"refusal": (), "annotations": ([],), "audio": (), "function_call": (), "type": ("message",)}
    idle |= {"id": None, "status": None}  # of a message that an earlier response has
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Few[Annotated[TextPart | FilePart | InputFilePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    tool_calls: Few[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        parts = self.content if isinstance(self.content, list) else []
        texts = (part.text for part in parts if isinstance(part, TextPart))
        return self.content if isinstance(self.content, str) else "".join(texts)

    @property
    def files(self) -> list[str]:
        """The files that the content names."""
        parts = self.content if isinstance(self.content, list) else []
        names = (part.file if isinstance(part, FilePart) else part for part in parts)
        return [name.file_id for name in names if isinstance(name, FileName)]


class Function(_Body):
    """A function that the model may call."""

    idle = {"strict": (False,)}
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Body):
    type: Literal["function"]
    function: Function


_TALKS: Mapping[str, Sequence[Any] | None] = {
    **_Asked.idle,
    **dict.fromkeys(("metadata", "safety_identifier", "prompt_cache_key")),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
"""Idle fields of both kinds of conversation."""


class ChatRequest(_Asked):
    """Body of `/v1/chat/completions`."""

    idle = {
        **_TALKS,
        **dict.fromkeys(("audio", "functions", "function_call", "prediction", "web_search_options"), ()),
        "response_format": ({"type": "text"},),
        "modalities": ([], ["text"]),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
    }
    limits = ("max_tokens", "max_completion_tokens")
    messages: Annotated[Few[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    """Newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Few[Tool] | None = None
    """Handed to the backbone's chat template; calls between <tool_call> tags come back as tool_calls."""
    tool_choice: Literal["auto", "none"] | None = None

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs has no effect without logprobs; set logprobs to true")
        if None not in (both := {self.max_tokens, self.max_completion_tokens}) and len(both) > 1:
            raise ValueError("max_tokens and max_completion_tokens exclude each other; drop one of them")
        return self

    @property
    def callable(self) -> Sequence[Tool]:
        """The tools that may be called."""
        return () if self.tool_choice == "none" else self.tools or ()

    @property
    def top(self) -> int | None:
        """Likeliest tokens to name with each token; None if log-probabilities are not asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None


class ResponsesRequest(_Asked):
    """Body of `/v1/responses`."""

    idle = {
        **_TALKS,
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "reasoning", "max_tool_calls"), ()),
        **dict.fromkeys(("n", "max_tokens", "stream_options"), ()),
        **dict.fromkeys(("tools", "include"), ([],)),
        "background": (False,),
        "tool_choice": ("auto", "none"),
        "text": ({"format": {"type": "text"}},),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    limits = ("max_output_tokens",)
    callable: ClassVar[Sequence[Tool]] = ()
    top: ClassVar[None] = None
    input: str | Annotated[Few[Message], Field(min_length=1)]
    """A question, or a conversation that ends with one."""
    instructions: str | None = None
    """A system message before it."""
    max_output_tokens: Count | None = None
    """Longest answer in tokens."""

    @property
    def messages(self) -> list[Message]:
        """The conversation, as chats have it."""
        opening = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        said = [Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return [*opening, *said]


class CompletionRequest(_Asked):
    """Body of `/v1/completions`."""

    idle = {**_Asked.idle, "echo": (False,), "suffix": ("",), "best_of": (1,)}
    prompt: str | Several[str] | TokenIds | Several[TokenIds]
    """A text or its token ids, or several; with a context, what follows its text."""
    logprobs: TopLogprobs | None = None

    @property
    def top(self) -> int | None:
        """Likeliest tokens to name with each token; None if log-probabilities are not asked for."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else list(self.prompt)  # type: ignore[list-item,arg-type]


Conversation: TypeAlias = ChatRequest | ResponsesRequest
Body: TypeAlias = Conversation | CompletionRequest
