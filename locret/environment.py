"""What a result depends on besides its options: versions, our commit, devices; `locret env` shows them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from locret._version import __version__
from locret.cli.command import parse_options, run

_PACKAGES = (
    "accelerate datasets huggingface_hub peft safetensors tokenizers lm_eval matplotlib flash_attn "
    "deepspeed fastapi uvicorn vllm llama_cpp_python gguf"
)


def versions() -> dict[str, str]:
    """Return the versions a run depends on, and our commit where the code runs from a checkout."""
    import torch  # which takes seconds, as transformers does
    import transformers

    found = {"locret": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    found["python"] = platform.python_version()
    if commit := source_commit():
        found["commit"] = commit
    return found


def peak_resident_bytes() -> int:
    """Return the most bytes of memory that this process ever held."""
    import resource  # only Unix has it

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def source_commit() -> str | None:
    """Return the toolkit's git commit, with `+dirty` if tracked files differ; None where it is not a checkout."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        run = subprocess.run(
            ["git", *arguments], cwd=here.parent, capture_output=True, text=True, timeout=10, check=True
        )
        return run.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # installed inside somebody else's checkout, we are not in it
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+dirty" if changes else "")


def report() -> dict[str, Any]:
    """Return versions, devices and what of the environment commands look at."""
    import torch

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
