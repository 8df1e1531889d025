from __future__ import annotations

from typing import Any

import pytest
import torch

import raydist as rd
from raydist.parameter_servers.requests import Push, PushKey, Sender
from raydist.parameter_servers.serving.optimizers import PushedRows, read_gradients
from tests.parameter_servers.served import served, slice_of


def push_of(*forms: Any, tables: tuple[int, ...] = ()) -> Push:
    return Push(Sender(0, 0), PushKey(0, 0), 0, tuple(range(len(forms))), forms, tables=tables)


def doubles(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64)


def test_gradients_are_used_where_they_lie() -> None:
    rows = torch.tensor([3, 3])
    tensors = [doubles(4, 2), rows, doubles(2, 2), torch.tensor([7]), doubles(1, 5)]
    with served(slice_of(0, 4, 2), slice_of(1, 4, 2)) as values:
        found = read_gradients(push_of("dense", "rows", tables=(9,)), tensors, values)
    assert found.slices[0] is tensors[0]
    some = found.slices[1]
    assert isinstance(some, PushedRows)
    assert some.values is tensors[2]
    assert some.sparse((4, 2)).to_dense().tolist() == [[0, 0], [0, 0], [0, 0], [2, 2]]
    assert found.tables[9].rows is tensors[3]


@pytest.mark.parametrize(
    ("form", "tensors", "message"),
    [
        ("dense", [doubles(4, 2), doubles(4, 2)], r"1 slices in 1 forms and 0 tables must bring 1 tensors, got 2"),
        ("rows", [doubles(4, 2)], r"must bring 2 tensors, got 1"),
        ("dense", [doubles(4)], r"gradient of variable0 must be torch.float64 of shape \(4, 2\), got .* shape \(4,\)"),
        ("dense", [doubles(4, 2).float()], r"must be torch.float64 .*, got torch.float32"),
        ("rows", [torch.tensor([1]), doubles(2, 2)], r"values of shape \(rows, 2\), got torch.int64 of shape \(1,\)"),
        ("rows", [torch.tensor([1]).int(), doubles(1, 2)], r"must be int64 rows"),
        ("rows", [torch.tensor([0, 4]), doubles(2, 2)], r"Rows of variable0 must be in \[0, 4\), got \[0, 4\]"),
        ("rows", [torch.tensor([-1]), doubles(1, 2)], r"must be in \[0, 4\), got \[-1, -1\]"),
    ],
)
def test_what_does_not_belong_together(form: str, tensors: list[torch.Tensor], message: str) -> None:
    with served(slice_of(0, 4, 2)) as values, pytest.raises(rd.InvalidArgumentError, match=message):
        read_gradients(push_of(form), tensors, values)


def test_no_rows_are_fine() -> None:
    with served(slice_of(0, 4, 2)) as values:
        found = read_gradients(push_of("rows"), [torch.empty(0, dtype=torch.int64), doubles(0, 2)], values)
    assert isinstance(found.slices[0], PushedRows)
