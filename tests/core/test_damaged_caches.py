"""Saved caches that are damaged, forged, or of other weights or another scorer are refused in one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import mutations
import pytest
import torch
from families import FAMILIES, build
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache, scorers
from locret.cache.schema import checksum

POLICY = {"budget": 16, "chunk_size": 12, "stabilizers": 4, "local_len": 4}
SCORERS = {"dense": "key_norm", "ragged": "key_norm", "sliding": "random", "tokens": "sirllm", "tiers": "key_norm"}
FORMS = sorted(SCORERS)


def read(form: str, model: torch.nn.Module, rows: int = 2) -> RetentionCache:
    """Return a cache of two rows of different lengths."""
    more: dict[str, Any] = {"head_budgets": "adaptive"} if form == "ragged" else {}
    if form == "tiers":
        more |= {"host_budget": 9, "recall": 3}
    if form == "tokens":
        more["positions"] = "original"
    cache = RetentionCache(model, SCORERS[form], RetentionPolicy(**POLICY, **more))
    ids = torch.randint(3, 199, (rows, 45), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:, :11] = 0
    prefill(model, ids, cache, attention_mask=mask)
    return cache


def family(form: str) -> str:
    return "gemma3" if form == "sliding" else "llama"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Return a model and a saved cache of every form."""
    folder, found = tmp_path_factory.mktemp("caches"), {}
    for form in FORMS:
        model = build(family(form))
        save_cache(read(form, model), folder / f"{form}.ctx", notes={"text": "a"})
        found[form] = (model, folder / f"{form}.ctx")
    return found


