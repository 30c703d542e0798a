"""Files that are damaged or of something else: each loader takes them or refuses them in one sentence.

One mutator changes bytes, JSON values, or tensors of every kind of file that is read. What still loads has to work, or
to say why not.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

import mutations
import pytest
import torch
from families import build, padded, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from locret import (
    LongContextModel,
    RetainingHeads,
    RetentionCache,
    RetentionPolicy,
    compose,
    generate,
    load_cache,
    loading,
    prefill,
    read_notes,
    save_cache,
    scorers,
)
from locret.cache.schema import checksum
from locret.engines.prefix import Prefix
from locret.loading.options import BackboneSource

NUMBERS: dict[str, Any] = {"budget": 16, "chunk_size": 12, "stabilizers": 4, "local_len": 4}
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "ragged": {"head_budgets": "adaptive"},
    "sliding": {},
    "tiers": {"host_budget": 9, "recall": 3, "positions": "original"},
    "tier of uneven heads": {"host_budget": 9, "recall": 3, "head_budgets": "shares", "head_shares": (0.5, 1.5) * 3},
    "codes": {"key_bits": 4, "value_bits": 8, "exact_recent": 4},
}
TEXT = "The grass is green. " * 8 + "The pass key is 71432. Remember it. " + "The sky is blue. " * 8


@once
def model_of(form: str) -> Any:
    return build("gemma3" if form == "sliding" else "llama")


def read(form: str, rows: int = 2) -> RetentionCache:
    cache = RetentionCache(model_of(form), "key_norm", RetentionPolicy(**NUMBERS, **FORMS[form]))
    ids, mask = padded([prompt(45), prompt(34, seed=1)][:rows])
    prefill(cache.model, ids, cache, attention_mask=mask)
    return cache


@once
def lm() -> LongContextModel:
    pair = {"model": "checkpoints/tiny", "heads": "checkpoints/tiny-heads"}
    policy = RetentionPolicy(budget=32, chunk_size=64, stabilizers=8, local_len=8)
    return LongContextModel.from_pretrained(**pair, policy=policy, device="cpu", dtype="float32")


@dataclass(frozen=True)
class Kind:
    """A file, or a folder of files."""

    write: Callable[[Path], object]
    load: Callable[[Path], Any]
    use: Callable[[Any], object]
    """What is done with what was loaded, which may be refused in a sentence too."""


def of_cache(form: str) -> Kind:
    return Kind(
        lambda path: save_cache(read(form), path, notes={"text": "a"}),
        lambda path: load_cache(path, model_of(form), "key_norm"),
        lambda cache: generate(cache.model, cache=cache, max_new_tokens=2, eos_token_id=None),
    )


def check_prefix(prefix: Prefix) -> None:
    assert len(prefix.placeholders) == prefix.units > 0
    for keys, values in zip(prefix.keys, prefix.values, strict=True):
        assert keys.shape == values.shape == prefix.keys[0].shape
        assert bool(keys.isfinite().all() & values.isfinite().all())


def write_heads(folder: Path) -> None:
    heads = RetainingHeads.for_model(model_of("dense"), hidden_dim=4, seed=0)
    label, policy = {"kind": "logit", "include_last_prompt_token": False}, {"budget": 64, "stabilizers": 4}
    heads.annotate(label=label, policy=policy, training={"steps": 3, "earlier": {"steps": 2}}, evaluation={"a": 5.0})
    heads.save_pretrained(folder)


def use_heads(heads: RetainingHeads) -> None:
    assert heads.generate_model_card()
    heads.check_matches(model_of("dense"))
    RetentionPolicy.from_dict(heads.config.policy or {}, "policy")


def official() -> dict[str, Tensor]:
    heads = RetainingHeads.for_model(model_of("dense"), hidden_dim=4, seed=0)
    names = {layer: f"model.layers.{layer}.self_attn" for layer in heads}
    return {f"{names[n]}.{fc}.weight": getattr(heads[n], fc).weight.detach() for n in heads for fc in ("fc1", "fc2")}


def write_official(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(save(official()))
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(official(), "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_backbone(folder: Path) -> None:
    build("llama", num_hidden_layers=1, layer_types=["full_attention"]).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path("checkpoints/tiny") / name, folder)


def load_backbone(folder: Path) -> Any:
    source = BackboneSource(model=str(folder))
    loading.load_tokenizer(source)
    return loading.load_model(source, loading.load_config(source), torch.device("cpu"), torch.float32)


KINDS: dict[str, Kind] = {
    **{f"cache, {form}": of_cache(form) for form in FORMS},
    "prefix": Kind(lambda path: save_cache(read("codes", rows=1), path), Prefix.from_file, check_prefix),
    "context": Kind(
        lambda path: lm().read(TEXT).save(path),
        lambda path: lm().load(path),
        lambda context: context.ask("Who?", max_new_tokens=2),
    ),
    "heads": Kind(write_heads, RetainingHeads.from_pretrained, use_heads),
    "official heads": Kind(
        write_official,
        lambda folder: RetainingHeads.from_official(folder, model_of("dense").config),
        lambda heads: heads.check_matches(model_of("dense")),
    ),
    "backbone": Kind(write_backbone, load_backbone, lambda model: model(torch.arange(3, 9)[None])),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a whole file, or folder, of every kind."""
    folder = tmp_path_factory.mktemp("whole")
    for name, kind in KINDS.items():
        kind.write(folder / name)
    return {name: folder / name for name in KINDS}


