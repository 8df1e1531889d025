"""The strategy as code inside a step sees it: its numbers and its arithmetic; everything else belongs to the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

from raydist.context.step_counter import StepCounter
from raydist.context.strategy import Strategy
from raydist.errors import FailedPreconditionError
from raydist.options import RunOptions

__all__ = ["ReplicaView"]


@final
class ReplicaView(Strategy):
    """What `ctx.strategy` and `rd.get_strategy()` are inside of a replica.

    Args:
        worker_devices: One name per replica.
        objects: What is mirrored here.
    """

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

    def _refuse(self, what: str) -> NoReturn:
        raise FailedPreconditionError(
            f"{what} is for the driver: this code runs inside of a replica, in strategy.run. Call it around the step."
        )

    def _mark_created(self) -> contextlib.AbstractContextManager[None]:
        self._refuse("strategy.scope")

    def _set_gradient_reduce_op(self, options: RunOptions) -> None:
        self._refuse("strategy.scope")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("strategy.run")

    def distribute_dataset(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("strategy.distribute_dataset")

    def distribute_datasets_from_function(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("strategy.distribute_datasets_from_function")

    def distribute_values_from_function(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("strategy.distribute_values_from_function")

    def stats(self) -> NoReturn:
        self._refuse("strategy.stats")

    def close(self) -> None:
        self._refuse("strategy.close")

    def _abort(self, *, fetch: bool) -> None:
        self._refuse("strategy.close")
