"""Retaining heads and bounded-memory inference for long-context language models."""

from locret._version import __version__

__all__ = ["__version__"]
