from __future__ import annotations

import threading
import time

import pytest
import torch

from raydist.collectives.base import Membership
from raydist.collectives.checked import CheckedCommunicator
from raydist.collectives.delegating import LimitedCommunicator
from raydist.errors import DeadlineExceededError
from raydist.values import ReduceOp
from tests.collectives.local_group import LocalGroup, LocalHub
from tests.collectives.threads import run_ranks


def test_the_group_is_the_inner_ones() -> None:
    membership = Membership("g", generation=0, rank=0, world_size=1)
    inner = LocalGroup(LocalHub(), membership, timeout_s=3.0).start()
    outer = CheckedCommunicator(inner)
    assert (outer.membership, outer.timeout_s, outer.rank, outer.world_size) == (membership, 3.0, 0, 1)
    outer.close()


def test_a_call_ends_at_its_own_limit_and_others_at_theirs() -> None:
    late = threading.Event()

    def body(group: LocalGroup) -> float:
        limited = LimitedCommunicator(group, 0.2)
        assert limited.timeout_s == 0.2
        tensor = torch.ones(2)
        limited.all_reduce(tensor, ReduceOp.SUM).wait()
        assert tensor.tolist() == [2.0, 2.0]
        began = time.monotonic()
        if group.rank == 0:
            with pytest.raises(DeadlineExceededError):
                limited.all_reduce(torch.ones(2), ReduceOp.SUM).wait()
            late.set()
        else:
            late.wait(10)
        return time.monotonic() - began

    assert max(run_ranks(2, body)) < 10
