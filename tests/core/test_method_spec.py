"""A method is written in one way everywhere; what is written otherwise gets one sentence, with names that are meant."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locret.base.method_spec import parse, split
from locret.base.nearest import nearest


@pytest.mark.parametrize(
    ("text", "name", "options", "modifiers"),
    [
        ("snapkv:kernel=7,pooling=max", "snapkv", {"kernel": 7, "pooling": "max"}, ()),
        ("locret+pyramid+linear", "locret", {}, ("pyramid", "linear")),
        ("sage_kv:k=none", "sage_kv", {"k": None}, ()),
        ("some.package:Scorer:power=2+pyramid", "some.package:Scorer", {"power": 2}, ("pyramid",)),
        ("locret+recall:recall_by=quest,page=4", "locret", {}, ("recall:recall_by=quest,page=4",)),
        ("h2o:accumulate=false+adaptive_heads", "h2o", {"accumulate": False}, ("adaptive_heads",)),
        ("a+b/c.py:Scorer:power=2", "a+b/c.py:Scorer", {"power": 2}, ()),
        (r"C:\some\where.py:Scorer", r"C:\some\where.py:Scorer", {}, ()),
        ("retaining_heads:heads=org/heads", "retaining_heads", {"heads": "org/heads"}, ()),
        (" snapkv : kernel = 7 ", "snapkv", {"kernel": 7}, ()),
    ],
)
def test_a_text_says_name_options_and_modifiers(
    text: str, name: str, options: dict[str, Any], modifiers: tuple[str, ...]
) -> None:
    spec = parse(text)
    assert (spec.name, spec.options, tuple(map(str, spec.modifiers))) == (name, options, modifiers)


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ("full,snapkv:kernel=7,pooling=max", ["full", "snapkv:kernel=7,pooling=max"]),
        ("h2o+pyramid:pyramid_beta=2,head_floor=1,full", ["h2o+pyramid:pyramid_beta=2,head_floor=1", "full"]),
        ("a.b:C:x=1,y=2,c.py:D", ["a.b:C:x=1,y=2", "c.py:D"]),
        (["full", "snapkv:kernel=7", "pooling=max"], ["full", "snapkv:kernel=7,pooling=max"]),
    ],
)
def test_commas_part_methods_but_not_the_options_of_one(methods: Any, expected: list[Any]) -> None:
    assert split(methods) == expected


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("snapkv:", 'method "snapkv:" is not NAME, NAME:OPTION=VALUE or MODULE:CLASS; write it like snapkv:kernel=7'),
        ("snapkv:kernel=", '"kernel=" is not an option; write OPTION=VALUE, such as kernel=7'),
        ("snapkv:kernel=7,kernel=9", "has the option kernel twice; drop one of them"),
        ("locret+linear+sqrt", 'method "locret+linear+sqrt": +linear and +sqrt both set memory; drop one of them'),
        ("locret+pyrmid", "+pyrmid is unknown; did you mean +pyramid?"),
        (
            "snapkv+prompt_end:window=8",
            '"snapkv+prompt_end:window=8": +prompt_end has no option window (it has none); options of the method '
            "itself come before the plus, NAME:OPTION=VALUE+MODIFIER",
        ),
        ({"snapkv": {"kernel": 7}}, "method {'snapkv': {'kernel': 7}} is not a text; write it like snapkv:kernel=7"),
    ],
)
def test_what_is_written_otherwise_is_refused(method: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        parse(method)
    assert "\n" not in str(caught.value)


@given(text=st.text(alphabet="snapkv:=,+.pymid1 -_\n{é", max_size=25) | st.text(max_size=10))
def test_any_text_is_a_method_or_refused_in_one_sentence(text: str) -> None:
    for one in split(text):
        try:
            spec, refusal = parse(one), ""
        except ValueError as error:
            spec, refusal = None, str(error)
        assert "\n" not in refusal
        if spec is not None:
            assert str(parse(str(spec))) == str(spec)


KNOWN = ("passkey", "two_stage", "long/qa", "long/vt", "short/vt", "other/narrative_qa")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Passky", ["passkey"]),
        ("vt", ["long/vt", "short/vt"]),
        ("narrativeqa", ["other/narrative_qa"]),
        ("lung/vt", ["long/vt"]),  # with a slash only whole names count
        ("stage", ["two_stage"]),
        ("nothing of the kind", []),
    ],
)
def test_names_are_compared_in_lower_case_and_without_what_precedes_their_slash(name: str, expected: list[str]) -> None:
    assert nearest(name, KNOWN) == expected
