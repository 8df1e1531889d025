"""`rd.CheckpointManager` as seen inside a replica."""

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
    """Allow managers in pickles inside the `with` block: a function that draws batches itself is pickled there."""
    token = _lending.set(True)
    try:
        yield
    finally:
        _lending.reset(token)


def may_be_lent() -> bool:
    """Return True if the current pickle goes to replicas that draw batches themselves."""
    return _lending.get()


@final
class ManagerHere:
    """A replica's view of a manager of the driver.

    Args:
        key: Key of the manager.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        metrics: Mapping[str, Any] | None = None,
    ) -> Any:
        """Save as `CheckpointManager.save` does. All replicas must call it after the same draw, counted once."""
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
