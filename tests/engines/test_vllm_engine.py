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
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]
vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

from locret.engines.prefix import Prefix  # noqa: E402
from locret.engines.prompts import SavedPrompts  # noqa: E402

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
            extra_args=None if name is None else {"kv_transfer_params": {"locret": name}},
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


@pytest.mark.parametrize("caching", ["cold", "warm"])
@pytest.mark.parametrize(
    "wrong", ["unknown", "other", "not text", "no question", "prompt_logprobs", "skip_reading_prefix_cache", "cut"]
)
def test_a_request_that_is_wrong_fails_alone(llm, books, wrong, caching):
    if caching == "cold":
        llm.reset_prefix_cache()
    jobs = books.jobs[:4]
    prompts, names, more = books.prompts(jobs), [name for name, _ in jobs], [{} for _ in jobs]
    if wrong in ("unknown", "other", "not text"):
        names[1] = {"unknown": "nosuchbook", "other": next(n for n in books.ids if n != names[1]), "not text": 7}[wrong]
    elif wrong in ("no question", "cut"):
        prompts[1] = {"prompt_token_ids": books.ids[names[1]][: 256 if wrong == "no question" else 200]}
    else:
        more[1] = {"prompt_logprobs": 1} if wrong == "prompt_logprobs" else {"skip_reading_prefix_cache": True}
    params = [
        vllm.SamplingParams(temperature=0, max_tokens=16, extra_args={"kv_transfer_params": {"locret": name}}, **one)
        for name, one in zip(names, more, strict=True)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    right = wrong == "skip_reading_prefix_cache"  # contexts are always looked for
    assert [output.outputs[0].finish_reason for output in outputs] == [
        "stop",
        "stop" if right else "error",
        "stop",
        "stop",
    ]
    rest = [0, 2, 3] + [1] * right
    assert identical([outputs[i] for i in rest], [jobs[i] for i in rest]) == len(rest)
    assert identical(ask(llm, books.prompts(books.jobs)), books.jobs) == 32


def test_logprobs_of_an_answer(llm, books):
    job = books.jobs[:1]
    (output,) = ask(llm, books.prompts(job), names=[job[0][0]], logprobs=1)
    first = output.outputs[0].logprobs[0][output.outputs[0].token_ids[0]]
    assert first.rank == 1
    assert -1 < first.logprob <= 0


def test_beside_ordinary_prompts(llm, books):
    llm.reset_prefix_cache()
    jobs, tokenizer = books.jobs[:8], llm.get_tokenizer()
    texts = [tokenizer(books.record[name]["text"][:2000]).input_ids for name, _ in jobs]
    plain = [{"prompt_token_ids": ids} for ids in texts]
    alone = ask(llm, plain)
    outputs = ask(llm, [*plain, *books.prompts(jobs)])
    assert identical(outputs[8:], jobs) == 8
    assert [o.outputs[0].token_ids for o in outputs[:8]] == [o.outputs[0].token_ids for o in alone]


def test_a_context_that_is_written_again_under_its_name(llm, books):
    path, (one, two) = llm.locret_folder / "again.ctx", list(books.ids)[:2]
    jobs = {name: [job for job in books.jobs if job[0] == name] for name in (one, two)}
    shutil.copy(books.folder / f"{one}.ctx", path)
    assert identical(ask(llm, books.prompts(jobs[one]), names=["again"] * 8), jobs[one]) == 8
    shutil.copy(books.folder / f"{two}.ctx", path)  # in place
    assert identical(ask(llm, books.prompts(jobs[two]), names=["again"] * 8), jobs[two]) == 8
    assert finished(ask(llm, books.prompts(jobs[one]), names=["again"] * 8)) == {"error"}
    path.write_bytes(path.read_bytes()[:-7])
    assert finished(ask(llm, books.prompts(jobs[two]), names=["again"] * 8)) == {"error"}
    path.unlink()
    assert finished(ask(llm, books.prompts(jobs[two]), names=["again"] * 8)) == {"error"}
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


def test_units_that_fill_no_whole_block(tmp_path_factory):
    books = read(tmp_path_factory, 218)
    assert {len(ids) for ids in books.ids.values()} == {250}
    with engine(books.folder) as made:
        for _ in range(2):
            outputs = ask(made, books.prompts(books.jobs), names=[name for name, _ in books.jobs])
            assert identical(outputs, books.jobs) == 32


# -- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(books, tmp_path_factory):
    return Path(shutil.copytree(books.folder, tmp_path_factory.mktemp("served") / "contexts"))


@contextlib.contextmanager
def process(command, log, address):
    """Run a server until the block ends; `address` finds where it answers in what it has written."""
    with log.open("w") as out:
        started = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)
        try:
            until = time.monotonic() + 240
            while True:
                if url := address():
                    with contextlib.suppress(OSError):
                        urllib.request.urlopen(url, timeout=5).close()
                        break
                alive = started.poll() is None and time.monotonic() < until
                assert alive, log.read_text()[-3000:]
                time.sleep(1)
            yield
        finally:
            started.terminate()
            started.wait(60)


@pytest.fixture(scope="module")
def server(served, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "--model": MODEL,
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--block-size": 32,
        "--max-model-len": 9216,
        "--kv-transfer-config": json.dumps(transfer(served)),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [str(part) for pair in options.items() for part in pair]
    url = f"http://127.0.0.1:{port}"
    with process(command, tmp_path_factory.mktemp("vllm") / "log", lambda: f"{url}/health"):
        yield url


def post(server, **body):
    request = urllib.request.Request(
        f"{server}/v1/completions",
        json.dumps({"model": "tiny", "max_tokens": 16, "temperature": 0, "return_token_ids": True, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def test_over_http(server, books):
    for name, asked in books.jobs[:4]:
        reply = post(server, prompt=[*books.ids[name], *asked["ids"]], kv_transfer_params={"locret": name})
        assert reply["choices"][0]["token_ids"] == asked["answer"]
        assert reply["usage"]["prompt_tokens"] == 256 + len(asked["ids"])
    prompts = [prompt["prompt_token_ids"] for prompt in books.prompts(books.jobs)]
    choices = sorted(post(server, prompt=prompts)["choices"], key=lambda choice: choice["index"])
    assert [choice["token_ids"] for choice in choices] == [asked["answer"] for _, asked in books.jobs]
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, prompt=prompts[0], kv_transfer_params={"locret": "nosuchbook"})
    assert refused.value.code == 500
    assert post(server, prompt=prompts[0])["choices"][0]["token_ids"] == books.jobs[0][1]["answer"]


def test_prompts_made_without_a_backbone(server, books):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for name, asked in books.jobs[:2]:
        prompts = SavedPrompts(books.folder / f"{name}.ctx", tokenizer)
        assert prompts.question_ids(asked["question"]) == asked["ids"]
        reply = post(server, prompt=prompts.ids(asked["question"]))
        assert asked["truth"] in reply["choices"][0]["text"]
