"""Gates that others published: read from their files, they rate units as the obvious version of their formula does."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gate_folders
import pytest
import torch
from families import build, prompt
from hub_server import HubServer, Repo
from oracle import gates as slow
from safetensors.torch import load_file, save_file
from torch import Tensor

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache, scorers
from locret.backbone.chunk import Attended
from locret.cache import captured_step
from locret.heads import checkpoint, gate_files, gates
from locret.heads.config import HeadsConfig
from locret.labels.labels import observe
from locret.scorers.retaining_heads import RetainingHeadScorer

POLICY = RetentionPolicy(budget=24, chunk_size=16, stabilizers=0, local_len=4, positions="original")
GATES = list(gate_folders.SCORERS)


def slowly(gate: str, weights: Any, layer: int, chunk: Attended, epsilon: float) -> Tensor:
    """The scores (K, T) of one layer, by the authors' names of its weights."""
    hidden, residual = chunk.projections.hidden, chunk.projections.residual
    assert hidden is not None
    assert residual is not None
    if gate == "fast-kvzip":
        return slow.fast_kvzip(hidden[0], {name: weight.float() for name, weight in weights[layer].items()}).log()
    if gate == "dms":
        name = f"model.layers.{layer}.self_attn.dms_proj_alpha"
        norm, weight = weights[f"{name}_norm.weight"], weights[f"{name}.weight"]
        return -slow.dms(residual[0], norm, weight, epsilon, scale=100.0, offset=5.0)
    parts = [""] if gate == "kvzap-linear" else [".0", ".2"]
    named = [[weights[f"layers.{layer}{part}.{kind}"].float() for kind in ("weight", "bias")] for part in parts]
    return slow.kvzap(hidden[0], [(weight, bias) for weight, bias in named])


@pytest.mark.parametrize("family", ["qwen3", "llama", "phi3"])
@pytest.mark.parametrize("gate", GATES)
def test_scores_are_those_of_the_obvious_version(gate: str, family: str, tmp_path: Path) -> None:
    model = build(family)
    weights = gate_folders.write(gate, tmp_path, model.config)
    scorer = scorers.get(gate_folders.SCORERS[gate], path=str(tmp_path))
    heads, compared = scorer.prepare(model), 0

    def compare(chunk: Attended) -> None:
        nonlocal compared
        features = chunk.features(scorer.feature_source(heads))
        found = scorer.score_features(heads, chunk.layer_idx, features)[0]
        wanted = slowly(gate, weights, chunk.layer_idx, chunk, model.config.rms_norm_eps)
        torch.testing.assert_close(found, wanted, atol=3e-5, rtol=3e-5)
        compared += 1

    observe(model, prompt(19), compare)
    assert compared == 3


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_rules_a_read_and_an_answer(gate: str, tmp_path: Path) -> None:
    model, ids = build("qwen3"), prompt(90)
    gate_folders.write(gate, tmp_path, model.config)
    scorer = scorers.get(gate_folders.SCORERS[gate], path=str(tmp_path), window=0, sinks=0)
    cache = RetentionCache(model, scorer, POLICY)
    prefill(model, ids, cache)
    kept = cache.kept_positions(1)
    assert kept.shape[-1] == 24 + 4
    whole = RetentionCache(model, scorer, RetentionPolicy(budget=96, chunk_size=96, positions="original"))
    prefill(model, ids, whole)
    scores = torch.stack([torch.as_tensor(one) for one in whole.kept_scores(0)[0]])
    # No eviction has touched the hidden states of the first layer, so its best units of a whole read stay.
    best = scores[:, :86].topk(24).indices.sort().values
    assert torch.equal(cache.kept_positions(0)[0, :, :24].long(), best)
    many = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    save_cache(cache, tmp_path / "one.safetensors")
    loaded = load_cache(tmp_path / "one.safetensors", model, scorer)
    assert torch.equal(generate(model, cache=cache.copy(), **many), generate(model, cache=loaded, **many))
    bounded = {**POLICY.to_dict(), "decode_budget": 32, "decode_interval": 2}
    small = RetentionCache(model, scorer, RetentionPolicy(**bounded))
    assert generate(model, ids, cache=small, **many).shape == (1, 114)
    assert small.memory().units <= 34


