"""The options of the commands that read and answer: one dataclass per concern, a field is a flag and a recipe's key."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from os.path import exists, expanduser
from typing import Any, ClassVar, Literal

from locret import shipped
from locret.base.fields import OptionClass, Range, Refusal, check_ranges, check_sampling
from locret.base.plugins import install
from locret.conversation.protect import ASSISTANT, DOCUMENT, SYSTEM, USER, check_rules, rules_of
from locret.infer.fetch import is_address
from locret.loading.options import BackboneSource, ShardedSource
from locret.policy.planned_bytes import parse_bytes, share_of
from locret.policy.resolve import PolicyFlags

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ModelOptions(BackboneSource, usual=("device",)):
    """The backbone, and where it runs."""

    trust_remote_code: bool = False
    """Run Python code that comes with the backbone."""
    device: str = "auto"
    """cpu, cuda, cuda:N or mps; auto takes the first CUDA device, else mps, else cpu."""
    attn: Literal["auto", "sdpa", "flash_attention_2"] = "auto"
    """auto and sdpa: PyTorch's fused kernels (a flash kernel on CUDA); flash_attention_2: the package flash-attn, half
    precision on CUDA."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attn == "flash_attention_2" and find_spec("flash_attn") is None:
            raise Refusal("attn", self.attn, f"needs the package flash-attn; {install('flash')}, or leave it out")

    @property
    def attn_implementation(self) -> str | None:  # type: ignore[override]
        """What the backbone is loaded with; all but the package are kernels of PyTorch."""
        return self.attn if self.attn == "flash_attention_2" else None


@dataclass(frozen=True, kw_only=True)
class ShardedModelOptions(ShardedSource, ModelOptions, usual=("device",)):
    """The backbone, where it runs, and how processes share it."""


@dataclass(frozen=True, kw_only=True)
class SavedModelOptions(ModelOptions):
    """The backbone of saved contexts, and where it runs."""

    model: str = None  # type: ignore[assignment]
    """The backbone: its folder, Hub id, a GGUF file, or smollm2; none: the one that the contexts name."""

    def __post_init__(self) -> None:
        if self.model is not None:
            super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(PolicyFlags, usual=("keep", "kv_memory", "budget")):
    """How many units stay. What is not given here is what the heads recommend, else the default."""

    exclusive: ClassVar = (("budget", "kv_memory", "keep"),)

    keep: float | str | None = None
    """How much of the text stays, such as 25%; it is tokenised as a whole first."""
    kv_memory: str | None = None
    """Or the bytes that the whole cache may take, such as 2GiB, or auto for what is free next to the
    weights; the largest budget that fits is used, with auto at most that of the prompt, which is then counted first.
    What --host-budget keeps is not part of it, nor are the tokens of a question that is asked of what was read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None:
            share_of(self.keep, "--keep: ")
        if self.kv_memory not in (None, AUTO):
            parse_bytes(str(self.kv_memory), "--kv-memory: ")


@dataclass(frozen=True, kw_only=True)
class TextOptions(OptionClass, usual=("prompt_file", "system")):
    """What to read."""

    prompt_file: list[str] = field(default_factory=list)
    """Text file of any size, UTF-8; a PDF, EPUB, DOCX or HTML file (extra documents); a folder, whose files are read
    below their names, without what git ignores; or a page, https://... Several, each with a --prompt-file of its own,
    are read below their names. - is standard input, as is no file at all if something is piped in."""
    system: str | None = field(default=None, metadata={"empty": True})
    """System message."""
    template: Literal["chat", "original", "none"] = "chat"
    """chat: the tokenizer's chat template; original: the one the original heads were trained on; none: plain text."""
    protect: list[str] = field(default_factory=list)
    """What stays whatever its scores, each with a --protect of its own: system, document, question (the last turn of
    the user), user, assistant, message:N or tokens:A-B; with a least share of the budget, as document=0.5, instead of
    all its units; each=0.05 gives every turn a share."""

    @property
    def again(self) -> bool:
        """Whether the text can be read a second time, as standard input cannot."""
        return bool(self.prompt_file) and "-" not in self.prompt_file

    def check_files(self) -> None:
        """Refuse what is not there, before what opens files is imported, torch among it."""
        for name in self.prompt_file:
            if name not in ("-", "") and not is_address(name) and not exists(expanduser(shipped.find(name))):
                raise ValueError(f"--prompt-file {name}: no such file; check the path, or use - for standard input")

    def __post_init__(self) -> None:
        if self.prompt_file.count("-") > 1:
            raise Refusal("prompt_file", "-", "is standard input, which can be read once; give it once")
        roles = (DOCUMENT, USER, ASSISTANT, *([] if self.system is None else [SYSTEM]))
        check_rules(rules_of(self.protect), roles, system="give --system TEXT")


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(OptionClass, usual=("question",)):
    """What to ask."""

    question: list[str] = field(default_factory=list)
    """What to ask; of several, --question TEXT for each, each is answered from its own copy of what was read. Without
    one a text that is read is the whole message."""
    evidence: bool = False
    """Say of each answer how sure it is, and where in the text it looked: an unsure one may lack what was evicted."""
    engine: Literal["transformers", "llamacpp"] = "transformers"
    """What writes answers: transformers, which reads the text too; or llama.cpp (extra llamacpp), with the same GGUF
    file, whose packed weights write two to three times as fast on a CPU."""

    def __post_init__(self) -> None:
        if any(not question.strip() for question in self.question):
            raise ValueError("--question is empty; leave it out if the text itself says what to do")
        if self.engine != "transformers" and (self.evidence or not self.question):
            raise Refusal("engine", self.engine, "answers a --question, without --evidence; change one of them")


