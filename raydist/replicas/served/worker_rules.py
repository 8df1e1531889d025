"""The hooks of a worker around a closure, by which its variables can live elsewhere."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from raydist.replicas.rules import StrategyHooks, VariablesView

__all__ = ["ClosureLabel", "WorkerRules"]


@final
@dataclass(frozen=True, slots=True)
class ClosureLabel:
    """The identity of a closure: the same when the closure runs again.

    Attributes:
        number: Unique in the strategy, and rising.
        finished_below: All closures with a lower number have ended.
        seen: By server, the version of its values that the driver knew when it scheduled the closure. The closure must
            see these versions or newer ones.
    """

    number: int
    finished_below: int = 0
    seen: Sequence[int] = ()


class WorkerRules(StrategyHooks):
    """Rules of a worker, a replica without peers. All hooks run in the worker's one thread.

    Around each closure: `before_run`, the function (with `step_optimizer`), `after_run` if it succeeded,
    `after_failure` if it raised, and `end_closure`.
    """

    exchanges_gradients = False

    @abstractmethod
    def before_run(self, variables: VariablesView, closure: ClosureLabel) -> None:
        """Prepare for a closure that is about to run."""

    @abstractmethod
    def after_failure(self, variables: VariablesView) -> None:
        """Recover after an error of the closure, or of a read between closures."""

    @abstractmethod
    def end_closure(self, variables: VariablesView, *, last: bool) -> None:
        """Clean up after a closure, whether it succeeded or not.

        Args:
            variables: The worker's objects.
            last: The worker has no further closure.
        """

    @abstractmethod
    def told(self) -> tuple[int, ...]:
        """Return, by server, the newest version that this worker knows of; each answer reports it to the driver."""

    @abstractmethod
    def settle(self, variables: VariablesView) -> Any:
        """Describe new variables, after the driver gave objects or values to this worker alone; no closure runs.

        Returns:
            The facts from which the driver plans the placement, with `specs`: the new variables.
        """

    @abstractmethod
    def place(self, variables: VariablesView, plan: Any, closure: ClosureLabel) -> None:
        """Carry out the driver's plan with this worker's values. `follow` comes next.

        Args:
            variables: The worker's objects.
            plan: The driver's plan.
            closure: A label of no closure, for the changes made here.
        """

    @abstractmethod
    def follow(self, variables: VariablesView, plan: Any) -> None:
        """Adjust to a change by the driver that was made to this worker's objects.

        Args:
            variables: The worker's objects.
            plan: The placement of new variables; None if there are none.
        """

    @abstractmethod
    def before_read(self, variables: VariablesView, *, states: bool) -> None:
        """Bring this worker's objects up to date before the driver reads them.

        Args:
            variables: The worker's objects.
            states: Bring optimizer states up to date, too.
        """

    def injected(self) -> Mapping[str, Any]:
        """Return, by name, the values that functions may use on this worker, beside those of every replica."""
        return {}

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the driver reads or writes this worker's objects, after `before_read`."""
        return contextlib.nullcontext()
