"""The engine of an iterator: opened on first use, and reopened at the same position after a forced close."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import final

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.exception_utils import what_was_raised
from raydist.options import Options
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.saved_state import (
    require_pipelines,
    require_settings,
    require_state,
    seeds_in,
    state_errors,
)
from raydist.pipelines.engine.arrival_order import ArrivalOrders
from raydist.pipelines.engine.build import Plan, start
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS, OpIterator
from raydist.pipelines.engine.request_size import RequestSize
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.run.plan import make_nested_plan

_ALL = 1 << 62
_VERSION = 1  # of states


@final
class LazyIterator:
    """One epoch of a plan. Only one thread may use it at a time.

    Attributes:
        seed: The root seed.
        epoch: Number of the epoch.
        resume_at: State at which the engine reopens; None for the beginning, or while it is open.
        border: State before the last block read.
        orders: Order of blocks, where any order is allowed.
        own_seeds: By name, seeds of operations that keep one order for all iterations.
        ended: True once the end was reached.
        closed: True if nothing may be read any more.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        make_executor: Callable[[Options], Executor],
        meters: IterationMeters,
        *,
        seed: int,
        epoch: int,
        row_ids: bool = False,
    ) -> None:
        self.seed = seed
        self.epoch = epoch
        self.resume_at: IteratorState | None = None
        self.border: IteratorState = {}
        self.orders = ArrivalOrders()
        self.own_seeds = {} if options.seed is not None else plan.own_seeds
        self.ended = False
        self.closed = False
        self._plan = plan
        self._options = options
        self._make_executor = make_executor
        self._meters = meters
        self._row_ids = row_ids
        self._executor: Executor | None = None
        self._source: OpIterator | None = None
        self._request = RequestSize()

    def read(self) -> Block:
        """Return the next block; `border` becomes the state before it.

        Raises:
            StopIteration: No block is left.
            FailedPreconditionError: The engine is closed.
            Exception: The error of an element. Errors of the pipeline itself lose no element.
        """
        if self.ended:
            raise StopIteration
        source = self._open()
        self.border = source.state_dict()
        try:
            return self._request.read(source, _ALL)
        except StopIteration:
            self.ended = True
            self.suspend(source.state_dict())
            raise
        except Exception as error:
            if isinstance(error, MACHINERY_ERRORS):
                self.suspend(self.border)  # no element is lost: the next call tries again from here
            failure = error
        except BaseException:  # Ctrl-C in a user's function: likewise
            self.suspend(self.border)
            raise
        raise what_was_raised(failure)

    def has_ready(self) -> bool:
        """Return True if `read` would not wait for a thread or a worker, as far as the running pipeline knows."""
        return self._source is not None and not self.ended and self._source.has_ready()

    def require_open(self) -> None:
        """Raise an error if the engine is closed.

        Raises:
            FailedPreconditionError: The engine is closed.
        """
        if self.closed:
            raise FailedPreconditionError("This iterator is closed. Take a new one with iter(dataset).")

    def state_dict(self) -> IteratorState:
        """Return the state after the last block. Opens the engine."""
        return self._open().state_dict()

    def _open(self) -> OpIterator:
        self.require_open()
        if self._source is None:
            self._executor = self._make_executor(self._options)
            self._source = start(
                self._plan,
                make_nested_plan,
                seed=self.seed,
                epoch=self.epoch,
                executor=self._executor,
                meters=self._meters,
                orders=self.orders,
                own_seeds=self.own_seeds,
                row_ids=self._row_ids,
            )
            self._resume(self._source)
        return self._source

    def _resume(self, source: OpIterator) -> None:
        if self.resume_at is None:
            return
        try:
            with state_errors():
                source.load_state_dict(self.resume_at)
        except BaseException:
            self.suspend(self.resume_at)  # the next call must not continue from a partly loaded state
            raise
        self.resume_at = None

    def suspend(self, state: IteratorState | None) -> None:
        """Close the engine; the next use reopens it at `state`."""
        self.resume_at = state
        if self._executor is not None:
            self._executor.close()  # first: a prefetch thread may wait for a function that never returns
            self._executor = None
        if self._source is not None:
            self._source.close()
            self._source = None

    @cached_property  # a distributed dataset saves a state with every step
    def _fingerprint(self) -> str:
        return self._plan.fingerprint

    @cached_property
    def _order_settings(self) -> dict[str, str]:
        return self._plan.order_settings

    def saved(self, at: IteratorState, skip: int) -> IteratorState:
        """Return the state of the iteration for users."""
        orders = self.orders.since(at)
        return {
            "version": _VERSION,
            "pipeline": self._fingerprint,
            "seed": self.seed,
            "epoch": self.epoch,
            "at": at,
            "skip": skip,
            **({"orders": orders} if orders else {}),
            **({"own_seeds": dict(self.own_seeds)} if self.own_seeds else {}),
            **({"settings": settings} if (settings := self._order_settings) else {}),
        }

    def require_own(self, state: IteratorState) -> None:
        """Check that any object is a saved state of this pipeline with the same settings.

        Raises:
            InvalidArgumentError: The state is invalid, or belongs to another pipeline or other settings.
        """
        require_pipelines(require_state(state), 1)
        found = (state.get("version"), state.get("pipeline"))
        if found != (_VERSION, self._fingerprint):
            raise InvalidArgumentError(
                f"The state must be of this pipeline ({self._fingerprint}), got one of {state.get('pipeline')!r} "
                f"(version {state.get('version')!r}). Build the dataset as it was when the state was saved."
            )
        require_settings(state, self._order_settings)

    def load(self, state: IteratorState) -> None:
        """Reopen at a saved state of this pipeline with the next use."""
        self.closed = self.ended = False
        self.seed, self.epoch = int(state["seed"]), int(state["epoch"])
        self.resume_at = dict(state["at"])
        self.orders.load(state.get("orders", {}))
        self.own_seeds = seeds_in(state.get("own_seeds", {}), self.own_seeds)