def content(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def resealed(metadata: dict[str, str], tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return metadata with a checksum that is right, as a forger would write it."""
    return {**metadata, "checksum": checksum(metadata["state"], tensors)}


@pytest.mark.filterwarnings("ignore:whether")
@pytest.mark.parametrize("sealed", [True, False])
@given(data=st.data())
def test_no_damage_is_answered_from(saved: dict[str, tuple[Any, Path]], sealed: bool, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMS))
    model, path = saved[form]
    metadata, tensors = content(path)
    kind = data.draw(st.sampled_from(("state", "tensors", "bytes")))
    damaged = path.with_suffix(".damaged")
    if kind == "state":
        metadata["state"] = json.dumps(mutations.values_of(data.draw, json.loads(metadata["state"])))
    elif kind == "tensors":
        tensors = mutations.tensors_of(data.draw, tensors)
    if sealed and kind != "bytes":
        metadata = resealed(metadata, tensors)
    raw = save(tensors, metadata)
    damaged.write_bytes(mutations.bytes_of(data.draw, raw) if kind == "bytes" else raw)
    cache = mutations.loaded_or_refused(lambda: load_cache(damaged, model, SCORERS[form]))
    # What was changed says nothing about the units, or it was sealed again and could be another cache.
    if cache is not None:
        mutations.loaded_or_refused(lambda: generate(model, cache=cache, max_new_tokens=2, eos_token_id=None))


@given(data=st.data())
def test_a_changed_value_never_passes_unnoticed(saved: dict[str, tuple[Any, Path]], data: st.DataObject) -> None:
    model, path = saved["dense"]
    metadata, tensors = content(path)
    name = data.draw(st.sampled_from(sorted(tensors)))
    flat = tensors[name].flatten()
    at = data.draw(st.integers(0, len(flat) - 1))
    flat[at] = flat[at] + 1
    save_file({**tensors, name: flat.reshape(tensors[name].shape)}, path.with_suffix(".changed"), metadata=metadata)
    with pytest.raises(ValueError, match="it is damaged"):
        load_cache(path.with_suffix(".changed"), model, "key_norm")


# -- weights and scorer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "name", "dtype", "spelt"),
    [
        ("tiers", "layers.1.host.scores", torch.float64, "F64 instead of .* of F32"),
        ("ragged", "layers.0.positions", torch.int64, "I64 instead of .* of I32"),
        ("dense", "layers.2.keys", torch.int8, "I8 instead of .* of F64 or F32 or BF16 or F16"),
    ],
)
def test_a_tensor_of_another_type_is_refused(
    saved: dict[str, tuple[Any, Path]], tmp_path: Path, form: str, name: str, dtype: torch.dtype, spelt: str
) -> None:
    model, path = saved[form]
    metadata, tensors = content(path)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, tmp_path / "forged", metadata=resealed(metadata, tensors))
    with pytest.raises(ValueError, match=rf"it is damaged \({name} is \[.*\] of {spelt}"):
        load_cache(tmp_path / "forged", model, SCORERS[form])


def test_other_weights_are_refused_and_both_sides_are_shown(tmp_path: Path) -> None:
    model = build("llama")
    save_cache(read("dense", model), tmp_path / "a.ctx")
    with pytest.raises(
        ValueError, match=r"other weights .*fingerprint '\w{12}' in the file, '\w{12}' in the model"
    ) as said:
        load_cache(tmp_path / "a.ctx", build("llama", seed=5), "key_norm")
    assert "\n" not in str(said.value)
    load_cache(tmp_path / "a.ctx", build("llama"), "key_norm")
    load_cache(tmp_path / "a.ctx", build("llama").bfloat16(), "key_norm")


def test_weights_in_float16_are_compared_with_each_other_only(tmp_path: Path) -> None:
    save_cache(read("dense", build("llama").half()), tmp_path / "a.ctx")
    load_cache(tmp_path / "a.ctx", build("llama").half(), "key_norm")
    with pytest.raises(ValueError, match="other weights"):
        load_cache(tmp_path / "a.ctx", build("llama", seed=5).half(), "key_norm")
    with pytest.warns(UserWarning, match="these are held in another form"):
        load_cache(tmp_path / "a.ctx", build("llama"), "key_norm")


def test_another_scorer_is_refused_unless_allowed(tmp_path: Path) -> None:
    model = build("llama")
    cache = RetentionCache(model, scorers.get("snapkv", window=8), RetentionPolicy(**POLICY))
    prefill(model, torch.arange(40)[None] + 3, cache)
    save_cache(cache, tmp_path / "a.ctx")
    path = tmp_path / "a.ctx"
    load_cache(path, model, scorers.get("snapkv", window=8))
    with pytest.raises(ValueError, match=r"with the scorer snapkv \(window=8.*here it is snapkv \(window=4"):
        load_cache(path, model, scorers.get("snapkv", window=4))
    with pytest.raises(ValueError, match=r"here it is key_norm.*allow_other_scorer=True"):
        load_cache(path, model, "key_norm")
    other = load_cache(path, model, "key_norm", allow_other_scorer=True)
    assert torch.equal(other.kept_positions(0), cache.kept_positions(0))
    prefill(model, torch.arange(40)[None] + 3, other)


def test_other_heads_are_another_scorer(tmp_path: Path) -> None:
    model = build("llama")
    heads, others = (RetainingHeads.for_model(model, hidden_dim=8, seed=seed) for seed in (0, 1))
    cache = RetentionCache(model, heads, RetentionPolicy(**POLICY))
    prefill(model, torch.arange(40)[None] + 3, cache)
    save_cache(cache, tmp_path / "a.ctx")
    heads.save_pretrained(tmp_path / "heads")
    load_cache(tmp_path / "a.ctx", model, RetainingHeads.from_pretrained(tmp_path / "heads"))
    with pytest.raises(
        ValueError, match=r"retaining_heads \(weights=\w+\), here it is retaining_heads \(weights=\w+\)"
    ):
        load_cache(tmp_path / "a.ctx", model, others)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_read_back(name: str, tmp_path: Path) -> None:
    model = build(name)
    for head_budgets in ("uniform", "adaptive"):
        policy = RetentionPolicy(**POLICY, head_budgets=head_budgets)
        cache = RetentionCache(model, "key_norm", policy)
        prefill(model, torch.arange(70).reshape(1, 70) + 3, cache)
        generate(model, cache=cache, max_new_tokens=3, eos_token_id=None)
        cache.take_back()
        save_cache(cache, tmp_path / "a.ctx")
        loaded = load_cache(tmp_path / "a.ctx", model, "key_norm")
        more = torch.arange(30)[None] + 9
        assert torch.equal(prefill(model, more, loaded), prefill(model, more, cache))


# -- paths ------------------------------------------------------------------------------------------------------------


def test_the_mode_is_the_umasks_and_a_file_that_is_there_keeps_its_own(tmp_path: Path) -> None:
    model = build("llama")
    old = os.umask(0o027)
    try:
        save_cache(read("dense", model), tmp_path / "a.ctx")
        assert (tmp_path / "a.ctx").stat().st_mode & 0o777 == 0o640
        (tmp_path / "a.ctx").chmod(0o600)
        save_cache(read("dense", model), tmp_path / "a.ctx")
        assert (tmp_path / "a.ctx").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(old)


def test_links_are_written_through_and_devices_stay(tmp_path: Path) -> None:
    cache = read("dense", build("llama"))
    save_cache(read("dense", build("llama")), tmp_path / "real.ctx")
    (tmp_path / "link.ctx").symlink_to("real.ctx")
    save_cache(cache, tmp_path / "link.ctx")
    assert (tmp_path / "link.ctx").is_symlink()
    load_cache(tmp_path / "real.ctx", cache.model, "key_norm")
    os.mkfifo(tmp_path / "pipe")
    for target in (Path("/dev/null"), tmp_path / "pipe"):
        with pytest.raises(OSError, match="it is a device or a pipe"):
            save_cache(cache, target)
    assert Path("/dev/null").is_char_device()
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.ctx", "pipe", "real.ctx"]


def test_a_missing_folder_and_a_folder_in_the_way_are_named(tmp_path: Path) -> None:
    cache = read("dense", build("llama"))
    with pytest.raises(OSError, match=r"cannot write .*a.ctx: there is no folder .*missing; make it"):
        save_cache(cache, tmp_path / "missing" / "a.ctx")
    with pytest.raises(OSError, match="it is a folder"):
        save_cache(cache, tmp_path)
    assert not list(tmp_path.iterdir())
    for path, said in ((tmp_path / "none.ctx", "does not exist"), (tmp_path, "is not a file")):
        with pytest.raises(ValueError, match=said):
            load_cache(path, cache.model, "key_norm")
