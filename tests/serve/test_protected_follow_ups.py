"""What a context protects while conversations about it go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from running import FILLER

from locret import LongContextModel
from locret.cache.cache_file import read_saved
from locret.infer.serve.index import Entry
from locret.infer.serve.library import Library
from locret.infer.serve.prompts import Prompts
from locret.infer.serve.schemas import ChatRequest


@pytest.mark.parametrize(("rule", "said"), [("document", "all"), ("document=0.5", "0.5")])
def test_what_follows_a_protected_document_is_no_part_of_it(
    rule: str, said: str, library: Library, read: Callable[..., Entry], serving: LongContextModel
) -> None:
    read(library, "book", "The pass key is 71432. The sky is blue.", protect=[rule])
    prompts = Prompts(serving, library)
    request = {"messages": [{"role": "user", "content": FILLER * 9}], "context": "book", "kept": True}
    (draft,) = prompts.of_chat(ChatRequest.model_validate(request))
    assert draft.long
    settled = prompts.settled(draft, lambda: False)
    assert settled.holder is not None
    ((_, end, _, _),) = read_saved(settled.holder.path).state["protected"][0]
    assert end is not None
    document = prompts.kept(settled)[0]
    assert document["protected"] == said
    assert document["least"] == document["tokens"] > 0


@pytest.mark.parametrize("protect", [[], ["document=0.5"]])
def test_a_long_question_follows_a_context_with_a_budget(
    protect: list[str], library: Library, read: Callable[..., Entry], serving: LongContextModel
) -> None:
    read(library, "book", "The pass key is 71432. " + FILLER * 9, protect=protect)
    prompts = Prompts(serving, library)
    request = {"messages": [{"role": "user", "content": FILLER * 9}], "context": "book", "budget": 40, "kept": True}
    (draft,) = prompts.of_chat(ChatRequest.model_validate(request))
    assert draft.long
    settled = prompts.settled(draft, lambda: False)
    assert settled.holder is not None
    spans = read_saved(settled.holder.path).state.get("protected")
    assert [end is not None for _, end, *_ in (spans[0] if spans else ())] == [True] * len(protect)
    assert prompts.kept(settled)[0]["protected"] == ("0.5" if protect else None)
