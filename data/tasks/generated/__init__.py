"""Tasks whose samples are made for a tokenizer, a length and a seed. To add one: a file here, a line in `TASKS`."""

from __future__ import annotations

from locret.data.tasks.generated.base import GeneratedTask
from locret.data.tasks.generated.multikey import MultiKey
from locret.data.tasks.generated.number import Number
from locret.data.tasks.generated.passkey import PassKey

TASKS: tuple[GeneratedTask, ...] = (PassKey(), Number(), MultiKey())
