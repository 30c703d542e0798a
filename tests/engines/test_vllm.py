"""The vLLM connector against a fake of vLLM's interface; see `fake_vllm.py` for where its signatures are from."""

import importlib
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_vllm
import pytest
import torch
from fake_vllm import BLOCK, Engine, Request, SamplingParams
from transformers import AutoConfig, AutoTokenizer

from locret import LongContextModel, RetentionPolicy
from locret.engines.prefix import Prefix
from locret.engines.prompts import SavedPrompts

ROOT = Path(__file__).parents[2]
TINY = ROOT / "checkpoints/tiny"
QUESTION = [5, 6, 7]
POLICY = RetentionPolicy(budget=24, chunk_size=64, stabilizers=8, local_len=6)
UNITS = 30  # no multiple of a block


@pytest.fixture(scope="module")
def connector():
    present = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    for name in present:
        del sys.modules[name]
    sys.modules.update(fake_vllm.modules())
    sys.modules.pop("locret.engines.vllm", None)
    yield importlib.import_module("locret.engines.vllm").LocretConnector
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"] + ["locret.engines.vllm"]:
        sys.modules.pop(name, None)
    sys.modules.update(present)


@pytest.fixture(scope="module")
def lm():
    return LongContextModel.from_pretrained(TINY, heads=str(ROOT / "checkpoints/tiny-heads"), policy=POLICY)


@pytest.fixture(scope="module")
def saved(lm, tmp_path_factory):
    """Contexts of two texts on disk."""
    folder = tmp_path_factory.mktemp("saved")
    for name, word in (("one", "grass"), ("two", "sky")):
        text = f"The {word} is green. " * 30 + "The pass key is 71432. " + "The map is short. " * 10
        lm.read(text, progress=False).save(folder / f"{name}.ctx")
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "contexts"))


def config_for(folder, dtype=torch.float32, policy="fail", extra=None, **model):
    text = AutoConfig.from_pretrained(TINY)
    for name, value in model.items():
        setattr(text, name, value)
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK),
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(
            hf_text_config=text,
            dtype=dtype,
            max_model_len=4096,
            get_vocab_size=lambda: text.vocab_size,
            get_num_layers=lambda parallel: text.num_hidden_layers,
        ),
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"contexts": str(folder)} if extra is None else extra,
            kv_load_failure_policy=policy,
        ),
    )


@pytest.fixture
def engine(connector, folder):
    return Engine(connector, config_for(folder))


def prefix_of(folder, name="one"):
    return Prefix.from_file(folder / f"{name}.ctx")


def about(folder, name="one", request_id=None, question=QUESTION, **more):
    return Request(request_id or name, [*prefix_of(folder, name).placeholders, *question], **more)


def assert_holds(engine, request, prefix, worker=0, heads=slice(None)):
    held = engine.units(request, prefix.units, worker)
    for (keys, values), wanted_keys, wanted_values in zip(held, prefix.keys, prefix.values, strict=True):
        assert torch.equal(keys, wanted_keys[:, heads].to(keys.dtype))
        assert torch.equal(values, wanted_values[:, heads].to(values.dtype))


def test_ordinary_prompts_are_left_alone(engine, folder):
    ordinary, other = Request("a", list(range(40))), Request("b", None, kv_transfer_params={"do_remote_prefill": False})
    other.prompt_token_ids = [1]
    engine.step(ordinary, other)
    assert (ordinary.external, other.external) == (0, 0)
    assert all(torch.isnan(keys).all() for keys, _ in engine.units(ordinary, 40))
    engine.scheduler.on_new_request(Request("embeds", None))
    assert engine.scheduler.get_num_new_matched_tokens(Request("embeds", None), 0) == (0, False)


def test_requests_share_whole_blocks_and_load_the_rest_each(engine, folder):
    first, second = about(folder), about(folder, request_id="again", question=[9, 8])
    engine.step(first, second)
    whole = UNITS // BLOCK
    assert first.blocks[:whole] == second.blocks[:whole]
    assert (first.external, second.external) == (UNITS, UNITS - whole * BLOCK)
    for request in (first, second):
        assert_holds(engine, request, prefix_of(folder))


def test_units_lie_where_a_request_has_its_first_positions_also_when_it_was_preempted(engine, folder):
    engine.free.reverse()  # blocks in no order
    request = about(folder)
    engine.step(request)
    assert request.outcome == "ok"
    assert prefix_of(folder).units == UNITS
    assert_holds(engine, request, prefix_of(folder))
    engine.cached.clear()
    request.outcome, before = "preempted", request.blocks
    for block in before:
        for layer in engine.layers[0].values():
            layer.kv_cache[:, block] = float("nan")
    engine.step(request)
    assert not set(before) & set(request.blocks)
    assert_holds(engine, request, prefix_of(folder))