def content(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def damaged(draw: st.DrawFn, file: Path) -> bytes:
    """Return the content of a file with something changed."""
    if file.suffix == ".json":
        return mutations.json_text_of(draw, json.loads(file.read_text()))
    if file.suffix == ".md" or draw(st.sampled_from((True, False, False, False))):
        return mutations.bytes_of(draw, file.read_bytes())
    metadata, tensors = content(file)
    plain = sorted(metadata.keys() & {"state", "notes"})
    if plain and draw(st.booleans()):
        name = draw(st.sampled_from(plain))
        metadata[name] = json.dumps(mutations.values_of(draw, json.loads(metadata[name])))
    else:
        tensors = mutations.tensors_of(draw, tensors)
    return save(tensors, metadata)


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data())
def test_no_damage_is_worked_with_or_said_in_more_than_a_sentence(saved: dict[str, Path], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(KINDS)))
    kind, whole = KINDS[name], saved[name]
    copy = whole.with_name("damaged")
    if whole.is_dir():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        file = copy / data.draw(st.sampled_from(sorted(one.name for one in whole.iterdir())))
        file.write_bytes(damaged(data.draw, file))
    else:
        copy = whole.with_name("damaged file")
        copy.write_bytes(damaged(data.draw, whole))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = mutations.loaded_or_refused(lambda: kind.load(copy))
        if loaded is not None:
            mutations.loaded_or_refused(lambda: (kind.use(loaded), True))


def test_every_kind_of_file_is_read_back_whole(saved: dict[str, Path]) -> None:
    for name, kind in KINDS.items():
        kind.use(kind.load(saved[name]))


# -- what must not pass -----------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(data=st.data())
def test_a_changed_number_never_passes_unnoticed(saved: dict[str, Path], data: st.DataObject) -> None:
    metadata, tensors = content(saved["cache, dense"])
    name = data.draw(st.sampled_from(sorted(tensors)))
    flat = tensors[name].flatten()
    at = data.draw(st.integers(0, len(flat) - 1))
    flat[at] = flat[at] + 1
    file = saved["cache, dense"].with_name("changed")
    file.write_bytes(save({**tensors, name: flat.reshape(tensors[name].shape)}, metadata))
    with pytest.raises(ValueError, match="it is damaged"):
        KINDS["cache, dense"].load(file)


