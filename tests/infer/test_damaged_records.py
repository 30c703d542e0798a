"""What an evaluation left behind, and recipes, are read strictly: damage is one sentence, or the end of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mutations
import yaml
from eval_runs import RECORD
from hypothesis import given, settings
from hypothesis import strategies as st

from locret.cli.command import parse_options
from locret.infer import command as infer
from locret.infer.evaluation.records import SAMPLES, SampleLog
from locret.train.training_options import OPTION_CLASSES


@given(data=st.data())
def test_damaged_records_are_refused_or_read(tmp_path_factory: Any, data: st.DataObject) -> None:
    lines = [json.dumps({**RECORD, "index": number}).encode() for number in range(3)]
    at = data.draw(st.integers(0, 2))
    if data.draw(st.booleans()):
        lines[at] = json.dumps(mutations.values_of(data.draw, RECORD)).encode()
    else:
        lines[at] = mutations.bytes_of(data.draw, lines[at])
    folder = tmp_path_factory.getbasetemp() / "records"
    path = mutations.put(folder, SAMPLES, b"\n".join(lines) + b"\n")
    mutations.loaded_or_refused(SampleLog(folder).load)
    assert path.is_file()


RECIPES = {"infer": "recipes/infer/tiny.yaml", "train": "recipes/train/tiny.yaml"}


def parsed(name: str, path: Path) -> Any:
    """Parse a recipe; the parser leaves with exit code 2 where a value is of another type."""
    try:
        if name == "infer":
            return parse_options("locret-infer", "Ask.", infer.OPTION_CLASSES, ["--config", str(path)])
        return parse_options("locret-train", "Train.", OPTION_CLASSES, ["--config", str(path)])
    except SystemExit as left:
        if left.code != 2:
            raise
        return None


@settings(max_examples=settings().max_examples // 3)
@given(data=st.data())
def test_damaged_recipes_are_refused_or_read(tmp_path_factory: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(RECIPES)))
    text = Path(RECIPES[name]).read_text()
    if data.draw(st.booleans()):
        content = yaml.safe_dump(mutations.values_of(data.draw, yaml.safe_load(text))).encode("utf-8", "surrogatepass")
    else:
        content = mutations.bytes_of(data.draw, text.encode())
    path = mutations.put(tmp_path_factory.getbasetemp() / "recipes", f"{name}.yaml", content)
    mutations.loaded_or_refused(lambda: parsed(name, path))
