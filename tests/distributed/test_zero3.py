"""DeepSpeed's ZeRO-3 as a loader of the frozen backbone; runs where deepspeed is installed, which CI does not do."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from launches import assert_equal_to_one_process, found

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]


@pytest.mark.parametrize("offload", [(), ("cpu",)])
def test_parts_of_a_backbone_do_what_the_whole_does(offload: tuple[str, ...]) -> None:
    assert_equal_to_one_process(found("zero3", *offload, DS_ACCELERATOR="cpu"))


def test_parts_on_a_disk_do_what_the_whole_does(tmp_path: Path) -> None:
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False):
        pytest.skip("DeepSpeed cannot build async_io here; it needs the headers of libaio")
    assert_equal_to_one_process(found("zero3", "nvme", tmp_path, DS_ACCELERATOR="cpu"))
