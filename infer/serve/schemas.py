"""The bodies of OpenAI's routes: what is taken, exactly, and what comes back.

A field of OpenAI's that has no effect here is taken with the value that asks for nothing, as its clients send it, and
with no other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from locret.conversation.protect import KeptTurn
from locret.conversation.text import is_text

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20
MOST_PAIRS = 16
MOST_PROTECTED = 64
MOST_PARTS = 1 << 14
"""Messages of a request, and parts of one."""


def _checked_text(value: str) -> str:
    if not is_text(value):
        raise ValueError("half characters (lone surrogates) are no text")
    return value


def _few_pairs(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MOST_PAIRS:
        raise ValueError(f"it has more than {MOST_PAIRS} entries")
    return value


_T = TypeVar("_T")
Text = Annotated[str, AfterValidator(_checked_text)]
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_checked_text)]
Stop = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_checked_text)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES)]
TopLogprobs = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)]
Pairs = Annotated[dict[str, _T], Field(max_length=MOST_PAIRS), BeforeValidator(_few_pairs)]
# A request is refused for one reason; to note a million of them, each with its value, takes gigabytes.
Few = Annotated[list[_T], Field(fail_fast=True, max_length=MOST_PARTS)]
Several = Annotated[list[_T], Field(fail_fast=True, min_length=1, max_length=MOST_CHOICES)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True, min_length=1)]
Zero = Annotated[float, Field(ge=0, le=0)]
_UNUSED: Any = Field(None, description="Has no effect here: taken with the value that asks for nothing.")


class Body(BaseModel):
    """A body that is refused for one field that it does not have, however many it has."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, value: Any) -> Any:
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        unknown = next(name for name in value if name not in cls.model_fields)
        return {name: one for name, one in value.items() if name in cls.model_fields or name == unknown}


class _Body(Body):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None
    """End with a chunk that counts the tokens."""
    include_obfuscation: Literal[False] | None = _UNUSED


class _Asked(_Body):
    """What chats and completions share."""

    model: Name | None = None
    """Name of the model, as `/v1/models` lists it."""
    context: Name | None = None
    """A context that has been read: what is asked follows it."""
    budget: Count | None = None
    """Units of the context to ask, if not all."""
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
    user: Text | None = None
    presence_penalty: Zero | None = _UNUSED
    frequency_penalty: Zero | None = _UNUSED
    logit_bias: Annotated[dict[str, float], Field(max_length=0), BeforeValidator(_few_pairs)] | None = _UNUSED

    @property
    def stops(self) -> list[str]:
        """The texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def choices(self) -> int:
        """How many answers there are to be."""
        return self.n or 1


class TextPart(_Body):
    type: Literal["text"]
    text: Text


class FunctionCall(_Body):
    name: Text
    arguments: Text


class ToolCall(_Body):
    """A call that an earlier answer made."""

    id: Text
    type: Literal["function"]
    function: FunctionCall


class Message(_Body):
    """A turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Few[TextPart] | None = None
    name: Text | None = None
    tool_calls: Few[ToolCall] | None = None
    tool_call_id: Text | None = None
    refusal: None = _UNUSED
    annotations: Annotated[list[Any], Field(max_length=0)] | None = _UNUSED
    audio: None = _UNUSED
    function_call: None = _UNUSED

    @property
    def text(self) -> str:
        """The content as one text."""
        parts = self.content if isinstance(self.content, list) else []
        return self.content if isinstance(self.content, str) else "".join(part.text for part in parts)


class Function(_Body):
    """A function that the model may call."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = _UNUSED


class Tool(_Body):
    type: Literal["function"]
    function: Function


class ResponseFormat(_Body):
    type: Literal["text"]


class ChatRequest(_Asked):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[Few[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    """Newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Few[Tool] | None = None
    """Handed to the backbone's chat template; calls come back in the answer's text."""
    tool_choice: Literal["auto", "none"] | None = None
    protect: Annotated[list[Name], Field(max_length=MOST_PROTECTED)] | None = None
    """What of the conversation stays whatever its scores when it is read in bounded memory: system, tools, question,
    user, assistant, tool, message:N or tokens:A-B, each with a least share of the budget, as message:3=0.1, instead of
    all its units; each=0.05 gives every message a share."""
    kept: bool | None = None
    """Say in the response what has stayed of each message."""
    metadata: Pairs[Text] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    parallel_tool_calls: Literal[True] | None = _UNUSED
    response_format: ResponseFormat | None = _UNUSED
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = _UNUSED
    store: Literal[False] | None = _UNUSED
    service_tier: Literal["auto", "default"] | None = _UNUSED
    reasoning_effort: Literal["none"] | None = _UNUSED
    verbosity: Literal["medium"] | None = _UNUSED
    audio: None = _UNUSED
    functions: None = _UNUSED
    function_call: None = _UNUSED
    prediction: None = _UNUSED
    web_search_options: None = _UNUSED

    @property
    def longest(self) -> int | None:
        """Longest answer in tokens, where it is said."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        """Likeliest tokens to name with each token; None if log-probabilities are not asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Asked):
    """Body of `/v1/completions`."""

    prompt: Text | Several[Text] | TokenIds | Several[TokenIds]
    """A text or its token ids, or several; with a context, what follows its text."""
    logprobs: TopLogprobs | None = None
    best_of: Choices | None = None
    echo: Literal[False] | None = _UNUSED
    suffix: Annotated[str, Field(max_length=0)] | None = _UNUSED

    @property
    def longest(self) -> int | None:
        """Longest answer in tokens, where it is said."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Likeliest tokens to name with each token; None if log-probabilities are not asked for."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else list(self.prompt)  # type: ignore[list-item,arg-type]


_MODELS: tuple[type[Body], ...] = (StreamOptions, Message, Function, ChatRequest, CompletionRequest)
NO_EFFECT = frozenset(
    name for model in _MODELS for name, one in model.model_fields.items() if one.description == _UNUSED.description
)
"""Fields of OpenAI's that are taken only with the value that asks for nothing."""


# -- what comes back ---------------------------------------------------------------------------------------------------


class _Sent(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class Error(_Sent):
    """Why a request is refused."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Sent):
    error: Error


class PromptDetails(_Sent):
    """What the tokens of a prompt came from."""

    cached_tokens: int
    """Tokens that had been read before."""
    read_tokens: int
    """Tokens that this request has read into a context of bounded memory."""
    units: int
    """Units per KV head that stand for the tokens of the context."""


class Usage(_Sent):
    prompt_tokens: int
    """Tokens of the whole prompt, those of the context included."""
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(_Sent):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Sent):
    content: list[TokenLogprob]
    refusal: None = None


class ChatAnswer(_Sent):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(_Sent):
    """One of n answers."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionLogprobs(_Sent):
    """Log-probabilities of an answer, token by token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Sent):
    """One of n answers."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class _Response(_Sent):
    id: str
    created: int
    model: str
    usage: Usage


class ChatCompletion(_Response):
    """Response of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    kept: list[KeptTurn] | None = None
    """What has stayed of each message, where the request asks for it."""


class Completion(_Response):
    """Response of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Model(_Sent):
    """What requests may name as their model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(_Sent):
    object: Literal["list"]
    data: list[Model]
