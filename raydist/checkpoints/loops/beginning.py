"""Start of a run that draws batches itself, if a manager watches for the end of the process."""

from __future__ import annotations

from typing import Any

from raydist.checkpoints.loops.driver_loop import DriverLoop, LoopHost
from raydist.checkpoints.loops.managed_loop import ManagedLoop
from raydist.checkpoints.managing.watch import ManagerWatch
from raydist.distributed_dataset import DistributedIterator
from raydist.nest import leaves_in
from raydist.preemption.boundaries import step_watchers

__all__ = ["begin_loop"]


def begin_loop(arguments: Any, host: LoopHost) -> DriverLoop | None:
    """Return the driver's half of a run; None if the run draws no batches or no manager saves. Blocks for earlier runs.

    Args:
        arguments: Arguments of the run; the function may draw from iterators among them.
        host: The strategy that runs the function.

    Raises:
        Exception: The previous run failed.
    """
    watchers = [each for each in step_watchers() if isinstance(each, ManagerWatch)]
    if not watchers:
        return None
    iterators = [leaf for leaf in leaves_in(arguments) if isinstance(leaf, DistributedIterator)]
    if not iterators:
        return None
    parts: list[tuple[ManagerWatch, ManagedLoop]] = []
    for watch in watchers:
        watch.settle()
        saves = watch.saves
        if saves is not None:
            part = ManagedLoop(watch.key, saves, watch.exit_code, iterators, asynchronous=watch.asynchronous)
            parts.append((watch, part))
    loop = DriverLoop(host, [part for _, part in parts])
    for watch, part in parts:
        watch.follow(loop, part)
    return loop
