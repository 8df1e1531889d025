from __future__ import annotations

import pytest
import torch

from raydist.collectives.tensors import check_parts, check_rows, rows_name
from raydist.errors import InvalidArgumentError


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


@pytest.mark.parametrize(
    "outputs",
    [
        [torch.ones(2, 3)],
        [torch.ones(2, 3), torch.ones(2, 4)],
        [torch.ones(1, 3), torch.ones(5, 3)],
        [torch.ones(2, 3), torch.ones(5, 3, dtype=torch.int64)],
        [torch.ones(2, 3), torch.tensor(1.0)],
    ],
    ids=["one-too-few", "other-columns", "not-my-length", "other-dtype", "no-rows"],
)
def test_rows_that_do_not_fit(outputs: list[torch.Tensor]) -> None:
    check_rows([torch.ones(2, 3), torch.ones(0, 3)], torch.ones(2, 3), rank=0, world_size=2)
    with pytest.raises(InvalidArgumentError, match=r"2 tensors of torch.float32 \(any, 3\)"):
        check_rows(outputs, torch.ones(2, 3), rank=0, world_size=2)


def test_rows_of_a_scalar() -> None:
    with pytest.raises(InvalidArgumentError, match="all_gather_rows"):
        check_rows([torch.tensor(1.0)], torch.tensor(1.0), rank=0, world_size=1)


def test_other_lengths_have_other_names() -> None:
    assert rows_name([torch.ones(1), torch.ones(2)]) != rows_name([torch.ones(2), torch.ones(1)])
