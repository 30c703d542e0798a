"""Labels of one document for many questions: it is read once, and every question with its answer goes on from there."""

# K KV heads, D document tokens

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from locret.backbone.adapters import describe, input_device, latents, unwrap
from locret.backbone.chunk import Attended
from locret.backbone.instrument import LayerObserver, instrumented
from locret.backbone.passes import keeping_step, run_decoder
from locret.backbone.shape import FULL, SLIDING
from locret.labels import kinds
from locret.labels.kinds import LabelKind
from locret.labels.labels import _BLOCK_ELEMENTS, answer_labels, layer_labels, observe, token_row

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Ids of questions and their answers, (1, m) each."""


@torch.no_grad()
@keeping_step
def labels_of_answers(
    model: nn.Module,
    document_ids: Tensor,
    asked: Iterable[tuple[Tensor, Tensor]],
    kind: str | LabelKind = "logit",
    include_last_prompt_token: bool = False,
    *,
    labelled: int | None = None,
    on_document: Callable[[Attended], None] | None = None,
) -> Tensor:
    """Return the largest label that any of several answers gives each token of a document.

    The same as the maximum of `answer_labels` over prompts of the document and one question each, but for rounding, in
    the time of one of them and of all questions and answers alone. The document's keys and values are held in full.

    Args:
        model: The backbone, in evaluation mode.
        document_ids: (1, n) or (n,).
        asked: Ids of each question, up to where the answer begins, and of its answer; (1, m) or (m,) both.
        kind: As for `answer_labels`.
        include_last_prompt_token: As for `answer_labels`.
        labelled: T, the first document tokens to label; all if None.
        on_document: Called for each full-attention layer, in order, while the document is read.

    Returns:
        (layers, kv_heads, n or T) float32, as of `answer_labels`.
    """
    document_1D, kind = token_row(document_ids, "document_ids"), kinds.get(kind)
    pairs = [(token_row(question, "question"), token_row(answer, "answer")) for question, answer in asked]
    if not pairs:
        raise ValueError("asked is empty; give at least one question with its answer")
    if _goes_on(model):
        one_by_one = _from_one_read(model, document_1D, pairs, kind, include_last_prompt_token, on_document)
    else:
        if on_document is not None:
            observe(model, document_1D.to(input_device(model)), on_document)
        one_by_one = _each_from_the_start(model, document_1D, pairs, kind, include_last_prompt_token)
    best: Tensor | None = None
    for labels in one_by_one:
        labels = labels[..., :labelled]
        best = labels if best is None else torch.maximum(best, labels, out=best)
    assert best is not None
    return best


def _goes_on(model: nn.Module) -> bool:
    """Return whether a cache of transformers holds just what later tokens attend to: keys and values of each layer."""
    backbone = describe(model)
    plain = all(kind in (FULL, SLIDING) for kind in backbone.kinds)
    return plain and not latents(model) and not any(map(backbone.borrows, range(len(backbone.kinds))))


def _each_from_the_start(model: nn.Module, document_1D: Tensor, pairs: Pairs, *how: Any) -> Iterator[Tensor]:
    for question, answer in pairs:
        prompt = torch.cat([document_1D, question.to(document_1D.device)], dim=1)
        yield answer_labels(model, prompt, answer.to(prompt.device), *how)[..., : document_1D.shape[1]]


def _from_one_read(
    model: nn.Module,
    document_1D: Tensor,
    pairs: Pairs,
    kind: LabelKind,
    include: bool,
    on_document: Callable[[Attended], None] | None,
) -> Iterator[Tensor]:
    backbone, length, device = describe(model), document_1D.shape[1], input_device(model)
    read: Any = DynamicCache(config=unwrap(model).config)
    rows: list[Tensor] = []
    with instrumented(model):
        read.reader = LayerObserver(backbone, on_document or (lambda chunk: None))
        run_decoder(model, document_1D.to(device), read)
        for question, answer in pairs:
            prompt = length + question.shape[1]

            def on_layer(chunk: Attended, prompt: int = prompt) -> None:
                labels = layer_labels(chunk, prompt, kind, include, labelled=length, block_elements=_BLOCK_ELEMENTS)
                rows.append(labels.to(device))

            read.reader = None
            fork = copy.deepcopy(read)
            fork.reader = LayerObserver(backbone, on_layer, length)
            run_decoder(model, torch.cat([question.to(device), answer.to(device)], dim=1), fork)
            yield pad_sequence(rows, batch_first=True, padding_value=-torch.inf)
            rows.clear()