@dataclass(frozen=True, kw_only=True)
class PromptOptions(QuestionOptions, TextOptions, usual=()):
    """What to read and what to ask."""

    protocol: Literal["apart", "aware"] = "apart"
    """apart: the text is read before the question is known, as in a context; aware: the question is read with the text,
    and scorers that look at the newest words see it."""

    def __post_init__(self) -> None:
        TextOptions.__post_init__(self)
        QuestionOptions.__post_init__(self)
        if self.protocol == "aware" and (len(self.question) != 1 or self.evidence or self.engine != "transformers"):
            rule = "needs one --question, which is read with the text, and no --evidence or --engine; leave it out"
            raise Refusal("protocol", "aware", rule)


@dataclass(frozen=True, kw_only=True)
class ChatOptions(TextOptions, usual=("prompt_file", "context")):
    """What the conversation is about."""

    prompt_file: list[str] = field(default_factory=list)
    """What is read first, as for locret-infer; /read FILE reads another later."""
    context: str | None = None
    """Instead of a text: a conversation or a context that has been saved, or a context on the Hub, to go on with."""
    quiet: bool = False
    """No progress, warnings or hints on standard error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "-" in self.prompt_file:
            raise Refusal("prompt_file", "-", "is standard input, which holds what you say; give a file")
        for name in ("prompt_file", "protect"):
            if self.context is not None and (given := getattr(self, name)):
                late = f"--{name.replace('_', '-')} {' '.join(given)}"
                rule = f"has been read already, so {late} comes too late; drop one of them"
                raise Refusal("context", self.context, rule)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(OptionClass, usual=("max_new_tokens", "temperature")):
    """How the answer is written; the backbone's own sampling settings are not used."""

    max_new_tokens: int = 256
    """Longest answer in tokens."""
    temperature: float = 0.0
    """Sampling temperature; 0 always takes the likeliest token."""
    top_p: float = 1.0
    """When sampling, draw from the likeliest tokens that have this probability together; 1 is all."""
    top_k: int = 0
    """When sampling, draw from this many likeliest tokens; 0 is all."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that the text or the answer has used already; 1 does nothing."""
    stop: list[str] = field(default_factory=list)
    """Texts that end the answer, each with a --stop of its own; the answer includes them."""
    seed: int = 0
    """Seed of sampling."""

    def __post_init__(self) -> None:
        check_ranges(self, {"max_new_tokens": Range(1), "temperature": Range(0), "top_k": Range(0)})
        if not 0 < self.top_p <= 1:
            raise Refusal("top_p", self.top_p, "is not a probability; give more than 0 and at most 1")
        if self.temperature:
            check_sampling("--temperature", self.temperature)
        check_sampling("--repetition-penalty", self.repetition_penalty)
        if any(not text for text in self.stop):
            raise ValueError("--stop has an empty text, which every answer contains; drop it")
        if not self.temperature and (self.top_p < 1 or self.top_k):
            raise ValueError("--top-p and --top-k shape sampling, which --temperature 0 turns off; set a temperature")

    def given(self) -> dict[str, Any]:
        """Return the options of `Context.ask`; neutral ones too, as a backbone may recommend others."""
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": self.temperature > 0,
            **(drawn if self.temperature else {}),
            "num_beams": 1,
            "repetition_penalty": self.repetition_penalty,
            "stop_strings": self.stop or None,
        }


@dataclass(frozen=True, kw_only=True)
class ReportOptions(OptionClass):
    """What is printed."""

    json: bool = False
    """Print one JSON object."""
    quiet: bool = False
    """No progress, warnings or summary on standard error."""


@dataclass(frozen=True, kw_only=True)
class ReadingOutput(ReportOptions, usual=("dry_run",)):
    """What comes out of reading."""

    dry_run: bool = False
    """Print the resolved options and planned cache bytes as JSON, and on standard error what stays of the text, without
    the backbone's weights. Standard input is read only where the plan depends on its length."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions(ReadingOutput, usual=("compare_full",)):
    """What comes out."""

    compare_full: bool = False
    """Answer once more with every unit kept, where that fits: whether the model or the eviction is to blame."""
