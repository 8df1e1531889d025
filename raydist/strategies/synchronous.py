"""What all strategies with replicas in lock step share: dispatching steps, mirrored variables, distributed input.

A subclass decides only where the replicas run.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple, final

import torch

from raydist.actors.passes.link import InputHost
from raydist.context.strategy import Strategy, require_call
from raydist.context.strategy_input import require_dataset
from raydist.context.strategy_values import ValueContext
from raydist.dataset import Dataset
from raydist.distributed_dataset import DistributedDataset, InputSide, distribute, distribute_from_function
from raydist.mirroring.calls import MirrorCalls
from raydist.mirroring.driver import MirrorDriver
from raydist.mirroring.shipment import Shipment
from raydist.options import InputOptions, RunOptions, Timeouts
from raydist.replicas.group import ReplicaGroup
from raydist.replicas.launch import LaunchPlan, launch
from raydist.replicas.results import StepValues, StructureMemory, returns_nothing
from raydist.replicas.step import StepHeader, batch_rows
from raydist.replicas.step_message import PlannedStep
from raydist.values import InputContext, PerReplica, ReduceOp

__all__ = ["SynchronousStrategy"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


class SynchronousStrategy(Strategy):
    """Replica actors in lock step; gradients meet in an all-reduce. Replicas start when they are first needed."""

    def __init__(self, kind: str, timeouts: Timeouts | None) -> None:
        super().__init__()
        self._name = f"{kind}-{uuid.uuid4().hex[:8]}"
        self._timeouts = timeouts or Timeouts()
        self._options = RunOptions(gradient_reduce_op=ReduceOp.MEAN)
        self._launch_plan: LaunchPlan | None = None
        self._launched: ReplicaGroup | None = None
        self._started = False
        self._mirror = MirrorDriver(self._name, _Link(self))
        self._memory = StructureMemory()
        self._input_host: InputHost | None = None
        self._next_step = 0

    @abstractmethod
    def _make_plan(self) -> LaunchPlan:
        """Where the replicas run. Called once; may start or join Ray."""

    def _plan(self) -> LaunchPlan:
        if self._launch_plan is None:
            self._launch_plan = self._make_plan()
        return self._launch_plan

    @final
    @property
    def num_replicas_in_sync(self) -> int:
        return len(self._plan().setups)

    @final
    def _launch(self) -> ReplicaGroup:
        """The replicas' processes, perhaps still starting: meanwhile the driver builds its model."""
        if self._launched is None:
            self._launched = launch(self._plan(), self._timeouts)
            self._close_when_dropped(functools.partial(self._launched.close, gently=False))
        return self._launched

    def _close_when_dropped(self, close: Callable[[], None]) -> None:
        """A strategy that is dropped without `close` gives its processes and its reservation back as well."""
        weakref.finalize(self, close)

    @final
    def _replicas(self) -> ReplicaGroup:
        """The replicas, ready for a step."""
        group = self._launch()
        if not self._started:
            group.start()
            self._started = True
        if group.failed:
            group.rebuild()
            self._mirror.reset()
        return group

    @final
    @contextlib.contextmanager
    def _mark_created(self) -> Iterator[None]:
        self._launch()
        with self._mirror.scope():
            yield

    @final
    def _set_gradient_reduce_op(self, options: RunOptions) -> None:
        self._options = options

    @final
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        self._require_open("run a step")
        require_call(fn, args)
        group = self._replicas()
        shipment = self._mirror.prepare(fn, tuple(args), dict(kwargs or {}), externals={"strategy": self})
        step = PlannedStep(self._next_header(shipment, options or RunOptions()), shipment.per_replica)
        outcome = group.dispatch(step)
        self._mirror.dispatched()
        return self._result(fn, StepValues(outcome))

    def _next_header(self, shipment: Shipment, options: RunOptions) -> StepHeader:
        """The next step, the same for every replica but for where its parts are."""
        self._next_step += 1
        return StepHeader(
            step=self._next_step - 1,
            generation=self._replicas().generation,
            shipment=shipment.without_parts(),
            rows=batch_rows(shipment.per_replica),
            gradient_reduce_op=options.gradient_reduce_op or self._options.gradient_reduce_op or ReduceOp.MEAN,
            stand_in=options.empty_batch == "stand_in",
            check_in_sync=options.check_in_sync,
            seed=torch.initial_seed(),
        )

    def _result(self, fn: Callable[..., Any], values: StepValues) -> Any:
        if returns_nothing(fn):
            return None
        if self.num_replicas_in_sync == 1:
            return values.plain_nest()
        expected = self._memory.expected(fn)
        if expected is not None:
            return values.expected_nest(expected)
        nest = values.nest()
        self._memory.learn(fn, values.structure(), nest)
        return nest

    @final
    def _input_side(self) -> InputSide:
        self._require_open("distribute a dataset")
        plan = self._plan()
        if self._input_host is None:
            self._input_host = InputHost(
                self._name, num_replicas=len(plan.setups), timeouts=self._timeouts, node_id=plan.node_id
            )
            self._close_when_dropped(self._input_host.close)
        self._input_host.start()  # its process starts while the replicas' do
        return InputSide(self._input_host, len(plan.setups), self._timeouts, drain=self._drain)

    def _drain(self) -> None:
        if self._launched is not None:
            self._launched.wait()

    @final
    def distribute_dataset(self, dataset: Dataset, options: InputOptions | None = None) -> DistributedDataset:
        require_dataset(dataset)
        return distribute(dataset, self._input_side(), options or InputOptions())

    @final
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> DistributedDataset:
        def checked_fn(context: InputContext) -> Dataset:
            return require_dataset(dataset_fn(context))

        return distribute_from_function(checked_fn, self._input_side(), options or InputOptions())

    @final
    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        count = self.num_replicas_in_sync
        values = [value_fn(ValueContext(rank, count)) for rank in range(count)]
        return values[0] if count == 1 else PerReplica(values)

    @final
    def close(self) -> None:
        self._process.require("closed")
        if self._closed:
            return
        try:
            if self._launched is not None and self._started:
                self._launched.wait_to_close()
        finally:
            self._abort(fetch=True)

    @final
    def _abort(self, *, fetch: bool) -> None:
        if self._closed or not self._process.is_this:
            return
        with contextlib.ExitStack() as stack:
            if self._launched is not None:
                stack.callback(self._launched.close, gently=self._started)
            if self._input_host is not None:
                stack.callback(self._input_host.close)
            # Last registered, first done: the replicas must live to give the variables their final values.
            stack.callback(self._release_variables, fetch=fetch)
        self._closed = True

    def _release_variables(self, *, fetch: bool) -> None:
        reachable = fetch and self._launched is not None and self._started
        if reachable and self._launched is not None and self._launched.answers(self._timeouts.close_s / 2):
            with contextlib.suppress(Exception):  # what happened before is on its way to the user
                self._mirror.release()
        self._mirror.release(fetch=False)


@final
class _Link:
    """How the driver half of the mirrored variables reaches the replicas: a `ReplicaLink`."""

    def __init__(self, strategy: SynchronousStrategy) -> None:
        self._strategy = strategy

    def call(self, rank: int, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        return self._strategy._replicas().ask_mirror(rank, method, *args)

    def call_all(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> list[_T]:
        return self._strategy._replicas().ask_mirrors(method, *args)
