"""Gates that others published: read from their files, they rate units as the obvious version of their formula does."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gate_folders
import pytest
import torch
from families import build, prompt
from hub_server import HubServer, Repo
from oracle import gates as slow
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill, scorers
from locret.backbone.chunk import Attended
from locret.backbone.instrument import attending_by
from locret.labels.labels import observe

WHOLE = RetentionPolicy(budget=200, chunk_size=200, positions="original")
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


@pytest.mark.parametrize(
    ("gate", "family"), [(gate, "qwen3") for gate in GATES] + [("dms", "phi3"), (GATES[1], "llama")]
)
def test_scores_are_those_of_the_obvious_version_and_gates_are_saved_as_heads(
    gate: str, family: str, tmp_path: Path
) -> None:
    model = build(family)
    weights = gate_folders.write(gate, tmp_path, model.config)
    scorer = scorers.get(gate_folders.SCORERS[gate], path=str(tmp_path))
    heads, compared = scorer.prepare(model), 0

    def compare(chunk: Attended) -> None:
        nonlocal compared
        features = chunk.projections.features(scorer.feature_source(heads))
        found = scorer.score_features(heads, chunk.layer_idx, features)[0]
        wanted = slowly(gate, weights, chunk.layer_idx, chunk, model.config.rms_norm_eps)
        torch.testing.assert_close(found, wanted, atol=3e-5, rtol=3e-5)
        compared += 1

    observe(model, prompt(19), compare)
    assert compared == 3
    heads.save_pretrained(tmp_path / "ours")
    ours = RetainingHeads.from_pretrained(tmp_path / "ours")
    assert ours.config == heads.config
    assert all(torch.equal(weight, heads.state_dict()[name]) for name, weight in ours.state_dict().items())


@pytest.mark.parametrize("gate", ["kvzap-mlp", "fast-kvzip", "dms"])
def test_a_gate_is_loaded_from_the_hub(gate: str, tmp_path: Path, hub: HubServer) -> None:
    model = build("qwen3")
    model.config._name_or_path = "Qwen/Qwen3-8B"
    gate_folders.write(gate, tmp_path, model.config)
    under, name = "qwen3-8b/" if gate == "fast-kvzip" else "", gate_folders.SCORERS[gate]
    files = {f"{under}{file.name}": file.read_bytes() for file in tmp_path.iterdir()}
    hub.repos["org/gates"] = Repo(branches={"main": "1" * 40, "next": "1" * 40}, commits={"1" * 40: files})
    hub.repos["org/empty"] = Repo(branches={"main": "2" * 40}, commits={"2" * 40: {"notes.txt": b""}})
    found = scorers.get(name, path="org/gates", revision="next").prepare(model)
    here = scorers.get(name, path=str(tmp_path)).prepare(model)
    assert all(torch.equal(weight, here.state_dict()[key]) for key, weight in found.state_dict().items())
    if gate == "dms":  # the other shard holds none of it
        assert not [path for _, path in hub.requests if "00002-of-00002" in path]
    with pytest.raises(ValueError, match=rf"scorer {name}: .*org/empty.* has no .*; give the "):
        scorers.get(name, path="org/empty").prepare(model)


# -- what is refused --------------------------------------------------------------------------------------------------


def changed(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def module(change: Callable[[list[Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = next(folder.glob("*.pt"))
        torch.save({"module": change(torch.load(file, weights_only=False)["module"])}, file)

    return apply


class Evil:
    """What a pickle may do when it is loaded."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("the pickle was run",))


