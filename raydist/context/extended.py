"""`strategy.extended`: tf.distribute's methods for libraries, implemented with the public methods of a strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from raydist.core.values import ReduceOp


@final
class StrategyExtended:
    """Further methods of a strategy, under tf.distribute's names. The property `strategy.extended` returns it.

    Args:
        strategy: The strategy.

    Source: tf.distribute.StrategyExtended.

    >>> rd.OneDeviceStrategy("cpu").extended.worker_devices
    ('CPU:0',)
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """One device name per replica: `strategy.worker_devices`.

        >>> rd.OneDeviceStrategy("cpu").extended.worker_devices
        ('CPU:0',)
        """
        names: tuple[str, ...] = self._strategy.worker_devices
        return names

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables: the devices of all replicas, each of which has a copy.

        >>> rd.OneDeviceStrategy("cpu").extended.parameter_devices
        ('CPU:0',)
        """
        names: tuple[str, ...] = self._strategy.worker_devices
        return names

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any = None, options: Any = None) -> Any:
        """Return `strategy.reduce(reduce_op, value, axis=None)`: blocks and raises like that method.

        Args:
            reduce_op: SUM or MEAN.
            value: A nest of PerReplica, tensors and numbers.
            destinations: No effect: the result is on the CPU, and may be used anywhere.
            options: No effect.

        Source: tf.distribute.StrategyExtended.reduce_to.

        >>> rd.OneDeviceStrategy("cpu").extended.reduce_to("SUM", 3, destinations=None)
        tensor(3)
        """
        return self._strategy.reduce(reduce_op, value, axis=None)

    def batch_reduce_to(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any = None
    ) -> list[Any]:
        """Call :meth:`reduce_to` for several values; return the list of results.

        Args:
            reduce_op: SUM or MEAN.
            value_destination_pairs: Pairs of the arguments `value` and `destinations` of `reduce_to`.
            options: No effect.

        Source: tf.distribute.StrategyExtended.batch_reduce_to.

        >>> rd.OneDeviceStrategy("cpu").extended.batch_reduce_to("SUM", [(3, None), (4, None)])
        [tensor(3), tensor(4)]
        """
        return [self.reduce_to(reduce_op, value, destinations) for value, destinations in value_destination_pairs]

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return `strategy.run(fn, args, kwargs)`.

        Args:
            fn: The step function.
            args: A tuple of its positional arguments.
            kwargs: Keyword arguments of the function.

        Source: tf.distribute.StrategyExtended.call_for_each_replica.

        >>> rd.OneDeviceStrategy("cpu").extended.call_for_each_replica(lambda x: x + 1, args=(2,))
        3
        """
        return self._strategy.run(fn, args, kwargs)

    def update(
        self,
        var: torch.Tensor,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(var, *args, **kwargs)` on the driver, without gradients: its writes reach every replica.

        Args:
            var: A variable of the strategy.
            fn: A function that writes to the variable in place.
            args: Further arguments, such as results of `reduce_to`.
            kwargs: Keyword arguments.
            group: No effect: the call returns when the value is written.

        Returns:
            The return value of `fn`.

        Source: tf.distribute.StrategyExtended.update.

        >>> import torch
        >>> strategy = rd.OneDeviceStrategy("cpu")
        >>> with strategy.scope():
        ...     layer = torch.nn.Linear(1, 1)
        >>> _ = strategy.extended.update(layer.bias, lambda bias, value: bias.copy_(value), args=(torch.ones(1),))
        >>> layer.bias.data
        tensor([1.])
        """
        with torch.no_grad():
            return fn(var, *args, **(kwargs or {}))

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Do nothing: variables made within the context are on all replicas, as `colocate_with_variable` is.

        Args:
            colocate_with_variable: A variable of the strategy.

        Source: tf.distribute.StrategyExtended.colocate_vars_with.

        >>> with rd.OneDeviceStrategy("cpu").extended.colocate_vars_with(None):
        ...     pass
        """
        yield
