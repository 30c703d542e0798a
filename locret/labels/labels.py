"""What a retaining head learns to predict: how strongly the answer will look at each prompt token.

Paper:    Locret, arXiv 2410.01805, Eq. 2: the largest attention logit that any answer token gives a prompt token, over
          the query heads of a KV head's group.
Deviates: What takes the logit's place is one object per kind of label (`locret.labels.kinds`);
          `include_last_prompt_token` adds the query that produces the answer's first token, which the paper's index
          range includes and the original code leaves out.
Many:     Of one document with many questions, the document is read once, and every question with its answer goes on
          from there (`labels_of_answers`).
"""

# K KV heads, G query heads of a group, N = K G query heads, R answer queries of a block, Q = G R, T prompt tokens,
# S prompt and answer tokens, D head dim; in what is one row of ids, document_1D has D document tokens

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from locret.heads.heads import RetainingHeads


_BLOCK_ELEMENTS = 2**22
"""Most logits in memory at once: 16 MiB. Products of fewer are too thin, more do not stay in the cache of a CPU."""


@torch.no_grad()
@keeping_step
def observe(model: nn.Module, input_ids: Tensor, on_layer: Callable[[Attended], None]) -> None:
    """Run the decoder once over (1, S) token ids, without cache and without the language-model head.

    `on_layer` is called for each full-attention layer, in order, and may switch gradients on for its own arithmetic.
    """
    with instrumented(model, LayerObserver(describe(model), on_layer)):
        run_decoder(model, input_ids)


def answer_labels(
    model: nn.Module,
    prompt_ids: Tensor,
    answer_ids: Tensor,
    kind: str | LabelKind = "logit",
    include_last_prompt_token: bool = False,
) -> Tensor:
    """Return the causal importance labels of a prompt, from one teacher-forced pass over prompt and answer.

    Args:
        model: The backbone, in evaluation mode.
        prompt_ids: (1, n) or (n,).
        answer_ids: (1, m) or (m,).
        kind: One of `locret.labels.names()`, such as "logit" (paper), or a kind of one's own.
        include_last_prompt_token: Count the last prompt token among the answer's queries.

    Returns:
        (layers, kv_heads, n) float32 for prompt positions 0 to n - 1; dimension 0 runs over the full-attention layers.
        Where layers have different numbers of KV heads, rows of -inf follow those of the layers that have fewer.

    Raises:
        ValueError: For an unknown kind, or a prompt or answer that is empty or more than one row.

    Examples:
        >>> answer = torch.tensor([tokenizer.encode("The pass key is 71432.")])
        >>> answer_labels(model, ids[:, :100], answer).shape  # (layers, KV heads, prompt tokens)
        torch.Size([5, 4, 100])
    """
    prompt_ids, answer_ids = token_row(prompt_ids, "prompt_ids"), token_row(answer_ids, "answer_ids")
    how = prompt_ids.shape[1], kinds.get(kind), include_last_prompt_token
    rows: list[Tensor] = []
    ids = torch.cat([prompt_ids, answer_ids], dim=1).to(input_device(model))
    observe(model, ids, lambda chunk: rows.append(layer_labels(chunk, *how)))
    return pad_sequence(rows, batch_first=True, padding_value=-torch.inf)


def prompt_scores(model: nn.Module, heads: RetainingHeads, prompt_ids: Tensor) -> Tensor:
    """Return the heads' scores of a prompt read in one full-attention pass, (layers, kv_heads, n) float32.

    Args:
        model: The backbone, in evaluation mode.
        heads: Retaining heads on the same device.
        prompt_ids: (1, n) or (n,).

    Raises:
        ValueError: If heads and backbone do not belong together, or the prompt is empty or more than one row.
    """
    heads.check_matches(model)
    rows: list[Tensor] = []
    observe(
        model,
        token_row(prompt_ids, "prompt_ids").to(input_device(model)),
        lambda chunk: rows.append(heads[chunk.layer_idx](heads.features(chunk)[0]).T),
    )
    return pad_sequence(rows, batch_first=True, padding_value=-torch.inf)