@pytest.mark.parametrize("gate", GATES)
def test_scores_of_answers_that_waited_are_those_of_tokens_that_did_not(gate: str, tmp_path: Path) -> None:
    model, ids = build("qwen3"), prompt(40)
    gate_folders.write(gate, tmp_path, model.config)
    scorer = scorers.get(gate_folders.SCORERS[gate], path=str(tmp_path))
    roomy = RetentionPolicy(budget=200, chunk_size=200, positions="original")
    answered = RetentionCache(model, scorer, roomy)
    text = generate(model, ids, cache=answered, max_new_tokens=21, do_sample=False, eos_token_id=None)
    read = RetentionCache(model, scorer, roomy)
    prefill(model, text[:, :-1], read)
    for layer in range(3):
        found, wanted = (torch.stack(list(one.kept_scores(layer)[0])) for one in (answered, read))
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gate", GATES)
def test_heads_that_are_a_gate_are_saved_and_loaded(gate: str, tmp_path: Path) -> None:
    model = build("qwen3")
    heads = RetainingHeads.for_model(model, 16 if gates.get(gate).width else None, seed=1, gate=gate)
    with torch.no_grad():
        for nth, weight in enumerate(heads.parameters()):
            weight += gate_folders.drawn(*weight.shape, seed=nth)
    heads.save_pretrained(tmp_path / "ours")
    ours = RetainingHeads.from_pretrained(tmp_path / "ours")
    assert ours.config == heads.config
    assert all(torch.equal(weight, heads.state_dict()[name]) for name, weight in ours.state_dict().items())
    assert gates.get(gate).about in (tmp_path / "ours" / "README.md").read_text()


def test_heads_of_gates_are_bound_to_their_backbone() -> None:
    heads = RetainingHeads.for_model(build("llama"), seed=0, gate="kvzap-linear")
    with pytest.raises(ValueError, match="hidden_size is 32 in the heads and 64 in the model"):
        heads.check_matches(build("llama", hidden_size=64, head_dim=8))
    with pytest.raises(ValueError, match="hidden_dim=8 changes nothing of a gate dms, which has no hidden layer"):
        RetainingHeads.for_model(build("llama"), 8, gate="dms")
    with pytest.raises(ValueError, match='gate "kvzap" is unknown; did you mean kvzap-mlp'):
        RetainingHeads.for_model(build("llama"), gate="kvzap")


def test_gates_of_a_window_backbone_are_those_of_its_full_layers(tmp_path: Path) -> None:
    model = build("gemma3")
    modules = gate_folders.fast_kvzip(tmp_path / "all", model.config)
    name = "q2_dim16_sink16.pt"
    torch.save({"module": [modules[1]]}, tmp_path / "full.pt")
    all_, full = (scorers.get("fast_kvzip", path=str(tmp_path / where)).prepare(model) for where in ("all", "full.pt"))
    assert all_.layers == full.layers == (1,)
    assert torch.equal(all_[1].k_base, full[1].k_base)
    assert (tmp_path / "all" / name).is_file()


# -- the Hub ----------------------------------------------------------------------------------------------------------


def publish(hub: HubServer, name: str, folder: Path, under: str = "") -> None:
    files = {f"{under}{file.name}": file.read_bytes() for file in folder.iterdir()}
    hub.blobs |= {hashlib.sha256(content).hexdigest(): content for content in files.values()}
    hub.repos[name] = Repo(branches={"main": "1" * 40, "next": "1" * 40}, commits={"1" * 40: files})


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_is_loaded_from_the_hub(gate: str, tmp_path: Path, hub: HubServer) -> None:
    model = build("qwen3")
    model.config._name_or_path = "Qwen/Qwen3-8B"
    gate_folders.write(gate, tmp_path, model.config)
    publish(hub, "org/gates", tmp_path, "qwen3-8b/" if gate == "fast-kvzip" else "")
    name = gate_folders.SCORERS[gate]
    found = scorers.get(name, path="org/gates", revision="next").prepare(model)
    here = scorers.get(name, path=str(tmp_path)).prepare(model)
    assert all(torch.equal(weight, here.state_dict()[key]) for key, weight in found.state_dict().items())
    if gate == "dms":  # the other shard holds none of it
        assert not [path for _, path in hub.requests if "00002-of-00002" in path]


def test_a_repository_without_the_files_is_named(tmp_path: Path, hub: HubServer) -> None:
    model = build("qwen3")
    (tmp_path / "notes.txt").write_text("nothing")
    publish(hub, "org/empty", tmp_path)
    with pytest.raises(ValueError, match="scorer kvzap: .*org/empty.* has no config.json; give the folder of"):
        scorers.get("kvzap", path="org/empty").prepare(model)
    with pytest.raises(ValueError, match=r"org/empty.* has no .*/q2_dim16_sink16.safetensors or .*\.pt; give the"):
        scorers.get("fast_kvzip", path="org/empty").prepare(model)


# -- what is refused --------------------------------------------------------------------------------------------------


