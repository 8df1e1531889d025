"""What an `rd.CheckpointManager` is inside of a replica, and the handle of a save that was asked for there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, final

from raydist.context.replica_context import loop_here
from raydist.errors import FailedPreconditionError

__all__ = ["ManagerHere", "lending_managers", "may_be_lent"]

_lending: ContextVar[bool] = ContextVar("raydist_lending_managers", default=False)


@contextlib.contextmanager
def lending_managers() -> Iterator[None]:
    """A function is pickled inside that draws batches itself: it may hold managers."""
    token = _lending.set(True)
    try:
        yield
    finally:
        _lending.reset(token)


def may_be_lent() -> bool:
    """Whether what is pickled now goes to replicas that draw batches themselves."""
    return _lending.get()


@final
class ManagerHere:
    """Stands for a manager of the driver.

    Args:
        key: Which one.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        metrics: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `CheckpointManager.save`: all replicas must call it, after the same draw; it counts once."""
        save: Callable[..., Any] | None = getattr(loop_here(), "save", None)
        if save is None:
            raise FailedPreconditionError(
                "A checkpoint must be saved by the driver, or after a draw from a distributed iterator that was passed "
                "to strategy.run, but this step was given none. Call save() between two runs."
            )
        return save(self._key, checkpoint_number, check_interval, metrics)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise FailedPreconditionError(
            f"Inside of strategy.run a CheckpointManager has `save` only, {name!r} was asked for. Ask it on the driver."
        )
