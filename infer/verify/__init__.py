"""Verification of a backbone: does what is read in bounded memory equal what the backbone itself computes?

Nothing is imported before it is used, so that the command's help comes at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from locret.on_demand import on_demand

if TYPE_CHECKING:
    from locret.infer.verify.findings import Report, Row
    from locret.infer.verify.suite import verify

__all__ = ["Report", "Row", "verify"]

__getattr__ = on_demand(
    __name__,
    {
        "Report": "locret.infer.verify.findings",
        "Row": "locret.infer.verify.findings",
        "verify": "locret.infer.verify.suite",
    },
)
