from __future__ import annotations

import pytest
import torch

from raydist.collectives.shared_memory.calls import CallTexts, check_parts
from raydist.collectives.shared_memory.layout import CALL_BYTES
from raydist.errors import InvalidArgumentError


def test_a_call_is_made_into_text_once() -> None:
    texts = CallTexts()
    first = texts.text("all_reduce(SUM)", torch.ones(2, 3))
    assert first == b"all_reduce(SUM) of torch.float32 (2, 3)"
    assert texts.text("all_reduce(SUM)", torch.zeros(2, 3)) is first
    assert texts.text("barrier", None) == b"barrier"
    for numel in range(3000):
        texts.text("all_reduce(SUM)", torch.empty(numel))
    assert len(texts._known) <= 1024


def test_long_calls_fit_and_differ() -> None:
    shapes = [(1,) * 63 + (last,) for last in (1, 2)]
    texts = [CallTexts().text("with a long name" * 9, torch.empty(shape)) for shape in shapes]
    assert all(len(text) == CALL_BYTES - 8 for text in texts)
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([torch.ones(3)], "2 tensors of torch.float32 (3,), one a rank, got 1."),
        ([torch.ones(3), torch.ones(2)], "got 2, of which one is torch.float32 (2,)."),
        ([torch.ones(3), torch.ones(3, dtype=torch.float64)], "got 2, of which one is torch.float64 (3,)."),
    ],
)
def test_parts_that_do_not_fit(parts: list[torch.Tensor], said: str) -> None:
    check_parts("all_gather", [torch.zeros(3), torch.zeros(3)], torch.ones(3), 2)
    with pytest.raises(InvalidArgumentError) as caught:
        check_parts("all_gather", parts, torch.ones(3), 2)
    assert said in str(caught.value)
