"""What every training test starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_cases import write_backbone, write_rows


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a backbone's folder and a file of six rows."""
    folder = tmp_path_factory.mktemp("training")
    return write_backbone(folder / "model"), write_rows(folder / "rows.json")
