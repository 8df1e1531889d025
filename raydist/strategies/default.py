"""The current strategy and replica context, and the defaults outside of every scope."""

from __future__ import annotations

from raydist.context.current import current
from raydist.context.replica_context import ReplicaContext
from raydist.context.strategy import Strategy
from raydist.strategies.one_device import default_strategy

__all__ = ["get_replica_context", "get_strategy"]


def get_strategy() -> Strategy:
    """Return the strategy whose scope or `run` this code is in. Does not block.

    Returns:
        The strategy; in a step on a replica actor a view of it (numbers and arithmetic only); outside of every scope a
        new `OneDeviceStrategy("cpu")`.

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
    """Return the context of the running step: this replica's rank, rows and collectives. Does not block.

    Returns:
        The context of the replica that runs this code; outside of every scope that of the only replica. Inside a scope
        but outside of `run` (the cross-replica context) there is none, and this is None. The annotation leaves None
        out, so that step functions need no check.

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
