from __future__ import annotations

import pytest
import torch

import raydist as rd
from tests.parameter_servers.served import served, slice_of


def test_slices_come_in_several_parts_and_may_be_overwritten() -> None:
    with served() as mine:
        assert mine.version == 0
        mine.create([slice_of(1, 2), slice_of(4)], [torch.ones(2).double(), torch.tensor(3.0).double()])
        first = mine.value(1)
        mine.create(
            [slice_of(2, 1, dtype=torch.int8), slice_of(1, 2)], [torch.tensor([5]).char(), torch.zeros(2).double()]
        )
        assert mine.version == 2
        assert first.tolist() == [0, 0]
        assert first.data_ptr() == mine.value(1).data_ptr()
        assert (mine.value(4).item(), mine.value(2).tolist()) == (3, [5])
        assert mine.num_bytes == 2 * 8 + 8 + 1


def test_values_must_be_the_slices() -> None:
    with served(slice_of(1, 2)) as mine:
        with pytest.raises(
            rd.InvalidArgumentError, match=r"variable2 must be torch.float64 of shape \(3,\), got torch.f"
        ):
            mine.create([slice_of(2, 3)], [torch.zeros(3)])
        with pytest.raises(rd.InvalidArgumentError, match=r"Slice 1 must stay torch.float64 of shape \(2,\)"):
            mine.create([slice_of(1, 3)], [torch.zeros(3).double()])
        with pytest.raises(rd.InvalidArgumentError, match=r"has 1 of them and not number 7"):
            mine.value(7)


def test_more_than_there_is_room_for_says_by_how_much() -> None:
    with (
        served(room=1_000_000) as mine,
        pytest.raises(rd.InvalidArgumentError, match=r"1,048,576 bytes more .* 48,576 too few"),
    ):
        mine.create([slice_of(1, 1 << 17)], [torch.zeros(1 << 17).double()])


def test_values_are_replaced_all_or_none() -> None:
    with served(slice_of(1, 2), slice_of(2)) as mine:
        mine.replace({1: torch.tensor([3.0, 4.0]).double(), 2: torch.tensor(5.0).double()})
        assert (mine.value(1).tolist(), mine.value(2).item(), mine.version) == ([3, 4], 5, 2)
        for number, value in ((2, torch.zeros(1).double()), (2, torch.tensor(0.0)), (7, torch.zeros(1))):
            with pytest.raises(rd.InvalidArgumentError):
                mine.replace({1: torch.zeros(2).double(), number: value})
        assert (mine.value(1).tolist(), mine.value(2).item(), mine.version) == ([3, 4], 5, 2)
