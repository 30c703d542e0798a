"""Quest: its bounds by hand and as bounds, its pages, and the oracle against full attention."""

from __future__ import annotations

import pytest
import torch
from families import build, prompt

from locret import reference

INV_FREQ = 10000.0 ** -(torch.arange(0, 8, 2).float() / 8)


def test_bounds_of_a_page_by_hand() -> None:
    keys = torch.tensor([[1.0, -2.0], [3.0, 5.0], [-1.0, 0.0]])
    (low, high), (short, same) = reference.page_bounds(keys, 2)
    assert (low.tolist(), high.tolist()) == ([1, -2], [3, 5])
    assert torch.equal(short, same)
    # 2 wants a large first channel (3), -1 a small second one (-2); no key of the page has both.
    assert reference.upper_bound(torch.tensor([2.0, -1.0]), low, high) == 2 * 3 + 1 * 2


@pytest.mark.parametrize("length", [1, 15, 16, 17, 90])
def test_no_key_of_a_page_exceeds_its_bound(length: int) -> None:
    torch.manual_seed(length)
    keys, queries = torch.randn(length, 6), torch.randn(20, 6)
    for start, (low, high) in zip(range(0, length, 16), reference.page_bounds(keys, 16), strict=True):
        for query in queries:
            assert reference.upper_bound(query, low, high) >= float((keys[start : start + 16] @ query).max()) - 1e-5


@pytest.mark.parametrize(
    ("tokens", "page", "pages", "expected"),
    [(1024, 16, 500, 64), (16, 16, 500, 3), (1024, 16, 40, 40), (100, 16, 500, 6), (16, 16, 2, 2)],
)
def test_pages_that_a_query_head_attends_to(tokens: int, page: int, pages: int, expected: int) -> None:
    assert reference.quest_pages(tokens, page, pages) == expected


def test_the_last_page_counts_where_it_is_always_chosen() -> None:
    keys = torch.cat([torch.ones(1, 6, 2), torch.zeros(1, 1, 2)], dim=1)  # the last page of one token is the worst
    query = torch.ones(1, 2)
    assert 6 not in reference.quest_kept(query, keys, tokens=6, page=2)[0]
    assert reference.quest_kept(query, keys, tokens=6, page=2, last=True)[0] == [0, 1, 2, 3, 6]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@torch.no_grad()
def test_oracle_with_a_budget_of_the_prompts_length_is_full_attention(family: str) -> None:
    model, ids = build(family), prompt(43)
    visible = reference.quest_visible(prompt=38, tokens=48, page=16, dense=1)
    logits = reference.read_by_choice(model, ids[0], [38, 1, 1, 1, 1, 1], INV_FREQ, 1.0, visible)
    torch.testing.assert_close(logits[-5:], model(ids).logits[0, -5:], atol=1e-4, rtol=0)
