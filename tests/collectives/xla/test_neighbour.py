from __future__ import annotations

import time

from raydist.collectives.rendezvous import RendezvousStore, connect_store
from raydist.collectives.xla.neighbour import Neighbour
from tests.collectives.threads import begin_threads


def test_a_rank_that_leaves_is_noticed_by_the_one_before_it() -> None:
    with RendezvousStore() as store:
        members = [store.membership("ring", generation=0, rank=rank, world_size=3) for rank in range(3)]
        ring = [Neighbour(member, 10.0) for member in members]
        joins = {rank: lambda rank=rank: ring[rank].connect(connect_store(members[rank], 10.0)) for rank in range(3)}
        assert set(begin_threads(joins)()) == {0, 1, 2}
        assert [line.rank for line in ring] == [1, 2, 0]
        assert not any(line.is_gone() for line in ring)
        ring[1].close()
        ring[1].close()
        deadline = time.monotonic() + 5
        while not ring[0].is_gone():
            assert time.monotonic() < deadline
        assert not ring[2].is_gone()
        for line in ring:
            line.close()


def test_one_that_has_not_connected_misses_nobody() -> None:
    with RendezvousStore() as store:
        alone = Neighbour(store.membership("ring", generation=0, rank=0, world_size=1), 1.0)
        assert not alone.is_gone()
