"""Base class of strategies with replicas in lock step: dispatching steps, mirrored variables, distributed input.

A subclass decides where the replicas run.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch

from raydist.actors.readers.driver_epoch import BatchLeaf, recut
from raydist.checkpoints.driver_loop import begin_loop
from raydist.checkpoints.replica_loop import sending_managers
from raydist.checkpoints.restore import ShardRestorer
from raydist.checkpoints.shards import DispatchedSave
from raydist.cluster.nodes import waits_for_own
from raydist.context.run_call import plain_call, require_call
from raydist.context.strategy_values import StrategyStats, ValueContext, regroup
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.exception_utils import folded
from raydist.core.nest import NOTHING, leaves_in
from raydist.distributed_dataset import DistributedIterator, InputSide
from raydist.mirroring.driver import MirrorDriver
from raydist.mirroring.messages import StepPayload
from raydist.options import CommunicationOptions, FailureOptions, RunOptions, Timeouts
from raydist.replicas.central_variables import CentralVariables
from raydist.replicas.group import ReplicaGroup
from raydist.replicas.launch import LaunchPlan, launch
from raydist.replicas.recovery import ReplicaFailure
from raydist.replicas.replica_states import RESTORES, SAVES, ReplicaRestorer, ReplicaSaver
from raydist.replicas.results import ReturnedStructures, StepOutcome, StepValues
from raydist.replicas.rules import StrategyHooks
from raydist.replicas.runner import ReplicaRunner
from raydist.replicas.step import StepHeader, StepHeaders, require_parts
from raydist.replicas.step_message import PlannedStep
from raydist.replicas.step_summaries import counting
from raydist.strategies.hosted import release_mirrored
from raydist.strategies.replica_links import LockStepLink, LoopReplicas
from raydist.strategies.resizable import ResizableStrategy
from raydist.strategies.sync_batch_norm import adopt_layer


class SynchronousStrategy(ResizableStrategy):
    """Replica actors in lock step, with an all-reduce of gradients. Replicas start when they are first needed."""

    def __init__(
        self,
        kind: str,
        timeouts: Timeouts | None,
        communication_options: CommunicationOptions | None = None,
        failure_options: FailureOptions | None = None,
    ) -> None:
        super().__init__(kind, timeouts, failure_options or FailureOptions())
        self._communication = communication_options or CommunicationOptions()
        self._started = False
        self._mirror = MirrorDriver(
            self._name, LockStepLink(self._replicas), self._device_types, row_holders=self._count_row_holders
        )
        self._returned = ReturnedStructures()
        self._headers = StepHeaders()
        self._num_looks = 0
        self._saver = ReplicaSaver(self._mirror, lambda: self._plan().setups, self._save_shards, self._hosts)
        self._mirror.shard_saver = self._saver
        self._restorer = ReplicaRestorer(self._mirror, self._saver.are_alike, self._ask_readers)
        self._loop_replicas = LoopReplicas(
            self._mirror, self._saver, self._launch, self._summaries, self._timeouts.step_s
        )
        self._nonfinite_counts = (0, 0)

    @abstractmethod
    def _make_plan(self) -> LaunchPlan:
        """Plan where the replicas run. Called once; may start or join Ray."""

    def replica_rules(self) -> StrategyHooks:
        """Return the rules of the replicas: a custom strategy returns its own.

        Returns:
            Rules that exchange gradients and do nothing more. Called once, when the replicas are planned.

        >>> rd.MirroredStrategy("cpu").replica_rules().exchanges_gradients
        True
        """
        return StrategyHooks()

    def _plan(self) -> LaunchPlan:
        if self._launch_plan is None:
            self._launch_plan = self._with_rules(self._make_plan(), self.replica_rules())
        return self._launch_plan

    def _with_rules(self, plan: LaunchPlan, rules: StrategyHooks) -> LaunchPlan:
        known = type(rules) in (StrategyHooks, CentralVariables)  # replicas with other rules may differ
        in_parts = plan.setups[0].sharding is not None
        together = plan.tpu_slice is not None or in_parts
        # Is there no other replica that has the whole state?
        by_copies = type(rules) is CentralVariables or len(plan.setups) == 1 or together
        recover = self._failure_options.recover
        if recover is None:
            recover = not in_parts and all(setup.device == "cpu" for setup in plan.setups)
        failures = self._failure_options if known and recover else None
        if failures is not None and failures.spares and plan.setups[0].device != "cpu":
            raise InvalidArgumentError(
                f"FailureOptions.spares must be 0 for replicas on {plan.setups[0].device}, got {failures.spares}: "
                "a spare process would have no device. Leave it out: another process starts when one is lost."
            )
        setups = tuple(
            replace(setup, rules=rules, failures=failures, by_copies=by_copies, die_together=together)
            for setup in plan.setups
        )
        return replace(plan, setups=setups)

    @final
    def failures(self) -> list[ReplicaFailure]:
        """Return the recoveries from lost replicas so far, oldest first. Does not block.

        Returns:
            For each recovery: the replaced replicas, the reason, the steps that ran again, and the seconds it took.

        >>> rd.MirroredStrategy("cpu").failures()
        []
        """
        return [] if self._launched is None else list(self._launched.failures)

    @final
    @property
    def num_replicas_in_sync(self) -> int:
        setups = self._plan().setups
        return len(setups) // setups[0].same_rows

    @final
    def _launch(self) -> ReplicaGroup:
        """Start the replicas' processes if necessary, without waiting: meanwhile the driver builds its model.

        Takes no lock once they are started: the thread that serves a loop in the replicas calls this while others wait.
        """
        if self._launched is not None:
            return self._launched
        with self._turn:
            if self._launched is None:
                launched = launch(self._plan(), self._timeouts, self._title)
                launched.steps.on_results += [self._summaries.take_results, counting(self._metrics)]
                recovered = weakref.WeakMethod(self._note_recovery)  # the group must not keep the strategy
                launched.on_recovered = lambda seconds: (note := recovered()) and note(seconds)
                self._when_dropped.add(functools.partial(launched.close, gently=False))
                self._prepare_growth()
                self._launched = launched
            return self._launched

    def _note_recovery(self, seconds: float) -> None:
        self._metrics.note_recovery(seconds)
        if self._loop is not None:
            self._loop.begin_again()

    @final
    def _replicas(self) -> ReplicaGroup:
        """Return the replicas, ready for a step. Blocks while they start or rebuild their group."""
        group = self._launch()
        if self._started and not group.steps.failed:
            return group
        with self._turn:
            if not self._started:
                group.start()
                self._started = True
            if group.steps.failed:
                self._mend(group)
            return group

    def _mend(self, group: ReplicaGroup) -> None:
        """Make replicas that are ready for a step, after one that failed. Blocks."""
        if not group.is_sharded:
            group.rebuild()
            self._mirror.reset()
        elif group.recovery is not None:
            group.start_over()
            self._mirror.forget_failed()
        else:
            raise FailedPreconditionError(
                f"{self._name} cannot go on after a failed step, because parts of its parameters may not fit together. "
                "Close it, and start again from the last checkpoint; failure_options=FailureOptions(recover=True) "
                "makes copies to go back to."
            )

    @final
    @contextlib.contextmanager
    def _mark_created(self) -> Iterator[None]:
        plan = self._plan()
        # If older strategies hold the resources, the first step waits: the program may drop those in the scope.
        if not waits_for_own(plan.bundles, plan.placement):
            self._launch()
        with self._mirror.scope(adopt_layer):
            yield

    @final
    def _has_made(self, obj: Any) -> bool:
        return self._mirror.has_made(obj)

    @final
    @folded
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        self._begin_run()
        require_call(fn, args, kwargs, options)
        given, named = plain_call(args, kwargs)
        with self._turn:
            expected = self._returned.expected(fn)
            returns_none = expected is NOTHING
            loop = self._loop
            values = self._dispatch(fn, given, named, options or RunOptions(), returns_none=returns_none)
            if self._loop is loop:
                self._adapt()
        if returns_none:
            return None
        if self.num_replicas_in_sync == 1:
            return values.plain_nest()
        return values.nest() if expected is None else values.expected_nest(expected)

    def _dispatch(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        named: dict[str, Any],
        options: RunOptions,
        *,
        returns_none: bool,
    ) -> StepValues:
        group, injected = self._replicas(), {"strategy": self}
        if group.copies is not None or group.steps.same_rows > 1:
            iterators = [leaf for leaf in leaves_in((args, named)) if isinstance(leaf, DistributedIterator)]
            if iterators and group.steps.same_rows > 1:
                raise FailedPreconditionError(
                    f"Replicas of {self._name} that get the same rows cannot draw batches themselves. Draw them on the "
                    "driver: for batch in dataset: strategy.run(step, args=(batch,))."
                )
            if group.copies is not None:
                group.copies.always |= self._mirror.has_tables
                group.copies.before_step(iterators)
        loop = begin_loop((args, named), self._loop_replicas)
        with self._summaries.pickling(), contextlib.nullcontext() if loop is None else sending_managers():
            ship = functools.partial(self._mirror.prepare, fn, args, named, injected=injected)
            payload = ship(carried=self._carried())
            if loop is not None and (partly_sent := loop.partly_sent()):
                payload = ship(carried=(*self._carried(), *partly_sent))
        header = self._next_header(payload, options)
        if loop is not None:
            header = replace(header, loop=loop.command())
        outcome = group.steps.dispatch(PlannedStep(header, payload.per_replica, returns_none=returns_none))
        self._mirror.dispatched()
        if loop is not None:
            self._loop = loop
            loop.start(header.step)
        return StepValues(outcome, functools.partial(self._returned.learn, fn))

    def _save_shards(self, function: Callable[..., Any], token: str, *args: Any) -> DispatchedSave:
        """Save the replicas' shards once the replicas have done all dispatched steps."""
        self._require_open("save")
        step, _ = self._dispatch_beside(function, (SAVES, *args), {"saves": SAVES})
        ask = functools.partial(self._launch().ask_beside, ReplicaRunner.shard_of, step, token)
        return self._note_save(DispatchedSave(ask, self._timeouts.step_s))

    @final
    def _find_restorer(self) -> ShardRestorer | None:
        return self._restorer

    def _ask_readers(self, function: Callable[..., bytes], *args: Any) -> Sequence[bytes]:
        """Call a function with each replica's `ShardReader` after all dispatched steps; return the results."""
        self._require_open("restore")
        if (copies := self._replicas().copies) is not None:
            copies.forget()
        _, outcome = self._dispatch_beside(function, (RESTORES, *args), {"restores": RESTORES})
        return [result.leaf(0) for result in outcome.results()]

    def _dispatch_beside(
        self, function: Callable[..., Any], args: tuple[Any, ...], injected: Mapping[str, Any]
    ) -> tuple[int, StepOutcome]:
        """Dispatch a call that is not a step of the program; return its number and its outcome."""
        group = self._replicas()
        with self._turn:
            payload = self._mirror.prepare(function, args, injected={"strategy": self, **injected})
            header = replace(self._next_header(payload, RunOptions()), looks_only=True, summaries=None)
            self._num_looks += 1
            outcome = group.steps.dispatch(PlannedStep(header, payload.per_replica))
            self._mirror.dispatched()
        return header.step, outcome

    def _hosts(self) -> tuple[str, ...]:
        """Return the nodes of replicas, as far as they are placed, whose drain ends the program."""
        group = self._launched
        if group is None:
            return ()
        hosts = tuple(group.hosts)
        leaves = group.recovery is not None and self._loop is None and len(set(hosts)) > 1 and not self._must_end
        return () if leaves else hosts

    def _next_header(self, payload: StepPayload, options: RunOptions) -> StepHeader:
        """Return the header of the next step, without the locations of its parts."""
        leaves = [each for each in payload.per_replica if isinstance(each, BatchLeaf)]
        recut({leaf.drawn for leaf in leaves}, self.num_replicas_in_sync)
        require_parts(payload.per_replica, self.num_replicas_in_sync)
        return self._headers.following(
            payload,
            options,
            self._gradient_reduce_op(options),
            generation=self._replicas().steps.generation,
            summaries=self._summaries.order(),
        )

    @final
    def _input_side(self) -> InputSide:
        host, plan = self._pipelines(), self._plan()
        failures = plan.setups[0].failures
        return InputSide(
            host,
            self._count_for_input,
            self._timeouts,
            drain=self._drain,
            restarts=0 if failures is None else failures.attempts_per_step,
        )

    @final
    def _num_readers(self) -> int:
        return self.num_replicas_in_sync

    @final
    def _worker_nodes(self) -> tuple[str, ...]:
        hosts = self._launch().hosts
        return tuple({setup.worker: host for setup, host in zip(self._plan().setups, hosts, strict=True)}.values())

    @final
    def _first_node(self) -> str:
        # The node of replica 0; before the placement, a node that the replicas may be on.
        return self._plan().node_id if self._launched is None else self._launched.hosts[0]

    @final
    def _drain(self) -> None:
        if self._launched is not None:
            self._launched.steps.wait()

    @final
    def _until_now(self) -> Callable[[], None]:
        return super()._until_now() if self._launched is None else self._launched.steps.until_now()

    @final
    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        count = self.num_replicas_in_sync
        values = [value_fn(ValueContext(rank, count)) for rank in range(count)]
        return values[0] if count == 1 else regroup(values)

    @final
    @folded
    def stats(self) -> StrategyStats:
        self._process.require("asked")
        if not self._closed:
            self._count()
        return StrategyStats(self._headers.count - self._num_looks, *self._nonfinite_counts)

    def _count(self) -> None:
        """Collect counts from the replicas, if there may be any."""
        if self._launched is not None and self._started:
            self._launched.steps.wait()
            if self._headers.looked:
                self._nonfinite_counts = self._replicas().nonfinite_counts()

    @final
    def _finish(self) -> None:
        if self._launched is None or not self._started:
            return
        self._launched.wait_to_close()
        if self._loop is not None:
            self._loop.settle()
        self._await_saves()
        self._metrics.publish()
        with contextlib.suppress(Exception):  # a missing count is no reason for an error at the end
            self._count()

    @final
    def _stop(self) -> None:
        if self._launched is not None:
            self._launched.close(gently=self._started)
        if self._loop is not None:
            self._loop.close()
        if self._growth is not None:
            self._growth.close()

    def _count_row_holders(self) -> int:
        """Return the number of replicas that rows of embedding tables are divided among; 0 if they cannot be."""
        setups = self._plan().setups
        divided = type(setups[0].rules) is StrategyHooks and setups[0].same_rows == 1
        return len(setups) if divided and self._device_types() <= {"cpu", "cuda"} else 0

    def _device_types(self) -> set[str]:
        return {torch.device(setup.device).type for setup in self._plan().setups}

    @final
    def _release_variables(self, *, fetch: bool) -> None:
        started = fetch and self._started
        limit_s = self._timeouts.close_s / 2
        release_mirrored(
            self._mirror, self._name, "replicas", started=started, answer=lambda: self._launch().answers(limit_s)
        )
