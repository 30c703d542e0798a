"""The options of `locret-infer`: one dataclass per concern, a field is a flag and a key of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import ClassVar, Literal

from locret.base.fields import check_finite, check_sampling
from locret.conversation.protect import ASSISTANT, DOCUMENT, SYSTEM, TEMPLATES, USER, check_rules, rules_of
from locret.loading.options import BackboneSource
from locret.policy.resolve import PolicyFlags

ATTENTION = ("auto", "sdpa", "flash_attention_2", "math")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(BackboneSource):
    """The backbone, and where it runs."""

    usual: ClassVar[tuple[str, ...]] = ("device",)

    trust_remote_code: bool = False
    """Run Python code that comes with the backbone."""
    device: str = "auto"
    """cpu, cuda, cuda:N or mps; auto takes the first CUDA device, else mps, else cpu."""
    attn: str = "auto"
    """auto and sdpa: PyTorch's fused kernels (a flash kernel on CUDA); flash_attention_2: the flash-attn package (half
    precision on CUDA); math: PyTorch's plain kernel, slow, to compare with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attn not in ATTENTION:
            raise ValueError(f"--attn {self.attn} is unknown; choose one of {', '.join(ATTENTION)}")
        if self.attn == "flash_attention_2" and find_spec("flash_attn") is None:
            raise ValueError(
                "--attn flash_attention_2 needs the flash-attn package, which is not installed; install locret[flash], "
                "or use --attn auto, which is a flash kernel of PyTorch on CUDA"
            )

    @property
    def attn_implementation(self) -> str | None:  # type: ignore[override]
        """What the backbone is loaded with; all but the package are kernels of PyTorch."""
        return self.attn if self.attn == "flash_attention_2" else None


@dataclass(frozen=True, kw_only=True)
class PlacedModelOptions(ModelOptions):
    """The backbone, where it runs, and where units are held."""

    usual: ClassVar[tuple[str, ...]] = ()

    store: str | None = None
    """What holds the units, if one of your own is to: package.module:Class, file.py:Class, or an announced name."""
    disk: str | None = None
    """A new file, or a folder, that holds the second tier (--host-budget) instead of host memory; it is scratch space,
    which nobody sees and which is given back at the end."""


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(PolicyFlags):
    """How many units stay. What is not given here is what the heads recommend, else the default."""

    usual: ClassVar[tuple[str, ...]] = ("kv_memory", "budget_share")

    chunk_size: int | Literal["auto"] | None = None  # type: ignore[assignment]
    """Prompt tokens per forward pass (the paper's B); auto: as many as help and fit into the memory that is free."""
    kv_memory: str | None = None
    """Instead of --budget: bytes that the whole cache may take, such as 2GiB, or auto for what is free next to the
    weights; the largest budget that fits is used, with auto at most that of the prompt, which is then counted first.
    What --host-budget keeps is not part of it, nor are the tokens of a question that is asked of what was read."""
    budget_share: float | None = None
    """Instead of --budget: share of the prompt's tokens, such as 0.1; the prompt is tokenised as a whole first."""
    exclusive: ClassVar = (("budget", "kv_memory", "budget_share"),)


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What to read."""

    usual: ClassVar[tuple[str, ...]] = ("prompt_file", "system")

    prompt_file: str | None = None
    """Text file of any size, UTF-8; - is standard input, as is no file at all if something is piped in."""
    system: str | None = field(default=None, metadata={"empty": True})
    """System message."""
    template: str = "chat"
    """chat: the tokenizer's chat template; original: the one the original heads were trained on; none: plain text."""
    protect: list[str] = field(default_factory=list)
    """What stays whatever its scores, each with a --protect of its own: system, document, question (the last turn of
    the user), message:N, tokens:A-B, or chars:A-B of the document; with a least share of the budget, as document=0.5,
    instead of all its units; each=0.05 gives every turn a share."""

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise ValueError(f"--template {self.template} is unknown; choose one of {', '.join(TEMPLATES)}")
        check_protect(self.protect, self.system)


def check_protect(protect: list[str], system: str | None) -> None:
    """Refuse names of nothing.

    Raises:
        ValueError: Naming the flag.
    """
    try:
        roles = (DOCUMENT, USER, ASSISTANT, *([] if system is None else [SYSTEM]))
        check_rules(rules_of(protect), roles, system="give --system TEXT")
    except ValueError as error:
        raise ValueError(str(error).replace("protect=", "--protect ")) from None


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """What to ask."""

    usual: ClassVar[tuple[str, ...]] = ("question", "questions")

    question: list[str] = field(default_factory=list)
    """What to ask; of several, --question TEXT for each, each is answered from its own copy of what was read."""
    questions: str | None = None
    """File with questions, one per line, or one JSON text or object with a question per line (.jsonl)."""

    evidence: bool = False
    """Say of each answer how sure it is, and where in the text it looked: an unsure one may lack what was evicted."""
    reread: str | None = None
    """With --evidence: the file that was read. Where evidence may be gone its passages are read again, and the question
    is answered once more."""

    def __post_init__(self) -> None:
        if self.reread is not None and not self.evidence:
            raise ValueError(f"--reread {self.reread} needs --evidence, which says what to read again; add that")
        if any(not question.strip() for question in self.question):
            raise ValueError("--question is empty; leave it out if the text itself says what to do")
        if self.question and self.questions is not None:
            raise ValueError(f"--question and --questions {self.questions} exclude each other; drop one of them")


