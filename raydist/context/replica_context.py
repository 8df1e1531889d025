"""Which strategy is current, and what a step function knows about its replica.

As in tf.distribute there are two contexts. The *cross-replica* context (the driver, inside `strategy.scope()`) sees all
replicas at once; the *replica* context (inside `strategy.run`) is one of them. Outside of both there is a default:
one replica, no strategy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final

from raydist.errors import FailedPreconditionError
from raydist.nest import map_structure
from raydist.values import ReduceOp

if TYPE_CHECKING:
    import torch

    from raydist.context.peers import Peers
    from raydist.context.strategy import Strategy

__all__ = [
    "ReplicaContext",
    "enter_cross_replica",
    "enter_replica",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

# The innermost open context: a strategy (its scope) or a ReplicaContext. Per thread and per task.
_current: ContextVar[Strategy | ReplicaContext | None] = ContextVar("raydist_context", default=None)


@final
class ReplicaContext:
    """What a step function sees of its replica and of the others (tf.distribute.ReplicaContext).

    >>> get_replica_context().num_replicas_in_sync  # outside of `run`: the only replica
    1
    """

    def __init__(self, strategy: Strategy, peers: Peers) -> None:
        self._strategy = strategy
        self._peers = peers

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's rank, 0 .. num_replicas_in_sync - 1."""
        return self._peers.rank

    @property
    def num_replicas_in_sync(self) -> int:
        return self._peers.world_size

    @property
    def strategy(self) -> Strategy:
        return self._strategy

    @property
    def device(self) -> torch.device:
        """Where this replica computes."""
        return self._peers.device

    @property
    def num_rows(self) -> int | None:
        """Rows of this replica's piece of the current distributed batch (0: it stands in); None without a batch."""
        rows = self._peers.rows
        return None if rows is None else rows[self._peers.rank]

    @property
    def global_num_rows(self) -> int | None:
        """Rows of the current distributed batch on all replicas; None without a batch."""
        rows = self._peers.rows
        return None if rows is None else sum(rows)

    def all_reduce(self, op: ReduceOp | str, value: Any) -> Any:
        """Reduce a nest of tensors or numbers over the replicas; every replica gets the result.

        Blocks until every replica has called it (limit: `Timeouts.collective_s`). Differentiable: the gradient is that
        of the global objective.

        Shapes: each leaf (...) on every replica -> (...), the same everywhere.
        Failure: CollectiveMismatchError on all replicas if shapes, dtypes or operations differ.
        """
        reduction = ReduceOp.parse(op)
        return map_structure(lambda leaf: self._peers.all_reduce(reduction, leaf), value)

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate a nest of tensors over the replicas in rank order along `axis`, where lengths may differ.

        Blocks and fails like :meth:`all_reduce`; differentiable (the gradient is this replica's slice of the sum).
        """
        return map_structure(lambda leaf: self._peers.all_gather(leaf, axis), value)

    def merge_call(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call `fn(strategy, *args)` in the cross-replica context, arguments being PerReplica of every replica's.

        `fn` runs in each replica on the same values, so it must be deterministic; a PerReplica in what it returns is
        replaced by this replica's part.
        """
        return self._peers.merge_call(self._strategy, fn, tuple(args), dict(kwargs or {}))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here stay local; they are reduced together with the next one outside.

        Source: torch.nn.parallel.DistributedDataParallel.no_sync.
        """
        with self._peers.no_sync():
            yield


@contextlib.contextmanager
def enter_cross_replica(strategy: Strategy) -> Iterator[None]:
    """The scope of `strategy`. The same one may be entered again; another one inside is an error."""
    current = _current.get()
    if isinstance(current, ReplicaContext):
        raise FailedPreconditionError("A scope must be entered by the driver, not inside of strategy.run.")
    if current is not None and current is not strategy:
        raise FailedPreconditionError(
            f"One scope must be left before another is entered: {type(current).__name__} is open, "
            f"{type(strategy).__name__} was asked for."
        )
    token = _current.set(strategy)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def enter_replica(context: ReplicaContext) -> Iterator[None]:
    """Run what is inside as one replica."""
    if isinstance(_current.get(), ReplicaContext):
        raise FailedPreconditionError("strategy.run must be called by the driver, not inside of another run.")
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def _default_strategy() -> Strategy:
    from raydist.strategies.one_device import OneDeviceStrategy  # below: one_device imports this module

    return OneDeviceStrategy("cpu")


def get_strategy() -> Strategy:
    """The current strategy; outside of every scope one CPU device (tf.distribute.get_strategy)."""
    current = _current.get()
    if current is None:
        return _default_strategy()
    return current.strategy if isinstance(current, ReplicaContext) else current


def has_strategy() -> bool:
    """Whether a scope or a `run` is open here (tf.distribute.has_strategy)."""
    return _current.get() is not None


def in_cross_replica_context() -> bool:
    """Whether this is inside a scope, seeing all replicas at once (tf.distribute.in_cross_replica_context)."""
    current = _current.get()
    return current is not None and not isinstance(current, ReplicaContext)


def get_replica_context() -> ReplicaContext:
    """The context of the running step; outside of every scope that of the only replica.

    Inside a scope but outside of `run`, where all replicas are seen at once, there is none and this is None, as in
    tf.distribute.get_replica_context. The annotation leaves that out: step functions need no check.
    """
    current = _current.get()
    if isinstance(current, ReplicaContext):
        return current
    if current is not None:
        return None  # type: ignore[return-value]  # see above
    from raydist.strategies.one_device import OneDeviceStrategy  # below: one_device imports this module

    return OneDeviceStrategy("cpu").make_replica_context()
