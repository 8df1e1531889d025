"""The strategy inside a step function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

from raydist.context.current import StepCounter
from raydist.context.strategy import Strategy
from raydist.core.errors import FailedPreconditionError


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(self: ReplicaView, *args: Any, **kwargs: Any) -> NoReturn:
        raise FailedPreconditionError(
            f"{what} is for the driver: this code runs inside of a replica, in strategy.run. Call it around the step."
        )

    return refuse


@final
class ReplicaView(Strategy):
    """The strategy inside a replica: `ctx.strategy` and `rd.get_strategy()`."""

    def __init__(self, worker_devices: tuple[str, ...], objects: Callable[[], Sequence[Any]] = tuple) -> None:
        super().__init__()
        self._worker_devices = worker_devices
        self._objects = objects

    @property
    def num_replicas_in_sync(self) -> int:
        return len(self._worker_devices)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return self._worker_devices

    def _find_counter(self) -> StepCounter | None:
        return next((found for found in self._objects() if isinstance(found, StepCounter)), None)

    _mark_created = _set_gradient_reduce_op = _refused("strategy.scope")
    run = _refused("strategy.run")
    distribute_dataset = _refused("strategy.distribute_dataset")
    distribute_datasets_from_function = _refused("strategy.distribute_datasets_from_function")
    distribute_values_from_function = _refused("strategy.distribute_values_from_function")
    stats = _refused("strategy.stats")
    close = _abort = _refused("strategy.close")
