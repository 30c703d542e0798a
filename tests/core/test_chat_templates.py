"""A conversation feeds the tokens that its chat template writes, for every family; and what follows a read."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import LLAMA3_WORDS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import locret
from locret import Chat, LongContextModel, RetentionCache, RetentionPolicy, generate, prefill, scorers
from locret.backbone.adapters import find_decoder
from locret.cache.limits import Limits
from locret.chunked_prefill import read_turn

ENDS = ("</s>", "<|eot_id|>", "<|end|>", "<|im_end|>", "<end_of_turn>")
SPECIAL = ["<unk>", "<s>", *ENDS, "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>"]
SPECIAL += ["<|user|>", "<|assistant|>", "<|system|>", "[INST]", "[/INST]"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "ChatML": CHATML,
    "Llama 3": "{% for m in messages %}{{ ('<s>' if loop.first else '') + '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "Phi 3": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "Qwen 2": "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}" + CHATML,
    "Qwen 3": CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\n') }}"),
    "Mistral": "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    "Gemma": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + "
    "m.content | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<start_of_turn>model\n' }}{% endif %}",
}
DOCUMENT = "The tower of Oslo is red. It has 48213 steps, and a garden.\n\nThe river is near; they say it is cold. " * 6
TURNS = [("What colour is it?", "It is red."), ("How many steps?", "It has 48213 steps."), ("Why?", "They say so.")]


def make_tokenizer(kind: str) -> Any:
    texts = [DOCUMENT, *(part for turn in TURNS for part in turn), "user assistant system model You are kind. red.\n\n"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "bytes":
        split = pre_tokenizers.Split(LLAMA3_WORDS, "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = sorted({character for text in (*texts, *SPECIAL, "<think></think>") for character in text} | {"▁"})
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {kind: make_tokenizer(kind) for kind in ("bytes", "metaspace")}


class Fed:
    """What a backbone was fed, by position; a token that is fed again stands where it stood."""

    def __init__(self, lm: LongContextModel) -> None:
        self.ids: dict[int, int] = {}
        find_decoder(lm.model).register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: Any, __: Any, given: dict[str, Any]) -> None:
        tokens = given["input_ids"][0].tolist()
        self.ids |= {given["past_key_values"].seen + nth: token for nth, token in enumerate(tokens)}

    def all(self) -> list[int]:
        return [self.ids[place] for place in range(len(self.ids))]


def make_model(kind: str, template: str) -> LongContextModel:
    tokenizer = TOKENIZERS[kind]
    tokenizer.chat_template = template
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).eval()
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(end) for end in ENDS]
    policy = RetentionPolicy(budget=60, chunk_size=32, stabilizers=8, local_len=8)
    return LongContextModel(model, tokenizer, "random", policy)


def ids_of(lm: LongContextModel, messages: list[dict[str, str]], prompt: bool = True) -> list[int]:
    return lm.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)


def say(lm: LongContextModel, chat: Chat, before: list[dict[str, str]], text: str, answer: str) -> list[dict[str, str]]:
    """Let the model answer with the template's own tokens of an answer, and return the conversation so far."""
    asked = [*before, {"role": "user", "content": text if before[-1:] else f"{DOCUMENT.strip()}\n\n{text}"}]
    if before and before[-1]["role"] == "system":
        asked[-1]["content"] = f"{DOCUMENT.strip()}\n\n{text}"
    answered = [*asked, {"role": "assistant", "content": answer}]
    prompt, whole = ids_of(lm, asked), ids_of(lm, answered, prompt=False)
    assert whole[: len(prompt)] == prompt
    script = whole[len(prompt) :]
    ends = [nth for nth, token in enumerate(script) if token in lm.end_ids]
    script = script[: ends[0] + 1]
    assert chat.say(text, prefix_allowed_tokens_fn=lambda _, ids: [script[len(ids) - 1]]) == answer
    return answered


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_conversation_feeds_the_templates_own_tokens(family: str, kind: str) -> None:
    lm = make_model(kind, TEMPLATES[family])
    fed = Fed(lm)
    # A message of the system stands where the template puts it.
    system = "You are kind." if kind == "bytes" and family not in ("Gemma", "Mistral") else None
    said = [] if system is None else [{"role": "system", "content": system}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chat = lm.read(DOCUMENT, system=system, progress=False).chat()
        for text, answer in TURNS:
            said = say(lm, chat, said, text, answer)
            asked = ids_of(lm, said[:-1])
            assert fed.all()[: len(asked)] == asked
    shown = [] if system is None else [system]
    assert [message["content"] for message in chat.messages] == [*shown, *(part for turn in TURNS for part in turn)]


@pytest.mark.parametrize("family", ["Gemma", "Mistral"])
def test_without_a_system_role_the_message_opens_the_users_turn(family: str) -> None:
    lm = make_model("bytes", TEMPLATES[family])
    fed = Fed(lm)
    lm.read(DOCUMENT, system="You are kind.", progress=False).ask("Why?", max_new_tokens=1)
    turn = f"You are kind.\n\n{DOCUMENT.strip()}\n\nWhy?"
    assert fed.all() == ids_of(lm, [{"role": "user", "content": turn}])


def test_a_template_that_drops_reasoning_is_named_and_what_was_read_stays() -> None:
    lm = make_model("bytes", TEMPLATES["Qwen 3"])
    script = lm.tokenizer("<think>\nred.\n</think>\n\nIt is red.<|im_end|>", add_special_tokens=False).input_ids
    chat = lm.read(DOCUMENT, progress=False).chat()
    chat.say("Why?", prefix_allowed_tokens_fn=lambda _, ids: [script[len(ids) - 1]])
    fed, before = Fed(lm), chat.cache.seen
    with pytest.warns(UserWarning, match="writes earlier turns otherwise .* what has been read stays as it was read"):
        chat.say("How?", max_new_tokens=1)
    after = "<|im_end|>\n<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"
    assert [fed.ids[before + nth] for nth in range(len(fed.ids))] == lm.tokenizer(after).input_ids


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
    limits = Limits(cache.policy, cache.scorer, cache.backbone)
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