def changed(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def reshaped(name: str, make: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = next(folder.glob("*.safetensors"))
        tensors = load_file(file)
        made = make(tensors.pop(name))
        save_file({**tensors, **({} if made is None else {name: made})}, file)

    return change


def biased_norm(folder: Path) -> None:
    """Call the weight of a norm its bias, which DMS has none of."""
    file, index = folder / "model-00001-of-00002.safetensors", folder / "model.safetensors.index.json"
    before, after = (f"model.layers.0.self_attn.dms_proj_alpha_norm.{kind}" for kind in ("weight", "bias"))
    save_file({name.replace(before, after): tensor for name, tensor in load_file(file).items()}, file)
    index.write_text(index.read_text().replace(before, after))


def twice(folder: Path) -> None:
    """Put an entry of the first shard into the second as well, and have the index name both."""
    first, second = (folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    copied = {name: tensor for name, tensor in load_file(first).items() if "layers.0" in name}
    save_file({**load_file(second), **copied}, second)
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"][next(iter(copied))] = second.name
    index.write_text(json.dumps(values))


def module(change: Callable[[list[Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = next(folder.glob("*.pt"))
        modules = torch.load(file, weights_only=False)["module"]
        torch.save({"module": change(modules)}, file)

    return apply


class Evil:
    """What a pickle may do when it is loaded."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("the pickle was run",))


def evil(folder: Path) -> None:
    next(folder.glob("*.pt")).write_bytes(pickle.dumps({"module": [Evil()]}))


NAN = float("nan")
REFUSED: list[tuple[str, Callable[[Path], None], str]] = [
    (
        "kvzap-mlp",
        changed(input_dim=64),
        "has input_dim=64, but qwen3 has 32 hidden size; take the KVzap model",
    ),
    ("kvzap-mlp", changed(output_dim=8), "has output_dim=8, but qwen3 has 2 KV heads"),
    ("kvzap-mlp", changed(n_modules=36), "has n_modules=36, but qwen3 has 3 layers"),
    ("kvzap-mlp", changed(n_modules=True), "has n_modules=True, but"),
    ("kvzap-mlp", changed(hidden_dim=2**60), "it must be null or a number from 1 to 1,048,576"),
    ("kvzap-mlp", changed(hidden_dim=25), "heads.0.inner.weight is [24, 32] in"),
    ("kvzap-mlp", changed(hidden_dim=None), "these weights belong to another backbone"),
    ("kvzap-mlp", changed(model_type="qwen3"), "has model_type 'qwen3', not \"kvzap\""),
    ("kvzap-mlp", lambda f: (f / "config.json").write_text("{"), "is not valid JSON"),
    ("kvzap-mlp", lambda f: (f / "config.json").write_text("[]"), 'has model_type None, not "kvzap"'),
    ("kvzap-mlp", lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors; give the folder of a KVzap"),
    ("kvzap-mlp", lambda f: (f / "model.safetensors").write_bytes(b"x" * 40), "is not a whole safetensors file"),
    ("kvzap-linear", reshaped("layers.1.bias", lambda w: w * NAN), "layers.1.bias in"),
    ("kvzap-linear", reshaped("layers.1.bias", lambda w: w.int()), "is of int32; give float32, bfloat16"),
    ("kvzap-linear", reshaped("layers.1.bias", lambda _: None), "missing: heads.1.out.bias"),
    ("kvzap-linear", reshaped("layers.2.weight", lambda w: w[:1]), "heads.2.out.weight is [1, 32] in"),
    ("fast-kvzip", module(lambda m: m[:2]), "has gates of 2 layers, but qwen3 has 3"),
    ("fast-kvzip", module(lambda m: {}), 'has no list of layers under "module"'),
    (
        "fast-kvzip",
        module(lambda m: [{**m[0], "more": m[0]["b"]}, *m[1:]]),
        "for layer 0; the gates of Fast",
    ),
    ("fast-kvzip", module(lambda m: [{**m[0], "b": 3}, *m[1:]]), "b of layer 0 in"),
    ("fast-kvzip", module(lambda m: [{**m[0], "b": m[0]["b"] * NAN}, *m[1:]]), "values that are not finite"),
    ("fast-kvzip", module(lambda m: [{**m[0], "k_base": m[0]["b"][0]}, *m[1:]]), "of width 16 with 0 sink keys"),
    ("fast-kvzip", module(lambda m: [m[0], {**m[1], "k_base": m[1]["k_base"][:, :, :3]}, m[2]]), "heads.1.k_base is"),
    ("fast-kvzip", evil, "holds more than tensors, and loading it could run code; convert it to safetensors"),
    ("fast-kvzip", lambda f: next(f.glob("*.pt")).rename(f / "x.bin"), "/q2_dim16_sink16.pt; give the gates of Fast"),
    (
        "fast-kvzip",
        lambda f: (f / "q2_dim8_sink1.pt").touch(),
        "several gates (q2_dim16_sink16.pt, q2_dim8_sink1.pt)",
    ),
    ("dms", changed(dms_alpha_scale=None), "has dms_alpha_scale=None; give one such as 100.0"),
    ("dms", changed(dms_alpha_scale=0), "has dms_alpha_scale=0; give one such as 100.0"),
    ("dms", changed(dms_alpha_per="token"), "has dms_alpha_per='token'"),
    ("dms", changed(dms_window_size=0), "dms_window_size=0"),
    ("dms", changed(attention_bias=True), "missing: heads.0.out.bias"),
    (
        "dms",
        changed(dms_separate_alpha=False),
        "are a number of its own queries (dms_separate_alpha=false)",
    ),
    ("dms", lambda f: (f / "config.json").write_text('{"model_type": "qwen3"}'), "says nothing of DMS"),
    ("dms", lambda f: (f / "model-00001-of-00002.safetensors").unlink(), "has no model-00001-of-00002.safetensors"),
    ("dms", reshaped("model.layers.0.self_attn.dms_proj_alpha.weight", lambda _: None), "missing: heads.0.out.weight"),
    ("dms", biased_norm, "missing: heads.0.norm"),
    ("dms", twice, "and so does another shard of"),
]


@pytest.mark.parametrize(("gate", "spoil", "sentence"), REFUSED)
def test_a_spoilt_gate_is_refused_in_a_sentence(
    gate: str, spoil: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    model = build("qwen3")
    gate_folders.write(gate, tmp_path, model.config)
    spoil(tmp_path)
    scorer = scorers.get(gate_folders.SCORERS[gate], path=str(tmp_path))
    for given in (model, model.config):  # with its weights, and before they are loaded
        with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
            scorer.prepare(given) if given is model else scorer.check_backbone(given)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(f"scorer {scorer.name}: ")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("kvzap", "scorer kvzap needs a KVzap model; write kvzap:path=FOLDER"),
        ("fast_kvzip", "scorer fast_kvzip needs gates; write fast_kvzip:path=FOLDER"),
        ("dms", "scorer dms needs a model that DMS was trained on"),
        ("kvzap:path=x,window=-1", "scorer kvzap: window=-1 is too small; it must be 0 or more"),
        ("kvzap:path=x,threshold=-4", 'scorer kvzap: it has no option "threshold"'),
    ],
)
def test_unfit_options_are_refused(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        scorers.get(spec)


def test_places_that_are_none_are_refused(tmp_path: Path) -> None:
    config = build("qwen3").config
    (tmp_path / "file").touch()
    for name in ("kvzap", "dms"):
        with pytest.raises(ValueError, match=f"scorer {name}: there is no folder or file '/no/where'; give the folder"):
            scorers.get(name, path="/no/where").check_backbone(config)
        with pytest.raises(ValueError, match=f"scorer {name}: '.*' is a file; give its folder"):
            scorers.get(name, path=str(tmp_path / "file")).check_backbone(config)
    with pytest.raises(ValueError, match="revision=main is for a repository of the Hub, but .* is here; drop it"):
        scorers.get("kvzap", path=str(tmp_path), revision="main").check_backbone(config)


def test_a_window_is_a_part_of_the_budget_unless_it_was_asked_for(tmp_path: Path) -> None:
    model = build("qwen3")
    gate_folders.write("kvzap-linear", tmp_path, model.config)
    scorer = scorers.get("kvzap", path=str(tmp_path))
    assert [scorer.recent(budget) for budget in (24, 512, 1024)] == [6, 128, 128]
    asked = scorers.get("kvzap", path=str(tmp_path), window=20, sinks=4)
    with pytest.raises(ValueError, match="scorer kvzap: window=20 and sinks=4 leave nothing of budget=24"):
        RetentionCache(model, asked, POLICY)
    cache = RetentionCache(model, scorers.get("kvzap", path=str(tmp_path), window=12, sinks=3), POLICY)
    prefill(model, prompt(90), cache)
    kept = cache.kept_positions(0)[0]
    assert all({0, 1, 2, *range(74, 86)} <= set(head.tolist()) for head in kept)


def test_a_gate_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    model = build("qwen3")
    gate_folders.write("kvzap-linear", tmp_path, model.config)
    scorer = scorers.get("kvzap", path=str(tmp_path))
    first = scorer.prepare(model)
    assert scorer.prepare(model) is first
    gate_folders.write("kvzap-mlp", tmp_path, model.config)
    assert scorer.prepare(model).config.gate["name"] == "kvzap-mlp"


def test_captured_steps_hand_out_hidden_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = build("llama"), []
    gate_folders.write("kvzap-linear", tmp_path, model.config)
    plain = RetentionCache(model, scorers.get("kvzap", path=str(tmp_path)), POLICY)
    prefill(model, prompt(40), plain, new_tokens=9)
    captured = plain.copy()
    nine = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    expected = generate(model, cache=plain, **nine)
    monkeypatch.setattr(captured_step, "DEVICES", ("cpu",))
    monkeypatch.setattr(captured_step, "capture", lambda step, _device: steps.append(step) or step)
    assert torch.equal(generate(model, cache=captured, **nine), expected)
    assert len(steps) == 1
    torch.testing.assert_close(captured.kept_scores(0), plain.kept_scores(0))


@pytest.mark.parametrize(
    ("gate", "name", "wrong"),
    [
        ("dms", "scale", [0.0, 1e-300]),
        ("dms", "offset", []),
        ("dms", "window", [0, -1, 1.5, 10**30]),
        ("dms", "epsilon", [-1.0]),
        ("fast-kvzip", "sinks", [0, -1, 1.5, 10**30]),
        ("fast-kvzip", "epsilon", [-1.0]),
    ],
)
def test_numbers_of_gates_from_a_file_are_not_believed(gate: str, name: str, wrong: list[float]) -> None:
    whole = HeadsConfig.for_model(build("qwen3").config, None, gate).to_json()
    for value in [*wrong, 10**400, 1e31, True, float("nan")]:
        with pytest.raises(ValueError, match=f"gate has {name}=.*; give one such as"):
            HeadsConfig.from_json({**whole, "gate": {**whole["gate"], name: value}}, "config.json")


def test_a_gate_follows_a_backbone_that_moves(tmp_path: Path) -> None:
    model = build("qwen3")
    gate_folders.kvzap(tmp_path, model.config, None)
    scorer = scorers.get("kvzap", path=str(tmp_path))
    assert scorer.prepare(model)[0].out.weight.device.type == "cpu"
    model.to("meta")
    assert scorer.prepare(model)[0].out.weight.device.type == "meta"


def test_a_gate_in_a_folder_of_its_own_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    model = build("qwen3")
    name = Path(model.config._name_or_path or "backbone").name
    scorer = scorers.get("fast_kvzip", path=str(tmp_path))
    gate_folders.fast_kvzip(tmp_path / name, model.config)
    before = scorer.prepare(model)
    file = next((tmp_path / name).glob("*.pt"))
    modules = torch.load(file, weights_only=False)
    modules["module"][0]["b"] += 1
    torch.save(modules, file)
    os.utime(file, ns=(1, 1))
    after = scorer.prepare(model)
    assert not torch.equal(before[0].b, after[0].b)
    assert scorer.prepare(model) is after


def test_a_gate_for_groups_of_another_size_is_not_taken(tmp_path: Path) -> None:
    model = build("qwen3")
    gate_folders.fast_kvzip(tmp_path, model.config)
    (own,) = tmp_path.glob("*.pt")
    shutil.copy(own, tmp_path / "q9_dim16_sink16.pt")
    scorers.get("fast_kvzip", path=str(tmp_path)).prepare(model)  # one of the two is this backbone's
    own.unlink()
    with pytest.raises(ValueError, match=r"has no .*/q\d_dim16_sink16\.safetensors or"):
        scorers.get("fast_kvzip", path=str(tmp_path)).prepare(model)


def test_a_config_is_asked_for_once_by_all_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = build("qwen3"), list[str]()
    gate_folders.write("dms", tmp_path / "dms", model.config)
    RetainingHeads.for_model(model, 4).save_pretrained(tmp_path / "heads")

    def count(module: Any, name: str) -> None:
        real = getattr(module, name)

        def counted(*given: Any) -> Any:
            asked.append(name)
            return real(*given)

        monkeypatch.setattr(module, name, counted)

    count(gate_files, "dms_config")
    count(checkpoint, "read_config")
    for scorer in (scorers.get("dms", path=str(tmp_path / "dms")), RetainingHeadScorer(heads=str(tmp_path / "heads"))):
        for _ in range(3):
            scorer.check_backbone(model.config)
            assert scorer.neighbours == 0
            assert scorer.layer_shares is None
    assert asked == ["dms_config", "read_config"]
