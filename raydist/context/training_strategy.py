"""The strategy that a program trains with, if it is unambiguous."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection
from typing import Any, Protocol, cast

from raydist.context.current import current, in_cross_replica_context
from raydist.context.step_counter import StepCounter

__all__ = ["CountsSteps", "note_strategy", "open_strategies", "training_strategy"]


class CountsSteps(Protocol):
    """The part of a `Strategy` that concerns its global step."""

    _closed: bool
    _is_default: bool

    def _find_counter(self) -> StepCounter | None: ...

    def _make_counter(self) -> StepCounter: ...

    def _has_made(self, obj: Any) -> bool: ...
    def _find_restorer(self) -> Any: ...


@functools.cache
def _living() -> weakref.WeakSet[CountsSteps]:
    """Return the strategies of this process."""
    return weakref.WeakSet()


def note_strategy(strategy: CountsSteps) -> None:
    """Register a strategy when it is made."""
    _living().add(strategy)


def open_strategies() -> list[CountsSteps]:
    """Return the strategies of this process that are not closed.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> strategy in open_strategies()
    True
    """
    return [each for each in _own_strategies() if not each._closed]


def _own_strategies() -> list[CountsSteps]:
    return [each for each in list(_living()) if not each._is_default]


def training_strategy(objects: Collection[Any] = ()) -> CountsSteps | None:
    """Return the strategy whose scope is open, else the one that made `objects`, else the only open one.

    Args:
        objects: Modules and variables; objects that no strategy has made are ignored.

    Returns:
        The strategy; None if there are several, or none.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> with strategy.scope():
    ...     training_strategy() is strategy
    True
    """
    if in_cross_replica_context():
        return cast("CountsSteps", current())
    makers = [each for each in _own_strategies() if any(each._has_made(obj) for obj in objects)]
    found = makers or open_strategies()
    return found[0] if len(found) == 1 else None
