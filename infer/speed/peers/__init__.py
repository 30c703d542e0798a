"""The same work done by others: each side in a process and environment of its own, measured by one meter.

`compare` runs them, `lines` writes the table. `worker.py` and the files `side_*.py` are programs for those processes:
nothing here imports them, and but for `side_locret.py` they know nothing of this package.
"""

from locret.infer.speed.peers.comparison import compare
from locret.infer.speed.peers.environments import PEERS, find_pythons
from locret.infer.speed.peers.report import lines

__all__ = ["PEERS", "compare", "find_pythons", "lines"]
