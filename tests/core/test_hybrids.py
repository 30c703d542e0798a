"""Hybrids: softmax layers are governed, the states of the others are carried, copied, saved and exported."""

from __future__ import annotations

import json
from functools import cache as once
from pathlib import Path
from typing import Any

import oracle as reference
import pytest
import torch
from accelerate import disk_offload
from families import HYBRIDS, SHAPE, build, merger, prompt
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from locret import (
    LongContextModel,
    RetainingHeads,
    RetentionCache,
    RetentionPolicy,
    compose,
    generate,
    load_cache,
    prefill,
    save_cache,
)
from locret.backbone.adapters import attention_modules, describe
from locret.cache.cache_file import read_prefix
from locret.cache.limits import planned_bytes
from locret.conversation.saved import SavedContext
from locret.labels import answer_labels
from locret.train.step import train_step

POLICY = RetentionPolicy(budget=20, chunk_size=9, stabilizers=6, local_len=5)
ROOMY = RetentionPolicy(budget=90, chunk_size=9, stabilizers=4, local_len=5)
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}
# One token after the other, their own code in transformers computes what it does of many at once a little differently.
LOOSE = {"nemotron-h": 2e-3, "zamba2": 2e-2}
families = pytest.mark.parametrize("family", HYBRIDS)
some = pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1", "jamba", "lfm2"])
_MODELS: dict[str, PreTrainedModel] = {}


def model_of(family: str) -> Any:
    if family not in _MODELS:
        _MODELS[family] = build(family)
    return _MODELS[family]


def read(family: str, ids: torch.Tensor, policy: RetentionPolicy = POLICY, scorer: Any = "random") -> RetentionCache:
    cache = RetentionCache(model_of(family), scorer, policy)
    prefill(model_of(family), ids, cache)
    return cache


def answer(family: str, cache: RetentionCache) -> torch.Tensor:
    return generate(model_of(family), cache=cache, **GREEDY)


# -- what is read and answered ----------------------------------------------------------------------------------------


@once
@torch.no_grad()
def own_answer(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the prompt's last token and the sequence, by transformers alone."""
    model, ids = model_of(family), prompt(70)
    return model(ids).logits[:, -1], model.generate(ids, **GREEDY)


@families
@pytest.mark.parametrize("positions", ["compact", "original"])
def test_a_budget_of_the_prompts_length_equals_the_backbones_own_generate(family: str, positions: str) -> None:
    model, ids = model_of(family), prompt(70)
    expected, own = own_answer(family)
    in_parts, at_once = (
        RetentionPolicy(budget=90, chunk_size=chunk_size, stabilizers=4, local_len=5, positions=positions)
        for chunk_size in (13, 64)
    )
    cache = RetentionCache(model, "random", in_parts)
    logits = prefill(model, ids, cache)
    torch.testing.assert_close(logits, expected, atol=LOOSE.get(family, 1e-4), rtol=0)
    # The last token is fed once more, which must not count twice in any state.
    assert torch.equal(generate(model, cache=cache, **GREEDY), own[:, 70:])
    held_back = generate(model, ids, cache=RetentionCache(model, "random", at_once), **GREEDY)
    assert torch.equal(held_back, own)


@families
@torch.no_grad()
def test_eviction_equals_the_slow_oracle(family: str) -> None:
    model, ids = model_of(family), prompt(58)
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=1)
    layers, modules = describe(model).layers, attention_modules(model)
    attentions = {index: modules[index] for index in layers}
    history, logits = reference.read_whole(model, heads, ids[0], attentions, (20, 9, 6, 5))
    policy = RetentionPolicy(budget=20, chunk_size=9, stabilizers=6, local_len=5, positions="original")
    kept: list[Any] = []

    def record(cache: RetentionCache) -> None:
        kept.append([cache.kept_positions(layer)[0].tolist() for layer in layers])

    ours = prefill(model, ids, RetentionCache(model, heads, policy), on_chunk=record)
    assert kept == history
    torch.testing.assert_close(ours[0], logits, atol=LOOSE.get(family, 1e-4), rtol=0)


@pytest.mark.parametrize("family", ["granite4-nope", "jamba", "nemotron-h"])
def test_without_rotary_positions_both_modes_are_one(family: str) -> None:
    ids = prompt(58)
    answers = []
    for positions in ("compact", "original"):
        policy = RetentionPolicy(budget=20, chunk_size=9, stabilizers=6, local_len=5, positions=positions)
        answers.append(prefill(model_of(family), ids, RetentionCache(model_of(family), "snapkv", policy)))
    assert torch.equal(*answers)


