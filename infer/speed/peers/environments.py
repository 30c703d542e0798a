"""Which python runs which peer: kvpress pins an older transformers than ours, so it needs an environment of its own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping

import torch

PEERS: Mapping[str, str] = {"kvpress": "kvpress==0.5.5", "transformers": "transformers accelerate safetensors"}
"""What pip installs for each peer."""
_HERE_ANYWAY = ("transformers",)


def find_pythons(peers: Iterable[str], pythons: Mapping[str, str]) -> dict[str, str]:
    """Return the interpreter that runs each of `peers`.

    Args:
        peers: Names out of `PEERS`.
        pythons: Interpreters by peer; `transformers` may be missing and is then run by ours.

    Raises:
        ValueError: For a peer without an environment, or an interpreter that is not there.
    """
    found = {}
    for peer in peers:
        path = pythons.get(peer, sys.executable if peer in _HERE_ANYWAY else None)
        if path is None:
            raise ValueError(f"--vs {peer} needs an environment of its own; {advice(peer)}")
        if shutil.which(path) is None:
            raise ValueError(f"--peer-python {peer}={path} is not a program; {advice(peer)}")
        found[peer] = path
    return found


def advice(peer: str) -> str:
    """Return how to make a peer's environment, with the same torch as ours."""
    same = torch.__version__.partition("+")[0]
    return (
        f"make one with `python -m venv {peer}-env` and `{peer}-env/bin/pip install {PEERS[peer]} torch=={same}`, "
        f"then add --peer-python {peer}={peer}-env/bin/python"
    )
