"""What checks of strategies have in common: some uneven batches, and what every replica returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import raydist as rd

__all__ = ["GLOBAL_BATCHES", "TOLERANCE", "batches_of", "on_all"]

TOLERANCE = 1e-9
GLOBAL_BATCHES = ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10])  # uneven on two replicas, and too few rows for all at the end


def batches_of(strategy: rd.Strategy) -> Any:
    return strategy.distribute_dataset(rd.Dataset.range(11).batch(5))


def on_all(strategy: rd.Strategy, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What each replica returned."""
    return list(strategy.local_results(strategy.run(fn, args=args)))
