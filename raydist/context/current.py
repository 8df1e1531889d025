"""The current context: a strategy's scope, a replica in a run, or none. The strategies of this process.

As in tf.distribute there are two contexts. The *cross-replica* context (the driver, inside `strategy.scope()`) sees all
replicas at once; the *replica* context (inside `strategy.run`) is that of one replica. `strategies/functions.py` has
the defaults outside of both.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast, final

import torch
from torch import nn

from raydist.core.contextvar_scope import contextvar_scope
from raydist.core.errors import FailedPreconditionError


@final
@dataclass(frozen=True, slots=True)
class _Opened:
    """One open context: its holder, and its kind."""

    holder: object
    is_replica: bool


# The innermost open context, per thread and per asyncio task.
_opened: ContextVar[_Opened | None] = ContextVar("raydist_context", default=None)


def current() -> object | None:
    """Return the holder of the innermost context: a `Strategy` (scope), a `ReplicaContext` (run), or None."""
    opened = _opened.get()
    return None if opened is None else opened.holder


def enter_cross_replica(strategy: object) -> AbstractContextManager[None]:
    """Return the scope of `strategy`. It may be entered again within itself; another strategy's scope is an error."""
    opened = _opened.get()
    if opened is not None and opened.is_replica:
        raise FailedPreconditionError(
            "A scope must be entered by the driver, but this code runs inside of strategy.run. Enter it around what "
            "creates the model, before the step."
        )
    if opened is not None and opened.holder is not strategy:
        raise FailedPreconditionError(
            f"One scope must be left before another is entered: {type(opened.holder).__name__} is open, "
            f"{type(strategy).__name__} was asked for."
        )
    return contextvar_scope(_opened, _Opened(strategy, is_replica=False))


def enter_replica(context: object) -> AbstractContextManager[None]:
    """Return a context that runs code as the replica of `context`, a `ReplicaContext`."""
    require_no_run()
    return contextvar_scope(_opened, _Opened(context, is_replica=True))


def require_no_run() -> None:
    """Raise inside of a `run`: no strategy may begin another run there."""
    opened = _opened.get()
    if opened is not None and opened.is_replica:
        raise FailedPreconditionError(
            "strategy.run must be called by the driver, not inside of another run. Call the function itself there."
        )


def has_strategy() -> bool:
    """Return True if a strategy's scope or a `run` is open here. Does not block.

    Returns:
        True inside `with strategy.scope():` and inside of a step function, else False.

    Source: tf.distribute.has_strategy.

    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     rd.has_strategy()
    True
    >>> rd.has_strategy()
    False
    """
    return _opened.get() is not None


def in_cross_replica_context() -> bool:
    """Return True if this code sees all replicas at once: inside a scope, and not inside of `run`. Does not block.

    Returns:
        True inside `with strategy.scope():`; False in a step function, and outside of every scope, which has a replica
        context with one replica.

    Source: tf.distribute.in_cross_replica_context.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> with strategy.scope():
    ...     rd.in_cross_replica_context(), strategy.run(rd.in_cross_replica_context)
    (True, False)
    """
    opened = _opened.get()
    return opened is not None and not opened.is_replica


@final
class StepCounter(nn.Module):
    """The global step of one strategy. Its buffer is mirrored; each replica adds to its own copy."""

    value: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros((), dtype=torch.int64))


@functools.cache
def process_counter() -> StepCounter:
    """Return the counter of this process outside of every scope."""
    return StepCounter()


class TrainingStrategy(Protocol):
    """The methods of a `Strategy` that checkpoints use. A protocol, because `Strategy` imports this module."""

    _closed: bool
    _is_default: bool

    def _find_counter(self) -> StepCounter | None: ...
    def _make_counter(self) -> StepCounter: ...
    def _has_made(self, obj: Any) -> bool: ...
    def _find_restorer(self) -> Any: ...


@functools.cache
def _living() -> weakref.WeakSet[TrainingStrategy]:
    """Return the strategies of this process."""
    return weakref.WeakSet()


_listing = threading.Lock()  # a set must not grow in another thread while one iterates over it


def note_strategy(strategy: TrainingStrategy) -> None:
    """Register a strategy when it is made."""
    with _listing:
        _living().add(strategy)


def open_strategies() -> list[TrainingStrategy]:
    """Return the strategies of this process that are not closed."""
    return [each for each in _own_strategies() if not each._closed]


def _own_strategies() -> list[TrainingStrategy]:
    with _listing:
        living = list(_living())
    return [each for each in living if not each._is_default]


def training_strategy(objects: Collection[Any] = ()) -> TrainingStrategy | None:
    """Return the strategy whose scope is open, else the one that made `objects`, else the only open one.

    Modules and variables that no strategy has made are ignored. Return None for several strategies, or none.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> with strategy.scope():
    ...     training_strategy() is strategy
    True
    """
    if in_cross_replica_context():
        return cast("TrainingStrategy", current())
    makers = [each for each in _own_strategies() if any(each._has_made(obj) for obj in objects)]
    found = makers or open_strategies()
    return found[0] if len(found) == 1 else None
