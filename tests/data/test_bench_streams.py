"""Prompts of millions of tokens come as streams: right length and place, bounded memory, and a backbone reads them."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from locret import RetentionCache, RetentionPolicy, prefill
from locret.data.tasks.published.infinitebench_generated import TASKS
from locret.data.tasks.published.niah import NEEDLE
from locret.data.text.essays import filler_sentences
from locret.infer.speed.lab.streamed_prompts import LongPrompt, stream_needle, stream_number

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def whole(prompt: LongPrompt) -> list[int]:
    return list(itertools.chain.from_iterable(prompt.ids))


def needle_share(tokenizer: Any, ids: list[int], start: str) -> float:
    text = tokenizer.decode(ids)
    return text.index(start) / len(text)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_number_prompt_is_the_generated_task_s_of_that_many_lines(depth: float, tokenizer: Any) -> None:
    prompt = stream_number(tokenizer, 20_000, depth=depth, seed=2)
    ids = whole(prompt)
    assert 20_000 - 25 <= len(ids) <= 20_000
    text = tokenizer.decode(ids)
    lines = text.count("The grass is green.")
    task = next(task for task in TASKS if task.form == "number_string")
    line = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    needle = f"The sequence of digits is {prompt.answer}. Remember it. {prompt.answer} is the sequence of digits. "
    place = round(depth * lines)
    row = {
        "context": line * place + needle + line * (lines - place),
        "input": "What is the sequence of digits?",
        "answer": [prompt.answer],
    }
    assert ids == tokenizer(task.read(0, "", row)[0].content)["input_ids"]


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.9, 1.0])
def test_a_needle_prompt_has_its_length_and_its_needle_where_it_should(depth: float, tokenizer: Any) -> None:
    prompt = stream_needle(tokenizer, 40_000, depth=depth)
    ids = whole(prompt)
    assert 40_000 - 30 <= len(ids) <= 40_000
    text = tokenizer.decode(ids)
    assert text.count(NEEDLE.strip()) == 1
    assert needle_share(tokenizer, ids, NEEDLE.strip()) == pytest.approx(depth, abs=0.02)
    assert text.startswith("<bos> <system> You are a helpful AI bot")
    assert text.endswith("Here is the most relevant sentence in the context: <eos> <assistant>")


@pytest.mark.parametrize("stream", [stream_number, stream_needle])
@pytest.mark.parametrize("marks", ["bytes", "words"])  # the ways of GPT-2 and of Llama 2
def test_other_tokenizers_get_their_length_too(stream: Callable[..., LongPrompt], marks: str) -> None:
    found = whole(stream(trained_tokenizer(marks), 12_000))
    assert 0.99 * 12_000 < len(found) <= 12_000


def trained_tokenizer(marks: str) -> Any:
    bpe = Tokenizer(models.BPE(byte_fallback=marks == "words"))
    bpe.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False) if marks == "bytes" else pre_tokenizers.Metaspace()
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(itertools.islice(filler_sentences(0), 2000), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe)
    fast.chat_template = tiny_tokenizer().chat_template.replace("bos_token", "'[S]'").replace("eos_token", "'[E]'")
    return fast


def test_essays_repeat_for_as_long_as_the_prompt_is(tokenizer: Any) -> None:
    if not (SHARED / "niah").is_dir():
        pytest.skip("needs the essays in ../shared/data")
    prompt = stream_needle(tokenizer, 30_000, data_dir=SHARED / "niah", passkey=True, template="none")
    ids = whole(prompt)
    assert prompt.haystack == "essays"
    assert 30_000 - 200 <= len(ids) <= 30_000
    assert tokenizer.decode(ids).count(f"The pass key is {prompt.answer}.") == 1


@pytest.mark.parametrize("stream", [stream_number, stream_needle])
@pytest.mark.slow
def test_host_memory_does_not_grow_with_the_prompt(stream: Callable[..., LongPrompt], tokenizer: Any) -> None:
    def peak(tokens: int) -> int:
        prompt = stream(tokenizer, tokens)
        tracemalloc.start()
        longest = max(len(block) for block in prompt.ids)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert longest < 60_000
        return found

    # Python's own objects alone: a list of 300,000 ids is 2.4 MB, its text 1.4 MB.
    assert peak(300_000) < 1.2 * peak(100_000)


def test_ten_million_tokens_start_at_once(tokenizer: Any) -> None:
    for prompt in (stream_number(tokenizer), stream_needle(tokenizer, 10**9)):
        assert len(next(prompt.ids)) >= 1


def test_a_stream_is_read_within_the_budget(tokenizer: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    policy = RetentionPolicy(budget=64, chunk_size=512, stabilizers=8, local_len=16)
    cache, most = RetentionCache(model, "random", policy), []
    prefill(
        model,
        stream_needle(tokenizer, 9000).ids,
        cache,
        on_chunk=lambda seen: most.append((seen.memory().units, seen.memory().actual)),
    )
    assert cache.seen > 8900
    assert {units for units, _ in most} == {64}
    assert len({held for _, held in most[1:]}) == 1


def test_impossible_prompts_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"depth=1.5 is outside the text"):
        stream_number(tokenizer, depth=1.5)
    with pytest.raises(ValueError, match="tokens=50 holds no line of noise"):
        stream_number(tokenizer, 50)
    with pytest.raises(ValueError, match=r"tokens=20 cannot hold needle and question, which take \d+"):
        stream_needle(tokenizer, 20)
