from __future__ import annotations

import torch

from raydist.collectives.backward_pass import BackwardPass
from raydist.collectives.buckets.buffer import BucketBuffer
from raydist.collectives.buckets.exchange import BucketExchange, make_buffers
from raydist.collectives.buckets.forms import StepWeight
from raydist.collectives.buckets.layout import ParameterSpec, plan_buckets
from raydist.collectives.buckets.tail import PassStamp
from raydist.collectives.local import LocalGroup
from tests.collectives.threads import run_ranks


def passing(group: LocalGroup, weight: StepWeight) -> BackwardPass:
    layout = plan_buckets([ParameterSpec(0, (4, 1), torch.float32, torch.device("cpu"))], bucket_bytes=1)
    flat = torch.empty(BucketBuffer.numel(layout.buckets[0], group.world_size))
    exchange = BucketExchange(group, layout, make_buffers(layout, [flat], group), PassStamp(0, 1), weight)
    return BackwardPass(group, exchange, weight, create_graph=False)


def outcome(group: LocalGroup, gradient: torch.Tensor | None, weight: StepWeight) -> torch.Tensor | None:
    present = passing(group, weight)
    if gradient is not None:
        present.exchange.put(0, gradient)
    return present.finish().get(0)


def sparse(rows: list[int], value: float) -> torch.Tensor:
    indices, values = torch.tensor([rows]), torch.full((len(rows), 1), value)
    return torch.sparse_coo_tensor(indices, values, (4, 1), check_invariants=True)


def test_an_empty_replica_drops_nans() -> None:
    def body(group: LocalGroup) -> torch.Tensor | None:
        gradient = torch.full((4, 1), torch.nan if group.rank else 2.0)
        return outcome(group, gradient, StepWeight(0.0 if group.rank else 1.0, counts=group.rank == 0))

    for result in run_ranks(2, body):
        assert result is not None
        assert result.tolist() == [[2.0]] * 4


def test_nobody_has_one() -> None:
    assert run_ranks(2, lambda group: outcome(group, None, StepWeight(0.5, counts=True))) == [None, None]


def test_sparse_gradients_keep_the_rows_that_anybody_touched() -> None:
    def body(group: LocalGroup) -> torch.Tensor | None:
        # Rows named twice, rows of two ranks, a row whose sum is zero.
        gradient = sparse([1, 1, 3], 1.0) if group.rank == 0 else sparse([3], -1.0)
        return outcome(group, gradient, StepWeight(0.5, counts=True))

    for result in run_ranks(2, body):
        assert result is not None
        assert result.is_sparse
        assert result.coalesce().indices().tolist() == [[1, 3]]
        assert result.to_dense().tolist() == [[0.0], [1.0], [0.0], [0.0]]


def test_a_rank_without_rows_gets_the_sparse_rows_of_others() -> None:
    def body(group: LocalGroup) -> torch.Tensor | None:
        return outcome(group, None if group.rank else sparse([2], 4.0), StepWeight(0.5, counts=True))

    for result in run_ranks(2, body):
        assert result is not None
        assert (result.is_sparse, result.to_dense().tolist()) == (True, [[0.0], [0.0], [2.0], [0.0]])
