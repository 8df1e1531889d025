from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from raydist.collectives.base import Membership
from raydist.collectives.rendezvous import RendezvousStore
from raydist.collectives.xla import communicator
from raydist.collectives.xla.communicator import XlaBackend
from raydist.errors import FailedPreconditionError, UnavailableError
from tests.xla_world import IS_REAL


def test_a_chip_that_is_stuck_joins_no_other_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        stuck = True

    backend = XlaBackend()
    group: Any = Stuck()
    monkeypatch.setitem(communicator._LATEST, ("g", 1), group)
    with pytest.raises(UnavailableError, match="chip of rank 1 is still in a collective that another chip has left"):
        backend.create(HashStore(), Membership("g", 1, 1, 2), 1.0)


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_replicas_that_are_not_one_a_chip(chips: None) -> None:
    with RendezvousStore() as store:
        member = store.membership("g", generation=0, rank=0, world_size=1)
        with pytest.raises(FailedPreconditionError, match=r"Each of the 1 replicas .* sees 3 chips .* numbers 2\."):
            XlaBackend().open(member, torch.device("xla:0"), 10.0)
