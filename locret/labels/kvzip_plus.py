"""The label of KVzip+: the attention, weighed by what a unit would add to the residual stream of the token that asks.

Paper:    KVzap, arXiv 2601.07891, section 3 (KVzip+); KVzip, arXiv 2505.23416, for asking with the text's repetition
          (`--label-source reconstruction`), without which these are labels of the answer.
Formula:  label[j] = max over queries i and heads g of ln(a_gij ||W_O_g v_j|| / ||h_i||): h_i is what the attention
          module was given for the token that asks, W_O_g the columns of its output projection that belong to head g.
Deviates: float32 throughout. What a backbone does between attention and output projection (gates of Qwen3-Next) is
          left out, as in the paper's code.
Cost:     That of `log_attention`, and per layer the output projection of N D tokens.
"""

# N query heads, K KV heads, G = N / K, Q = G R queries of R tokens, L tokens that ask, S tokens, T labelled tokens,
# D head dim of a value, E hidden size

from __future__ import annotations

from typing import TYPE_CHECKING

from locret.labels.base import LabelKind, LabelTerms

if TYPE_CHECKING:
    from torch import Tensor, nn

    from locret.backbone.chunk import Attended


def _block(logits_KQS: Tensor, labelled: int, terms: LabelTerms) -> Tensor:
    totals_KQ1 = logits_KQS.logsumexp(dim=-1, keepdim=True)
    labels_KQT = logits_KQS[:, :, :labelled].sub_(totals_KQ1)
    labels_KGRT = labels_KQT.unflatten(1, (-1, len(terms.query_L))) + terms.query_L[:, None]
    labels_KT: Tensor = (labels_KGRT.amax(dim=2) + terms.unit_KGT).amax(dim=1)
    return labels_KT


def _terms(chunk: Attended, labelled: int) -> LabelTerms:
    """Return -ln ||h_i|| of the tokens that ask, and ln ||W_O_g v_j|| of the labelled ones."""
    import torch  # here, because commands know the kinds of label before torch is imported

    from locret.backbone.adapters import output_projection

    projections, tokens = chunk.projections, chunk.query.shape[2]
    if projections.shape.latent:
        raise ValueError(
            "--label-kind kvzip_plus weighs values by the output projection, but this backbone holds latents; use "
            "log_attention"
        )
    assert projections.module is not None
    assert projections.hidden is not None
    module = output_projection(projections.module)
    rows, heads = chunk.query.shape[1] * chunk.value.shape[-1], (chunk.key.shape[1], -1)
    if projections.hidden.shape[1] != tokens or getattr(module, "in_features", rows) != rows:
        raise ValueError(
            "--label-kind kvzip_plus needs the hidden states of all tokens and all heads in one process; drop "
            "--shard tp, or use log_attention"
        )
    least = torch.finfo(torch.float32).tiny
    gram_KGDD = _gram(module, rows, chunk).unflatten(0, heads)
    values_KTD = chunk.value[0, :, :labelled].float()
    products_KGT = torch.einsum("ktd,kgde,kte->kgt", values_KTD, gram_KGDD, values_KTD)
    lengths_L = projections.hidden[0].float().norm(dim=-1)
    return LabelTerms(-lengths_L.clamp(min=least).log(), products_KGT.clamp(min=least).log() / 2)


def _gram(module: nn.Module, rows: int, chunk: Attended) -> Tensor:
    """Return (N, D, D) float32 products of the columns of W_O among those of each head.

    The projection is asked, rather than its weight: it may be quantised, adapted, offloaded or gathered when called.
    """
    import torch

    unit_RR = torch.eye(rows, dtype=chunk.value.dtype, device=chunk.value.device)
    columns_RE = (module(unit_RR) - module(unit_RR.new_zeros(1, rows))).float()
    columns_NDE = columns_RE.unflatten(0, (chunk.query.shape[1], -1))
    gram_NDD: Tensor = columns_NDE @ columns_NDE.mT
    return gram_NDD


KVZIP_PLUS = LabelKind(
    name="kvzip_plus",
    meaning="the log of the attention, times the length of the value behind the output projection, divided by that of "
    "the hidden state that asks",
    block=_block,
    whole_rows=True,
    comparable=True,
    terms=_terms,
)
