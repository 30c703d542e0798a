"""`locret env`: versions and devices, to be pasted into a report of a problem."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from locret.cli.command import parse_options, run

_PACKAGES = (
    "accelerate datasets huggingface_hub peft safetensors tokenizers lm_eval matplotlib flash_attn "
    "deepspeed fastapi uvicorn vllm llama_cpp_python gguf"
)


def report() -> dict[str, Any]:
    """Return versions, devices and what of the environment commands look at."""
    import torch  # for the report alone

    from locret.environment import versions

    found: dict[str, Any] = {"platform": platform.platform(), **versions()}
    for name in _PACKAGES.split():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["cpus"], found["cpu_threads"] = os.cpu_count(), torch.get_num_threads()
    found["cuda"], found["mps"] = torch.version.cuda, torch.backends.mps.is_available()
    found["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    names = [name for name in os.environ if name.startswith(("HF_", "ACCELERATE_", "CUDA_VISIBLE", "OMP_NUM"))]
    # Of a secret only that it is set.
    return {**found, "environment": {n: "(set)" if "TOKEN" in n else os.environ[n] for n in sorted(names)}}


def command(argv: Sequence[str] | None = None) -> int:
    """Print the report as JSON; return 0."""
    parse_options("locret env", "Show versions and devices.", [], argv)
    print(json.dumps(report(), indent=1))
    return 0


if __name__ == "__main__":
    run(command)