REFUSED: list[tuple[str, Callable[[Path], None], str]] = [
    ("kvzap-mlp", changed(hidden_dim=25), "heads.0.inner.weight is [24, 32] in"),
    ("fast-kvzip", module(lambda m: m[:2]), "has gates of 2 layers, but qwen3 has 3"),
    ("fast-kvzip", lambda f: next(f.glob("*.pt")).write_bytes(pickle.dumps([Evil()])), "loading it could run code"),
    ("fast-kvzip", lambda f: (f / "q2_dim8_sink1.pt").touch(), "several gates (q2_dim16_sink16.pt, q2_dim8_sink1.pt)"),
    ("dms", changed(dms_separate_alpha=False), "are a number of its own queries (dms_separate_alpha=false)"),
    ("dms", lambda f: (f / "model-00001-of-00002.safetensors").unlink(), "has no model-00001-of-00002.safetensors"),
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


def test_options_and_places_that_are_none_are_refused(tmp_path: Path) -> None:
    config = build("qwen3").config
    (tmp_path / "file").touch()
    for spec, sentence in [
        ("kvzap", "scorer kvzap needs a KVzap model; write kvzap:path=FOLDER"),
        ("kvzap:path=/no/where", "scorer kvzap: there is no folder or file '/no/where'; give the folder"),
        (f"dms:path={tmp_path}/file", "' is a file; give its folder"),
        (f"kvzap:path={tmp_path},revision=main", "revision=main is for a repository of the Hub, but"),
    ]:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            scorers.get(spec).check_backbone(config)


# -- DMS whose queries lend a number to its decisions: attention takes it for 0, and the scorer reads it ---------------

NUMBERS = {
    "dms_alpha_scale": 10.0,
    "dms_initial_alpha_offset": 0.5,
    "dms_window_size": 24,
    "dms_separate_alpha": False,
    "dms_alpha_per": "head",
}


def written(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **NUMBERS, **changes}))
    return str(folder)


@contextmanager
def lending_slowly(model: Any, seen: list[Tensor]) -> Iterator[None]:
    """Let transformers' own attention do what DMS does, and gather the numbers of each layer that are lent."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads

    def blank(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        seen.append(output[0, :, ::group, -1].T.clone())
        output[:, :, ::group, -1] = 0
        return output

    def attend(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        query = query.clone()
        query[:, ::group, :, -1] = 0
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("dms-slow", attend)
    with attending_by(model, "dms-slow"), ExitStack() as hooks:
        for layer in model.model.layers:
            hooks.enter_context(layer.self_attn.q_norm.register_forward_hook(blank))
        yield


@pytest.mark.parametrize("tokens", [40, 4])  # as many as query heads is where layouts look alike
def test_reading_is_what_dms_computes_and_scores_are_its_logits(tokens: int, tmp_path: Path) -> None:
    model, ids, seen = build("qwen3", **NUMBERS), prompt(tokens), list[Tensor]()
    with lending_slowly(model, seen), torch.no_grad():
        wanted = model(ids).logits[:, -1]
    scorer = scorers.get("dms", path=written(tmp_path), window=0)
    cache = RetentionCache(model, scorer, WHOLE)
    torch.testing.assert_close(prefill(model, ids, cache), wanted, atol=2e-5, rtol=1e-4)
    for layer in range(3):
        torch.testing.assert_close(cache.kept_scores(layer)[0], 0.5 - 10.0 * seen[layer], atol=1e-4, rtol=1e-4)
    unlent = build("qwen3")
    unlent.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert not torch.allclose(unlent(ids).logits[:, -1], wanted, atol=1e-3)


def test_decisions_are_of_the_layer_where_asked_and_of_no_other_backbone(tmp_path: Path) -> None:
    model = build("qwen3", **{**NUMBERS, "dms_alpha_per": "layer"})
    scorer = scorers.get("dms", path=written(tmp_path, dms_alpha_per="layer"))
    assert [scorer.recent(budget) for budget in (64, 96, 4096)] == [16, 24, 24]
    cache = RetentionCache(model, scorer, WHOLE)
    prefill(model, prompt(30), cache)
    scores = cache.kept_scores(0)[0]
    assert torch.equal(scores[0], scores[1])
    for other in (build("qwen3"), build("qwen3", **{**NUMBERS, "dms_alpha_scale": 20.0})):
        with pytest.raises(ValueError, match="are a number of its own queries .*; read with that model itself"):
            scorer.prepare(other)