WRONG = {
    "there is no question": lambda folder: Request("one", prefix_of(folder).placeholders),
    "has not all 30 placeholders": lambda folder: Request("one", [*prefix_of(folder).placeholders[:20], 1, 2, 3]),
    "prompt_logprobs": lambda folder: about(folder, sampling_params=SamplingParams(prompt_logprobs=1)),
    "repetition_penalty would": lambda folder: about(folder, sampling_params=SamplingParams(repetition_penalty=1.05)),
    "of no context": lambda _: Request("one", [1, 2, 3] * 20, kv_transfer_params={"locret": True}),
    "nothing here; give true": lambda folder: about(folder, kv_transfer_params={"locret": [10**6] * 10**4}),
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("reason", WRONG)
def test_what_is_wrong_fails_alone_and_says_why(engine, folder, reason, before):
    request, right = WRONG[reason](folder), about(folder, request_id="right")
    request.request_id = "wrong"
    request.skip_reading_prefix_cache = reason == "prompt_logprobs"  # as vLLM does
    if before:
        engine.step(first := about(folder, request_id="first"))
        engine.scheduler.request_finished(first, first.blocks)
    engine.step(request, right)
    assert (request.outcome, right.outcome) == ("error", "ok")
    assert any(reason in line and len(line) < 300 for line in fake_vllm.LOGGER.lines[-8:])
    assert_holds(engine, right, prefix_of(folder))
    for one in (request, right):
        assert engine.scheduler.request_finished(one, one.blocks) == (False, None)
    assert not engine.scheduler._verdicts


def test_a_file_that_went_away_fails_those_that_need_it(engine, folder):
    gone, right = about(folder), about(folder, "two")
    engine.scheduler.on_new_request(gone)
    (folder / "one.ctx").unlink()
    gone.outcome = "preempted"  # it is in the queue already
    engine.step(gone, right)
    assert (gone.outcome, right.outcome) == ("error", "ok")
    assert_holds(engine, right, prefix_of(folder, "two"))
    assert not any(tuple(gone.prompt_token_ids[: n * BLOCK]) in engine.cached for n in range(1, 4))


def test_a_folder_that_changes(engine, folder):
    new = about(folder, "two", request_id="new")
    old = about(folder)
    shutil.copy(folder / "two.ctx", folder / "one.ctx")  # in place: the folder's own time stays
    engine.step(new, old)
    assert (new.outcome, old.external) == ("ok", 0)
    named = about(folder, "two", request_id="named", kv_transfer_params={"locret": True})
    engine.step(named)
    assert named.outcome == "ok"
    assert_holds(engine, named, prefix_of(folder, "two"))


@pytest.mark.parametrize("workers", [2, 8])
def test_each_worker_holds_its_own_heads(connector, folder, workers):
    engine = Engine(connector, config_for(folder), workers=workers)  # 4 KV heads
    request = about(folder)
    engine.step(request)
    for worker in range(workers):
        local = max(1, 4 // workers)
        first = worker * local if workers <= 4 else worker * 4 // workers
        assert_holds(engine, request, prefix_of(folder), worker, slice(first, first + local))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "recompute"}, "kv_load_failure_policy='recompute'"),
        ({"extra": {}}, 'needs "contexts"'),
        ({"extra": {"contexts": "nowhere"}}, "contexts='nowhere' is no folder"),
        ({"extra": {"contexts": ".", "context_in_memory": 4}}, "'context_in_memory', which means nothing"),
    ],
)
def test_an_engine_that_could_only_be_wrong_does_not_start(connector, folder, change, message):
    with pytest.raises(ValueError, match=message):
        Engine(connector, config_for(folder, **change))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"num_hidden_layers": 4}, "num_layers 5 in the file, 4 in vLLM"),
        ({"model_type": "mistral"}, "model_type llama in the file, mistral in vLLM"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "rope_parameters.rope_theta 1000000"),
    ],
)
def test_a_context_of_another_backbone_is_refused(connector, folder, model, message):
    engine = Engine(connector, config_for(folder, **model))
    request = about(folder)
    engine.step(request)
    assert request.outcome == "error"
    assert message in fake_vllm.LOGGER.lines[-1]


def test_prompts_are_made_without_a_backbone(lm, saved):
    context, tokenizer = lm.load(saved / "one.ctx"), AutoTokenizer.from_pretrained(TINY)
    prompts = SavedPrompts(saved / "one.ctx", tokenizer)
    question = "What is the pass key?"
    assert prompts.question_ids(question) == context.question_ids(question)[0].tolist()
    assert prompts.ids(question)[:UNITS] == Prefix.of(context).placeholders
    with pytest.raises(ValueError, match="nothing to answer"):
        prompts.ids(" ")
