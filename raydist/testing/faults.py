"""Faults on purpose: to test that a program survives the loss of its processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, final

from raydist.actors.supervision import kill_actors
from raydist.context.strategy import Strategy
from raydist.core.errors import InvalidArgumentError, RaydistError
from raydist.replicas.runner import ReplicaRunner
from raydist.strategies.synchronous import SynchronousStrategy

_LOOK_S = 0.005
_HOW = ("kill", "stop", "exit")


@final
@dataclass(frozen=True, slots=True)
class Fault:
    """The loss of one process.

    Attributes:
        step: The step in which it happens: the first `run` of the strategy is step 0. At a random moment of the step.
        role: "replica", or "input" for the input pipeline.
        rank: Rank of the replica.
        how: "kill" (SIGKILL), "stop" (SIGSTOP: the process does not answer any more), or "exit". Input pipelines can be
            killed only.

    Raises:
        InvalidArgumentError: A value is invalid.

    >>> Fault(3, rank=1)
    Fault(step=3, role='replica', rank=1, how='kill')
    """

    step: int
    role: Literal["replica", "input"] = "replica"
    rank: int = 0
    how: Literal["kill", "stop", "exit"] = "kill"

    def __post_init__(self) -> None:
        known = self.how in _HOW if self.role == "replica" else self.role == "input" and self.how == "kill"
        if not known:
            raise InvalidArgumentError(
                f'A fault must have the role "replica" with one of {_HOW}, or "input" with "kill", got {self}.'
            )
        if self.step < 0 or self.rank < 0:
            raise InvalidArgumentError(f"A fault must have a step and a rank >= 0, got {self}.")


@final
class FaultPlan:
    """Faults that happen to the processes of a strategy, each once.

    Args:
        faults: The faults, in any order.

    Example::

        from raydist.testing import Fault, FaultPlan

        with rd.MirroredStrategy(2) as strategy:
            FaultPlan(Fault(5, rank=1), Fault(9, role="input")).arm(strategy)
            train(strategy)
            assert [failure.ranks for failure in strategy.failures()][0] == (1,)
    """

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults

    def arm(self, strategy: Strategy) -> None:
        """Make the faults happen at their steps from now on. Blocks until the replicas have started.

        Raises:
            InvalidArgumentError: The strategy has no replicas in lock step, or none of a fault's rank.
        """
        if not isinstance(strategy, SynchronousStrategy):
            raise InvalidArgumentError(
                f"A fault plan must get a strategy with replicas in lock step, such as rd.MirroredStrategy, got "
                f"{type(strategy).__name__}."
            )
        size = strategy.num_replicas_in_sync
        for fault in self.faults:
            if fault.role == "replica" and fault.rank >= size:
                raise InvalidArgumentError(f"A fault must have a rank < {size}, got {fault}.")
        strategy._replicas()
        threading.Thread(target=self._cause, args=(strategy,), name="raydist-faults", daemon=True).start()

    def _cause(self, strategy: SynchronousStrategy) -> None:
        """Cause the faults, those of one step together, and the next ones once these have been noticed."""
        ordered = sorted(self.faults, key=lambda fault: fault.step)
        for _, faults in groupby(ordered, key=lambda fault: fault.step):
            for is_noticed in [_begin(fault, strategy) for fault in faults]:
                _await(strategy, is_noticed)


def _begin(fault: Fault, strategy: SynchronousStrategy) -> Callable[[], bool]:
    """Begin a fault. Return a function that tells whether it was noticed."""
    if fault.role == "input":
        _await(strategy, lambda: strategy._launch().steps.first_unfinished >= fault.step)
        kill_actors([strategy._pipelines()._main.actor])
        return lambda: True  # if all batches have been read, nobody will notice
    before = len(strategy.failures())
    _await(strategy, lambda: _tell_replica(fault, strategy))
    return lambda: len(strategy.failures()) > before


def _tell_replica(fault: Fault, strategy: SynchronousStrategy) -> bool:
    try:
        answers = strategy._launch().ask_beside(ReplicaRunner.fail_at, fault.step, fault.how, ranks=[fault.rank])
    except RaydistError:
        return True  # it is gone already
    return bool(answers[0])  # None from a new replica that is not ready


def _await(strategy: SynchronousStrategy, is_so: Callable[[], bool]) -> None:
    while not strategy._closed and not is_so():
        time.sleep(_LOOK_S)
