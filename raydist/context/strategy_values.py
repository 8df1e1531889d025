"""The methods of every strategy for per-replica values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

from raydist.context.cross_replica import gather, local_results, reduce
from raydist.foreign_errors import folded
from raydist.values import ReduceOp

__all__ = ["StrategyValues", "ValueContext"]


@final
class ValueContext:
    """The replica for which a value function computes a value.

    Attributes:
        replica_id_in_sync_group: The replica's rank, 0 .. num_replicas_in_sync - 1.
        num_replicas_in_sync: Number of replicas.

    Args:
        replica_id_in_sync_group: See above.
        num_replicas_in_sync: See above.

    Source: tf.distribute.experimental.ValueContext.

    >>> context = rd.ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=3)
    >>> context.replica_id_in_sync_group, context.num_replicas_in_sync
    (1, 3)
    """

    def __init__(self, replica_id_in_sync_group: int, num_replicas_in_sync: int) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync


class StrategyValues(ABC):
    """Methods that make, reduce, gather and read per-replica values."""

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that reduce their gradients in one step, >= 1.

        If the strategy chooses its devices, the first access may start or join Ray (limit: `Timeouts.start_s`).

        Source: tf.distribute.Strategy.num_replicas_in_sync.

        >>> rd.OneDeviceStrategy("cpu").num_replicas_in_sync
        1
        """

    @abstractmethod
    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Compute one value per replica, in this process and at once.

        Args:
            value_fn: Called with a ValueContext once per replica, in rank order.

        Returns:
            The nest that it returned with a PerReplica for each leaf, as an argument of `run`; with one replica its
            plain value.

        Source: tf.distribute.Strategy.experimental_distribute_values_from_function.

        >>> rd.OneDeviceStrategy("cpu").distribute_values_from_function(lambda context: context.num_replicas_in_sync)
        1
        """

    @final
    @folded
    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None) -> Any:
        """Reduce a value over replicas.

        Blocks until the steps that computed the value are done (limit: `Timeouts.step_s`), and raises their errors.

        Shapes: (...) on every replica -> (...); an axis removes that dimension, and its lengths may differ.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
            value: A nest of PerReplica, tensors and numbers. Results of replicas without rows are skipped.
            axis: None adds element by element (shapes must agree). MEAN then weights results of a step by the rows of
                each replica (of its batch argument, or of all batches drawn from an iterator), so that a mean loss is
                that of the global batch; other values have equal weights. An axis, or several, reduces over that
                dimension as well; MEAN then divides by the true number of entries: rows [0, 1, 2, 3] and [4, 5] give
                sum 15, mean 2.5.

        Returns:
            The nest with a tensor on the CPU for each leaf.

        Raises:
            InvalidArgumentError: Another reduction, shapes that do not fit, an invalid axis, a plain value under SUM
                with several replicas, or a value that no replica had rows for.
            SpecError: A leaf is neither a tensor nor a number.

        Source: tf.distribute.Strategy.reduce.

        >>> import torch
        >>> rd.OneDeviceStrategy("cpu").reduce(rd.ReduceOp.MEAN, torch.tensor([1.0, 3.0]), axis=0)
        tensor(2.)
        """
        return reduce(reduce_op, self._read_remote(value), axis, self.num_replicas_in_sync)

    @final
    @folded
    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate a value over replicas in rank order.

        Blocks until the steps that computed the value are done (limit: `Timeouts.step_s`), and raises their errors.

        Shapes: (n_i, ...) on replica i -> (sum of n_i, ...), where n_i is the length along `axis`.

        Args:
            value: A nest of PerReplica and tensors. Results of replicas without rows are skipped.
            axis: The dimension to concatenate along; negative values count from the end.

        Returns:
            The nest with a tensor on the CPU for each leaf. A leaf that is None on every replica stays None.

        Raises:
            InvalidArgumentError: Scalars, other dimensions that differ, or a value that no replica had rows for.
            SpecError: A leaf is neither a tensor nor a number.

        Source: tf.distribute.Strategy.gather.

        >>> import torch
        >>> rd.OneDeviceStrategy("cpu").gather(torch.tensor([1, 2]))
        tensor([1, 2])
        """
        return gather(self._read_remote(value), axis)

    @final
    @folded
    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of single replicas.

        Blocks until the steps that computed the values are done (limit: `Timeouts.step_s`), and raises their errors.

        Args:
            value: A nest of PerReplica and other values.

        Returns:
            One nest per replica in rank order, without results of replicas without rows; a value without any PerReplica
            alone in a tuple.

        Source: tf.distribute.Strategy.experimental_local_results.

        >>> rd.OneDeviceStrategy("cpu").local_results(rd.PerReplica([3, 4]))
        (3, 4)
        """
        return local_results(self._read_remote(value))

    def _read_remote(self, value: Any) -> Any:
        """Return `value` with all remote values in it fetched, except PerReplica."""
        return value
