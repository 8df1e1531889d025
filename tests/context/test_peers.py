from __future__ import annotations

import torch

from raydist.context.peers import Alone
from raydist.values import ReduceOp


def test_alone_every_collective_is_the_identity() -> None:
    alone = Alone(torch.device("cpu"))
    assert alone.all_reduce(ReduceOp.SUM, 3).item() == 3
    assert alone.all_reduce(ReduceOp.MEAN, 3).dtype == torch.float32
    assert alone.all_gather(torch.tensor([1, 2]), 0).tolist() == [1, 2]
    assert alone.merge_call(lambda x, *, by: x + by, (1,), {"by": 1}) == 2
    with alone.no_sync():
        assert alone.rows is None
