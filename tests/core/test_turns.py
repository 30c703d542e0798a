"""What follows a finished read: by default all units stay, as in any engine that was handed them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import locret
from locret import LongContextModel, RetentionCache, RetentionPolicy, generate, prefill, scorers
from locret.cache.limits import Limits
from locret.chunked_prefill import read_turn

POLICY = RetentionPolicy(budget=64, chunk_size=96, stabilizers=16, local_len=16)


@pytest.fixture(scope="module")
def plain() -> torch.nn.Module:
    """The backbone as any other code has it, never seen by a cache of ours."""
    return AutoModelForCausalLM.from_pretrained("checkpoints/tiny").eval()


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(10, 900, (1, count), generator=torch.Generator().manual_seed(seed))


def continued(plain: torch.nn.Module, cache: RetentionCache, question: Tensor, new: int) -> Tensor:
    """What transformers writes after the exported units and a question."""
    prefix = cache.to_dynamic_cache()
    full = torch.cat([torch.zeros(1, prefix.get_seq_length(), dtype=torch.long), question], dim=1)
    options = {"past_key_values": prefix, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    return plain.generate(full, attention_mask=torch.ones_like(full), **options)[:, full.shape[1] :]


@pytest.mark.parametrize("name", ["heads", *(name for name in scorers.names() if not scorers.find(name).needs)])
def test_generate_writes_what_any_engine_writes_with_the_same_units(
    lm: LongContextModel, plain: torch.nn.Module, name: str
) -> None:
    cache = RetentionCache(lm.model, lm.scorer if name == "heads" else name, POLICY)
    text, question = ids(400), ids(40, seed=1)
    prefill(lm.model, text, cache)
    wanted = continued(plain, cache, question, 8)
    with torch.inference_mode():  # a copy is usable there too
        twin = cache.copy()
        got = generate(lm.model, torch.cat([text, question], 1), cache=twin, max_new_tokens=8, min_new_tokens=8)
    assert torch.equal(got[:, 440:], wanted)
    assert {layer.fill for layer in twin.governed} == {cache.memory().units + 40 + 7}


def test_a_turn_is_read_like_text_where_the_smallest_layer_has_no_room_for_it(lm: LongContextModel) -> None:
    budgets = {"stabilizers": 4, "layer_budgets": "pyramid", "decode_budget": 200, "decode_interval": 8}
    cache = RetentionCache(lm.model, lm.scorer, RetentionPolicy(**{**POLICY.to_dict(), **budgets}))
    text = ids(400)
    prefill(lm.model, text, cache)
    layers = cache.backbone.layers
    limits = Limits(cache.policy, cache.scorer, len(layers))
    most = [limits.most_answering(nth) or 0 for nth in range(len(layers))]
    room = min(limit - layer.fill for limit, layer in zip(most, cache.governed, strict=True))
    assert 0 < cache.turn_room == room < 200 - max(layer.fill for layer in cache.governed)
    for length in (room, room + 1):
        twin = cache.copy()
        read_turn(lm.model, ids(length, 1), twin)
        assert all(layer.fill <= limit for layer, limit in zip(twin.governed, most, strict=True))
        held = cache.kept_positions(layers[-1])
        stays = torch.equal(twin.kept_positions(layers[-1])[..., : held.shape[-1]], held)
        assert stays == (length == room)


def test_turns_as_text_compete_for_the_budget_and_long_ones_always_do(lm: LongContextModel) -> None:
    for turns, length, units in (("text", 40, 80), ("local", 96, 80 + 96), ("local", 97, 80)):
        cache = RetentionCache(lm.model, lm.scorer, RetentionPolicy(**{**POLICY.to_dict(), "turns": turns}))
        text = ids(400)
        prefill(lm.model, text, cache)
        generate(lm.model, torch.cat([text, ids(length, 1)], 1), cache=cache, max_new_tokens=1)
        # The one new token is never fed.
        assert cache.memory().units == units, (turns, length)


def test_a_conversation_is_compacted_when_its_turns_take_more_than_a_chunk(lm: LongContextModel) -> None:
    cache, read = RetentionCache(lm.model, lm.scorer, POLICY), ids(400)
    prefill(lm.model, read, cache)
    held = []
    for turn in range(6):
        read = torch.cat([read, ids(30, turn)], dim=1)
        read = generate(lm.model, read, cache=cache, max_new_tokens=5, min_new_tokens=5)
        held.append(cache.memory().units)
    most = POLICY.budget + POLICY.local_len + POLICY.chunk_size + 5
    assert max(held) <= most
    assert held[1] > held[0]  # the first turns are all there
    assert any(later < earlier for earlier, later in zip(held, held[1:], strict=False))


# -- contexts, their files, and what follows more than once -----------------------------------------------------------


@pytest.mark.parametrize("made", ["read", "loaded", "forked", "shrunk", "composed"])
def test_ask_writes_what_any_engine_writes_however_a_context_was_made(
    lm: LongContextModel, plain: torch.nn.Module, made: str, tmp_path: Path
) -> None:
    context = lm.read("The grass is green. " * 30 + "The tower is tall.", name="text")
    if made == "loaded":
        context.save(tmp_path / "a.ctx")
        context = lm.load(tmp_path / "a.ctx")
    elif made == "composed":
        context = locret.compose([context, lm.read("The sky is blue. " * 30)], 100)
    elif made != "read":
        context = context.fork() if made == "forked" else context.shrink(40)
    for question in ("What is green?", "How tall is the tower, and of what is it made?"):
        wanted = continued(plain, context.cache, context.question_ids(question), 8)[0].tolist()
        answer = context.ask(question, max_new_tokens=8, min_new_tokens=8)
        assert answer == lm.tokenizer.decode(wanted, skip_special_tokens=True, clean_up_tokenization_spaces=False)
