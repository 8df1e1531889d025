"""How closures of a program become closures of the coordinator: checked, prepared and scheduled in one turn."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from raydist.actors.readers.driver_iterator import DistributedIterator
from raydist.context.step_counter import StepCounter
from raydist.coordinator.closure_header import closure_header
from raydist.coordinator.closures import Closure
from raydist.coordinator.coordinator import Coordinator
from raydist.coordinator.per_worker_input import PerWorkerInput
from raydist.coordinator.remote_value import RemoteValue, holds_remote
from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.mirroring.driver import MirrorDriver
from raydist.mirroring.shipment import Shipment
from raydist.nest import leaves_in
from raydist.options import RunOptions
from raydist.preemption.boundaries import boundary_number
from raydist.replicas.step_summaries import StepSummaries
from raydist.summaries.order import SummaryOrder
from raydist.values import ReduceOp

__all__ = ["ClosureScheduler"]


@final
class ClosureScheduler:
    """Schedules what a strategy is asked to run, for any thread.

    Args:
        mirror: What workers are to know of the program's objects.
        coordinator: Has workers run closures; asking for it may start them.
        per_worker: What each worker has its own of.
        summaries: Of steps.
        reduce_op: What gradients do in a step with these options.

    Attributes:
        num_steps: How many steps of the program were scheduled.
    """

    def __init__(
        self,
        mirror: MirrorDriver,
        coordinator: Callable[[], Coordinator],
        per_worker: PerWorkerInput,
        summaries: StepSummaries,
        reduce_op: Callable[[RunOptions], ReduceOp],
    ) -> None:
        self.num_steps = 0
        self._mirror = mirror
        self._coordinator = coordinator
        self._per_worker = per_worker
        self._summaries = summaries
        self._reduce_op = reduce_op
        self._turn = threading.RLock()  # threads that schedule take turns: what one has prepared is sent next
        self._is_ending = False

    def end(self) -> None:
        """Take no more steps: somebody closes the strategy, and waits for what was scheduled before."""
        self._is_ending = True

    def schedule(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: RunOptions,
        *,
        strategy: Any,
        carried: Callable[[], Sequence[StepCounter]],
    ) -> RemoteValue:
        """Have a worker run a step of the program.

        Args:
            fn: The step function.
            args: Of it.
            kwargs: Of it.
            options: Of the step.
            strategy: Whose step it is; the function may name it.
            carried: What workers are to have whether the step reaches it or not.
        """
        leaves = leaves_in((args, kwargs))
        if holds_remote((args, kwargs)):
            raise InvalidArgumentError(
                "The arguments of a closure must be values, got a RemoteValue, which may not be computed yet. Fetch it "
                "first: value.get(), or coordinator.fetch(value)."
            )
        with self._turn:
            coordinator = self._free_for(leaves)
            externals = {"strategy": strategy, **self._per_worker.externals()}
            with self._summaries.noting():
                shipment = self._mirror.prepare(fn, args, kwargs, externals=externals, carried=carried())
            make_header = functools.partial(self._header, shipment, options, self._summaries.order())
            closure = coordinator.schedule(shipment, make_header, shipment.digest, boundary=boundary_number())
            self._mirror.dispatched()
            self.num_steps += 1
            return RemoteValue(coordinator, closure)

    def schedule_alone(
        self, function: Callable[..., Any], args: tuple[Any, ...], externals: Mapping[str, Any], *, strategy: Any
    ) -> Closure:
        """Have a worker do what is no step of the program, while nothing else runs."""
        with self._turn:
            shipment = self._mirror.prepare(
                function, args, externals={"strategy": strategy, **externals, **self._per_worker.externals()}
            )
            make_header = functools.partial(self._header, shipment, RunOptions(), None, looks_only=True)
            closure = self._coordinator().schedule(shipment, make_header, shipment.digest, alone=True)
            self._mirror.dispatched()
            return closure

    def _free_for(self, leaves: Sequence[Any]) -> Coordinator:
        """The coordinator, once it takes a step with these arguments."""
        if self._is_ending:
            raise FailedPreconditionError(
                "This ParameterServerStrategy must be open to run a step, but it is being closed. Let threads that "
                "schedule end before close()."
            )
        coordinator = self._coordinator()
        if any(isinstance(leaf, DistributedIterator) for leaf in leaves):
            coordinator.join()  # one worker reads it at a time
        coordinator.raise_error()
        return coordinator

    def _header(
        self,
        shipment: Shipment,
        options: RunOptions,
        summaries: SummaryOrder | None,
        number: int,
        looks_only: bool = False,
    ) -> bytes:
        return closure_header(shipment, options, self._reduce_op(options), summaries, number, looks_only=looks_only)
