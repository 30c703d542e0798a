"""The object for people: a backbone and what decides which units stay; it reads texts into contexts."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from locret import loading, scorers, shipped
from locret.backbone.adapters import unwrap
from locret.cache.cache import RetentionCache
from locret.cache.cache_file import load_cache
from locret.cache.disk import Disk
from locret.cache.store import Store
from locret.chunked_prefill import prefill
from locret.conversation import answer_options
from locret.conversation.chat import Chat
from locret.conversation.context import Context, as_arguments
from locret.conversation.document import (
    Document,
    PositionWarning,
    ReadingBar,
    Source,
    as_prompt,
    is_text,
    open_document,
)
from locret.conversation.prompt import Prompt, written
from locret.conversation.rules import ASSISTANT, DOCUMENT, SYSTEM, USER, Rule, check_named, check_rules, rules_of
from locret.conversation.saved_turns import saved_protection, saved_sources, saved_turns
from locret.conversation.templates import Message, leading_special_ids
from locret.conversation.text_stream import TokenStream, trimmed
from locret.conversation.transcript import Transcript
from locret.conversation.turns import Layout, Protection
from locret.heads.heads import RetainingHeads
from locret.loading.options import BackboneSource, ScorerOptions
from locret.policy.policy import RetentionPolicy, policy_of
from locret.policy.protection import Span
from locret.policy.resolve import resolve
from locret.scorers import Scorer
from locret.scorers.chosen import check_matches, chosen_heads, load_scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Protect = str | Span | Rule | Iterable[str | Span | Rule] | None
"""What is to be protected, as people say it."""
EMBEDDED_KNOWS = (
    "the embedded backbone knows only texts that locret generates, such as recipes/infer/pass_key.txt; for texts of "
    "your own give a language model of the Hub"
)


@dataclass(frozen=True, kw_only=True)
class _Backbone(BackboneSource):
    device: str = "auto"
    trust_remote_code: bool = False
    attn_implementation: str | None = None  # type: ignore[assignment]


class LongContextModel:
    """A backbone, its tokenizer, and what decides which cache units stay: reads texts of any length, and answers.

    Args:
        model: The backbone.
        tokenizer: The backbone's.
        scorer: Retaining heads, a scorer object, or the name of a training-free scorer.
        policy: How many units stay, also as a mapping of its numbers; if None, what the heads recommend, else the
            defaults.
        budget: Instead of a policy: the units that stay per layer and KV head, on average; all else as the heads
            recommend it, or the defaults.
        template: How turns become text: "chat" (the tokenizer's chat template), "original" (the one the original heads
            were trained on) or "none" (plain text); if None, the chat template where there is one, else plain text.
        store: What holds the units, as in `RetentionCache`; if None, ours.
        disk: A new file, or a folder, for the second tiers of all contexts, as in `RetentionCache`.

    Raises:
        ValueError: If the model has no keys and values to evict, or scorer, policy and model do not match.

    Examples:
        >>> lm = LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy=policy)
        >>> context = lm.read("recipes/infer/pass_key.txt")
        >>> context.ask("What is the pass key?")
        'The pass key is 43600.'
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        scorer: RetainingHeads | Scorer | str,
        policy: RetentionPolicy | Mapping[str, Any] | None = None,
        *,
        budget: int | None = None,
        template: str | None = None,
        store: type[Store] | str | None = None,
        disk: Disk | str | Path | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        policy = _with_budget(policy_of(policy, budget), budget, scorer)
        empty = RetentionCache(model, scorer, policy, store=store, disk=disk)
        self.scorer, self.policy, self.backbone = empty.scorer, empty.policy, empty.backbone
        self.store, self.disk = empty.store, empty.disk
        self.template = template or ("chat" if tokenizer.chat_template else "none")
        self.name = str(getattr(unwrap(model).config, "name_or_path", "") or type(unwrap(model)).__name__)
        self._transcript()  # refuses a template that cannot hold a document
        self._knows_little = shipped.is_embedded_backbone(self.name)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        heads: str | Path | RetainingHeads | None = None,
        scorer: str | Scorer | None = None,
        policy: RetentionPolicy | Mapping[str, Any] | None = None,
        budget: int | None = None,
        adapter: str | None = None,
        revision: str | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        torch_dtype: str | torch.dtype | None = None,
        device_map: str | dict[str, int | str] | None = None,
        max_memory: dict[int | str, int | str] | None = None,
        offload_folder: str | Path | None = None,
        load_in_4bit: bool = False,
        load_in_8bit: bool = False,
        quantization_config: Any = None,
        gguf_file: str | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        allow_other_base: bool = False,
        template: str | None = None,
        store: type[Store] | str | None = None,
        disk: Disk | str | Path | None = None,
    ) -> LongContextModel:
        """Load a backbone with its tokenizer, and heads or a scorer for it.

        Args:
            model: Folder of the backbone, its Hub id, or a GGUF file; `checkpoints/tiny` is embedded, with
                `checkpoints/tiny-heads`; `smollm2` is a real one that a package brings.
            heads: Retaining heads: a folder, a Hub id, loaded ones; "auto" takes the best on the Hub for this backbone.
            scorer: A training-free scorer instead: its name, or an object. Without either a fallback decides.
            policy: How many units stay, also as a mapping of its numbers; if None, what the heads recommend, else the
                defaults.
            budget: Instead of a policy: the units that stay per layer and KV head, on average; all else as the heads
                recommend it, or the defaults.
            adapter: LoRA adapter (PEFT) to put on the backbone.
            revision: Branch, tag or commit of the backbone.
            device: "cpu", "cuda", "cuda:N" or "mps"; "auto" takes the first of CUDA, mps and cpu that there is.
            dtype: Of the weights; "auto" takes the backbone's own on an accelerator, and what is fast on a CPU.
            torch_dtype: The older name of `dtype` in transformers.
            device_map: Where weights are, as in transformers, instead of `device`.
            max_memory: The most that `device_map` may put in each place, as in transformers.
            offload_folder: Folder for weights that `device_map` puts on disk, as in transformers.
            load_in_4bit: Quantise the weights while they are loaded (bitsandbytes: NF4, double quantisation).
            load_in_8bit: Quantise the weights while they are loaded (bitsandbytes: LLM.int8).
            quantization_config: Quantise the weights in another way: one of transformers' configs, its values, or a
                JSON file.
            gguf_file: GGUF file in the folder or repository; or give a local one as `model`.
            attn_implementation: As in transformers.
            trust_remote_code: Run Python code that comes with the backbone.
            allow_other_base: Accept heads of another backbone of the same shape.
            template: How turns become text, as in the class.
            store: What holds the units, as in `RetentionCache`.
            disk: A new file, or a folder, for the second tiers of all contexts, as in `RetentionCache`.

        Raises:
            ValueError: If something is missing, broken or does not match.
            OSError: If the Hub refuses or cannot be reached.
        """
        if heads is not None and scorer is not None:
            raise ValueError(f"heads {heads} and scorer {scorer} exclude each other; drop one of them")
        if torch_dtype is not None:
            if dtype != "auto":
                raise ValueError(f"dtype={dtype} and torch_dtype={torch_dtype} are one setting; give dtype alone")
            dtype = torch_dtype
        policy = policy_of(policy, budget)
        with as_arguments():
            if isinstance(heads, str):
                heads = chosen_heads(heads, str(model))
            source = _Backbone(
                model=str(model),
                revision=revision,
                adapter=adapter,
                dtype=str(dtype).removeprefix("torch."),
                device=str(device),
                device_map=device_map,
                max_memory=max_memory,
                offload_folder=None if offload_folder is None else str(offload_folder),
                load_in_4bit=load_in_4bit,
                load_in_8bit=load_in_8bit,
                quantization_config=quantization_config,
                gguf_file=gguf_file,
                trust_remote_code=trust_remote_code,
                attn_implementation=attn_implementation,
            )
            place, found = loading.device_of_source(source), heads if heads is not None else scorer
            named = ScorerOptions(heads=str(heads) if heads is not None else None, allow_other_base=allow_other_base)
            if found is None:
                found = scorers.FALLBACK
                warnings.warn(
                    f"without trained heads the scorer {found} decides which units stay; give heads for this backbone "
                    "as heads, or another scorer as scorer",
                    stacklevel=2,
                )
            if isinstance(heads, (str, Path)):
                found, _ = load_scorer(named)
            elif isinstance(found, str):
                found, recommended = load_scorer(replace(named, scorer=found))
                policy = _with_changes(policy, recommended)
            config = loading.load_config(source)
            if isinstance(found, RetainingHeads):
                check_matches(named, found, config)
                policy = _with_budget(policy, budget, found)
            tokenizer = loading.load_tokenizer(source)
            backbone = loading.load_model(source, config, place, loading.resolve_dtype(source.dtype, config, place))
        assert isinstance(found, (RetainingHeads, Scorer))
        return cls(backbone, tokenizer, found, policy, template=template, store=store, disk=disk)

    # -- reading ------------------------------------------------------------------------------------------------------

    @overload
    def read(
        self,
        source: list[str] | list[Path] | tuple[str | Path, ...],
        *,
        system: str | None = None,
        name: str | None = None,
        progress: bool = True,
        protect: Protect = None,
    ) -> list[Context]: ...

    @overload
    def read(
        self,
        source: Any,
        *,
        system: str | None = None,
        name: str | None = None,
        progress: bool = True,
        protect: Protect = None,
    ) -> Context: ...

    def read(
        self,
        source: Any,
        *,
        system: str | None = None,
        name: str | None = None,
        progress: bool = True,
        protect: Protect = None,
    ) -> Context | list[Context]:
        """Read a text of any length in bounded memory, before any question about it is known.

        The text becomes the beginning of the user's first turn; its last few words wait for the question that follows,
        because a tokenizer may join them. White space around it is dropped, unless the template is plain text.

        Args:
            source: A text; a path (a str that names a file is one); an iterator of pieces of a text; token ids, or an
                iterator of them. A list of texts and paths is read into as many contexts.
            system: System message. Where the chat template has none, it opens the user's turn.
            name: What to call the context; else the file's name.
            progress: Show a progress bar, in a notebook or where somebody watches standard error.
            protect: What stays whatever its scores, also in the chats that follow: "system", "document", "question"
                (the last turn of the user), "user", "assistant", "message:N", "tokens:A-B", "chars:A-B" of the
                document, or a `Span`; each with a least share of the budget, as "document=0.5", instead of all its
                units; "each=0.05" gives every turn a share. Or a list of them.

        Raises:
            ValueError: For an empty text, a file that is not there or not text, or more protected than the budget
                holds.
        """
        if isinstance(source, (list, tuple)) and source and all(isinstance(one, (str, Path)) for one in source):
            if name is not None:
                raise ValueError(f"name={name!r} names one context, but {len(source)} texts are given; leave it out")
            documents = [open_document(one) for one in source]
            return [
                self.read_into(self.new_cache(), one, system=system, progress=progress, protect=protect)
                for one in documents
            ]
        document = open_document(source, name)
        return self.read_into(self.new_cache(), document, system=system, progress=progress, protect=protect)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Prompt:
        """Return a whole conversation as token ids, and where its messages are, to be read by `locret.prefill`.

        Args:
            messages: As transformers' chat templates take them.
            tools: Definitions of tools, likewise.

        Raises:
            ValueError: If the template refuses them, or rewrites messages so that they are not found.
        """
        return written(self.tokenizer, self.template, messages, tools)

    def new_cache(self) -> RetentionCache:
        """Return an empty cache."""
        return RetentionCache(self.model, self.scorer, self.policy, store=self.store, disk=self.disk)

    def system_end(self, system: str) -> int:
        """Return how many characters the template writes for a system message; 0 where it writes nothing of it."""
        return self._transcript(system).system_end()

    def tokens(
        self, document: Document, *, system: str | None = None, template: str | None = None
    ) -> Iterator[list[int]]:
        """Yield the token ids that `read_into` feeds."""
        stream, transcript = TokenStream(self.tokenizer), self._transcript(system, template)
        return self._ids(document, transcript, stream, ReadingBar(document, False), Layout((), stream))

    def read_into(
        self,
        cache: RetentionCache,
        document: Document,
        *,
        system: str | None = None,
        template: str | None = None,
        progress: bool = True,
        new_tokens: int = 0,
        feed: Callable[[Iterator[list[int]]], Iterable[list[int]]] | None = None,
        on_chunk: Callable[[RetentionCache], None] | None = None,
        protect: Protect = None,
    ) -> Context:
        """Read a document into an empty cache of this model; see `read`.

        Args:
            cache: Filled in place.
            document: What to read.
            system: As in `read`.
            template: How turns become text; None: as for the model's other texts.
            progress: As in `read`.
            new_tokens: As for `prefill`.
            feed: Takes the token ids as they are made, and hands them on.
            on_chunk: Called with the cache after every chunk.
            protect: As in `read`.
        """
        transcript, stream = self._transcript(system, template), TokenStream(self.tokenizer)
        layout = self._layout(rules_of(protect), transcript, stream, document)
        bar = ReadingBar(document, progress, lambda: stream.pending)
        ids = self._ids(document, transcript, stream, bar, layout)
        return self._read(cache, ids, document, transcript, stream, bar, layout, new_tokens, feed, on_chunk)

    def converse(
        self,
        document: Document,
        question: str | None = None,
        *,
        cache: RetentionCache | None = None,
        system: str | None = None,
        progress: bool = True,
        new_tokens: int = 0,
        protect: Protect = None,
    ) -> Chat:
        """Read a document and a question as one prompt, so that what stays can depend on the question.

        Args:
            document: What to read.
            question: What is asked about it; `say` it once more, and the chat answers. None: the document is all.
            cache: Filled in place; a new one if not given.
            system: As in `read`.
            progress: As in `read`.
            new_tokens: Longest answer in tokens, as for `prefill`.
            protect: As in `read`.
        """
        transcript, stream = self._transcript(system), TokenStream(self.tokenizer)
        layout = self._layout(rules_of(protect), transcript, stream, document)
        bar = ReadingBar(document, progress, lambda: stream.pending)
        roles = [*([SYSTEM] if transcript.system_end() else []), DOCUMENT, *([] if question is None else [USER])]
        check_named(layout.rules, roles)
        self.say_what_it_knows(document.name)
        asked = transcript.copy()
        added = asked.ask(question)
        ids = self._ids(document, transcript, stream, bar, layout, (added, question is not None))
        cache = self.new_cache() if cache is None else cache
        context = self._read(cache, ids, document, asked, stream, bar, layout, new_tokens)
        protection = Protection(layout.fixed(cache.seen), tuple(layout.turns(cache.seen)))
        protection.apply(cache, cache.seen)
        chat = context.chat(cache)
        chat.protection, chat.asked = protection, question or ""
        return chat

    def _read(
        self,
        cache: RetentionCache,
        ids: Iterator[list[int]],
        document: Document,
        transcript: Transcript,
        stream: TokenStream,
        bar: ReadingBar,
        layout: Layout,
        new_tokens: int,
        feed: Callable[[Iterator[list[int]]], Iterable[list[int]]] | None = None,
        on_chunk: Callable[[RetentionCache], None] | None = None,
    ) -> Context:
        """Read ids into a cache, with a bar."""
        warn = PositionWarning(self.backbone, cache.policy)

        def after_chunk(cache: RetentionCache) -> None:
            warn(cache)
            bar(cache)
            if on_chunk is not None:
                on_chunk(cache)

        blocks: Iterable[list[int]] = bar.blocks(layout.watched(ids, cache))
        if feed is not None:
            blocks = feed(iter(blocks))
        bar.start()
        try:
            prompt = as_prompt(blocks, cache.policy, cache.policy.prefill_units)
            prefill(self.model, prompt, cache, new_tokens=new_tokens, on_chunk=after_chunk)
            warn(cache)
            bar.end()
        finally:
            bar.close()
        protection = Protection(layout.fixed(cache.seen), tuple(layout.turns(None)))
        return Context(self, cache, stream, transcript, document.name, (document.read(cache.seen),), protection)

    def _layout(
        self, rules: tuple[Rule, ...], transcript: Transcript, stream: TokenStream, document: Document
    ) -> Layout:
        """Return where the turns of a document are that is about to be read.

        Raises:
            ValueError: If a rule is about what there is not.
        """
        end = transcript.system_end()
        dropped = "" if transcript.system is None else " of which the template writes something"
        roles = [*([SYSTEM] if end else []), DOCUMENT, USER, ASSISTANT]
        check_rules(rules, roles, system=f"give a system message as system{dropped}")
        for rule in rules:
            if rule.what == "chars" and document.pieces is None:
                raise ValueError(f"protect={rule} names characters, but token ids are read; name tokens, as tokens:A-B")
        layout = Layout(rules, stream, len(self._special(transcript.template)))
        if end:
            layout.turn(SYSTEM)
        layout.turn(DOCUMENT, end or None)
        return layout

    def _special(self, template: str) -> list[int]:
        return leading_special_ids(self.tokenizer) if template != "chat" else []

    def _ids(
        self,
        document: Document,
        transcript: Transcript,
        stream: TokenStream,
        bar: ReadingBar,
        layout: Layout,
        added: tuple[str, bool] | None = None,
    ) -> Iterator[list[int]]:
        """Yield the tokens of what comes before the document, and of the document but for its last words.

        No words wait where what the turn adds to the document is given, and whether that is a question.
        """
        if special := self._special(transcript.template):
            yield special
        opening = transcript.opening()
        if document.pieces is None:
            assert document.ids is not None
            yield from self._given(opening, document.ids, stream)
            yield from self._end(added, stream, layout)
            return
        dropped = list[int]()
        pieces: Iterator[str] = (piece for piece in document.pieces if piece)
        pieces = bar.pieces(pieces) if transcript.template == "none" else trimmed(bar.pieces(pieces), dropped.append)
        first = next(pieces, None)
        if first is None:
            raise ValueError(f"{document.name} is empty; give a text to read")
        layout.document(len(opening) - sum(dropped))
        if added is not None:
            yield from stream.add(chain([opening, first], pieces))
            yield from self._end(added, stream, layout)
            return
        some = False
        for blocks in (stream.add([opening, first]), stream.add(pieces), stream.hold()):
            for block in blocks:
                some = True
                yield block
        if not some:  # too short to be cut
            yield stream.finish()

    @staticmethod
    def _end(added: tuple[str, bool] | None, stream: TokenStream, layout: Layout) -> Iterator[list[int]]:
        """Yield the tokens of what a turn adds to a document."""
        if added is None:
            return
        end = stream.taken + len(stream.pending)
        layout.document_ends(end)
        if added[1]:
            layout.turn(USER, end)
        if ids := stream.rest(added[0]):
            yield ids

    def _given(self, opening: str, ids: Any, stream: TokenStream) -> Iterator[list[int]]:
        """Yield the opening and ids that a user gave, without a begin of text of their own."""
        if opening:
            yield from stream.add([opening])
            yield stream.finish()
        start, newest = leading_special_ids(self.tokenizer), list[int]()
        for block in ids:
            if not newest and start and block[: len(start)] == start:
                block = block[len(start) :]
            if len(block) and not 0 <= min(block) <= max(block) < self._vocabulary:
                foreign = min(block) if min(block) < 0 else max(block)
                raise ValueError(
                    f"token id {foreign} is not among the {self._vocabulary} of this backbone; use its own tokenizer"
                )
            newest = [*newest, *block][-stream.margin // 8 :]
            if len(block):
                yield block
        stream.context = self.tokenizer.decode(newest, clean_up_tokenization_spaces=False)

    def _transcript(self, system: str | None = None, template: str | None = None) -> Transcript:
        if system is not None and not is_text(system):
            raise ValueError(f"system={system!r} is no text; give the system message as one")
        transcript = Transcript(self.tokenizer, template or self.template, system)
        transcript.opening()
        return transcript

    # -- asking -------------------------------------------------------------------------------------------------------

    def ask(self, contexts: Sequence[Context], question: str, **options: Any) -> list[str]:
        """Ask several contexts the same question and return the answers in their order; see `Context.ask`.

        Raises:
            ValueError: If one of them is not a context of this model.
        """
        for context in contexts:
            if not isinstance(context, Context) or context.lm is not self:
                raise ValueError(f"{context!r} was not read by this model; ask it with its own ask")
        return [context.ask(question, **options) for context in contexts]

    def settings(self, max_new_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `locret.generate` for one answer; see `answer_options.settings`."""
        return answer_options.settings(self.model, self.tokenizer, self.end_ids, max_new_tokens, options)

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end an answer."""
        ends: Any = unwrap(self.model).generation_config.eos_token_id
        return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    def say_what_it_knows(self, name: str) -> None:
        """Say once that the embedded backbone knows no language, when it is asked about a text of another `name`."""
        if self._knows_little and name != shipped.TEXT.name:
            self._knows_little = False
            warnings.warn(EMBEDDED_KNOWS, stacklevel=_users_level())

    # -- on disk ------------------------------------------------------------------------------------------------------

    def load(
        self,
        path: str | Path,
        *,
        revision: str | None = None,
        allow_other_scorer: bool = False,
        disk: Disk | str | Path | None = None,
    ) -> Context:
        """Return a context that `Context.save` has written, or `Context.push_to_hub` has published.

        Args:
            path: The file, or org/name on the Hub.
            revision: Branch, tag or commit on the Hub.
            allow_other_scorer: Accept another scorer than the text was read with: what was kept stays.
            disk: A new file, or a folder, for its second tier; if not given, that of this model.

        Raises:
            ValueError: If the file is none, or was made with another backbone or scorer.
            OSError: If the file cannot be read.
        """
        read, turns, _ = self._load(path, allow_other_scorer, disk, revision)
        if turns:
            raise ValueError(f"{path} holds a conversation; load it with load_chat, or go on with locret-chat")
        return Context(*read)

    def load_chat(
        self, path: str | Path, *, allow_other_scorer: bool = False, disk: Disk | str | Path | None = None
    ) -> Chat:
        """Return a conversation that `Chat.save` has written, or a new one about a context.

        Args:
            path: The file, or a context's org/name on the Hub.
            allow_other_scorer: As in `load`.
            disk: As in `load`.

        Raises:
            ValueError: If the file is none, or was made with another backbone or scorer.
            OSError: If the file cannot be read.
        """
        read, _, unread = self._load(path, allow_other_scorer, disk)
        return Chat(*read[:5], unread=unread, sources=read[5], protection=read[6])

    def _load(
        self,
        path: str | Path,
        allow_other_scorer: bool,
        disk: Disk | str | Path | None,
        revision: str | None = None,
    ) -> tuple[_Parts, tuple[Message, ...], tuple[int, ...]]:
        from locret.conversation.published import find_context

        path = find_context(path, revision=revision)
        stream, transcript, name, unread = saved_turns(path, self.tokenizer, self._vocabulary)
        sources, where = saved_sources(path), self.disk if disk is None else disk
        protection = saved_protection(path)
        cache = load_cache(path, self.model, self.scorer, allow_other_scorer=allow_other_scorer, disk=where)
        return (self, cache, stream, transcript, name, sources, protection), transcript.turns, unread

    @property
    def _vocabulary(self) -> int:
        """Token ids there are."""
        return int(unwrap(self.model).config.get_text_config().vocab_size)

    def __repr__(self) -> str:
        return f"LongContextModel({self.name}, scorer {self.scorer.name}, budget {self.policy.budget:,})"


_Parts = tuple[LongContextModel, RetentionCache, TokenStream, Transcript, str, tuple[Source, ...], Protection]
"""What contexts and chats are made of."""


def _users_level() -> int:
    """Return the `stacklevel` of a warning of the caller that shows the line which called locret."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("locret", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def _with_budget(policy: RetentionPolicy | None, budget: int | None, scorer: Any) -> RetentionPolicy | None:
    """Return what heads recommend, at another budget, where a budget alone was given."""
    if budget is None or not isinstance(scorer, RetainingHeads) or not scorer.config.policy:
        return policy
    return resolve({"budget": budget}, RetentionPolicy.from_dict(scorer.config.policy, "the heads' policy").to_dict())


def _with_changes(policy: RetentionPolicy | None, recommended: dict[str, Any]) -> RetentionPolicy:
    """Return the policy of a scorer that was named with changes of its own, such as snapkv+pyramid."""
    if policy is None:
        return resolve({}, recommended)
    return policy.changed(**{name: value for name, value in recommended.items() if name != "positions"})
