from __future__ import annotations

from torch import manual_seed, seed

from raydist.checkpoints.random_state import RESTORED_REPLICAS
from raydist.replicas.seed_calls import num_seed_calls


def test_who_seeds_begins_anew_and_not_where_a_restore_was() -> None:
    num_seed_calls()
    RESTORED_REPLICAS.restore([[b"1"], [b"2"]])
    count = RESTORED_REPLICAS.count
    assert RESTORED_REPLICAS.since(count - 1) == ((b"1",), (b"2",))
    manual_seed(3)
    assert RESTORED_REPLICAS.since(count - 1) == ()


def test_every_way_to_seed_counts() -> None:
    before = num_seed_calls()
    manual_seed(3)
    manual_seed(3)
    seed()
    assert num_seed_calls() - before == 3
