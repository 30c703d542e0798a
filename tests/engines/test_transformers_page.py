"""The Python about contexts in transformers on docs/transformers.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"


@pytest.mark.filterwarnings("ignore:the embedded backbone knows")
def test_contexts_answer_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    about = text[text.index("## A context as a `DynamicCache`") : text.index("## `custom_generate`")]
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", about, re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert capsys.readouterr().out == "The pass key is 43600.\n" * 9
