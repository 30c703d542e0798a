"""Contexts in a real vLLM; run where it is installed, and skipped elsewhere.

    VLLM_PYTHON -m pytest tests/engines/test_vllm_engine.py

Texts of 8K tokens are read once, by `LOCRET_PYTHON` if it is set and by this Python otherwise.
"""

import contextlib
import gc
import inspect
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]
vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

from locret.engines.prefix import Prefix  # noqa: E402

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "checkpoints/tiny")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": str(ROOT),
}
os.environ.update(ENVIRONMENT)


class Books:
    """Contexts, and what Locret answers from them."""

    def __init__(self, folder):
        self.folder = folder / "contexts"
        self.record = json.loads((folder / "record.json").read_text())
        self.ids = {name: Prefix.from_file(self.folder / f"{name}.ctx").placeholders for name in self.record}
        self.jobs = [(name, asked) for name, book in self.record.items() for asked in book["questions"]]
        random.Random(0).shuffle(self.jobs)

    def prompts(self, jobs, **more):
        return [{"prompt_token_ids": [*self.ids[name], *asked["ids"]], **more} for name, asked in jobs]


def read(tmp_path_factory, budget):
    folder = tmp_path_factory.getbasetemp().parent / f"vllm-books-{budget}"
    if not (folder / "record.json").exists():
        python = os.environ.get("LOCRET_PYTHON", sys.executable)
        command = [python, str(ROOT / "tests/engines/read_contexts.py"), str(folder), str(budget)]
        subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT}, timeout=600)
    return Books(folder)


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    return read(tmp_path_factory, 224)


def transfer(folder, **more):
    extra = {"contexts": str(folder)}
    return {
        "kv_connector": "LocretConnector",
        "kv_role": "kv_consumer",
        "kv_connector_module_path": "locret.engines.vllm",
        "kv_connector_extra_config": extra,
        **more,
    }


@contextlib.contextmanager
def engine(folder, **options):
    defaults = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 9216, "max_num_seqs": 64}
    options = {**defaults, "max_num_batched_tokens": 2048, "disable_log_stats": False, **options}
    llm = vllm.LLM(MODEL, kv_transfer_config=transfer(folder), **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def ask(llm, prompts, *, names=None, tokens=16, **more):
    params = [
        vllm.SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=tokens > 16,
            extra_args=None if name is None else {"kv_transfer_params": {"locret": True}},
            **more,
        )
        for name in (names or [None] * len(prompts))
    ]
    return llm.generate(prompts, params, use_tqdm=False)


def identical(outputs, jobs):
    written = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(tokens == asked["answer"] for tokens, (_, asked) in zip(written, jobs, strict=True))


def finished(outputs):
    return {output.outputs[0].finish_reason for output in outputs}


def metric(llm, name):
    return next(found.value for found in llm.get_metrics() if found.name == name)


def test_the_fake_has_the_signatures_of_this_vllm():
    import fake_vllm

    for theirs, ours in fake_vllm.mirrored():
        for name, method in vars(ours).items():
            if inspect.isfunction(method):
                assert str_signature(method) == str_signature(getattr(theirs, name)), name
        assert getattr(ours, "__abstractmethods__", None) == getattr(theirs, "__abstractmethods__", None)


def str_signature(function):
    return [(name, p.kind, p.default) for name, p in inspect.signature(function).parameters.items()]


@pytest.fixture(scope="module")
def llm(books, tmp_path_factory):
    folder = tmp_path_factory.mktemp("contexts")
    for file in books.folder.glob("*.ctx"):
        shutil.copy(file, folder)
    (folder / "notes.txt").write_text("no context")
    with engine(folder) as made:
        made.locret_folder = folder
        yield made


def test_32_questions_about_4_contexts_in_one_shuffled_batch(llm, books):
    assert len(books.jobs) == 32
    outputs = ask(llm, books.prompts(books.jobs), names=[name for name, _ in books.jobs])
    assert identical(outputs, books.jobs) == 32
    tokenizer = llm.get_tokenizer()
    assert all(
        asked["truth"] in tokenizer.decode(output.outputs[0].token_ids)
        for output, (_, asked) in zip(outputs, books.jobs, strict=True)
    )
    again = ask(llm, books.prompts(books.jobs))  # not named, from vLLM's own prefix cache
    assert identical(again, books.jobs) == 32
    assert min(output.num_cached_tokens for output in again) >= 256


def test_what_is_not_named_is_recognised_and_poisons_nothing(llm, books):
    llm.reset_prefix_cache()
    assert identical(ask(llm, books.prompts(books.jobs[:8])), books.jobs[:8]) == 8
    jobs = books.jobs[:8]
    assert identical(ask(llm, books.prompts(jobs), names=[name for name, _ in jobs]), jobs) == 8


@pytest.mark.parametrize("wrong", ["unknown", "no question", "prompt_logprobs"])
def test_a_request_that_is_wrong_fails_alone(llm, books, wrong):
    jobs = books.jobs[:4]
    prompts, more = books.prompts(jobs), [{} for _ in jobs]
    if wrong == "unknown":
        prompts[1] = {"prompt_token_ids": list(range(5, 300))}
    elif wrong == "no question":
        prompts[1] = {"prompt_token_ids": books.ids[jobs[1][0]]}
    else:
        more[1] = {"prompt_logprobs": 1}
    params = [
        vllm.SamplingParams(temperature=0, max_tokens=16, extra_args={"kv_transfer_params": {"locret": True}}, **one)
        for one in more
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "error", "stop", "stop"]
    assert identical(ask(llm, books.prompts(books.jobs)), books.jobs) == 32


def test_preempted_requests_are_loaded_again(llm, books):
    names = [name for name, _ in books.jobs]
    whole = [output.outputs[0].token_ids for output in ask(llm, books.prompts(books.jobs), names=names, tokens=200)]
    with engine(books.folder, num_gpu_blocks_override=99, max_model_len=2048) as small:
        outputs = ask(small, books.prompts(books.jobs), names=names, tokens=200)
        preempted = metric(small, "vllm:num_preemptions")
    assert [output.outputs[0].token_ids for output in outputs] == whole
    assert preempted > 0


VARIANTS = {
    "prefix caching off": {"enable_prefix_caching": False},
    "blocks of 128": {"block_size": 128},
    "two workers": {"tensor_parallel_size": 2},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "asynchronous scheduling": {"async_scheduling": True},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_variants_of_the_engine(books, options):
    with engine(books.folder, **options) as made:
        outputs = ask(made, books.prompts(books.jobs), names=[name for name, _ in books.jobs])
    assert identical(outputs, books.jobs) == 32
