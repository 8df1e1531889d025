"""Scheduling of step functions as closures of the coordinator: check, prepare and schedule under one lock."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from raydist.actors.readers.driver_iterator import DistributedIterator
from raydist.cluster.preemption import boundary_number
from raydist.context.current import StepCounter
from raydist.coordinator.closures import Closure, closure_header
from raydist.coordinator.coordinator import Coordinator
from raydist.coordinator.per_worker import PerWorkerInput
from raydist.coordinator.remote_value import RemoteValue, holds_remote
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.nest import leaves_in
from raydist.core.values import ReduceOp
from raydist.mirroring.driver import MirrorDriver
from raydist.mirroring.messages import StepPayload
from raydist.options import RunOptions
from raydist.replicas.step_summaries import StepSummaries
from raydist.summary.recording import SummaryOrder


@final
class ClosureScheduler:
    """A thread-safe scheduler of the steps of a parameter server strategy.

    `coordinator` returns the workers' coordinator, and may start the workers; `reduce_op` returns the reduction of
    gradients in a step with the given options.

    Attributes:
        num_steps: Number of scheduled steps of the program.
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
        self._turn = threading.RLock()  # a step must be sent before the next one is prepared
        self._is_ending = False

    def end(self) -> None:
        """Refuse further steps: the strategy is closing, and waits for the steps scheduled before."""
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
        """Schedule a step of the program on a worker. The function may refer to its strategy.

        `carried` returns objects that workers need even if the step does not refer to them.
        """
        leaves = leaves_in((args, kwargs))
        if holds_remote((args, kwargs)):
            raise InvalidArgumentError(
                "The arguments of a closure must be values, got a RemoteValue, which may not be computed yet. Fetch it "
                "first: value.get(), or coordinator.fetch(value)."
            )
        with self._turn:
            coordinator = self._free_for(leaves)
            injected = {"strategy": strategy, **self._per_worker.injected()}
            with self._summaries.pickling():
                payload = self._mirror.prepare(fn, args, kwargs, injected=injected, carried=carried())
            make_header = functools.partial(self._header, payload, options, self._summaries.order())
            closure = coordinator.schedule(payload, make_header, payload.digest, boundary=boundary_number())
            self._mirror.dispatched()
            self.num_steps += 1
            return RemoteValue(coordinator, closure)

    def schedule_alone(
        self, function: Callable[..., Any], args: tuple[Any, ...], injected: Mapping[str, Any], *, strategy: Any
    ) -> Closure:
        """Schedule work that is not a step of the program, to run while nothing else runs."""
        with self._turn:
            payload = self._mirror.prepare(
                function, args, injected={"strategy": strategy, **injected, **self._per_worker.injected()}
            )
            make_header = functools.partial(self._header, payload, RunOptions(), None, looks_only=True)
            closure = self._coordinator().schedule(payload, make_header, payload.digest, alone=True)
            self._mirror.dispatched()
            return closure

    def _free_for(self, leaves: Sequence[Any]) -> Coordinator:
        """Return the coordinator, once it accepts a step with these arguments."""
        if self._is_ending:
            raise FailedPreconditionError(
                "This ParameterServerStrategy must be open to run a step, but it is being closed. Let threads that "
                "schedule end before close()."
            )
        coordinator = self._coordinator()
        if any(isinstance(leaf, DistributedIterator) for leaf in leaves):
            coordinator.join()  # only one worker at a time may read the iterator
        coordinator.raise_error()
        return coordinator

    def _header(
        self,
        payload: StepPayload,
        options: RunOptions,
        summaries: SummaryOrder | None,
        number: int,
        looks_only: bool = False,
    ) -> bytes:
        return closure_header(payload, options, self._reduce_op(options), summaries, number, looks_only=looks_only)
