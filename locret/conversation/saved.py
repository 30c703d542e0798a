"""Saved contexts, from their files alone: what one is, what it kept, and where it is found.

No backbone is loaded for any of it. What comes from the Hub is a safetensors file, checked as any other; nothing of a
repository is run.
"""

# K KV heads, C kept units

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from torch import Tensor

from locret import hub
from locret.cache.cache_file import SavedCache, described_scorer, read_saved
from locret.cache.layer import HOST
from locret.cache.store import POSITIONS
from locret.conversation.protect import KeptTurn, Protection, kept_turns
from locret.conversation.turns import checked_notes
from locret.engines.prefix import Prefix
from locret.pictures import Retention
from locret.policy.protection import spans_from

_LONGEST = 200
"""Characters of a text that are shown."""


@dataclass(frozen=True)
class SavedContext:
    """A file that `Context.save`, `Chat.save` or `save_cache` wrote, all of it checked."""

    path: Path
    saved: SavedCache
    protection: Protection = Protection()
    """What is protected, and where its turns are."""

    @classmethod
    def open(cls, path: str | Path) -> SavedContext:
        """Read and check a file."""
        saved = read_saved(path)
        notes = saved.notes.get("conversation")
        protection = Protection() if notes is None else checked_notes(notes, path, saved.state["vocab_size"])
        return cls(Path(path), saved, protection)

    @property
    def conversation(self) -> Mapping[str, Any]:
        """What a conversation needs to go on; empty for a cache that was saved on its own."""
        return self.saved.notes.get("conversation", {})  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """What its text was called."""
        return str(self.conversation.get("name", self.path.name))

    @property
    def tokens(self) -> int:
        """Tokens that were read."""
        return int(self.saved.state["seen"])

    @property
    def dtype(self) -> str:
        """The type of its keys and values, or how many bits they have in codes."""
        policy = self.saved.policy
        if not policy.exact_bits:
            return f"{policy.key_bits} and {policy.value_bits} bits"
        first = self.saved.tensors[f"layers.{self.saved.backbone.layers[0]}.keys"]
        return str(first.dtype).removeprefix("torch.")

    def units(self, counter: str = "fill") -> list[int]:
        """Return a counter of each full-attention layer: its units per KV head, a mean where heads differ."""
        return [int(self.saved.state["layers"][index].get(counter, 0)) for index in self.saved.backbone.layers]

    def bytes_of(self, *, host: bool) -> int:
        """Return the bytes of the units of one tier, with what belongs to each."""
        return sum(
            tensor.numel() * tensor.element_size()
            for name, tensor in self.saved.tensors.items()
            if name.startswith("layers.") and name.split(".", 2)[2].startswith(HOST) == host
        )

    def facts(self) -> dict[str, Any]:
        """Return what there is to say about it, as plain data."""
        state, backbone, notes, prefix = self.saved.state, self.saved.backbone, self.conversation, self.prefix
        return {
            "context": str(self.path),
            "name": self.name,
            "tokens": self.tokens,
            "units": self.units(),
            "bytes": self.bytes_of(host=False),
            "host_units": self.units("host_fill"),
            "host_bytes": self.bytes_of(host=True),
            "dtype": self.dtype,
            "positions": self.saved.policy.positions,
            "digest": None if isinstance(prefix, str) else prefix.digest.hex(),
            "no_prefix_because": prefix if isinstance(prefix, str) else None,
            "backbone": {**asdict(backbone), "layers": list(backbone.layers)},
            "weights": state.get("weights"),
            "scorer": state.get("scorer"),
            "policy": self.saved.policy.to_dict(),
            "template": notes.get("template"),
            "system": notes.get("system"),
            "turns": len(notes.get("turns", [])),
            "protect": [str(rule) for rule in self.protection.rules],
            "messages": None if (kept := self.kept_by_message()) is None else [asdict(one) for one in kept],
            "file_bytes": self.path.stat().st_size,
            "format": state.get("format"),
            "written_by": state.get("toolkit_version"),
        }

    def lines(self) -> list[tuple[str, str]]:
        """Return the facts as people read them: what, and how much of it."""
        policy, backbone, facts, prefix = self.saved.policy, self.saved.backbone, self.facts(), self.prefix
        system = "a system message" if facts["system"] else "no system message"
        shapes = {backbone.shape(index): None for index in range(backbone.num_layers)}
        widths = " or ".join(f"{one.num_kv_heads} KV heads, head dim {one.head_dim}" for one in shapes)
        weights = str(facts["weights"]).rpartition(":")[2][:12] if facts["weights"] else "not recorded"
        numbers = ("budget", "chunk_size", "stabilizers", "local_len")
        found = {
            "name": self.name,
            "read": f"{self.tokens:,} tokens, template {facts['template'] or 'none'}, {system}",
            "held": f"{_span(facts['units'])} units per KV head, {facts['bytes']:,} bytes kept, {self.dtype}",
            "second tier": f"{_span(facts['host_units'])} units per KV head, {facts['host_bytes']:,} bytes"
            if any(facts["host_units"])
            else "",
            "said": f"{facts['turns']} turns" if facts["turns"] else "",
            "backbone": f"{backbone.model_type}, {backbone.num_layers} layers of {widths}, weights {weights}",
            "scorer": described_scorer(self.saved.state),
            "policy": ", ".join(f"{name} {int(getattr(policy, name)):,}" for name in numbers),
            "positions": policy.positions,
            "other engines": f"no: {prefix}"
            if isinstance(prefix, str)
            else f"a prefix of {prefix.units:,} tokens, digest {prefix.digest.hex()[:16]}",
            "file": f"{facts['file_bytes']:,} bytes, {facts['format']}, written by locret {facts['written_by']}",
        }
        return [(name, shown_text(text)) for name, text in found.items() if text]

    def kept(self, layer: int) -> list[Tensor]:
        """Return for every KV head of a full-attention layer the (C,) positions in the text that it holds."""
        return kept_heads(self.saved.tensors.__getitem__, layer)

    def kept_by_message(self) -> list[KeptTurn] | None:
        """Return what has stayed of each turn; None where the file does not say where they are."""
        if self.protection.turns is None:
            return None
        rows = spans_from(self.saved.state.get("protected", []))
        return kept_turns(self.retention(), self.protection.turns, rows[0] if rows else ())

    def retention(self) -> Retention:
        """Return what is drawn of it."""
        return Retention({layer: self.kept(layer) for layer in self.saved.backbone.layers}, self.tokens)

    @cached_property
    def prefix(self) -> Prefix | str:
        """What other engines are handed; where the context is no ordinary prefix, the reason."""
        try:
            return Prefix.from_saved(self.saved)
        except ValueError as error:
            return str(error).removeprefix(f"{self.path}: ")


