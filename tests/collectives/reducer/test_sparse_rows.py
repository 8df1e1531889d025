"""Gradients of which only rows travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raydist.collectives.base import Work
from raydist.collectives.local import LocalGroup
from raydist.collectives.reducer.bucket import ParameterSpec
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.collectives.reducer.sparse_rows import SparseRows
from raydist.values import ReduceOp
from tests.collectives.threads import run_ranks

CPU = torch.device("cpu")
Rows = Sequence[tuple[int, float]]


def spec(index: int, *shape: int, dtype: torch.dtype = torch.float64) -> ParameterSpec:
    return ParameterSpec(index, shape, dtype, CPU)


def gradient(rows: Rows, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A sparse gradient; row numbers may repeat."""
    numbers = torch.tensor([[row for row, _ in rows]], dtype=torch.int64)
    values = torch.tensor([value for _, value in rows], dtype=dtype).reshape(-1, *[1] * (len(shape) - 1))
    values = values.expand(-1, *shape[1:]).contiguous()
    return torch.sparse_coo_tensor(numbers, values, shape, check_invariants=True)


def exchanged(
    specs: Sequence[ParameterSpec],
    put: Callable[[SparseRows, int], None],
    *,
    world_size: int = 3,
    compression: torch.dtype | None = None,
    empty: Sequence[int] = (),
) -> list[dict[int, torch.Tensor]]:
    def body(group: LocalGroup) -> dict[int, torch.Tensor]:
        counts = group.rank not in empty
        lane = SparseRows(group, specs, scale=0.5, counts=counts, compression=compression)
        put(lane, group.rank)
        lane.finish()
        return lane.reduced

    return run_ranks(world_size, body)


ROWS = st.lists(st.tuples(st.integers(0, 6), st.floats(-4, 4, width=16)), max_size=6)

SHAPES = st.sampled_from([(7,), (7, 3), (7, 2, 2)])


@settings(max_examples=60)
@given(
    rows=st.lists(st.one_of(st.none(), ROWS), min_size=1, max_size=4), shape=st.sampled_from([(7,), (7, 3), (7, 2, 2)])
)
def test_rows_of_all_ranks_are_added_up(rows: list[Rows | None], shape: tuple[int, ...]) -> None:
    def put(lane: SparseRows, rank: int) -> None:
        mine = rows[rank]
        if mine is not None:
            lane.put(4, gradient(mine, shape))

    results = exchanged([spec(4, *shape), spec(9, 5, 2)], put, world_size=len(rows))
    given_rows = [mine for mine in rows if mine is not None]
    for reduced in results:
        assert 9 not in reduced
        if not given_rows:
            assert reduced == {}
            continue
        expected = 0.5 * gradient([one for mine in given_rows for one in mine], shape).to_dense()
        torch.testing.assert_close(reduced[4].to_dense(), expected, rtol=1e-12, atol=1e-15)
        assert reduced[4].is_coalesced()
        assert reduced[4].indices()[0].tolist() == sorted({row for mine in given_rows for row, _ in mine})
        torch.testing.assert_close(reduced[4], results[0][4], rtol=0, atol=0)


def test_several_parameters_and_dtypes_share_one_message() -> None:
    specs = [spec(1, 4, 3, dtype=torch.float32), spec(2, 9, dtype=torch.float64), spec(3, 5, 1, dtype=torch.bfloat16)]

    def put(lane: SparseRows, rank: int) -> None:
        for one in specs:
            lane.put(one.index, gradient([(rank, 2.0), (3, 4.0)], one.shape, one.dtype))

    for reduced in exchanged(specs, put):
        for one in specs:
            assert reduced[one.index].dtype is one.dtype
            values = reduced[one.index].to_dense().reshape(one.shape[0], -1)[:, 0].tolist()
            assert values[:4] == [1.0, 1.0, 1.0, 6.0]


def test_gradients_that_came_before_and_those_that_do_not_count() -> None:
    def put(lane: SparseRows, rank: int) -> None:
        lane.put(0, gradient([(0, 8.0)], (4, 2)))
        lane.put(0, gradient([(1, 8.0)], (4, 2)))
        if rank:
            lane.preloaded[0] = gradient([(2, 1.0)], (4, 2))

    for reduced in exchanged([spec(0, 4, 2)], put, empty=[1]):
        assert reduced[0].to_dense()[:, 0].tolist() == [8.0, 8.0, 2.0, 0.0]


def test_where_one_rank_has_no_rows_but_all_the_gradient_is_dense_everywhere() -> None:
    def put(lane: SparseRows, rank: int) -> None:
        lane.put(0, torch.ones(3, 2, dtype=torch.float64) if rank == 1 else gradient([(2, 4.0)], (3, 2)))

    for reduced in exchanged([spec(0, 3, 2)], put):
        assert not reduced[0].is_sparse
        assert reduced[0][:, 0].tolist() == [0.5, 0.5, 4.5]


def test_values_are_compressed_as_those_in_buckets() -> None:
    def put(lane: SparseRows, rank: int) -> None:
        lane.put(0, gradient([(rank, 2 + 2.0**-9)], (3, 2), torch.float32))

    for reduced in exchanged([spec(0, 3, 2, dtype=torch.float32)], put, compression=torch.bfloat16):
        assert reduced[0].dtype is torch.float32
        assert reduced[0].to_dense().tolist() == [[1.0, 1.0]] * 3


def sent_in_three_steps(rows: int, *, expected: bool) -> list[list[int]]:
    """By step, the bytes of each collective."""

    def body(group: LocalGroup) -> list[list[int]]:
        sent: list[int] = []
        all_reduce, all_gather = group.all_reduce, group.all_gather

        def reduced(tensor: torch.Tensor, op: ReduceOp) -> Work:
            sent.append(tensor.nbytes)
            return all_reduce(tensor, op)

        def gathered(outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
            sent.append(tensor.nbytes)
            return all_gather(outputs, tensor)

        group.all_reduce, group.all_gather = reduced, gathered  # type: ignore[method-assign]  # to look at them
        table = next(copies[group.rank].parameters())
        reducer = GradientReducer(group, expect_rows=lambda: {id(table)} if expected else ())
        reducer.attach(tuple(copies[group.rank].parameters()))
        steps = []
        for _ in range(3):
            sent.clear()
            copies[group.rank].zero_grad()
            with reducer.step(weight=0.5):
                copies[group.rank](torch.arange(rows) + group.rank).sum().backward()
            steps.append(list(sent))
        return steps

    copies = [nn.Sequential(nn.Embedding(10_000, 16, sparse=True), nn.Linear(16, 1)) for _ in range(2)]
    return run_ranks(2, body)[0]


@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("expected", [False, True])
def test_only_rows_travel_where_they_are_expected_or_were_found(rows: int, expected: bool) -> None:
    first, *others = sent_in_three_steps(rows, expected=expected)
    assert (sum(first) > 640_000) is not expected
    for sent in others:
        assert sum(sent) < 2000 + rows * (8 + 64)
        assert len(sent) == 3  # a bucket, numbers of rows, rows
