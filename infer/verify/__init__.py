"""Verification of a backbone: does what is read in bounded memory equal what the backbone itself computes?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from locret.base.plugins import on_demand
from locret.infer.verify.report import Report, Row

if TYPE_CHECKING:
    from locret.infer.verify.suite import verify

__all__ = ["Report", "Row", "verify"]

__getattr__ = on_demand(__name__, {"verify": "locret.infer.verify.suite"})  # which imports torch
