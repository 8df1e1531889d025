from __future__ import annotations

import pytest
import torch

from raydist.errors import CollectiveMismatchError
from raydist.values import ReduceOp
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_ranks


def test_reductions_are_in_rank_order() -> None:
    def body(group: LocalGroup) -> float:
        # (1e16 + 1) - 1e16 loses the one; any other order keeps it.
        tensor = torch.tensor([1e16, 1.0, -1e16][group.rank], dtype=torch.float64)
        group.all_reduce(tensor, ReduceOp.SUM).wait()
        return tensor.item()

    assert run_ranks(3, body) == [0.0, 0.0, 0.0]


def test_mismatch_names_every_call() -> None:
    def body(group: LocalGroup) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            group.all_reduce(torch.ones(2 + group.rank), ReduceOp.SUM).wait()
        return str(caught.value)

    for message in run_ranks(2, body):
        assert "rank 0: all_reduce(SUM) of torch.float32 (2,)" in message
        assert "rank 1: all_reduce(SUM) of torch.float32 (3,)" in message
