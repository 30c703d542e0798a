"""The object for people: a backbone and what decides which units stay; it reads texts into contexts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from logging import getLogger
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from locret import loading
from locret.backbone.adapters import describe, unwrap
from locret.base.fields import Refusal, as_arguments
from locret.base.warned import warn_user
from locret.cache.cache import RetentionCache
from locret.cache.cache_file import load_cache
from locret.cache.store import Store
from locret.chunked_prefill import prefill
from locret.conversation.chat import Chat, answer_settings
from locret.conversation.context import Context
from locret.conversation.document import Document, ReadingBar, TokenStream, is_text, leading_special_ids, open_document
from locret.conversation.head_shares import sharing
from locret.conversation.protect import USER, Protection, Rule, check_named, rules_of
from locret.conversation.turns import Talk, Transcript, Written, saved_talk, written
from locret.heads.heads import RetainingHeads
from locret.loading.gguf import without_bars
from locret.loading.options import FULL, PythonSource, ScorerOptions
from locret.policy.policy import RetentionPolicy, policy_of, usual_budget
from locret.policy.protection import Span
from locret.policy.resolve import resolve
from locret.policy.sizes import EVERY_UNIT
from locret.scorers import Scorer, chosen
from locret.token_ids import check_ids

Protect = str | Span | Rule | Iterable[str | Span | Rule] | None
"""What is to be protected, as people say it."""


class LongContextModel:
    """A backbone, its tokenizer, and what decides which cache units stay: reads texts of any length, and answers.

    Args:
        model: The backbone.
        tokenizer: The backbone's.
        scorer: Retaining heads, a scorer object, or the name of a training-free scorer; "full" keeps every unit.
        policy: How many units stay, also as a mapping of its numbers; if None, what the heads recommend, else the
            defaults.
        budget: Instead of a policy: the units that stay per layer and KV head, on average; all else as the heads
            recommend it, or the defaults.
        template: How turns become text: "chat" (the tokenizer's chat template), "original" (the one the original heads
            were trained on) or "none" (plain text); if None, the chat template where there is one, else plain text.
        store: What holds the units, as in `RetentionCache`; if None, ours.
        parse_special: Let what spells a special token become one in documents, questions and messages, too. A risk:
            then a text can end the user's turn and speak for the system.

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
        parse_special: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.parse_special = model, tokenizer, parse_special
        policy = policy_of(policy, chosen.checked_budget(scorer, budget))
        if scorer == FULL:
            scorer, numbers = chosen.keeping_all()
            policy = replace(policy or RetentionPolicy(), **numbers)
        policy = _recommended(policy, budget, scorer)
        self.template = template or ("chat" if tokenizer.chat_template else "none")
        if policy is not None:
            policy = sharing(policy, scorer, model, tokenizer, self.template)
        empty = RetentionCache(model, scorer, policy, store=store)
        self.scorer, self.policy, self.backbone = empty.scorer, empty.policy, empty.backbone
        self.store = empty.store
        self.name = str(getattr(unwrap(model).config, "name_or_path", "") or type(unwrap(model)).__name__)
        self._transcript()  # refuses a template that cannot hold a document

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        heads: str | Path | RetainingHeads | None = None,
        scorer: str | Scorer | None = None,
        policy: RetentionPolicy | Mapping[str, Any] | None = None,
        budget: int | None = None,
        allow_other_base: bool = False,
        template: str | None = None,
        store: type[Store] | str | None = None,
        **backbone: Any,
    ) -> LongContextModel:
        """Load a backbone with its tokenizer, and heads or a scorer for it.

        Args:
            model: Folder of the backbone, its Hub id, or a GGUF file; `checkpoints/tiny` is embedded, with
                `checkpoints/tiny-heads`; `smollm2` is a real one that a package brings.
            heads: Retaining heads: a folder, a Hub id, loaded ones; "auto" takes those shipped for this backbone.
            scorer: A training-free scorer instead: its name, or an object. Without either, and without a store of your
                own, shipped heads decide, or a fallback for a backbone that has none.
            policy: How many units stay, as in the class; where neither it, nor a scorer, nor the heads say more than a
                budget, KV heads have measured sizes.
            budget: Instead of a policy, as in the class.
            allow_other_base: Accept heads of another backbone of the same shape.
            template: How turns become text, as in the class.
            store: What holds the units, as in `RetentionCache`.
            **backbone: How the backbone is loaded, as in transformers: device ("cpu", "cuda", "mps", else the best
                there is), dtype (or torch_dtype), revision, adapter (LoRA of PEFT), device_map, max_memory,
                load_in_4bit, load_in_8bit, quantization_config, gguf_file, attn_implementation,
                trust_remote_code.

        Raises:
            ValueError: If something is missing, broken or does not match.
            OSError: If the Hub refuses or cannot be reached.
        """
        if heads is not None and scorer is not None:
            raise ValueError(f"heads {heads} and scorer {scorer} exclude each other; drop one of them")
        usual = scorer is None and policy is None and store is None
        policy = policy_of(policy, chosen.checked_budget(scorer, budget))
        with as_arguments():
            source = PythonSource.of(str(model), backbone)
            if isinstance(heads, str) or (heads is None and scorer is None and store is None):
                heads = chosen.chosen_heads(heads, source, getLogger(__name__).info, usual=True)
            place, found = loading.device_of_source(source), heads if heads is not None else scorer
            named = ScorerOptions(
                heads=str(heads) if heads is not None else None,
                scorer=scorer if isinstance(scorer, str) else None,
                allow_other_base=allow_other_base,
            )
            changes = dict[str, Any]()
            if found is None or isinstance(found, str | Path):
                found, changes = chosen.load_scorer(named, sharing=usual)
            elif usual:
                changes = dict(chosen.MEASURED)
            if isinstance(found, RetainingHeads) and found.config.policy:
                changes = {}  # the cache takes what heads recommend
            config = loading.load_config(source)
            if changes:
                own = changes.get("budget") or usual_budget(describe(config).max_positions)
                policy = policy or RetentionPolicy(budget=own)
                policy = chosen.modified(policy, changes)
            if isinstance(found, RetainingHeads):
                chosen.check_matches(named, found, config)
                policy = _recommended(policy, budget, found)
            tokenizer = loading.load_tokenizer(source)
            with without_bars():
                whole = loading.load_model(source, config, place, loading.resolve_dtype(source.dtype, config, place))
            if usual and policy is not None:
                policy = sharing(policy, found, whole, tokenizer, template, asked=False)
        return cls(whole, tokenizer, found, policy, template=template, store=store)

    # -- reading ------------------------------------------------------------------------------------------------------

    @overload
    def read(self, source: list[str] | list[Path] | tuple[str | Path, ...], **how: Any) -> list[Context]: ...

    @overload
    def read(self, source: Any, **how: Any) -> Context: ...

    def read(  # type: ignore[misc]
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
                (the last turn of the user), "user", "assistant", "message:N", "tokens:A-B", or a `Span`; each with a
                least share of the budget, as "document=0.5", instead of all its units; "each=0.05" gives every turn a
                share. Or a list of them.

        Raises:
            ValueError: For an empty text, a file that is not there or not text, or more protected than the budget
                holds.
        """
        how: dict[str, Any] = {"system": system, "progress": progress, "protect": protect}
        if isinstance(source, (list, tuple)) and source and all(isinstance(one, (str, Path)) for one in source):
            if name is not None:
                raise ValueError(f"name={name!r} names one context, but {len(source)} texts are given; leave it out")
            return [self.read_into(self.new_cache(), one, **how) for one in map(open_document, source)]
        return self.read_into(self.new_cache(), open_document(source, name), **how)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Written:
        """Return a conversation as the template writes it, to be read by `locret.prefill`; no text becomes a turn.

        Args:
            messages: As transformers' chat templates take them.
            tools: Definitions of tools, likewise.

        Raises:
            ValueError: If the template refuses them, or does not write tools.
        """
        return Written(written(self.tokenizer, self.template, messages, tools, raw=self.parse_special))

    def new_cache(self) -> RetentionCache:
        """Return an empty cache."""
        return RetentionCache(self.model, self.scorer, self.policy, store=self.store)

    def tokens(self, document: Document, *, system: str | None = None) -> Iterator[list[int]]:
        """Yield the token ids that `read_into` feeds."""
        return self._ids(document, self._transcript(system), TokenStream(self.tokenizer), ReadingBar(document, False))

    def read_into(
        self,
        cache: RetentionCache,
        document: Document,
        *,
        system: str | None = None,
        progress: bool | str = True,
        new_tokens: int = 0,
        on_chunk: Callable[[RetentionCache, int], None] | None = None,
        protect: Protect = None,
    ) -> Context:
        """Read a document into an empty cache of this model; see `read`.

        Args:
            cache: Filled in place.
            document: What to read.
            system: As in `read`.
            progress: As in `read`; a text is what the bar is called.
            new_tokens: As for `prefill`.
            on_chunk: Called after every chunk, with the cache and how much of the text it has read, in its unit.
            protect: As in `read`.
        """
        talk, bar = self._opened(document, system, rules_of(protect)), ReadingBar(document, progress)
        talk.protection.apply(cache)
        ids = self._ids(document, talk.transcript, talk.stream, bar)
        self._read(cache, talk, ids, bar, new_tokens, on_chunk)
        return Context(self, cache, talk)

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
        cache, bar = self.new_cache() if cache is None else cache, ReadingBar(document, progress)
        talk = self._opened(document, system, rules_of(protect))
        there = [turn.role for turn in talk.protection.known]
        check_named(talk.protection.rules, there if question is None else [*there, USER])
        before, talk.transcript = talk.transcript, replace(talk.transcript)
        added = talk.transcript.ask(question)
        talk.protection.apply(cache)

        def prompt() -> Iterator[list[int]]:
            made = 0
            for block in self._ids(document, before, talk.stream, bar, hold=False):
                made += len(block)
                yield block
            ids, asked = talk.stream.followed(added)
            if question is not None:
                talk.protection = talk.protection.began(USER, made + asked)
                talk.protection.apply(cache)
            yield ids

        self._read(cache, talk, filter(None, prompt()), bar, new_tokens)
        talk.protection.apply(cache, cache.seen)
        chat = Chat(self, cache, talk)
        chat.asked = question or ""
        return chat

    def _opened(self, document: Document, system: str | None, rules: tuple[Rule, ...]) -> Talk:
        """Return a conversation about a document that is about to be read."""
        transcript = self._transcript(system)
        way_out = "give a system message" + ("" if system is None else " of which the template writes something")
        protection = Protection.of_document(rules, transcript.system_tokens(), way_out)
        return Talk(TokenStream(self.tokenizer), transcript, document.name, protection)

    def _read(
        self,
        cache: RetentionCache,
        talk: Talk,
        ids: Iterable[list[int]],
        bar: ReadingBar,
        new_tokens: int,
        on_chunk: Callable[[RetentionCache, int], None] | None = None,
    ) -> None:
        taken, warned = array("i"), False

        def noted() -> Iterator[list[int]]:
            for block in ids:
                taken.extend(block)
                bar.tokens = len(taken)
                yield block

        def warn() -> None:
            nonlocal warned
            longest = self.backbone.max_positions
            if not warned and cache.next_position > longest:
                warned, way_out = True, "shorten the prompt, or hold fewer units at a time"
                if cache.policy.positions == "original" and not self.backbone.slides:
                    way_out = "use compact positions, which number the kept units only"
                    if cache.policy.budget == EVERY_UNIT:
                        way_out = "with everything kept there is no way around it: do not judge the text by them"
                warn_user(
                    f"rotary positions reach beyond {longest}, the longest context of this backbone, where its answers "
                    f"usually fall apart; reading goes on, but {way_out}"
                )

        def after_chunk(cache: RetentionCache) -> None:
            warn()
            bar(cache)
            if on_chunk is not None:
                on_chunk(cache, bar.done(cache))

        done = False
        try:
            prompt = _as_prompt(noted(), cache.policy)
            prefill(self.model, prompt, cache, new_tokens=new_tokens, on_chunk=after_chunk)
            warn()
            talk.ids, done = taken, True
        finally:
            bar.close(whole=done)

    def _ids(
        self, document: Document, transcript: Transcript, stream: TokenStream, bar: ReadingBar, *, hold: bool = True
    ) -> Iterator[list[int]]:
        """Yield the tokens of what comes before the document, and of the document but for its last words.

        Without `hold` fewer words wait, as where somebody knows what follows.
        """
        if special := transcript.special:
            yield special
        opening = transcript.opening()
        if document.pieces is None:
            assert document.ids is not None
            yield from self._given(opening, document.ids, stream)
        else:
            plain, counted = transcript.template == "none", replace(document, pieces=bar.pieces(document.pieces))
            words = counted.words(self.tokenizer, plain=plain, raw=transcript.raw)
            yield from stream.add(chain([opening], words))
            if hold:
                yield from stream.hold()

    def _given(self, opening: str, ids: Any, stream: TokenStream) -> Iterator[list[int]]:
        """Yield the opening and ids that a user gave, without a begin of text of their own."""
        if opening:
            yield from stream.add([opening])
            yield stream.finish()
        start, newest = leading_special_ids(self.tokenizer), list[int]()
        for block in ids:
            if not newest and start and block[: len(start)] == start:
                block = block[len(start) :]
            if len(block) and not 0 <= min(block) <= max(block) < self.vocabulary:
                check_ids(torch.tensor(block), self.vocabulary)
            newest = [*newest, *block][-stream.margin // 8 :]
            if len(block):
                yield block
        stream.context = self.tokenizer.decode(newest, clean_up_tokenization_spaces=False)

    def _transcript(self, system: str | None = None) -> Transcript:
        if system is not None and not is_text(system):
            raise Refusal("system", repr(system), "is no text; give the system message as one")
        transcript = Transcript(self.tokenizer, self.template, system, raw=self.parse_special)
        transcript.opening()
        return transcript

    # -- asking -------------------------------------------------------------------------------------------------------

    settings = answer_settings

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end an answer."""
        ends: Any = unwrap(self.model).generation_config.eos_token_id
        return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    # -- on disk ------------------------------------------------------------------------------------------------------

    def load(self, path: str | Path, **how: Any) -> Context:
        """Return a context that `Context.save` has written.

        Args:
            path: The file, or org/name on the Hub.
            **how: revision: branch, tag or commit on the Hub. allow_other_scorer: accept another scorer than the text
                was read with, what was kept stays.

        Raises:
            ValueError: If the file is none, or was made with another backbone or scorer.
            OSError: If the file cannot be read.
        """
        cache, talk = self._load(path, **how)
        if talk.transcript.turns:
            raise ValueError(f"{path} holds a conversation; load it with load_chat, or go on with locret-chat")
        return Context(self, cache, talk)

    def load_chat(self, path: str | Path, **how: Any) -> Chat:
        """Return a conversation that `Chat.save` has written, or a new one about a context; see `load`."""
        return Chat(self, *self._load(path, **how))

    def _load(
        self, path: str | Path, *, revision: str | None = None, allow_other_scorer: bool = False
    ) -> tuple[RetentionCache, Talk]:
        from locret.conversation.saved import find_context  # it draws, and knows engines

        path = find_context(path, revision=revision)
        talk = saved_talk(path, self.tokenizer, self.vocabulary)
        talk.transcript.raw = self.parse_special
        cache = load_cache(path, self.model, self.scorer, allow_other_scorer=allow_other_scorer)
        return cache, talk

    @property
    def vocabulary(self) -> int:
        """Token ids there are."""
        return int(unwrap(self.model).config.get_text_config().vocab_size)

    def __repr__(self) -> str:
        return f"LongContextModel({self.name}, {chosen.told(self.scorer, self.policy)})"


def _as_prompt(blocks: Iterable[list[int]], policy: RetentionPolicy) -> Tensor | Iterable[list[int]]:
    """Return ids as `prefill` takes them: as a whole, 8 bytes each, where the plan depends on their number.

    So it is where one step reads them all, which are not worth a stream: no more than their number is allocated then.
    """
    rest, head = iter(blocks), array("q")
    for block in rest:
        head.extend(block)
        if len(head) > policy.prefill_units and not policy.plans_by_length:
            return chain([head.tolist()], rest)
    return torch.tensor(head, dtype=torch.long)[None]


def _recommended(policy: RetentionPolicy | None, budget: int | None, scorer: Any) -> RetentionPolicy | None:
    """Return what heads recommend, at another budget if one was given, where no policy was."""
    if (policy and budget is None) or not isinstance(scorer, RetainingHeads) or not scorer.config.policy:
        return policy
    found = RetentionPolicy.from_dict(scorer.config.policy, "the heads' policy")
    return found if budget is None else resolve({"budget": budget}, found.to_dict())
