"""The Triton label kernels give the labels of the plain path, interpreted on the CPU where there is no GPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import oracle as reference
import pytest
import torch
from torch import Tensor

from locret.backbone.chunk import Attended, Projections
from locret.labels.labels import layer_labels

if find_spec("triton") is None:
    pytest.skip(
        "triton is not installed; `pip install triton` runs these tests, without a GPU too", allow_module_level=True
    )
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from locret.labels import kernel as label_kernel  # noqa: E402


def chunk(heads: int, kv_heads: int, tokens: int, dim: int, **changes: Any) -> Attended:
    """A layer's tensors as backbones make them: views of a token-major projection."""
    generator = torch.Generator().manual_seed(heads + tokens + dim)

    def part(count: int) -> Tensor:
        flat = torch.randn(1, tokens, count * dim, generator=generator).to(DEVICE, changes.get("dtype"))
        return flat.unflatten(-1, (count, dim)).transpose(1, 2)

    key = part(kv_heads)
    nothing = Projections(None)  # type: ignore[arg-type]
    return Attended(
        layer_idx=0,
        query=part(heads),
        key=key,
        value=key,
        scaling=dim**-0.5,
        softcap=changes.get("softcap"),
        projections=nothing,
    )


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("kind", ["logit", "log_attention"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "prompt", "answer", "dim"),
    [(6, 2, 65, 67, 16), (3, 1, 130, 1, 24)],
)
def test_labels_are_those_of_the_plain_path_and_of_the_oracle(
    heads: int, kv_heads: int, prompt: int, answer: int, dim: int, kind: str, include_last: bool
) -> None:
    layer = chunk(heads, kv_heads, prompt + answer, dim)
    fused = layer_labels(layer, prompt, kind, include_last, fused=True)
    assert fused.dtype == torch.float32
    torch.testing.assert_close(fused, layer_labels(layer, prompt, kind, include_last, fused=False), atol=1e-5, rtol=0)
    oracle = reference.labels(
        layer.query[0].cpu(), layer.key[0].cpu(), prompt, prompt - include_last, layer.scaling, kind
    )
    torch.testing.assert_close(fused.cpu(), oracle, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["logit", "log_attention"])
@pytest.mark.parametrize("changes", [{"softcap": 3.0}, {"dtype": torch.float16}], ids=str)
def test_a_softcap_and_half_precision_change_nothing(changes: dict[str, Any], kind: str) -> None:
    layer = chunk(4, 2, 50, 16, **changes)
    plain = layer_labels(layer, 41, kind, False, fused=False)
    torch.testing.assert_close(layer_labels(layer, 41, kind, False, fused=True), plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["logit", "log_attention"])
def test_several_answers_and_a_cut_raise_the_same_labels(kind: str) -> None:
    layer, answers = chunk(4, 2, 90, 16), [(0, 2), (7, 12), (33, 34)]
    for labelled in (20, 70):
        fused, plain = (
            layer_labels(layer, 70, kind, True, labelled=labelled, earlier_answers=answers, fused=choice)
            for choice in (True, False)
        )
        torch.testing.assert_close(fused, plain, atol=1e-5, rtol=0)


def test_kernels_that_fail_are_named_once_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no C compiler")

    assert label_kernel.works(torch.device(DEVICE), torch.float32, 16)
    monkeypatch.setattr(label_kernel, "raise_labels", refuse)
    with pytest.warns(UserWarning, match="without Triton kernels, which fail here: no C compiler"):
        assert not label_kernel.works(torch.device(DEVICE), torch.float32, 32)
    monkeypatch.undo()
    assert not label_kernel.works(torch.device(DEVICE), torch.float32, 32)  # nor tried again
    label_kernel.works.cache_clear()
