from __future__ import annotations

import functools
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
from raydist.parameter_servers.slicing import (
    ReadVersions,
    cut_state,
    form_of,
    joined_state,
    rows_and_values,
)


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


def test_partitioners_split_as_those_of_tensorflow() -> None:
    for partitioner, shape, expected in OF_TENSORFLOW:
        assert partitioner(shape, torch.float32) == expected, (partitioner, shape)


def test_partitioners_need_sound_numbers() -> None:
    makes: list[tuple[Callable[[], Any], str]] = [
        (lambda: rd.FixedShardsPartitioner(0), r"num_shards must be an int >= 1, got 0"),
        (lambda: rd.MinSizePartitioner(max_shards=0), r"max_shards must be an int >= 1, got 0"),
        (lambda: rd.MinSizePartitioner(0), r"min_shard_bytes must be an int >= 1, got 0"),
        (lambda: rd.MaxSizePartitioner(1.5), r"max_shard_bytes must be an int >= 1, got 1.5"),  # type: ignore[arg-type]
        (lambda: rd.MaxSizePartitioner(8, True), r"max_shards must be an int >= 1, got True"),
    ]
    for make, message in makes:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            make()
    answers: list[Any] = [None, 2, "21", [2], [2, 2], [0, 1], [-1, 1], [True, 1], [2.0, 1], [2, 1, 1]]
    for answer in answers:
        with pytest.raises(rd.InvalidArgumentError, match=r"list of 2 ints for v0 of shape \(4, 3\), \[k, 1, ...\]"):
            plan_slices([spec(0, 4, 3)], [0], functools.partial(lambda answer, shape, dtype: answer, answer), 0)


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
    whole = [spec(0), spec(1, 6, partitioned=False), spec(2, 0, 3), spec(3, 1)]
    planned = plan_slices(whole, [0, 0], FixedShardsPartitioner(2), 0)
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


def part(number: int, begin: int, *shape: int, server: int = 0, handle: int = 1) -> PsSlice:
    return PsSlice(number, handle, "v", server, begin, shape, torch.float32)


def test_a_change_of_ones_own_leaves_all_else_as_new_as_it_was() -> None:
    read = ReadVersions()
    read.add([1, 2, 3])
    assert read.older_than(0) == [1, 2, 3]
    read.note([1, 2, 3], 5)
    read.note_change([1], 6)
    assert read.older_than(6) == []
    read.note_change([1], 8)  # somebody else made version 7
    assert (read.older_than(8), read.newest) == ([2, 3], 8)
    assert (read.oldest([1]), read.oldest([1, 2]), read.oldest([])) == (8, 6, 8)
    read.forget()
    assert read.older_than(0) == [1, 2, 3]
    read.drop([1, 2])
    assert read.older_than(0) == [3]
    assert read.newest == 8


HALVES = (part(4, 0, 3, 2), part(5, 3, 1, 2, server=1))


def test_what_is_sparse_in_another_way_is_sent_whole() -> None:
    odd = torch.eye(3).to_sparse()
    assert form_of(odd) == "dense"
    whole = rows_and_values(odd)
    assert isinstance(whole, torch.Tensor)
    assert torch.equal(whole, torch.eye(3))
    dense = torch.ones(2, requires_grad=True)
    kept = rows_and_values(dense)
    assert isinstance(kept, torch.Tensor)
    assert kept.data_ptr() == dense.data_ptr()
    assert not kept.requires_grad


def test_what_was_cut_is_joined_again_and_shares_nothing_that_can_change() -> None:
    state = {"step": torch.tensor(3.0), "momentum": torch.arange(8.0).view(4, 2), "list": [1], "none": None}
    cut = cut_state(state, (4, 2), HALVES)
    assert cut[5]["momentum"].tolist() == [[6, 7]]
    assert cut[4]["momentum"].data_ptr() != state["momentum"].data_ptr()  # type: ignore[attr-defined]
    joined = joined_state(cut, (4, 2), HALVES)
    assert torch.equal(joined["momentum"], state["momentum"])  # type: ignore[arg-type]
    assert (joined["step"].item(), joined["list"], joined["none"]) == (3, [1], None)
    cut[4]["list"].append(2)
    assert cut[5]["list"] == [1]
    joined["list"].clear()
    assert cut[4]["list"] == [1, 2]
    only = (part(1, 0),)
    scalars = {"step": torch.tensor(2.0), "square": torch.tensor(4.0)}
    assert joined_state(cut_state(scalars, (), only), (), only) == scalars
    assert joined_state({}, (), only) == joined_state({1: {}}, (), only) == {}


def test_momentum_of_rows_is_cut_too() -> None:
    dense = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    for mine in (HALVES, (part(6, 0, 4, 2),)):
        momentum = dense.to_sparse(1)
        joined = joined_state(cut_state({"momentum": momentum}, (4, 2), mine), (4, 2), mine)["momentum"]
        assert joined.layout is torch.sparse_coo
        assert torch.equal(joined.to_dense(), dense)
        momentum._values().zero_()
        assert torch.equal(joined.to_dense(), dense)
