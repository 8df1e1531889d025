"""The strategy and the replica context that code finds, and the ones that hold where it has opened none."""

from __future__ import annotations

from raydist.context.current import current
from raydist.context.replica_context import ReplicaContext
from raydist.context.strategy import Strategy
from raydist.strategies.one_device import default_strategy

__all__ = ["get_replica_context", "get_strategy"]


def get_strategy() -> Strategy:
    """The strategy whose scope or whose `run` this code is in.

    Returns:
        That strategy; in a step on a replica actor its view from there (numbers and arithmetic only); outside of
        every scope a new `OneDeviceStrategy("cpu")`. Waits for nothing.

    Source: tf.distribute.get_strategy.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> with strategy.scope():
    ...     rd.get_strategy() is strategy
    True
    >>> rd.get_strategy().num_replicas_in_sync
    1
    """
    holder = current()
    if isinstance(holder, ReplicaContext):
        return holder.strategy
    return holder if isinstance(holder, Strategy) else default_strategy()


def get_replica_context() -> ReplicaContext:
    """The context of the running step: this replica's number, its rows, its collectives.

    Returns:
        The context of the replica that runs this code; outside of every scope that of the only replica. Inside a scope
        but outside of `run`, where all replicas are seen at once, there is none and this is None. The annotation
        leaves that out, so that step functions need no check. Waits for nothing.

    Source: tf.distribute.get_replica_context.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> strategy.run(lambda: rd.get_replica_context().replica_id_in_sync_group)
    0
    >>> with strategy.scope():
    ...     print(rd.get_replica_context())
    None
    """
    holder = current()
    if isinstance(holder, ReplicaContext):
        return holder
    if holder is not None:
        return None  # type: ignore[return-value]  # see above
    return default_strategy().make_replica_context()
