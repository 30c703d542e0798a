"""What the bars of retention count."""

from __future__ import annotations

import pytest
import torch

from locret.pictures import Retention, as_lines, kept_shares, require_matplotlib


def test_shares_count_kept_positions_column_by_column() -> None:
    kept = {0: [torch.tensor([0, 1, 9]), torch.tensor([4, 5, 6])], 3: [torch.tensor([7, 8, 9])]}
    shares = kept_shares(Retention("", kept, 10), 4)
    expected = [[1, 0, 0, 0.5], [0, 1 / 3, 2 / 3, 0], [0, 0, 1 / 3, 1]]
    assert torch.allclose(shares, torch.tensor(expected))  # of the columns [0, 2), [2, 5), [5, 8) and [8, 10)
    assert as_lines(Retention("", {0: kept[0], 3: kept[3]}, 10), 4) == ["    0 |▆▄▅▄|", "    3 |  ▅█|"]


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--picture needs matplotlib; install it with `pip install 'locret\[eval\]'`"):
        require_matplotlib("--picture")