def test_other_types_and_shapes_are_refused_by_what_is_wrong_with_them(saved: dict[str, Path], tmp_path: Path) -> None:
    for form, name, changed, spelt in (
        ("tiers", "layers.1.host.scores", torch.Tensor.double, "F64 instead of .* of F32"),
        ("dense", "layers.2.keys", torch.Tensor.char, "I8 instead of .* of F64 or F32 or BF16 or F16"),
        ("codes", "layers.2.keys", torch.Tensor.float, "F32 instead of .* of U8"),
        ("dense", "layers.0.keys", lambda keys: keys[..., :7].clone(), r"F32 instead of \[2, 2, 20, 8\]"),
    ):
        metadata, tensors = content(saved[f"cache, {form}"])
        tensors[name] = changed(tensors[name])
        metadata["checksum"] = checksum(metadata["state"], tensors)
        (tmp_path / "other").write_bytes(save(tensors, metadata))
        with pytest.raises(ValueError, match=rf"its units are not as .* \({name} is \[.*\] of {spelt}"):
            KINDS[f"cache, {form}"].load(tmp_path / "other")


@pytest.mark.parametrize("name", ["counts", "apart", "host.counts"])
@pytest.mark.parametrize("change", ["negative", "more", "elsewhere", "float", "heads", "rows"])
def test_wrong_numbers_of_kv_heads_are_refused(saved: dict[str, Path], tmp_path: Path, change: str, name: str) -> None:
    form = "cache, tier of uneven heads" if name.startswith("host") else "cache, ragged"
    metadata, tensors = content(saved[form])
    counts = tensors[f"layers.1.{name}"]
    ways = {"more": counts + 1, "negative": counts + torch.tensor([99, -99]), "float": counts.float()}
    ways |= {"elsewhere": counts + torch.tensor([[4], [-4]]), "heads": counts[:, :1], "rows": counts.repeat(2, 1)}
    tensors[f"layers.1.{name}"] = ways[change].contiguous()
    metadata["checksum"] = checksum(metadata["state"], tensors)
    (tmp_path / "other").write_bytes(save(tensors, metadata))
    with pytest.raises(ValueError, match=r"not as .* \((KV heads of layer 1 are said|layers.1.apart is no number)"):
        KINDS[form].load(tmp_path / "other")


def test_what_other_versions_write_is_refused_as_theirs(saved: dict[str, Path], tmp_path: Path) -> None:
    metadata, tensors = content(saved["cache, tier of uneven heads"])
    state = {**json.loads(metadata["state"]), "toolkit_version": "9.0"}
    newer = {**state, "policy": {**state["policy"], "finer": 1}}
    for other, said in (
        ({**state, "format": "locret-cache-9"}, "-9' of locret '9.0' instead of '.*-1' of locret '0.*with that"),
        (newer, r"other \(of locret '9.0', here it is '0.*'\): policy has an unknown key 'finer'"),
    ):
        save_file(tensors, tmp_path / "other", metadata={**metadata, "state": json.dumps(other)})
        with pytest.raises(ValueError, match=said):
            KINDS["cache, tier of uneven heads"].load(tmp_path / "other")
    for name in [name for name in tensors if ".host." in name and not name.endswith("counts")]:
        tensors[name] = tensors[name].new_zeros(2, 2, 9, *tensors[name].shape[1:])  # rows and heads, as before
    metadata["checksum"] = checksum(metadata["state"], tensors)
    (tmp_path / "other").write_bytes(save(tensors, metadata))
    with pytest.raises(ValueError, match=r"not as .*\(layers.0.host.keys is \[2, 2, 9, 8\].*load it with the code"):
        KINDS["cache, tier of uneven heads"].load(tmp_path / "other")