def kept_heads(tensor: Callable[[str], Tensor], layer: int) -> list[Tensor]:
    """Return for every KV head of a layer of a file's first row, by its tensors, the positions that it holds."""
    positions = tensor(f"layers.{layer}.{POSITIONS}").long()
    if positions.dim() == 1:  # head after head, row after row
        counts = tensor(f"layers.{layer}.counts")[0].tolist()
        return list(positions[: sum(counts)].split(counts))
    return [head[head >= 0] for head in positions[0]]


def shown_text(text: str) -> str:
    """Return a text of a file for a terminal or a page: on one line, without control characters, not too long."""
    line = text if text.isprintable() else ascii(text)[1:-1]
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


def _span(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


FILE = "context.safetensors"
_LACKS = f"has no {FILE}, so it does not hold a context; give a repository to which one was uploaded by that name"


def find_context(name: str | Path, *, revision: str | None = None) -> Path:
    """Return the file of a context: the one named, or a download of the repository named, not checked yet."""
    path, text = Path(name), str(name)
    if not path.exists() and hub.REPOSITORY.fullmatch(text) and not path.parent.exists():
        with hub.one_sentence("load", text, what="file", lacks=_LACKS):
            return Path(hf_hub_download(text, FILE, revision=revision))
    if revision is not None:
        raise ValueError(f"revision={revision!r} is of a repository on the Hub, but {text} is a file; leave it out")
    return path
