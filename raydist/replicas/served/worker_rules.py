"""What a worker does around a closure: the hooks through which its variables can live somewhere else."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from raydist.replicas.replica_view import VariablesView
from raydist.replicas.rules import ReplicaRules

__all__ = ["ClosureLabel", "WorkerRules"]


@final
@dataclass(frozen=True, slots=True)
class ClosureLabel:
    """Which closure it is: the same when it runs again.

    Attributes:
        number: Unique in the strategy, and rising.
        finished_below: Closures with a lower number have ended for good.
        seen: By server, the version of its values that the driver knew of when the closure was scheduled. What the
            program had seen by then the closure must see as well.
    """

    number: int
    finished_below: int = 0
    seen: Sequence[int] = ()


class WorkerRules(ReplicaRules):
    """Rules of a worker, a replica without peers. All of it happens in the worker's one thread.

    Around each closure: `before_run`, the function (with `step_optimizer`), `after_run` where it has succeeded,
    `after_failure` where it has not, and `end_closure`.
    """

    exchanges_gradients = False

    @abstractmethod
    def before_run(self, variables: VariablesView, closure: ClosureLabel) -> None:
        """A closure is about to run."""

    @abstractmethod
    def after_failure(self, variables: VariablesView) -> None:
        """The closure, or what looked at variables between closures, raised an error."""

    @abstractmethod
    def end_closure(self, variables: VariablesView, *, last: bool) -> None:
        """The closure has ended, in whatever way.

        Args:
            variables: This worker's.
            last: The worker knows of no other that it is to run.
        """

    @abstractmethod
    def told(self) -> tuple[int, ...]:
        """By server, the version of its values that this worker knows of: it goes to the driver with each answer."""

    @abstractmethod
    def settle(self, variables: VariablesView) -> Any:
        """This worker, alone, was given objects or values by the driver; nothing runs anywhere.

        Returns:
            What the driver needs to know to make a plan for what is new, with `specs`: the new variables.
        """

    @abstractmethod
    def place(self, variables: VariablesView, plan: Any, closure: ClosureLabel) -> None:
        """Carry out the driver's plan: the values are this worker's. `follow` comes next.

        Args:
            variables: This worker's.
            plan: What the driver made of `settle`.
            closure: No closure has this label: it is for what is changed here.
        """

    @abstractmethod
    def follow(self, variables: VariablesView, plan: Any) -> None:
        """What the driver has done was done to this worker's objects.

        Args:
            variables: This worker's.
            plan: The plan that was made for it; None where it needed none.
        """

    @abstractmethod
    def before_read(self, variables: VariablesView, *, states: bool) -> None:
        """The driver is about to read this worker's objects.

        Args:
            variables: This worker's.
            states: What optimizers remember as well.
        """

    def externals(self) -> Mapping[str, Any]:
        """By name, what functions may reach on this worker beside what every replica has."""
        return {}

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Around what the driver reads or writes of this worker's objects, after `before_read`."""
        return contextlib.nullcontext()