def test_other_weights_and_another_scorer_are_refused_and_both_sides_are_shown(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    path, model = saved["cache, dense"], model_of("dense")
    with pytest.raises(ValueError, match=r"other weights .*fingerprint '\w{12}' in the file, '\w{12}' in the model"):
        load_cache(path, build("llama", seed=5), "key_norm")
    with pytest.raises(ValueError, match="num_kv_heads 2 in the file, 4 in the model"):
        load_cache(path, build("llama-mha"), "key_norm")
    turned = build("llama", rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    with pytest.raises(ValueError, match=r"in another way \(rope_theta 10000\.0 in the file, 5\.0 in the model"):
        load_cache(path, turned, "key_norm")
    load_cache(path, build("llama").bfloat16(), "key_norm")
    with pytest.warns(UserWarning, match=r"unknown \(bfloat16 or wider then, float16 now; load them as then"):
        load_cache(path, build("llama").half(), "key_norm")
    with pytest.raises(ValueError, match=r"here it is tova.*allow_other_scorer=True"):
        load_cache(path, model, "tova")
    again = load_cache(path, model, scorers.get("tova"), allow_other_scorer=True)
    assert torch.equal(again.kept_positions(0), load_cache(path, model, "key_norm").kept_positions(0))
    for seeds in ((0, 1), (1, 0)):
        heads = [RetainingHeads.for_model(model, hidden_dim=8, seed=seed) for seed in seeds]
        cache = RetentionCache(model, heads[0], RetentionPolicy(**NUMBERS))
        prefill(model, prompt(40), cache)
        save_cache(cache, tmp_path / "a.ctx")
        with pytest.raises(ValueError, match=r"retaining_heads \(weights=\w+\), here it is retaining_heads"):
            load_cache(tmp_path / "a.ctx", model, heads[1])


# -- writing ----------------------------------------------------------------------------------------------------------


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, path = read("dense"), tmp_path / "a.ctx"
    save_cache(cache, path, notes={"nth": 1})
    path.chmod(0o600)
    (tmp_path / "link.ctx").symlink_to("a.ctx")
    save_cache(cache, tmp_path / "link.ctx", notes={"nth": 2})
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "link.ctx").is_symlink()
    assert read_notes(path) == {"nth": 2}
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("stopped")))
    with pytest.raises(OSError, match="stopped"):
        save_cache(cache, path, notes={"nth": 3})
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.ctx", "link.ctx"]


def test_what_cannot_be_written_or_read_is_refused_in_a_sentence(tmp_path: Path) -> None:
    cache = read("dense")
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: save_cache(cache, tmp_path / "missing" / "a.ctx"), r"there is no folder .*missing; make it"),
        (lambda: save_cache(cache, "/dev/null"), "it is a device or a pipe"),
        (lambda: save_cache(cache.fresh(), tmp_path / "a.ctx"), "has read nothing yet"),
        (lambda: save_cache(cache, tmp_path / "a.ctx", notes={"a": float("nan")}), "notes cannot be saved"),
        (lambda: save_cache(cache, tmp_path / "a.ctx", notes={"a": (1, 2)}), "they would come back changed"),
        (lambda: load_cache(tmp_path / "none.ctx", cache.model, "key_norm"), "does not exist"),
        (lambda: load_cache(tmp_path, cache.model, "key_norm"), "is not a file"),
        (lambda: load_cache(__file__, cache.model, "key_norm"), "is not a saved cache"),
    ]
    for call, said in refused:
        with pytest.raises((OSError, ValueError), match=said):
            call()
    assert not list(tmp_path.iterdir())
    assert Path("/dev/null").is_char_device()


FOLDER = Path(__file__).with_name("saved_caches")
ANSWERS = json.loads((FOLDER / "answers.json").read_text())


