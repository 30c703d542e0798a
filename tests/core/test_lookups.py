"""Lookups of the second tier whose options make no sense, or do not fit what they are for."""

from __future__ import annotations

import pytest
from families import build

from locret import RetentionCache, RetentionPolicy, lookups


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("codes:bits=2", 'lookup "codes" was retired; release 0.1.0'),
        ("omnikv:filter_layers=8-2", "filter_layers=8-2 are not layers in ascending order; write 2-8-18"),
        ("omnikv:tokens=0", "tokens=0 is neither a number of units nor a share"),
        ("omnikv:memory=1.5", "memory=1.5 is not a share"),
        ("omnikv:tokens=9,memory=0.5", "tokens=9 and memory=0.5 both say"),
        ("omnikv:window=4", "window=4 is what uniform and exp look from"),
    ],
)
def test_a_lookup_that_makes_no_sense_is_refused(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        lookups.get(spec)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("omnikv:filter_layers=2-9", "filter_layers=2-9 names layers that a backbone of 3 does not have"),
        ("omnikv:filter_layers=1", "filter_layers=1 leave no sparse layer of 3"),
        ("omnikv:memory=0.5", "memory=0.5 is no more than the dense layers take"),
        ("omnikv:tokens=100", "tokens=100, but recall=8; leave tokens out, or recall as many"),
        ("quest:dense=3", "dense=3 leaves no layer of 3"),
    ],
)
def test_a_lookup_that_does_not_fit_is_refused_before_anything_is_read(spec: str, says: str) -> None:
    policy = RetentionPolicy(budget=8, host_budget=64, recall=8, recall_by=spec)
    with pytest.raises(ValueError, match=says):
        RetentionCache(build("llama"), "random", policy)
