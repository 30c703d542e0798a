"""Tasks whose samples are made for a tokenizer, a length and a seed. To add one: a file here, a line in `TASKS`."""

from __future__ import annotations

from locret.data.tasks.generated.base import GeneratedTask
from locret.data.tasks.generated.multikey import MultiKey
from locret.data.tasks.generated.multivalue import MultiValue
from locret.data.tasks.generated.number import Number
from locret.data.tasks.generated.passkey import PassKey
from locret.data.tasks.generated.two_stage import TwoStage
from locret.data.tasks.generated.variable_tracking import VariableTracking

TASKS: tuple[GeneratedTask, ...] = (PassKey(), Number(), MultiKey(), MultiValue(), VariableTracking(), TwoStage())