@some
def test_states_do_not_depend_on_how_a_text_is_cut(family: str) -> None:
    ids = prompt(61)
    states = []
    for chunk_size in (1, 5, 64):
        policy = RetentionPolicy(budget=90, chunk_size=chunk_size, stabilizers=0, local_len=4)
        tensors, _ = read(family, ids, policy).state()
        states.append({name: tensor for name, tensor in tensors.items() if ".states." in name})
    assert states[0]
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        for name, tensor in other.items():
            torch.testing.assert_close(tensor, states[0][name], atol=1e-4, rtol=1e-4)


@some
@pytest.mark.parametrize("scorer", ["snapkv", "sirllm"])
def test_one_eviction_at_the_prompts_end_feeds_its_last_token_once(family: str, scorer: str) -> None:
    model, ids = model_of(family), prompt(60)
    with torch.no_grad():
        own = model.generate(ids, **GREEDY)
    policy = RetentionPolicy(budget=60, chunk_size=34, stabilizers=0, local_len=5, when="prompt_end")
    assert torch.equal(generate(model, ids, cache=RetentionCache(model, scorer, policy), **GREEDY), own)


@some
def test_rows_of_different_length_and_beams_answer_as_alone(family: str) -> None:
    model, long, short = model_of(family), prompt(60), prompt(41, seed=1)
    together = torch.cat([long, torch.cat([torch.zeros(1, 19, dtype=torch.long), short], dim=1)])
    mask = torch.ones_like(together)
    mask[1, :19] = 0
    alone = [generate(model, ids, cache=RetentionCache(model, "random", POLICY), **GREEDY) for ids in (long, short)]
    both = generate(model, together, cache=RetentionCache(model, "random", POLICY), attention_mask=mask, **GREEDY)
    assert torch.equal(both[0], alone[0][0])
    assert torch.equal(both[1, 19:], alone[1][0])
    options = {**GREEDY, "num_beams": 3}
    with torch.no_grad():
        own = model.generate(long, **options)
    assert torch.equal(generate(model, long, cache=RetentionCache(model, "random", ROOMY), **options), own)


# -- whole caches -----------------------------------------------------------------------------------------------------


@families
def test_bytes_are_as_planned(family: str) -> None:
    model = model_of(family)
    cache = read(family, prompt(58))
    memory, backbone = cache.memory(), cache.backbone
    assert memory.actual <= memory.planned == memory.peak or (family == "lfm3" and memory.actual <= memory.planned)
    held = sum(states.nbytes for states in cache.carriers.values())
    assert held == backbone.state_bytes(4) > 0
    assert planned_bytes(backbone, cache.scorer, POLICY, 4, 58) == cache.memory().planned
    assert describe(model.config) == backbone


@some
def test_copies_go_their_own_ways(family: str) -> None:
    model, cache = model_of(family), read(family, prompt(58))
    twin = cache.copy()
    first = answer(family, cache.copy())
    prefill(model, prompt(30, seed=4), twin)
    other = answer(family, twin)
    assert torch.equal(answer(family, cache), first)
    assert not torch.equal(other, first)


@families
def test_a_saved_cache_answers_alike(family: str, tmp_path: Path) -> None:
    model, cache = model_of(family), read(family, prompt(58))
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", model, "random")
    assert [s.nbytes for s in loaded.carriers.values()] == [s.nbytes for s in cache.carriers.values()]
    assert torch.equal(answer(family, loaded), answer(family, cache))


def rewritten(path: Path, change: Any) -> None:
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    state = json.loads(metadata["state"])
    change(tensors, state)
    metadata.pop("checksum", None)
    save_file(tensors, path, {**metadata, "state": json.dumps(state)})


def lose(tensors: Any, state: Any) -> None:
    del tensors["layers.0.states.recurrent.0"]


def turn(tensors: Any, state: Any) -> None:
    tensors["layers.0.states.conv.0"] = tensors["layers.0.states.conv.0"].transpose(1, 2).contiguous()


def add_rows(tensors: Any, state: Any) -> None:
    tensors["layers.0.states.conv.0"] = tensors["layers.0.states.conv.0"].repeat(2, 1, 1)


def not_finite(tensors: Any, state: Any) -> None:
    tensors["layers.2.states.recurrent.0"][0, 0, 0, 0] = torch.nan


def no_numbers(tensors: Any, state: Any) -> None:
    tensors["layers.2.states.recurrent.0"] = tensors["layers.2.states.recurrent.0"].long()


