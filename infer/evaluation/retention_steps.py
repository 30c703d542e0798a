"""Which positions of a text every KV head holds after each chunk, and the picture of it.

Paper:    Locret, arXiv 2410.01805, Figures 7 and 8: position in the text against time, one panel per layer and head.
Deviates: a panel's column is a prefill step, as in the paper; its rows bundle neighbouring positions of a long text and
          show the share kept, where the paper draws single positions.
"""

# S prefill steps, R rows of a panel, C kept units

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill
from locret.conversation.templates import Message, render
from locret.data.tasks import Sample
from locret.infer.evaluation.figures import new_figure
from locret.infer.evaluation.methods import Prompt
from locret.method_spec import file_name
from locret.pictures import INK, NEEDLE, column_edges, save
from locret.scorers import Scorer

ROWS = 200
"""Most rows of a panel: one row stands for several neighbouring positions of a longer text."""
_MOST_LAYERS, _MOST_HEADS = 8, 4


@dataclass(frozen=True)
class RetentionSteps:
    """What one cache held of a text after every prefill step."""

    title: str
    kept: tuple[dict[int, list[Tensor]], ...]
    """Per step, for every full-attention layer and in it every KV head: the (C,) int64 original positions held."""
    read: tuple[int, ...]
    """Tokens that had been read after each step."""
    prompt_tokens: int


def record_steps(model: nn.Module, ids: Tensor, cache: RetentionCache, title: str) -> RetentionSteps:
    """Read a prompt and take down what is kept after the eviction that follows every chunk.

    Args:
        model: The backbone of the cache.
        ids: (1, N) or (N,) token ids.
        cache: An empty cache; holds the prompt afterwards.
        title: Heading of the picture.

    Returns:
        One step per chunk; the local tokens, which come after the last eviction, are not a step.

    Raises:
        ValueError: If the prompt is empty.
    """
    kept: list[dict[int, list[Tensor]]] = []
    read: list[int] = []

    def on_chunk(cache: RetentionCache) -> None:
        # The cache evicts in axes, so what it holds now must be copied.
        now = {layer: cache.kept_everywhere(layer)[0].cpu().clone() for layer in cache.backbone.layers}
        kept.append({layer: [head[head >= 0] for head in heads] for layer, heads in now.items()})
        read.append(cache.seen)

    prefill(model, ids, cache, on_chunk=on_chunk)
    return RetentionSteps(title, tuple(kept), tuple(read), cache.seen)


def step_grid(steps: RetentionSteps, layer: int, head: int, rows: int = ROWS) -> Tensor:
    """Return (R, S) float32: the share of each stretch of the text that a head holds after each step.

    Shares count positions read so far; stretches of which nothing has been read are NaN.

    Args:
        steps: What was recorded.
        layer: Index of a full-attention layer.
        head: Index of a KV head.
        rows: R, at most the number of prompt tokens.
    """
    edges = column_edges(steps.prompt_tokens, min(rows, steps.prompt_tokens))
    columns = []
    for kept, read in zip(steps.kept, steps.read, strict=True):
        counts = torch.histogram(kept[layer][head].to(torch.float64), edges).hist
        present = edges.clamp(max=read).diff()
        columns.append(torch.where(present > 0, counts / present.clamp(min=1), torch.nan))
    return torch.stack(columns, dim=1).float()


