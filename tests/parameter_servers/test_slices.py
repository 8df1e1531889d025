from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.parameter_servers.slices import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    PsSlice,
    VariablePartitioner,
    VariableSpec,
    plan_slices,
)


def a_slice(shape: tuple[int, ...], begin: int = 0) -> PsSlice:
    return PsSlice(0, 1, "weight/part_1", server=0, begin=begin, shape=shape, dtype=torch.float64)


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


def spec(handle: int, *shape: int, dtype: torch.dtype = torch.float32, partitioned: bool = True) -> VariableSpec:
    return VariableSpec(handle, f"v{handle}", shape, dtype, partitioned)


# What TensorFlow 2.21 gives for float32.
OF_TENSORFLOW: list[tuple[VariablePartitioner, tuple[int, ...], list[int]]] = [
    (FixedShardsPartitioner(8), (3, 2), [3, 1]),
    (FixedShardsPartitioner(2), (13,), [2]),
    (MinSizePartitioner(4, 2), (6, 1), [2, 1]),
    (MinSizePartitioner(4, 10), (6, 1), [6, 1]),
    (MinSizePartitioner(), (6, 1), [1, 1]),
    (MinSizePartitioner(256 << 10, 8), (1024, 1024), [8, 1]),
    (MinSizePartitioner(10, 8), (6, 1), [3, 1]),
    (MinSizePartitioner(5, 8), (3, 2), [3, 1]),
    (MaxSizePartitioner(4), (6, 1), [6, 1]),
    (MaxSizePartitioner(4, 2), (6, 1), [2, 1]),
    (MaxSizePartitioner(1024), (6, 1), [1, 1]),
    (MaxSizePartitioner(11), (7, 1), [4, 1]),
    (MaxSizePartitioner(3), (5, 2, 2), [5, 1, 1]),
    (MaxSizePartitioner(100), (100, 3), [13, 1]),
]


@pytest.mark.parametrize(("partitioner", "shape", "expected"), OF_TENSORFLOW)
def test_partitioners_split_as_those_of_tensorflow(
    partitioner: VariablePartitioner, shape: tuple[int, ...], expected: list[int]
) -> None:
    assert partitioner(shape, torch.float32) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rd.FixedShardsPartitioner(0), r"num_shards must be an int >= 1, got 0"),
        (lambda: rd.MinSizePartitioner(max_shards=0), r"max_shards must be an int >= 1, got 0"),
        (lambda: rd.MinSizePartitioner(0), r"min_shard_bytes must be an int >= 1, got 0"),
        (lambda: rd.MaxSizePartitioner(1.5), r"max_shard_bytes must be an int >= 1, got 1.5"),  # type: ignore[arg-type]
        (lambda: rd.MaxSizePartitioner(8, True), r"max_shards must be an int >= 1, got True"),
    ],
)
def test_partitioners_need_sound_numbers(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        make()


@pytest.mark.parametrize("answer", [None, 2, "21", [2], [2, 2], [0, 1], [-1, 1], [True, 1], [2.0, 1], [2, 1, 1]])
def test_a_partitioner_that_returns_nonsense_is_told_so(answer: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"list of 2 ints for v0 of shape \(4, 3\), \[k, 1, ...\]"):
        plan_slices([spec(0, 4, 3)], [0], lambda shape, dtype: answer, 0)


def parts(planned: list[PsSlice]) -> list[tuple[int, int, int, int]]:
    return [(each.number, each.server, each.begin, each.shape[0]) for each in planned]


def test_rows_are_divided_as_by_tensorflow() -> None:
    planned = plan_slices([spec(0, 13, 2)], [0, 0], FixedShardsPartitioner(2), 5)
    assert parts(planned) == [(5, 0, 0, 7), (6, 1, 7, 6)]
    assert [each.name for each in planned] == ["v0/part_0", "v0/part_1"]
    assert [each.shape[0] for each in plan_slices([spec(0, 10)], [0], FixedShardsPartitioner(4), 0)] == [3, 3, 2, 2]
    assert [each.shape[0] for each in plan_slices([spec(0, 3)], [0], lambda shape, dtype: (9,), 0)] == [1, 1, 1]


def test_whole_variables_go_to_the_server_that_has_least() -> None:
    specs = [spec(0, 1), spec(1, 10), spec(2, 4), spec(3, 5), spec(4)]
    planned = plan_slices(specs, [0, 8], None, 0)
    assert [(each.handle, each.server) for each in planned] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 0)]
    assert [each.name for each in planned] == ["v0", "v1", "v2", "v3", "v4"]


def test_scalars_buffers_and_what_has_no_rows_stay_whole() -> None:
    specs = [spec(0), spec(1, 6, partitioned=False), spec(2, 0, 3), spec(3, 1)]
    planned = plan_slices(specs, [0, 0], FixedShardsPartitioner(2), 0)
    assert [each.shape for each in planned] == [(), (6,), (0, 3), (1,)]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3), st.booleans()), max_size=6),
    st.lists(st.integers(0, 500), min_size=1, max_size=5),
    st.integers(1, 7),
)
def test_every_row_lies_on_one_server(sizes: list[tuple[int, int, bool]], loads: list[int], shards: int) -> None:
    specs = [spec(handle, rows, columns, partitioned=split) for handle, (rows, columns, split) in enumerate(sizes)]
    planned = plan_slices(specs, loads, FixedShardsPartitioner(shards), 3)
    assert [each.number for each in planned] == list(range(3, 3 + len(planned)))
    for each in specs:
        mine = [part for part in planned if part.handle == each.handle]
        covered = [row for part in mine for row in range(part.begin, part.begin + part.shape[0])]
        assert covered == list(range(each.shape[0]))
        dealt = [sum(part.server == server for part in mine) for server in range(len(loads))]
        assert max(dealt) - min(dealt) <= 1
        assert all(part.shape[1:] == each.shape[1:] and 0 <= part.server < len(loads) for part in mine)
