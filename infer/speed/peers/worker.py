"""One side of a comparison in a process of its own: reads one JSON request per line, answers with one line each.

    python worker.py SIDE METERS

SIDE names a file side_SIDE.py next to this one; METERS is the folder with allocations.py and resident.py, which count
bytes on the CPU. This program imports nothing but torch, transformers, safetensors, these and that side, so that it
runs in a peer's environment, and it is the same for all sides: all are timed and counted by the same lines.

Requests, by "do": hello; load (backbone, prompt and numbers); logits (of the prompt's first tokens); time and memory
(of one method over the prompt's first tokens).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent


class Clock:
    """A streamer for `generate` that only notes when tokens come; what is put first is the prompt."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self.tokens: list[int] = []

    def put(self, ids: Any) -> None:
        """Note one moment; ids that reach the host are computed."""
        self.tokens.append(int(ids.reshape(-1)[-1]))
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: the last token has come."""


class Worker:
    """What lives between requests: the side, its backbone, the prompt."""

    def __init__(self, side: str, meters: str) -> None:
        self.side = _file(HERE / f"side_{side}.py")
        self.allocations, self.resident = (_file(Path(meters, name)) for name in ("allocations.py", "resident.py"))

    def hello(self, **_: Any) -> dict[str, Any]:
        """Return the versions of what runs here."""
        names = ("torch", *self.side.PACKAGES)
        return {"python": sys.version.split()[0], **{name: version(name) for name in names}}

    def load(self, backbone: str, prompt: str, job: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Load the backbone; no token ends an answer."""
        import torch
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(job["threads"])
        device = torch.device(job["device"])
        if job["memory_cap"] is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, job["memory_cap"] / total), device.index)
        dtype = getattr(torch, job["dtype"])
        model = AutoModelForCausalLM.from_pretrained(backbone, dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(device).eval()
        self.model.generation_config.eos_token_id = None
        self.ids = load_file(prompt)["prompt"].to(device)
        self.cuda = torch.cuda if self.ids.is_cuda else None
        self.methods = self.side.prepare(self.model, job)
        return {"parameters": sum(parameter.numel() for parameter in self.model.parameters())}

    def logits(self, tokens: int, **_: Any) -> dict[str, Any]:
        """Return the logits of the last of the prompt's first tokens, by plain attention."""
        import torch

        with torch.no_grad():
            return {"logits": self.model(self.ids[:, :tokens]).logits[0, -1].float().tolist()}

    def time(self, method: str, tokens: int, **_: Any) -> dict[str, Any]:
        """Run a method once; return seconds to the first token and to the last, the units held and the tokens."""
        answer = self._run(method, tokens)
        if self.cuda:
            self.rest()
        return answer

    def memory(self, method: str, tokens: int, warm_up: int, **_: Any) -> dict[str, Any]:
        """Run a method and return its peak bytes, above what was there before: of torch's allocator, of the process."""
        self._run(method, warm_up)  # what is loaded or set up only once does not count as memory of this run
        self.rest()
        if self.cuda:
            before = self.cuda.memory_allocated(), self.cuda.memory_reserved()
            self.cuda.reset_peak_memory_stats()
            self._run(method, tokens)
            peaks = self.cuda.max_memory_allocated(), self.cuda.max_memory_reserved()
            self.rest()
            return {"allocated": peaks[0] - before[0], "process": peaks[1] - before[1]}
        process = self.resident.resident_growth(lambda: self._run(method, tokens))
        self.rest()
        allocated = self.allocations.peak_bytes(lambda: self._run(method, tokens)).everything
        self.rest()
        return {"allocated": allocated, "process": process}

    def _run(self, method: str, tokens: int) -> dict[str, Any]:
        import torch

        clock = Clock()
        if self.cuda:
            self.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            held = self.methods[method](self.ids[:, :tokens], clock)
        first, last = clock.moments[1], clock.moments[-1]
        return {"first_token": first - start, "seconds": last - start, "held": held, "tokens": clock.tokens[1:]}

    def rest(self) -> None:
        """Give freed memory back to the system, for the next run here and for the other sides."""
        self.resident.give_back()
        if self.cuda:
            self.cuda.empty_cache()


def _file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _answer(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(getattr(worker, request["do"])(**request))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}


def main() -> None:
    """Answer until the requests end."""
    # Whatever libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # This folder's names must hide no library's.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            worker = worker or Worker(*sys.argv[1:3])
            answer = _answer(worker, request)
        except ImportError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