def spread(items: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the items, the first and the last among them, as evenly spread as possible."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def draw_steps(
    steps: RetentionSteps,
    path: str | Path,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    spans: Sequence[tuple[int, int]] = (),
) -> None:
    """Draw a panel per layer (down) and KV head (across): position in the text against prefill step.

    Args:
        steps: What was recorded.
        path: PNG file to write; an existing one is replaced.
        layers: Layers to show; if None, at most eight, evenly spread.
        heads: KV heads to show; if None, at most four, evenly spread.
        spans: First and last positions of passages to mark at the right edge.

    Raises:
        ValueError: If matplotlib is not installed, or the prompt was too short for a single step.
        OSError: If the file cannot be written.
    """
    if not steps.kept:
        raise ValueError(
            f"{steps.prompt_tokens} prompt tokens are read in no step with an eviction; give a longer prompt"
        )
    layers = spread(sorted(steps.kept[0]), _MOST_LAYERS) if layers is None else layers
    heads = spread(range(len(next(iter(steps.kept[0].values())))), _MOST_HEADS) if heads is None else heads
    figure = new_figure(2.6 * len(heads) + 2.2, 1.9 * len(layers) + 1.0)
    grid = figure.subplots(len(layers), len(heads), squeeze=False, sharex=True, sharey=True)
    shown = {(layer, head): step_grid(steps, layer, head) for layer in layers for head in heads}
    highest = max(float(share.nan_to_num(0).max()) for share in shown.values()) or 1.0
    for row, layer in enumerate(layers):
        for column, head in enumerate(heads):
            image = _draw_panel(grid[row, column], shown[layer, head], steps, highest, spans)
            grid[row, column].set_title(f"layer {layer}, KV head {head}", fontsize=9, loc="left", color=INK)
    figure.supxlabel("prefill step (chunks read)", fontsize=10, color=INK)
    figure.supylabel("position in the text (tokens)", fontsize=10, color=INK)
    figure.colorbar(image, ax=list(grid.flatten()), label="share kept (%); grey: not read yet", fraction=0.04, pad=0.02)
    note = "\narrows: what the question asks for" if spans else ""
    figure.suptitle(steps.title + note, fontsize=11, color=INK)
    save(figure, path)


def _draw_panel(
    axes: Any, share: Tensor, steps: RetentionSteps, highest: float, spans: Sequence[tuple[int, int]]
) -> Any:
    from matplotlib.colors import PowerNorm

    axes.set_facecolor("#D0D0D0")
    # A square root shows a single kept position of a long stretch, which a linear scale would leave white.
    image = axes.imshow(
        100 * share.numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap="Blues",
        norm=PowerNorm(0.5, 0, 100 * highest),
        extent=(0.5, len(steps.kept) + 0.5, steps.prompt_tokens, 0),
    )
    for first, last in spans:
        axes.plot(
            1.0,
            (first + last) / 2,
            "<",
            color=NEEDLE,
            markersize=6,
            transform=axes.get_yaxis_transform(),
            clip_on=False,
        )
    return image


def answer_spans(tokenizer: Any, sample: Sample) -> list[tuple[int, int]]:
    """Return the first and last prompt position of every axes in the document that states a target.

    Args:
        tokenizer: The backbone's; a fast one, which knows which characters a token stands for.
        sample: What is read.

    Raises:
        ValueError: If the tokenizer cannot tell.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("the tokenizer does not tell which characters its tokens stand for; use a fast tokenizer")
    text = render(tokenizer, [Message("user", sample.content)], "chat")
    start = text.index(sample.document.strip())
    end = start + len(sample.document.strip())
    encoded = tokenizer(text, add_special_tokens=False)
    spans = []
    for target in sample.targets:
        at = text.find(target, start, end)
        while at >= 0:
            tokens = {encoded.char_to_token(at + i) for i in range(len(target))} - {None}
            spans.append((min(tokens), max(tokens)))
            at = text.find(target, at + len(target), end)
    return sorted(set(spans))


def write_retention_steps(
    output: str | Path,
    prompt: Prompt,
    scorers: Mapping[str, RetainingHeads | Scorer | str],
    policy: RetentionPolicy,
) -> list[str]:
    """Draw what each method keeps of one sample while it is read, a file `retention_steps_<method>.png` each.

    Args:
        output: Folder that exists.
        prompt: What is read, with the backbone.
        scorers: By method: retaining heads, a scorer, or the name of a training-free one.
        policy: Budget and chunk size.

    Returns:
        Names of the files written.

    Raises:
        ValueError: If matplotlib is not installed, or the prompt is too short for a step.
        OSError: If a file cannot be written.
    """
    ids, model, tokenizer, names = prompt.ids_1N, prompt.setup.model, prompt.setup.tokenizer, []
    spans = answer_spans(tokenizer, prompt.sample) if getattr(tokenizer, "is_fast", False) else []
    for method, scorer in scorers.items():
        title = f"{method}: {ids.shape[1]:,} tokens read with a budget of {policy.budget:,} units per KV head"
        steps = record_steps(model, ids, RetentionCache(model, scorer, policy), title)
        names.append(f"retention_steps_{file_name(method)}.png")
        draw_steps(steps, Path(output) / names[-1], spans=spans)
    return names
