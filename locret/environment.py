"""What a result depends on besides its options: versions of the libraries, and the toolkit's own commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import torch
import transformers

from locret._version import __version__


def versions() -> dict[str, str]:
    """Return the versions a run depends on, and our commit where the code runs from a checkout."""
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