@pytest.mark.parametrize("name", ANSWERS)
def test_a_cache_saved_by_an_earlier_version_answers_as_it_did(name: str) -> None:
    saved = ANSWERS[name]
    model = build(saved["family"])
    with pytest.warns(UserWarning, match="unknown .the file does not record them"):
        cache = load_cache(FOLDER / f"{name}.safetensors", model, saved["scorer"])
    answer = generate(model, cache=cache, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert answer.tolist() == saved["answer"]
    assert cache.kept_scores(cache.backbone.layers[0]).shape[:2] == (2, cache.backbone.num_kv_heads)


def test_a_context_of_an_earlier_version_does_what_every_context_does(tmp_path: Path) -> None:
    policy = RetentionPolicy(budget=32, chunk_size=64, stabilizers=8, local_len=8)
    lm = LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy=policy)
    context, asked = lm.load(FOLDER / "context.ctx"), "What is the pass key?"
    answer, then = context.ask(asked, max_new_tokens=8), context.fork()
    then.cache.policy = then.cache.policy.changed(turns="text")  # as it was then
    assert then.ask(asked, max_new_tokens=8) == "712."
    assert context.shrink(6).memory().units == 6
    assert compose([context, lm.read("The grass is green. " * 20)]).ask(asked, max_new_tokens=8)
    context.save(tmp_path / "a.ctx")
    assert lm.load(tmp_path / "a.ctx").ask(asked, max_new_tokens=8) == answer
    with pytest.raises(ValueError, match="it was written by an earlier version; load it with its backbone, and save"):
        Prefix.from_file(FOLDER / "context.ctx")
    assert Prefix.from_file(tmp_path / "a.ctx").digest == Prefix.of(context).digest


def test_what_retired_features_have_written_is_left_out(tmp_path: Path) -> None:
    policy, path = RetentionPolicy(budget=8, chunk_size=8, stabilizers=2, local_len=2), tmp_path / "a.ctx"
    cache = RetentionCache(build("llama"), "expected_attention", policy)
    prefill(cache.model, torch.arange(24)[None] + 3, cache)
    save_cache(cache, path)
    metadata, tensors = content(path)
    state = json.loads(metadata["state"])
    state["policy"] |= {"ledger": 8, "refit": True, "merge": "d2o:threshold=0.5", "host_by": "recency"}
    state["policy"] |= {"layer_budgets": "shares", "layer_shares": [1.0, 2.0, 3.0]}
    state["scorer"]["options"] |= {"covariance": True, "value_norm": True, "epsilon": 0.0}
    for index in cache.backbone.layers:
        tensors[f"layers.{index}.ledger"] = torch.full((2, 8), -torch.inf)
        state["layers"][index] |= {"ledger_width": 32, "ledger_end": 24}
    text = json.dumps(state)
    save_file(tensors, path, metadata={"state": text, "notes": "{}", "checksum": checksum(text, tensors)})
    loaded = load_cache(path, cache.model, "expected_attention")
    assert loaded.policy == cache.policy
    assert torch.equal(loaded.kept_positions(0), cache.kept_positions(0))
    for field, what in {"ledger": (8, 'policy field "ledger"'), "merge": ("d2o:threshold=0.5", 'merge "d2o"')}.items():
        with pytest.raises(ValueError, match=f"{what[1]} was retired; release 0.1.0"):
            RetentionCache(cache.model, "streaming", {"budget": 8, field: what[0]})


def test_codes_of_a_retired_rounding_are_read(tmp_path: Path) -> None:
    """A file that says "rotated" holds what today's "earlier_rotated" writes."""
    model, path = build("llama"), tmp_path / "a.ctx"
    codes = {"budget": 8, "key_bits": 4, "value_bits": 8, "rounding": "rotated:group=4"}
    with pytest.raises(ValueError, match='rounding "rotated" was retired; release 0.1.0'):
        RetentionCache(model, "streaming", codes)
    cache = RetentionCache(model, "streaming", RetentionPolicy(**{**codes, "rounding": "earlier_rotated:group=4"}))
    prefill(model, torch.arange(24)[None] + 3, cache)
    save_cache(cache, path)
    metadata, tensors = content(path)
    text = metadata["state"].replace("earlier_rotated", "rotated")
    save_file(tensors, path, metadata={"state": text, "notes": "{}", "checksum": checksum(text, tensors)})
    answers = [generate(model, cache=one, max_new_tokens=8) for one in (cache, load_cache(path, model, "streaming"))]
    assert torch.equal(*answers)
