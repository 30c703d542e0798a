"""Questions about contexts in a real vLLM, one whole run; skipped where it is not installed.

    VLLM_PYTHON -m pytest tests/engines/test_vllm_engine.py

Texts of 8K tokens are read first, by `LOCRET_PYTHON` if it is set and by this Python otherwise.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]
vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

from locret.engines.prefix import Prefix  # noqa: E402

ROOT = Path(__file__).parents[2]
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": str(ROOT),
}


def test_32_questions_about_4_contexts_in_one_shuffled_batch_beside_one_that_is_wrong(tmp_path):
    python = os.environ.get("LOCRET_PYTHON", sys.executable)
    subprocess.run([python, str(ROOT / "tests/engines/read_contexts.py"), str(tmp_path)], check=True, timeout=600)
    record = json.loads((tmp_path / "record.json").read_text())
    ids = {name: Prefix.from_file(tmp_path / f"contexts/{name}.ctx").placeholders for name in record}
    jobs = [(name, asked) for name, questions in record.items() for asked in questions]
    random.Random(0).shuffle(jobs)
    prompts = [{"prompt_token_ids": [*ids[name], *asked["ids"]]} for name, asked in jobs]
    transfer = {
        "kv_connector": "LocretConnector",
        "kv_role": "kv_consumer",
        "kv_connector_module_path": "locret.engines.vllm",
        "kv_connector_extra_config": {"contexts": str(tmp_path / "contexts")},
    }
    options = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 9216, "max_num_seqs": 64}
    llm = vllm.LLM(str(ROOT / "checkpoints/tiny"), kv_transfer_config=transfer, **options)
    named = vllm.SamplingParams(temperature=0, max_tokens=16, extra_args={"kv_transfer_params": {"locret": True}})
    plain = vllm.SamplingParams(temperature=0, max_tokens=16)
    wrong = {"prompt_token_ids": ids[jobs[0][0]]}  # no question
    try:
        first = llm.generate([*prompts, wrong], [named] * 33, use_tqdm=False)
        again = llm.generate(prompts, [plain] * 32, use_tqdm=False)  # recognised, or from vLLM's own prefix cache
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert first.pop().outputs[0].finish_reason == "error"
    for outputs in (first, again):
        assert [list(output.outputs[0].token_ids) for output in outputs] == [asked["answer"] for _, asked in jobs]
    assert min(output.num_cached_tokens for output in again) >= 256
