from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from raydist.collectives.base import Membership
from raydist.collectives.xla.backend import XlaBackend
from raydist.collectives.xla.chip import Chip
from raydist.errors import FailedPreconditionError, UnavailableError


def test_making_a_communicator_starts_nothing() -> None:
    communicator = XlaBackend().communicator(Membership("g", 0, 1, 2), torch.device("xla:1"), 1.0)
    assert communicator.checks_itself
    communicator.close()


def test_a_group_without_a_chip_is_our_own_mistake() -> None:
    with pytest.raises(FailedPreconditionError, match="raydist bug: rank 1 must have a chip"):
        XlaBackend().create(HashStore(), Membership("g", 0, 1, 2), 1.0)


def test_a_chip_that_is_stuck_joins_no_other_group() -> None:
    class Stuck:
        stuck = True

        def close(self) -> None:
            """Nothing."""

    group: Any = Stuck()
    store = PrefixStore("g/1", HashStore())
    with pytest.raises(UnavailableError, match="chip of rank 1 is still in a collective that another chip has left"):
        XlaBackend(Chip(0), group).create(store, Membership("g", 1, 1, 2), 1.0)