def layer_labels(
    chunk: Attended,
    prompt: int,
    kind: str | LabelKind,
    include_last_prompt_token: bool,
    *,
    labelled: int | None = None,
    block_elements: int | None = None,
) -> Tensor:
    """Return one layer's labels, (K, T) float32, as a running maximum over blocks of answer queries.

    Args:
        chunk: The layer's tensors of prompt and answer, batch 1; its queries may be those of the last tokens alone, of
            which there must be all that label.
        prompt: Number of prompt tokens.
        kind: See `answer_labels`.
        include_last_prompt_token: Whether queries start one token before the answer.
        labelled: T, the first prompt tokens to label; all if None.
        block_elements: Most logits in memory at once, if one answer token has no more; by default 2^22, and no more
            than the layer's queries, so that what labels need stays small compared with what the layer needs.
    """
    kind = kinds.get(kind)
    labelled = prompt if labelled is None else min(labelled, prompt)
    labels_KT = chunk.key.new_full((chunk.key.shape[1], labelled), -torch.inf, dtype=torch.float32)
    held, heads = chunk.key.shape[2] - chunk.query.shape[2], chunk.query.shape[1]
    most = min(_BLOCK_ELEMENTS, chunk.query.numel()) if block_elements is None else block_elements
    # Float32 even under autocast: labels rounded to bfloat16 tie, and the log-sum-exp is a difference of large numbers.
    with torch.autocast(chunk.query.device.type, enabled=False):
        keys_KDS = chunk.key[0].float().mT
        start, end = max(0, prompt - include_last_prompt_token), chunk.key.shape[2]
        rows = max(1, most // max(1, heads * (end if kind.whole_rows else labelled)))
        for first in range(start, end, rows):
            last = min(first + rows, end)
            queries_NRD = chunk.query[0, :, first - held : last - held].float()
            logits_KQS = _logits(queries_NRD, keys_KDS[:, :, : last if kind.whole_rows else labelled], chunk)
            if kind.whole_rows:  # only the block's own tokens can be in the future of some of its queries
                future_RR = torch.ones(last - first, last - first, dtype=torch.bool, device=keys_KDS.device).triu(1)
                group = logits_KQS.shape[1] // (last - first)
                logits_KQS[:, :, first:].masked_fill_(future_RR.repeat(group, 1), -torch.inf)
                if chunk.learned_sinks is not None:  # what else the prompt's tokens weigh against
                    sinks_KG = chunk.learned_sinks.float().view(len(logits_KQS), -1)
                    column_KQ = sinks_KG.repeat_interleave(last - first, dim=1)
                    logits_KQS = torch.cat([logits_KQS, column_KQ[..., None]], dim=-1)
            torch.maximum(labels_KT, kind.block(logits_KQS, labelled), out=labels_KT)
    return labels_KT


def _logits(queries_NRD: Tensor, keys_KDS: Tensor, chunk: Attended) -> Tensor:
    """Return (K, Q, S): the logits of a block of queries, of all query heads of a KV head's group."""
    queries_KQD = queries_NRD.unflatten(0, (keys_KDS.shape[0], -1)).flatten(1, 2)
    logits_KQS: Tensor = (queries_KQD * chunk.scaling) @ keys_KDS
    if chunk.softcap is not None:
        logits_KQS.div_(chunk.softcap).tanh_().mul_(chunk.softcap)
    return logits_KQS


def token_row(ids: Tensor, name: str) -> Tensor:
    """Return token ids as (1, n)."""
    row = ids[None] if ids.ndim == 1 else ids
    if row.ndim != 2 or row.shape[0] != 1 or not row.shape[1]:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; give the ids of one text, (n,) or (1, n), n >= 1")
    return row


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
