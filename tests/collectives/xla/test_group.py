from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from raydist.collectives.base import Membership
from raydist.collectives.xla.chip import Chip
from raydist.collectives.xla.group import XlaGroup
from raydist.errors import FailedPreconditionError
from tests.xla_world import IS_REAL


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_replicas_that_are_not_one_a_chip(chips: None) -> None:
    store = PrefixStore("g/0", HashStore())
    alone = XlaGroup(store, Membership("g", 0, 0, 1), Chip(0).open(), 1.0)
    with pytest.raises(FailedPreconditionError, match=r"Each of the 1 replicas .* sees 3 chips in all, .* numbers 2\."):
        alone.start()


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_what_is_gathered_is_put_in_the_order_of_ranks(chips: None) -> None:
    group = XlaGroup(PrefixStore("g/0", HashStore()), Membership("g", 0, 0, 3), Chip(0).open(), 1.0)
    group._ordinals = (2, 0, 1)
    assert [part.item() for part in group.by_rank(torch.tensor([10, 11, 12]))] == [12, 10, 11]
