"""Worker pools of a dataset's own iterators, kept for a while between iterators."""

from __future__ import annotations

import threading
from typing import final

import ray

from raydist.actors.workers.pool import ActorExecutor
from raydist.actors.workers.pools_of_passes import PassPools, SharedExecutor
from raydist.cluster import ensure_ray
from raydist.options import Options, Timeouts
from raydist.pipelines.engine.executor import Executor

__all__ = ["IteratorPools"]

_KEPT_S = 60.0  # a pool that is idle for longer is stopped
_PATIENCE_S = 1.0  # for unfinished blocks of an iterator that was closed


@final
class IteratorPools:
    """A pool that is reused by one iterator after the other, because starting workers takes about a second.

    Args:
        kept_s: Seconds after which an idle pool stops.
    """

    def __init__(self, kept_s: float = _KEPT_S) -> None:
        self._limits = Timeouts(idle_s=kept_s)
        self._pools = PassPools()
        self._cluster = ""
        self._closed = False
        self._lock = threading.Lock()  # guards `_closed`: iterators end in any thread

    def open(self, options: Options) -> Executor:
        """Return a pool of `options.num_input_workers` workers; closing it returns the pool. Joins or starts Ray."""
        ensure_ray()
        if (cluster := _cluster_name()) != self._cluster:  # the kept workers ended with their cluster
            self._pools, self._cluster = PassPools(), cluster
        pools = self._pools
        pool = pools.borrow(
            options.num_input_workers,
            name="raydist-input",
            resources={},
            timeouts=self._limits,
            memory_bytes=options.input_worker_memory,
        )
        return SharedExecutor(pool, on_close=lambda: self._take_back(pool, pools))

    def _take_back(self, pool: ActorExecutor, pools: PassPools) -> None:
        if self._closed or pools is not self._pools:
            pool.close()
            return
        pools.give_back(pool, patience_s=_PATIENCE_S)
        with self._lock:
            if self._closed:
                pools.clear()

    def close(self) -> None:
        """Stop the idle pool; a pool in use stops when its iterator returns it."""
        with self._lock:
            self._closed = True
        self._pools.clear()


def _cluster_name() -> str:
    """Return a name of the cluster that this process is connected to."""
    return str(ray.get_runtime_context().gcs_address)
