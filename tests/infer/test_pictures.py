"""What the bars of retention count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from locret import RetentionCache, RetentionPolicy, prefill
from locret.pictures import Retention, as_lines, kept_shares, require_matplotlib, retention_of


def test_shares_count_kept_positions_column_by_column() -> None:
    kept = {0: [torch.tensor([0, 1, 9]), torch.tensor([4, 5, 6])], 3: [torch.tensor([7, 8, 9])]}
    shares = kept_shares(Retention("", kept, 10), 4)
    expected = [[1, 0, 0, 0.5], [0, 1 / 3, 2 / 3, 0], [0, 0, 1 / 3, 1]]
    assert torch.allclose(shares, torch.tensor(expected))  # of the columns [0, 2), [2, 5), [5, 8) and [8, 10)
    assert as_lines(Retention("", {0: kept[0], 3: kept[3]}, 10), 4) == ["    0 |▆▄▅▄|", "    3 |  ▅█|"]


def test_retention_of_a_cache_names_its_governed_layers(tiny_llama: Any) -> None:
    cache = RetentionCache(tiny_llama, "streaming", RetentionPolicy(budget=8, chunk_size=4, stabilizers=0, local_len=2))
    prefill(tiny_llama, torch.arange(30)[None], cache)
    retention = retention_of(cache, "streaming")
    assert (list(retention.kept), retention.prompt_tokens) == ([0, 1], 30)
    assert retention.kept[1][1].tolist() == [0, 1, 2, 3, 24, 25, 26, 27, 28, 29]


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--picture needs matplotlib; install it with `pip install 'locret\[eval\]'`"):
        require_matplotlib("--picture")
