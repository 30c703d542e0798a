"""`locret patterns`: find which sparse pattern serves each head of a backbone, for `--prefill-attention minference`.

The backbone reads one text densely, in one pass; every head's attention to it decides. The file has the form that
MInference publishes: `--prefill-attention minference:patterns=FILE` reads it, and so does theirs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from locret.cli.command import parse_options, print_json, run
from locret.loading.options import BackboneSource

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SourceOptions(BackboneSource):
    """The backbone, and where it runs."""

    trust_remote_code: bool = False
    """Run Python code that comes with the backbone."""
    device: str = "auto"
    """cpu, cuda, cuda:N or mps; auto takes the first CUDA device, else mps, else cpu."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The text, and what is searched in it."""

    text: str
    """Text file to search on, such as the longest that the backbone will read; - is standard input."""
    out: str
    """JSON file to write: the pattern of every layer and query head."""
    tokens: int = 8192
    """Tokens of the text that are read, in one pass of dense attention."""
    late: int = 2500
    """First token whose attention counts (MInference: 2500); earlier ones see nearly everything by any pattern."""
    by: str = "mass"
    """What is compared: mass, attention recovered; or output, numbers of the output that change by 5e-3 at most."""
    share: float | None = None
    """Scale the patterns, for every head, until each computes at most this share of dense attention, such as 0.25;
    without, their published sizes serve, which are for texts of 100K tokens and more."""
    dry_run: bool = False
    """Check the options and print the candidates, without loading the backbone."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        for name in ("late", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} is too small; give 1 or more")
        if self.late >= self.tokens:
            raise ValueError(f"--late {self.late} leaves none of --tokens {self.tokens}; lower it, or raise --tokens")
        if self.share is not None and not 0 < self.share < 1:
            raise ValueError(f"--share {self.share} is not a part of dense attention; give one between 0 and 1")
        if self.by not in ("mass", "output"):
            raise ValueError(f"--by {self.by} is unknown; choose mass or output")
        if not self.out or os.path.isdir(self.out):
            raise ValueError(f"--out {self.out or 'is empty'}: that is no file; give one, such as patterns.json")
        folder = os.path.dirname(os.path.abspath(self.out))
        if not os.path.isdir(folder):
            raise ValueError(f"--out {self.out}: there is no folder {folder}; make it first")
        if os.path.exists(self.out) and os.path.getsize(self.out):
            _check_replaceable(self.out)


def _check_replaceable(file: str) -> None:
    from locret.prefill_attention.minference import read_patterns

    try:
        read_patterns(file)
    except ValueError:
        raise ValueError(f"--out {file} is there already and holds no patterns; choose another file") from None


def search(source: SourceOptions, options: SearchOptions) -> dict[str, Any]:
    """Search, and write the file.

    Returns:
        A record: the candidates and, but for a dry run, per layer the entries of the file, their mean score, and the
        mean share of dense attention that they compute.

    Raises:
        ValueError: If the text is too short, or the backbone cannot be loaded.
        OSError: If the file cannot be written.
    """
    from locret import loading
    from locret.backbone.adapters import describe
    from locret.base.files import write_text
    from locret.labels.labels import observe
    from locret.prefill_attention.minference import entry
    from locret.prefill_attention.search import CANDIDATES, Found, search_layer

    record: dict[str, Any] = {"model": source.model, "candidates": [entry(one, 0)[:3] for one in CANDIDATES]}
    if options.dry_run:
        return record
    device = loading.device_of_source(source)
    config = loading.load_config(source)
    ids = _read(options, loading.load_tokenizer(source)).to(device)
    model = loading.load_model(source, config, device, loading.resolve_dtype(source.dtype, config, device))
    found: dict[int, list[Found]] = {}

    def on_layer(layer: Any) -> None:
        found[layer.layer_idx] = search_layer(layer, late=options.late, by=options.by, share=options.share)

    observe(model, ids, on_layer)
    layers = [
        {str(head): entry(one.pattern, one.score) for head, one in enumerate(found.get(layer, []))}
        for layer in range(describe(model).num_layers)
    ]
    write_text(options.out, json.dumps(layers, indent=1) + "\n")
    every = list(chain.from_iterable(found.values()))
    mean = {name: sum(getattr(one, name) for one in every) / len(every) for name in ("score", "share")}
    return {
        **record,
        "tokens": ids.shape[1],
        "late": options.late,
        "by": options.by,
        "most_share": options.share,
        **mean,
        "layers": layers,
    }


def _read(options: SearchOptions, tokenizer: Any) -> Tensor:
    """Return the (1, L) first tokens of the text."""
    import torch

    from locret.conversation.text_stream import read_text, token_stream, trimmed

    ids: list[int] = []
    for part in token_stream(tokenizer, trimmed(read_text(options.text, setting="--text "))):
        ids += part
        if len(ids) >= options.tokens:
            break
    if len(ids) <= options.late:
        raise ValueError(
            f"--text {options.text} has {len(ids)} tokens, but only those from --late {options.late} on count; give a "
            "longer text, or lower --late"
        )
    return torch.tensor([ids[: options.tokens]])


def command(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    (source, options), _ = parse_options(
        "locret patterns", "Find the sparse pattern of every head.", [SourceOptions, SearchOptions], argv
    )
    source.refuse_shard("locret patterns")
    record = search(source, options)
    if options.json:
        print_json(record)
        return 0
    if options.dry_run:
        lines = [" ".join(map(str, one)) for one in record["candidates"]]
    else:
        entries = sorted(entry for layer in record["layers"] for entry in layer.values())
        lines = [_kind(kind, list(of)) for kind, of in groupby(entries, lambda entry: str(entry[0]))]
        lines.append(f"mean {options.by} {record['score']:.4f}, computing {record['share']:.1%} of dense attention")
        lines.append(f"wrote {options.out}")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _kind(kind: str, entries: list[Any]) -> str:
    sizes = [f"{min(found)} to {max(found)}" for found in ([one[1] for one in entries], [one[2] for one in entries])]
    return f"{len(entries):>5} heads  {kind}, columns {sizes[0]}, diagonals {sizes[1]}"


def main() -> None:
    """Entry point of `python -m locret.infer.pattern_search`."""
    run(command, prog="locret patterns")


if __name__ == "__main__":
    main()
