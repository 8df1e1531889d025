"""Which context is open here: a strategy's scope, a replica in a run, or none.

As in tf.distribute there are two contexts. The *cross-replica* context (the driver, inside `strategy.scope()`) sees all
replicas at once; the *replica* context (inside `strategy.run`) is one of them. What holds outside of both is not known
here: `strategies/default.py` says it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import final

from raydist.errors import FailedPreconditionError
from raydist.set_inside import SetInside

__all__ = [
    "current",
    "enter_cross_replica",
    "enter_replica",
    "has_strategy",
    "in_cross_replica_context",
    "require_no_run",
]


@final
@dataclass(frozen=True, slots=True)
class _Opened:
    """One open context: whose it is, and of which of the two kinds."""

    holder: object
    is_replica: bool


# The innermost open context. Per thread and per task.
_opened: ContextVar[_Opened | None] = ContextVar("raydist_context", default=None)


def current() -> object | None:
    """Who opened the innermost context: a `Strategy` its scope, a `ReplicaContext` its run; None outside of both."""
    opened = _opened.get()
    return None if opened is None else opened.holder


def enter_cross_replica(strategy: object) -> AbstractContextManager[None]:
    """The scope of `strategy`. The same one may be entered again; another one inside is an error."""
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
    return SetInside(_opened, _Opened(strategy, is_replica=False))


def enter_replica(context: object, *others: SetInside) -> AbstractContextManager[None]:
    """Run what is inside as the replica of `context`, a `ReplicaContext`; `others` are what else holds there."""
    require_no_run()
    return SetInside(_opened, _Opened(context, is_replica=True), *others)


def require_no_run() -> None:
    """Raise inside of a `run`: of whichever strategy, no other begins there."""
    opened = _opened.get()
    if opened is not None and opened.is_replica:
        raise FailedPreconditionError(
            "strategy.run must be called by the driver, not inside of another run. Call the function itself there."
        )


def has_strategy() -> bool:
    """Whether a strategy's scope or a `run` is open here.

    Returns:
        True inside `with strategy.scope():` and inside of a step function, else False. Waits for nothing.

    Source: tf.distribute.has_strategy.

    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     rd.has_strategy()
    True
    >>> rd.has_strategy()
    False
    """
    return _opened.get() is not None


def in_cross_replica_context() -> bool:
    """Whether this code sees all replicas at once: inside a scope, and not inside of `run`.

    Returns:
        True inside `with strategy.scope():`; False in a step function, and outside of every scope, where a replica
        context with one replica holds. Waits for nothing.

    Source: tf.distribute.in_cross_replica_context.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> with strategy.scope():
    ...     rd.in_cross_replica_context(), strategy.run(rd.in_cross_replica_context)
    (True, False)
    """
    opened = _opened.get()
    return opened is not None and not opened.is_replica
