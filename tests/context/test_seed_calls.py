from __future__ import annotations

from torch import manual_seed, seed

from raydist.context.seed_calls import num_seed_calls


def test_every_way_to_seed_counts() -> None:
    before = num_seed_calls()
    manual_seed(3)
    manual_seed(3)
    seed()
    assert num_seed_calls() - before == 3
