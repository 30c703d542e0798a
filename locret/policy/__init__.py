"""How much stays: the numbers a user gives, the plan that follows from them, and the choice of units."""

from locret.policy.policy import RetentionPolicy

__all__ = ["RetentionPolicy"]
