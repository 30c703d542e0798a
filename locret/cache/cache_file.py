"""A compressed context on disk: one safetensors file with the kept units and the counters that go with them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, contiguous_format, nn

from locret._version import __version__
from locret.backbone.adapters import sharers_of, unwrap
from locret.backbone.rotary import different_rotation, rotary_from, rotary_parameters
from locret.backbone.shape import Backbone, LayerShape
from locret.base.fields import checked_values, shown
from locret.base.files import written_whole
from locret.base.warned import warn_user
from locret.cache.cache import RetentionCache
from locret.cache.export import check_one_row, check_prefix, positions_now, turned_back
from locret.cache.layer import HOST
from locret.cache.quantised import QuantisedStore
from locret.cache.rounding import forms_of
from locret.cache.row_algebra import load_state, saved_state, state_of
from locret.cache.schema import DTYPES, check_counts, check_units, checksum
from locret.cache.store import POSITIONS, DenseStore, Workspace
from locret.heads.fingerprint import any_fingerprint, computation, different_computation, other_weights
from locret.heads.heads import RetainingHeads
from locret.policy.policy import RetentionPolicy
from locret.scorers import Scorer

FORMAT = "locret-cache-1"
CONTEXT_WRITERS = "context.save, chat.save or locret-context read"
_ODD = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, SafetensorError)
"""What reading a header raises that says something else than ours do."""


_RETIRED_OPTIONS: dict[str, dict[str, Any]] = {
    "nacl": {"group": "sum", "proxy_mask": "causal", "sampling": "attention", "draws": "by_head"},
    "sirllm": {"definition": "paper"},
    "h2o": {"normalise": False},
    "expected_attention": {"covariance": True, "value_norm": True, "epsilon": 0.0},
}
"""Options of scorers that files of earlier versions have, and the values that rated as scorers do now."""


def save_cache(cache: RetentionCache, path: str | Path, *, notes: Mapping[str, Any] | None = None) -> None:
    """Write what a cache holds to one file, so that the same context can be asked again later.

    Args:
        cache: A cache that has read something.
        path: File to write; an existing one is replaced once the new one is complete.
        notes: Whatever else the caller wants to find again with `read_notes`: plain JSON values by name.

    Raises:
        ValueError: If the cache is empty, a read of it was interrupted, the notes are no JSON values, or the path is a
            file that is not a saved cache.
        OSError: If the file cannot be written; nothing half-written stays.

    Examples:
        >>> cache = RetentionCache(model, scorer=heads, policy=policy)
        >>> logits = prefill(model, ids, cache)
        >>> save_cache(cache, "book.safetensors")
    """
    cache.check_whole()
    if not cache.seen:
        raise ValueError(f"{path}: the cache has read nothing yet; call locret.prefill before saving it")
    check_savable(cache.policy, path)
    check_replaceable(path)
    kept = _notes(notes or {})
    tensors, numbers, still = *saved_state(cache), cache.rotary.still
    tensors = state_of(tensors, cache.ranks, whole=True)
    state = {
        "format": FORMAT,
        "toolkit_version": __version__,
        "backbone": cache.whole.record(),
        "policy": cache.policy.to_dict(),
        "following": cache.policy.following(),
        "weights": any_fingerprint(cache.model),
        "computation": cache.computation or computation(cache.model),
        "vocab_size": unwrap(cache.model).config.get_text_config().vocab_size,
        "rotary": rotary_parameters(cache.decoder) | ({"still": sorted(still)} if still else {}),
        "scorer": _identity(cache),
        "columns": {name: DTYPES.get(dtype, str(dtype)) for name, dtype in cache.scorer.columns.items()},
        **numbers,
    }
    text, units = json.dumps(state), {name: tensor.cpu() for name, tensor in tensors.items()}
    metadata = {"state": text, "notes": kept, "checksum": checksum(text, units)}

    def write() -> None:
        with written_whole(path) as fresh:
            save_file(units, fresh, metadata=metadata)

    if (sharers := sharers_of(cache.model)) is None:
        write()
    else:
        sharers.in_first(write)


def check_savable(policy: RetentionPolicy, path: str | Path) -> None:
    """Refuse to save what a file has no place for, known before anything is read."""
    if policy.recalls_blocks:
        raise ValueError(
            f"{path}: a file has no place for the blocks that recall_by={policy.recall_by} holds; keep the cache, or "
            "take another recall_by"
        )


def check_replaceable(path: str | Path) -> None:
    """Refuse to write a cache over a file that is something else, such as the text that was read."""
    if Path(path).is_file() and Path(path).stat().st_size:
        try:
            _header(path)
        except ValueError:
            raise ValueError(
                f"{path} is there already and is not a saved cache; choose another file, or remove it first"
            ) from None


def _notes(notes: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(dict(notes), allow_nan=False)
        if json.loads(text) != notes:
            raise ValueError("they would come back changed; give lists instead of tuples, and texts as names")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"notes cannot be saved ({error}); give numbers, texts, lists and mappings") from error
    return text


def read_notes(path: str | Path, writer: str = "save_cache") -> dict[str, Any]:
    """Return the notes that `save_cache` was given, without reading the units; empty if there were none.

    Args:
        path: The file.
        writer: What writes such files, for messages.

    Raises:
        ValueError: If the file is not a saved cache.
    """
    return _header(path, writer)[1]


def read_scorer(path: str | Path, writer: str = "save_cache") -> str:
    """Return what rated the units of a saved cache, as messages name it; arguments as for `read_notes`."""
    return described_scorer(_header(path, writer)[0])


def load_cache(
    path: str | Path, model: nn.Module, scorer: RetainingHeads | Scorer | str, *, allow_other_scorer: bool = False
) -> RetentionCache:
    """Read a cache back, ready for `generate` or for more text.

    Everything in the file is checked before it is used: what it was made with, shapes and types, then a checksum.

    Args:
        path: File written by `save_cache`.
        model: The backbone it was made with, with the same weights.
        scorer: Scores the units of further tokens; the one it was made with.
        allow_other_scorer: Accept another scorer, or other options of it: what was kept stays, with its scores, and
            only further tokens are scored in the other way.

    Raises:
        ValueError: If there is no such file, it is not a cache, is damaged, or belongs to another backbone, other
            weights or another scorer; the message shows both sides.
        OSError: If the file cannot be read.

    Warns:
        UserWarning: If the file, or this backbone, does not tell which weights or which scorer it has.

    Examples:
        >>> cache = RetentionCache(model, scorer=heads, policy=policy)
        >>> logits = prefill(model, ids, cache)
        >>> save_cache(cache, "book.safetensors")
        >>> cache = load_cache("book.safetensors", model, heads)
        >>> answer = generate(model, cache=cache, max_new_tokens=16)
        >>> tokenizer.decode(answer[0], skip_special_tokens=True)
        'The pass key is 71432.'
    """
    state, _ = _header(path)
    with _named(path, state):
        cache = _empty(state, model, scorer, allow_other_scorer)
        ours = {name: DTYPES.get(dtype, str(dtype)) for name, dtype in cache.scorer.columns.items()}
        columns = state.get("columns", ours)
        if lost := ours.keys() - columns.keys():
            raise ValueError(f'its units lack the column "{min(lost)}" that the scorer {cache.scorer.name} needs')
        units = _checked_units(path, state, cache.whole, cache.policy, columns)
        load_state(cache, state_of(units, cache.ranks, whole=False), state)
    return cache


@contextmanager
def _named(path: str | Path, state: Mapping[str, Any]) -> Iterator[None]:
    """Let errors say in which file it is, and which version wrote it, if that is another."""
    version = state.get("toolkit_version", __version__)
    here = f"{path}" + ("" if version == __version__ else f" (of locret {shown(version)}, here it is {__version__!r})")
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{here}: {error}") from error
    except _ODD as error:
        raise ValueError(f"{here}: it is damaged ({error!r}); copy it again, or save the cache again") from error


def check_header(path: str | Path, model: nn.Module, scorer: RetainingHeads | Scorer | str) -> dict[str, Any]:
    """Return the counters and settings of a saved cache, without reading its units; arguments as for `load_cache`."""
    state, _ = _header(path)
    with _named(path, state):
        _empty(state, model, scorer, False)
    return state


def _empty(
    state: Mapping[str, Any], model: nn.Module, scorer: RetainingHeads | Scorer | str, allow_other_scorer: bool
) -> RetentionCache:
    """Return an empty cache for what a file holds, which fits its backbone and scorer."""
    cache = RetentionCache(model, scorer, policy_in(state))
    _check_backbone(state, cache)
    _check_scorer(state, cache, allow_other_scorer)
    return cache


def policy_in(state: Mapping[str, Any]) -> RetentionPolicy:
    """Return the policy by which what a file holds was read."""
    # Files of earlier versions do not say what nobody gave. Stabilizers that were given left room for what is protected
    # when the text was read, and are none the worse for being held against it no more.
    return RetentionPolicy.from_dict(state.get("policy"), "policy", state.get("following", ["stabilizers"]))


def _check_backbone(state: Mapping[str, Any], cache: RetentionCache) -> None:
    """Refuse another backbone; files of earlier versions do not say all of it."""
    here = json.loads(json.dumps(cache.whole.record()))
    saved = {"kinds": here["kinds"], **state["backbone"]}
    different = [
        f"{key} {shown(saved.get(key))} in the file, {shown(here.get(key))} in the model"
        for key in here | saved
        if saved.get(key) != here.get(key)
    ]
    if different:
        raise ValueError(f"it was made with another backbone ({'; '.join(different)}); load that backbone")
    if found := different_rotation(state.get("rotary", {}), rotary_parameters(cache.decoder)):
        raise ValueError(f"its keys were rotated in another way ({found}); load the backbone with that configuration")
    cache.computation = computation(cache.model)
    if found := different_computation(state.get("computation", {}), cache.computation):
        raise ValueError(
            f"it was made by a model that computes something else ({found}); load that one, with its adapter, or read "
            "the text again"
        )
    ours, theirs = any_fingerprint(cache.model), state.get("weights")
    if (other := other_weights(ours, theirs)) is None:
        then, now = (str(one or "unknown:").rpartition(":")[0] or "bfloat16 or wider" for one in (theirs, ours))
        why = f"{then} then, {now} now; load them as then to know" if theirs else "the file does not record them"
        warn_user(
            f"whether {cache.backbone.model_type} has the weights that this cache was made with is unknown ({why}); "
            "with other weights its answers mean nothing"
        )
    elif other:
        then, now = (str(one).rpartition(":")[2][:12] for one in (theirs, ours))
        raise ValueError(
            f"it was made with other weights of this backbone (fingerprint {then!r} in the file, {now!r} in the "
            "model), and its keys and values mean nothing to these; load those weights, or read the text again"
        )


def _check_scorer(state: Mapping[str, Any], cache: RetentionCache, allow_other: bool) -> None:
    saved, here = _recorded_scorer(state), _identity(cache)
    options = {**here["options"], **saved.get("options", {})}  # one that is newer than the file had its default
    if (saved["name"], options) != (here["name"], here["options"]) and not allow_other:
        raise ValueError(
            f"it was made with the scorer {_described(saved)}, here it is {_described(here)}; give that scorer "
            "or those heads (--heads FOLDER), or only ask it, with allow_other_scorer=True (locret-context ask "
            "--allow-other-scorer)"
        )


def _recorded_scorer(state: Mapping[str, Any]) -> dict[str, Any]:
    saved = state["scorer"]
    if isinstance(saved, str):  # files of earlier versions have the name alone
        return {"name": saved}
    usual, options = _RETIRED_OPTIONS.get(saved["name"], {}), saved.get("options", {})
    return {**saved, "options": {name: one for name, one in options.items() if name not in usual or one != usual[name]}}


def _identity(cache: RetentionCache) -> dict[str, Any]:
    options = cache.scorer.identity(cache.prepared)
    return {"name": cache.scorer.name, "options": _finite_json(json.dumps(options, default=str))}


def _described(scorer: Mapping[str, Any]) -> str:
    # Twelve characters tell fingerprints apart.
    given = [
        f"{name}={value[:12] if isinstance(value, str) else shown(value)}"
        for name, value in list(scorer.get("options", {}).items())[:6]
    ]
    name = f"{scorer['name'][:40]} ({', '.join(given)})" if given else scorer["name"][:40]
    return name if name.isprintable() else ascii(name)


def _checked_units(
    path: str | Path, state: Mapping[str, Any], backbone: Backbone, policy: RetentionPolicy, columns: Mapping[str, str]
) -> dict[str, Tensor]:
    """Read the tensors: whether they are those that were written, then whether they are of this version's form."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        if "checksum" in metadata and checksum(metadata["state"], tensors) != metadata["checksum"]:
            raise ValueError("its checksum is another")
    except _ODD as error:
        raise ValueError(f"it is damaged ({error}); copy it again, or save the cache again") from error
    try:
        shapes = {name: (tuple(one.shape), DTYPES.get(one.dtype, str(one.dtype))) for name, one in tensors.items()}
        check_units(shapes, state, backbone, policy, columns)
        check_counts(tensors, state, backbone, policy.spacing)
    except _ODD as error:
        why = f"its units are not as locret {__version__} writes them ({error})"
        raise ValueError(f"{why}; load it with the code that wrote it, or read the text again") from error
    # Earlier versions remembered more of what was read.
    return {name: tensor for name, tensor in tensors.items() if not name.endswith((".ledger", ".newest_features"))}


