"""A backbone spread over two processes gives exactly what a whole one gives, however unequal their work is."""

from __future__ import annotations

import pytest
from launches import assert_equal_to_one_process, found

pytestmark = pytest.mark.slow


def test_slices_of_a_backbone_do_what_the_whole_does() -> None:
    assert_equal_to_one_process(found("fsdp"))
