"""Sparse and compressed gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raydist.collectives.base import Work
from raydist.collectives.delegating import DelegatingCommunicator
from raydist.collectives.reducer.buckets import ParameterSpec
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.collectives.reducer.sparse_rows import reduce_rows
from raydist.core.values import ReduceOp
from tests.collectives.local_group import LocalGroup
from tests.collectives.models import (
    gradients_of,
)
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
    own_of: Callable[[int], dict[int, torch.Tensor]],
    *,
    world_size: int = 3,
    compression: torch.dtype | None = None,
) -> list[dict[int, torch.Tensor]]:
    def body(group: LocalGroup) -> dict[int, torch.Tensor]:
        own = dict.fromkeys([spec.index for spec in specs]) | own_of(group.rank)
        return reduce_rows(group, specs, own, compression)

    return run_ranks(world_size, body)


ROWS = st.lists(st.tuples(st.integers(0, 6), st.floats(-4, 4, width=16)), max_size=6)


@settings(max_examples=25)
@given(
    rows=st.lists(st.one_of(st.none(), ROWS), min_size=1, max_size=4), shape=st.sampled_from([(7,), (7, 3), (7, 2, 2)])
)
def test_rows_of_all_ranks_are_added_up(rows: list[Rows | None], shape: tuple[int, ...]) -> None:
    def own_of(rank: int) -> dict[int, torch.Tensor]:
        mine = rows[rank]
        return {} if mine is None else {4: gradient(mine, shape)}

    results = exchanged([spec(4, *shape), spec(9, 5, 2)], own_of, world_size=len(rows))
    given_rows = [mine for mine in rows if mine is not None]
    for reduced in results:
        assert 9 not in reduced
        if not given_rows:
            assert reduced == {}
            continue
        expected = gradient([one for mine in given_rows for one in mine], shape).to_dense()
        torch.testing.assert_close(reduced[4].to_dense(), expected, rtol=1e-12, atol=1e-15)
        assert reduced[4].is_coalesced()
        assert reduced[4].indices()[0].tolist() == sorted({row for mine in given_rows for row, _ in mine})
        torch.testing.assert_close(reduced[4], results[0][4], rtol=0, atol=0)


def test_several_parameters_and_dtypes_one_of_which_is_dense_on_one_rank() -> None:
    specs = [spec(1, 4, 3, dtype=torch.float32), spec(2, 9, dtype=torch.float64), spec(3, 5, 1, dtype=torch.bfloat16)]
    dense = spec(0, 3, 2)

    def own_of(rank: int) -> dict[int, torch.Tensor]:
        own = {one.index: gradient([(rank, 1.0), (3, 2.0)], one.shape, one.dtype) for one in specs}
        return own | {0: torch.ones(3, 2, dtype=torch.float64) if rank == 1 else gradient([(2, 4.0)], (3, 2))}

    def rounded(rank: int) -> dict[int, torch.Tensor]:
        return {0: gradient([(rank, 1 + 2.0**-10)], (3, 2), torch.float32)}

    for reduced in exchanged([spec(0, 3, 2, dtype=torch.float32)], rounded, compression=torch.bfloat16):
        assert reduced[0].dtype is torch.float32
        assert reduced[0].to_dense().tolist() == [[1.0, 1.0]] * 3  # compressed as in buckets
    for reduced in exchanged([dense, *specs], own_of):
        assert not reduced[0].is_sparse
        assert reduced[0][:, 0].tolist() == [1.0, 1.0, 9.0]
        for one in specs:
            assert reduced[one.index].dtype is one.dtype
            values = reduced[one.index].to_dense().reshape(one.shape[0], -1)[:, 0].tolist()
            assert values[:4] == [1.0, 1.0, 1.0, 6.0]


class Counting(DelegatingCommunicator):
    """Notes the bytes of each collective on tensors."""

    def __init__(self, inner: LocalGroup) -> None:
        super().__init__(inner)
        self.sent: list[int] = []

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        self.sent.append(tensor.nbytes)
        return super().all_reduce(tensor, op)

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        self.sent.append(tensor.nbytes)
        return super().all_gather_rows(outputs, tensor)


def sent_in_three_steps(rows: int, *, expected: bool) -> list[list[int]]:
    """By step, the bytes of each collective."""

    def body(inner: LocalGroup) -> list[list[int]]:
        group = Counting(inner)
        table = next(copies[group.rank].parameters())
        reducer = GradientReducer(group, expect_rows=lambda: {id(table)} if expected else ())
        reducer.attach(tuple(copies[group.rank].parameters()))
        steps = []
        for _ in range(3):
            group.sent.clear()
            copies[group.rank].zero_grad()
            with reducer.step(weight=0.5):
                copies[group.rank](torch.arange(rows) + group.rank).sum().backward()
            steps.append(list(group.sent))
        return steps

    copies = [nn.Sequential(nn.Embedding(10_000, 16, sparse=True), nn.Linear(16, 1)) for _ in range(2)]
    return run_ranks(2, body)[0]


def test_only_rows_travel() -> None:
    for count, expected in ((1, False), (100, True)):
        for sent in sent_in_three_steps(count, expected=expected):
            assert sum(sent) < 2000 + count * (8 + 64)
            assert len(sent) == 3  # a bucket, numbers of rows, values of rows


Compression = Literal["fp16", "bf16"]


def compressed(
    start: nn.Module, compression: Compression | None, backward: Callable[[nn.Module, int], None], world_size: int = 3
) -> list[tuple[nn.Module, int]]:
    """Replicas after two steps, of which the second one's traffic is counted."""
    replicas = [copy.deepcopy(start) for _ in range(world_size)]

    def main(inner: LocalGroup) -> tuple[nn.Module, int]:
        group, model = Counting(inner), replicas[inner.rank]
        reducer = GradientReducer(group, bucket_bytes=1 << 10, first_bucket_bytes=256, compression=compression)
        reducer.attach(tuple(model.parameters()))
        for _ in range(2):
            group.sent.clear()
            model.zero_grad()
            with reducer.step(weight=1 / world_size):
                backward(model, group.rank)
        return model, sum(group.sent)

    return run_ranks(world_size, main)


def test_only_float32_is_compressed() -> None:
    def backward(model: nn.Module, rank: int) -> None:
        torch.stack([(p * (1 + 2.0**-12)).double().sum() for p in model.parameters()]).sum().backward()

    dtypes = (torch.float64, torch.bfloat16, torch.float32)
    start = nn.ParameterList([torch.ones(5, dtype=dtype) for dtype in dtypes])
    (replica, sent), *_ = compressed(start, "fp16", backward, world_size=2)
    assert compressed(start, None, backward, world_size=2)[0][1] - sent >= 5 * 2
    double, half, single = (torch.ones(0) if p.grad is None else p.grad for p in replica.parameters())
    assert double.tolist() == [1 + 2.0**-12] * 5
    assert half.dtype is torch.bfloat16
    assert single.tolist() == [1.0] * 5


def test_what_does_not_fit_into_float16_is_infinite_everywhere() -> None:
    def backward(model: nn.Module, rank: int) -> None:
        (next(model.parameters()) * (3e5 if rank else 1.0)).sum().backward()

    for compression, expected in (("fp16", torch.inf), ("bf16", 2e5)):
        for replica, _ in compressed(nn.Linear(2, 1, bias=False), compression, backward):  # type: ignore[arg-type]
            (gradient,) = gradients_of(replica)
            assert gradient is not None
            torch.testing.assert_close(gradient, torch.full_like(gradient, expected), rtol=1e-2, atol=0)
