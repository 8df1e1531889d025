"""Pools of input workers that are reused between epochs: starting workers takes longer than a short epoch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, final

import ray

from raydist.actors.workers.pool import ActorExecutor
from raydist.cluster.nodes import ensure_ray
from raydist.core.errors import CancelledError
from raydist.options import Options, Timeouts
from raydist.pipelines.engine.block_size import BlockSize
from raydist.pipelines.engine.build import walk
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.engine.op_kinds import ElementwiseOp

if TYPE_CHECKING:
    from raydist.options import Timeouts
    from raydist.pipelines.elements.blocks import Block
    from raydist.pipelines.engine.op import DatasetOp


_MOST_WORKERS = 8


def choose_num_workers(
    ops: Sequence[DatasetOp], *, num_cores: int, num_replicas: int, num_nodes: int = 1, are_elsewhere: bool = False
) -> int:
    """Return the initial number of input workers for AUTOTUNE.

    0 if no operation can run on workers (no map, filter or parsing without a fixed parallelism). Else the number of
    cores that neither replicas nor the pipeline use, at most 8 per node. With one such core or none, 0, because the
    pipeline has its own process and a block that stays there is not copied; but 1 if workers have resources of their
    own (`are_elsewhere`), which may be on other nodes.
    """
    if not any(_may_spread(node) for op in ops for node in walk(op)):
        return 0
    spare = num_cores * num_nodes - num_replicas - 1
    return min(spare, _MOST_WORKERS * num_nodes) if spare > 1 else int(are_elsewhere)


def _may_spread(node: DatasetOp) -> bool:
    return isinstance(node, ElementwiseOp) and node.parallelism != 1


@final
class SharedExecutor(Executor):
    """One iterator's view of a pool: closing it cancels this iterator's blocks, and the pool stays open.

    Args:
        pool: The pool.
        on_close: Called by the first `close`.
    """

    def __init__(self, pool: Executor, on_close: Callable[[], None] | None = None) -> None:
        self._pool = pool
        self._on_close = on_close
        self.window = pool.window
        self.place = pool.place
        self.num_workers = pool.num_workers
        self.stores_results = pool.stores_results
        self._closed = False
        self._tasks: weakref.WeakSet[Pending] = weakref.WeakSet()

    def block_size(self, spec: StageSpec, together: int) -> BlockSize:
        return self._pool.block_size(spec, together)

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        if self._closed:
            raise CancelledError(
                f"This iterator is closed and takes no more work, such as a block of stage {spec.name}. Take a new one."
            )
        task = self._pool.submit(spec, block, starts)
        self._tasks.add(task)
        return task

    def close(self) -> None:
        """Cancel all blocks of this iterator; the pool stays open."""
        self._closed = True
        for task in tuple(self._tasks):
            task.cancel()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


@final
class EpochPools:
    """A store of at most one idle pool, reused by the next epoch that asks for the same settings.

    A pool that is idle for `Timeouts.idle_s` is stopped: its resources may keep autoscaled nodes alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: ActorExecutor | None = None
        self._idle_s = 0.0
        self._timer: threading.Timer | None = None

    def borrow(
        self,
        num_workers: int,
        *,
        name: str,
        resources: Mapping[str, float],
        timeouts: Timeouts,
        node_ids: Sequence[str] = (),
        memory_bytes: int | None = None,
    ) -> ActorExecutor:
        """Return the idle pool if it has these settings, else a new pool."""
        with self._lock:
            idle = self._take_idle()
            self._idle_s = timeouts.idle_s
        if idle is not None:
            if idle.serves(num_workers, resources, timeouts, memory_bytes, node_ids):
                return idle
            idle.close()
        return ActorExecutor(
            num_workers,
            name=name,
            resources=resources,
            timeouts=timeouts,
            node_ids=node_ids,
            memory_bytes=memory_bytes,
        )

    def give_back(self, pool: ActorExecutor, *, patience_s: float) -> None:
        """Keep `pool` if its workers finish their blocks within `patience_s`, else kill them."""
        keep = pool.is_idle(patience_s)
        with self._lock:
            if keep and self._idle is None:
                self._idle = pool
                self._start_timer()
                return
        pool.close()

    def _start_timer(self) -> None:
        self._timer = threading.Timer(self._idle_s, self.clear)
        self._timer.name = "raydist-idle-pool"
        self._timer.daemon = True
        self._timer.start()

    def _take_idle(self) -> ActorExecutor | None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        idle, self._idle = self._idle, None
        return idle

    def clear(self) -> None:
        """Stop the idle pool."""
        with self._lock:
            idle = self._take_idle()
        if idle is not None:
            idle.close()


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
        self._pools = EpochPools()
        self._cluster = ""
        self._closed = False
        self._lock = threading.Lock()  # guards `_closed`: iterators end in any thread

    def open(self, options: Options) -> Executor:
        """Return a pool of `options.num_input_workers` workers; closing it returns the pool. Joins or starts Ray."""
        ensure_ray()
        if (cluster := _cluster_name()) != self._cluster:  # the kept workers ended with their cluster
            self._pools, self._cluster = EpochPools(), cluster
        pools = self._pools
        pool = pools.borrow(
            options.num_input_workers,
            name="raydist-input",
            resources={},
            timeouts=self._limits,
            memory_bytes=options.input_worker_memory,
        )
        return SharedExecutor(pool, on_close=lambda: self._take_back(pool, pools))

    def _take_back(self, pool: ActorExecutor, pools: EpochPools) -> None:
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