def foreign(tensors: Any, state: Any) -> None:
    tensors["layers.1.states.conv.0"] = torch.zeros(1, 2, 3)


def unmarked(tensors: Any, state: Any) -> None:
    state["layers"][0]["marked"] = False


def no_flag(tensors: Any, state: Any) -> None:
    del state["layers"][0]["marked"]


def units(tensors: Any, state: Any) -> None:
    state["layers"][0]["fill"] = 4


def other_kinds(tensors: Any, state: Any) -> None:
    state["backbone"]["kinds"][0] = "none"


def other_numbers(tensors: Any, state: Any) -> None:
    state["backbone"]["state_numbers"] = [1, 2]


DAMAGES = [
    lose,
    turn,
    add_rows,
    not_finite,
    no_numbers,
    foreign,
    unmarked,
    no_flag,
    units,
    other_kinds,
    other_numbers,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damaged_state_is_answered_from(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    save_cache(read("qwen3-next", prompt(40)), path)
    rewritten(path, damage)
    with pytest.raises(ValueError, match=str(path)) as refused:
        load_cache(path, model_of("qwen3-next"), "random")
    assert "\n" not in str(refused.value)


@some
def test_the_export_to_transformers_answers_alike(family: str) -> None:
    model, ids = model_of(family), prompt(58)
    cache = RetentionCache(model, "random", POLICY)
    generate(model, ids, cache=cache, **{**GREEDY, "max_new_tokens": 1})  # all but the new token has been read
    cache = read(family, ids)
    new = prompt(1, seed=8)
    with torch.no_grad():
        exported = cache.to_dynamic_cache()
        theirs = []
        token = new
        for _ in range(5):
            token = model(token, past_key_values=exported, use_cache=True).logits[:, -1:].argmax(-1)
            theirs.append(int(token))
    full = torch.cat([ids, new], dim=1)
    ours = generate(model, full, cache=cache, **{**GREEDY, "max_new_tokens": 5})
    assert ours[0, 59:].tolist() == theirs


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_token_whose_state_is_gone_is_not_taken_back() -> None:
    model, cache = model_of("qwen3-next"), read("qwen3-next", prompt(40))
    cache.take_back()
    cache.take_back()  # changes nothing
    again = generate(model, prompt(40), cache=cache, **GREEDY)
    assert torch.equal(again, generate(model, prompt(40), cache=RetentionCache(model, "random", POLICY), **GREEDY))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mamba2", {"num_heads": 8, "head_dim": 8}, "no layer of mamba2 has softmax attention, so there is nothing"),
        ("falcon_mamba", {}, "no layer of falcon_mamba has softmax attention"),
        ("granitemoehybrid", {"mamba_n_heads": 8}, "no layer of granitemoehybrid has softmax attention"),
        ("minimax", {"head_dim": 8, "block_size": 8}, "minimax carries states that transformers' own cache does not"),
    ],
)
def test_nothing_to_govern_and_states_elsewhere_are_refused(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    config = CONFIG_MAPPING[model_type](**{**SHAPE, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for make in (lambda: RetentionCache(model, "snapkv", POLICY), lambda: RetainingHeads.for_model(model)):
        with pytest.raises(ValueError, match=message) as refused:
            make()
        assert "\n" not in str(refused.value)


def test_recurrent_layers_have_no_units() -> None:
    with pytest.raises(ValueError, match=r"layer 0 has no scored units; layers that have: \(1, 3\)"):
        read("qwen3-next", prompt(30)).kept_positions(0)


# -- heads, conversations, other wrappers -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1"])
def test_heads_of_the_attention_layers_learn(family: str, tmp_path: Path) -> None:
    model, row = model_of(family), (prompt(50), prompt(6, seed=2))
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = train_step(model, heads, *row)
    assert torch.isfinite(result.total)
    assert heads.config.layers == describe(model).layers
    for parameter in heads.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    heads.save_pretrained(tmp_path)
    RetainingHeads.from_pretrained(tmp_path).check_matches(model)


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1", "olmo-hybrid"])
@torch.no_grad()
def test_labels_are_those_of_the_backbones_own_attention(family: str) -> None:
    model, ids = model_of(family), torch.cat([prompt(40), prompt(6, seed=2)], dim=1)
    layers, modules, found = describe(model).layers, attention_modules(model), []
    handles = [modules[index].register_forward_hook(lambda *call: found.append(call[2][1])) for index in layers]
    try:
        model(ids, use_cache=False, output_attentions=True)
    finally:
        for handle in handles:
            handle.remove()
    expected = [weights[0, :, 40:, :40].unflatten(0, (2, 2)).amax((1, 2)) for weights in found]
    labels = answer_labels(model, ids[:, :40], ids[:, 40:], kind="log_attention")
    torch.testing.assert_close(labels, torch.stack(expected).log(), atol=1e-4, rtol=1e-4)


def test_a_context_is_asked_forked_saved_and_shrunk(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "checkpoints" / "tiny")
    model = build("qwen3-next", vocab_size=len(tokenizer), max_position_embeddings=4096)
    lm = LongContextModel(model, tokenizer, "random", RetentionPolicy(budget=60, chunk_size=32, local_len=8))
    context = lm.read("The grass is green. The pass key is 71432. " * 10)
    first = context.ask("What is the pass key?", max_new_tokens=6)
    assert context.ask("What is the pass key?", max_new_tokens=6) == first
    context.save(tmp_path / "a.ctx")
    assert lm.load(tmp_path / "a.ctx").ask("What is the pass key?", max_new_tokens=6) == first
    chat = context.chat()
    chat.say("Who?", max_new_tokens=4)
    fork = chat.fork()
    assert chat.say("Why?", max_new_tokens=4) == fork.say("Why?", max_new_tokens=4)
    assert isinstance(context.shrink(20).ask("Who?", max_new_tokens=4), str)
    for join in (lambda: compose([context, lm.read("The sky is blue. " * 9)]), lambda: context.merge(chat, fork)):
        with pytest.raises(ValueError, match="carry a recurrent state, and there is none of texts that were"):
            join()
    with pytest.raises(ValueError, match="which a prefix of keys and values does not hold"):
        read_prefix(tmp_path / "a.ctx")
    facts = SavedContext.open(tmp_path / "a.ctx").facts()
    assert "recurrent state" in facts["no_prefix_because"]
    assert list(facts["backbone"]["kinds"]) == ["recurrent", "full", "recurrent", "full"]


def test_the_text_part_of_a_multimodal_backbone_is_read() -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=model_of("qwen3.5").config.to_dict(), vision_config={**vision, "patch_size": 4})
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    own = model.generate(prompt(60), **GREEDY)
    for positions in ("compact", "original"):
        policy = RetentionPolicy(budget=90, chunk_size=9, stabilizers=4, local_len=5, positions=positions)
        ours = generate(model, prompt(60), cache=RetentionCache(model, "random", policy), **GREEDY)
        assert torch.equal(ours, own)


@pytest.mark.parametrize("family", ["falcon-h1", "jamba"])
def test_offloaded_layers_carry_their_states(family: str, tmp_path: Path) -> None:
    model, ids = build(family), prompt(58)
    disk_offload(model, offload_dir=tmp_path, execution_device=torch.device("cpu"))
    ours = generate(model, ids, cache=RetentionCache(model, "random", POLICY), **GREEDY)
    own = model_of(family)
    assert torch.equal(ours, generate(own, ids, cache=RetentionCache(own, "random", POLICY), **GREEDY))


def test_an_interrupted_read_leaves_the_backbone_as_it_was() -> None:
    model = build("jamba")
    cache = RetentionCache(model, "random", POLICY)

    def stop(_: RetentionCache) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill(model, prompt(40), cache, on_chunk=stop)
    with pytest.raises(ValueError, match="an earlier read of this cache was interrupted"):
        prefill(model, prompt(40), cache)
    assert not [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scorer", ["random", "expected_attention"])
@pytest.mark.parametrize(
    "changes",
    [
        {"host_budget": 20, "recall": 8},
        {"key_bits": 4, "value_bits": 4},
        {"head_budgets": "adaptive"},
        {"layer_budgets": "pyramid", "memory": "sqrt"},
        {"merge": "loco"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_other_mechanism_works_on_their_attention(changes: dict[str, Any], scorer: str) -> None:
    for family in ("granite4-nope", "qwen3-next"):
        model, ids = model_of(family), prompt(58)
        changes = {name: merger(family) if name == "merge" else value for name, value in changes.items()}
        policy = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6, **changes)
        cache = RetentionCache(model, scorer, policy)
        whole = generate(model, ids, cache=cache, **GREEDY)
        assert cache.memory().actual <= cache.memory().planned
        again = RetentionCache(model, scorer, policy)
        prefill(model, ids, again)
        assert torch.equal(whole[:, 58:], generate(model, cache=again, **GREEDY))