@dataclass(frozen=True)
class SavedCache:
    """What a saved cache holds, checked as when it is loaded; nothing can be asked of it without its backbone."""

    path: str | Path
    state: dict[str, Any]
    notes: dict[str, Any]
    backbone: Backbone
    policy: RetentionPolicy
    tensors: dict[str, Tensor]
    """As in the file."""

    def prefix(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return its units as an ordinary prefix.

        Returns:
            Keys and values of each layer, (units, KV heads, head dim), keys rotated to 0, 1, ...
        """
        state, policy, backbone = self.state, self.policy, self.backbone
        with _named(self.path, state):
            check_prefix(policy, backbone, {counters["fill"] for counters in state["layers"]}, state["rotary"])
            check_one_row(len(self.tensors["layers.0.keys"]))
            units = [_prefix_of(nth, self.tensors, state, policy, backbone) for nth in range(backbone.num_layers)]
        # Of a single KV head `contiguous` would copy nothing, and the file may be replaced while its units are read.
        parts = (tuple(states[nth][0].transpose(0, 1) for states in units) for nth in range(2))
        keys, values = (tuple(one.clone(memory_format=contiguous_format) for one in part) for part in parts)
        return keys, values


def read_saved(path: str | Path) -> SavedCache:
    """Read all of a saved cache, and check it, without its backbone."""
    state, notes = _header(path, CONTEXT_WRITERS)
    with _named(path, state):
        if any(state.get(name) is None for name in ("vocab_size", "columns", "rotary", "backbone")):
            raise ValueError("it was written by an earlier version; load it with its backbone, and save it once more")
        policy, backbone = policy_in(state), _saved_backbone(state)
        tensors = _checked_units(path, state, backbone, policy, state["columns"])
    return SavedCache(path, state, notes, backbone, policy, tensors)


def _prefix_of(
    nth: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], policy: RetentionPolicy, backbone: Backbone
) -> tuple[Tensor, Tensor]:
    """Return (1, K, U, D) keys, rotated to 0, 1, ..., and values of a layer that has been checked."""
    counters, base, prefix = state["layers"][nth], state["next_position"], f"layers.{nth}."
    held = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    form, others = forms_of(policy, backbone.num_layers)[nth], held.get(HOST + POSITIONS)
    if form is None and counters["rotated"] and counters["fill"] == base and others is None:
        return held["keys"], held["values"]
    try:
        rotary = rotary_from(state["rotary"], backbone.shape(nth).head_dim, backbone.max_positions)
    except ValueError as error:
        raise ValueError(
            f"its units are not at positions 0, 1, ..., or in codes, and {error}; load it with its backbone and take "
            "Prefix.of(context), or save it with context.shrink(budget) first"
        ) from error
    known = {spelt: dtype for dtype, spelt in DTYPES.items()}
    columns = {name: known[spelt] for name, spelt in state["columns"].items()}
    store = DenseStore(rotary, Workspace(), columns)
    if form is not None:
        store = QuantisedStore(rotary, Workspace(), columns, form=form)
    store.load({name: tensor for name, tensor in held.items() if not name.startswith(HOST)}, counters["fill"])
    if not counters["rotated"]:
        store.turn_keys(base)
    view = store.view(base)
    return turned_back(view.keys, rotary, positions_now(held[POSITIONS], others, base)), view.values.clone()


def _saved_backbone(state: Mapping[str, Any]) -> Backbone:
    values = dict(state["backbone"])
    shapes = [LayerShape(**checked_values(LayerShape, one, "backbone.shapes")) for one in values.pop("shapes", ())]
    lists: dict[str, Any] = {
        name: tuple(values.pop(name, ())) for name in ("layers", "kinds", "sources", "state_numbers") if name in values
    }
    return Backbone(**checked_values(Backbone, values, "backbone"), **lists, shapes=tuple(shapes))


def _header(path: str | Path, writer: str = "save_cache") -> tuple[dict[str, Any], dict[str, Any]]:
    if not Path(path).is_file():
        what = "is not a file" if Path(path).exists() else "does not exist"
        raise ValueError(f"{path} {what}; give a file written by {writer}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        state, notes = (dict(_finite_json(metadata.get(name, "{}"))) for name in ("state", "notes"))
        form, version = state["format"], state.get("toolkit_version")
    except _ODD as error:
        raise ValueError(f"{path} is not a saved cache ({error}); give a file written by {writer}") from error
    if form != FORMAT:
        says = f"has format {shown(form)} of locret {shown(version)} instead of {FORMAT!r} of locret {__version__!r}"
        raise ValueError(f"{path} {says}; load it with that version, or read the text again")
    return state, notes


def _finite_json(text: str) -> Any:
    """Return what JSON says; NaN and what is too large for a number stay texts, which no check takes for numbers."""

    def number(digits: str) -> float | str:
        return float(digits) if math.isfinite(float(digits)) else digits

    return json.loads(text, parse_constant=str, parse_float=number)


def described_scorer(state: Mapping[str, Any]) -> str:
    """Return the scorer of a saved cache as messages name it."""
    return _described(_recorded_scorer(state))
