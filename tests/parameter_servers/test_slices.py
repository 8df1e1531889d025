from __future__ import annotations

import torch

from raydist.parameter_servers.slices import ServedSlice


def a_slice(shape: tuple[int, ...], begin: int = 0) -> ServedSlice:
    return ServedSlice(0, 1, "weight/part_1", server=0, begin=begin, shape=shape, dtype=torch.float64)


def test_rows_of_its_variable() -> None:
    variable = torch.arange(12.0).view(6, 2)
    part = a_slice((2, 2), begin=3).within(variable)
    assert part.tolist() == [[6.0, 7.0], [8.0, 9.0]]
    part.zero_()
    assert variable.sum() == 66 - 30


def test_a_scalar_is_whole() -> None:
    scalar = torch.tensor(2.0)
    assert a_slice(()).within(scalar) is scalar


def test_bytes() -> None:
    assert [a_slice(shape).num_bytes for shape in ((), (3,), (2, 5), (0, 4))] == [8, 24, 80, 0]