@dataclass(frozen=True, kw_only=True)
class PromptOptions(QuestionOptions, TextOptions):
    """What to read and what to ask."""

    usual: ClassVar[tuple[str, ...]] = ("context", "question")

    context: str | None = None
    """Instead of a text: a saved context (see --save-context), or its repository on the Hub, which is asked without
    reading."""
    allow_other_scorer: bool = False
    """Ask a --context with other heads or another scorer than it was read with: what was kept stays."""
    question: list[str] = field(default_factory=list)
    """What to ask about the text; without it the text is the whole message. Of several, --question TEXT for each, each
    is answered from its own copy of one reading."""
    protocol: Literal["apart", "aware"] = "apart"
    """apart: the text is read before the question is known, as in a context; aware: the question is read with the text,
    and scorers that look at the newest words see it."""

    def __post_init__(self) -> None:
        TextOptions.__post_init__(self)
        QuestionOptions.__post_init__(self)
        if self.allow_other_scorer and self.context is None:
            raise ValueError("--allow-other-scorer is about --context, which is not given; add it, or drop the flag")
        if self.context is not None and self.prompt_file is not None:
            raise ValueError(
                f"--context {self.context} has been read already, so --prompt-file {self.prompt_file} would not be; "
                "drop one of them"
            )
        if self.context is not None and not self.question and self.questions is None:
            raise ValueError(f"--context {self.context} waits for a question; give --question or --questions")


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How the answer is written; the backbone's own sampling settings are not used."""

    usual: ClassVar[tuple[str, ...]] = ("max_new_tokens", "temperature")

    max_new_tokens: int = 256
    """Longest answer in tokens."""
    temperature: float = 0.0
    """Sampling temperature; 0 always takes the likeliest token."""
    top_p: float = 1.0
    """When sampling, draw from the likeliest tokens that have this probability together; 1 is all."""
    top_k: int = 0
    """When sampling, draw from this many likeliest tokens; 0 is all."""
    num_beams: int = 1
    """Beams of a beam search; the cache is held once more for each of them."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that the answer has used already; 1 does nothing."""
    stop: list[str] = field(default_factory=list)
    """Texts that end the answer, each with a --stop of its own; the answer includes them."""
    seed: int = 0
    """Seed of sampling."""

    def __post_init__(self) -> None:
        check_finite(self)
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"--seed {self.seed} is not a number of 64 bits; give a smaller one")
        for name in ("max_new_tokens", "num_beams"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} is too small; give 1 or more")
        if self.temperature < 0:
            raise ValueError(f"--temperature {self.temperature} is negative; give 0 (greedy) or more")
        if self.temperature:
            check_sampling("--temperature", self.temperature)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p} is not a probability; give more than 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k} is negative; give 0 (all tokens) or more")
        check_sampling("--repetition-penalty", self.repetition_penalty)
        if any(not text for text in self.stop):
            raise ValueError("--stop has an empty text, which every answer contains; drop it")
        if not self.temperature and (self.top_p < 1 or self.top_k):
            raise ValueError("--top-p and --top-k shape sampling, which --temperature 0 turns off; set a temperature")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What is printed."""

    json: bool = False
    """Print one JSON object."""
    quiet: bool = False
    """No progress, warnings or summary on standard error."""


@dataclass(frozen=True, kw_only=True)
class ReadingOutput(ReportOptions):
    """What comes out of reading."""

    usual: ClassVar[tuple[str, ...]] = ("dry_run",)

    dry_run: bool = False
    """Print the resolved options, the planned steps and cache bytes as JSON, and the steps as a table on standard
    error, without the backbone's weights. The prompt is read only where the plan depends on its length."""
    picture: str | None = None
    """PNG file to write: which positions of the text each layer kept. Needs locret[eval]."""
    kept: bool = False
    """Print for each message of the prompt how many of its units stayed."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions(ReadingOutput):
    """What comes out besides the answer."""

    usual: ClassVar[tuple[str, ...]] = ("json", "save_context", "compare_full")

    json: bool = False
    """Print one JSON object with answer, memory and speed, instead of the answer as it is written."""
    save_context: str | None = None
    """File to write what has been read to, for --context; without a question that is all."""
    compare_full: bool = False
    """Answer once more with every unit kept, where that fits: whether the model or the eviction is to blame."""
