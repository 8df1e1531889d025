"""Helpers for the checks of strategies: uneven batches, and the results of every replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import raydist as rd

TOLERANCE = 1e-9
GLOBAL_BATCHES = ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10])  # uneven on two replicas; the last has too few rows for all


def batches_of(strategy: rd.Strategy) -> Any:
    return strategy.distribute_dataset(rd.Dataset.range(11).batch(5))


def on_all(strategy: rd.Strategy, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function and return the result of each replica."""
    return list(strategy.local_results(strategy.run(fn, args=args)))
