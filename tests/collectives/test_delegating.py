from __future__ import annotations

import torch

from raydist.collectives.base import Membership
from raydist.collectives.checked import CheckedCommunicator
from raydist.collectives.local import LocalGroup, LocalHub


def test_the_group_is_the_inner_ones() -> None:
    membership = Membership("g", generation=0, rank=0, world_size=1)
    inner = LocalGroup(LocalHub(), membership, timeout_s=3.0).start()
    outer = CheckedCommunicator(inner, torch.device("cpu"))
    assert (outer.membership, outer.timeout_s, outer.rank, outer.world_size) == (membership, 3.0, 0, 1)
    later = Membership("g", generation=1, rank=0, world_size=1)
    outer.reconfigure(later)
    assert inner.membership == outer.membership == later
    outer.close()
