"""Base class of strategies whose number of replicas may change between two steps."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import final

from raydist.actors.replica import Place
from raydist.checkpoints.driver_loop import DriverLoop
from raydist.cluster.nodes import PlaceRequest
from raydist.cluster.ray_session import draining_nodes
from raydist.cluster.reservation import Reservation
from raydist.context.current import require_no_run
from raydist.core.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from raydist.core.exception_utils import folded
from raydist.distributed_dataset import ReplicaCount
from raydist.mirroring.driver import MirrorDriver, TableStates
from raydist.options import FailureOptions, Timeouts
from raydist.replicas.group import ReplicaGroup
from raydist.replicas.launch import LaunchPlan, further_bundles, resize
from raydist.replicas.rules import StrategyHooks
from raydist.strategies.growth import Growth
from raydist.strategies.hosted import HostedStrategy

_log = logging.getLogger("raydist")
_LOOK_S = 1.0  # between two looks at the nodes
_ROOM = "the cluster has room again"


class ResizableStrategy(HostedStrategy):
    """Replicas whose number may change; they leave nodes that are drained."""

    _mirror: MirrorDriver

    def __init__(self, kind: str, timeouts: Timeouts | None, failure_options: FailureOptions) -> None:
        super().__init__(kind, timeouts)
        self._failure_options = failure_options
        self._launch_plan: LaunchPlan | None = None
        self._launched: ReplicaGroup | None = None
        self._loop: DriverLoop | None = None
        self._turn = threading.RLock()  # one thread at a time calls `run`, or starts the replicas
        self._replica_count: ReplicaCount | None = None
        self._growth: Growth | None = None
        self._look_at = 0.0  # time of the next look at the nodes
        self._must_end = False  # nodes are drained that the replicas cannot leave

    @abstractmethod
    def _plan(self) -> LaunchPlan:
        """Return the plan of the present replicas. May start or join Ray."""

    @abstractmethod
    def _with_rules(self, plan: LaunchPlan, rules: StrategyHooks) -> LaunchPlan:
        """Return a plan with the rules of the replicas, and what they keep for failures."""

    @abstractmethod
    def _launch(self) -> ReplicaGroup:
        """Start the replicas' processes if necessary, without waiting."""

    @abstractmethod
    def _replicas(self) -> ReplicaGroup:
        """Return the replicas, ready for a step. Blocks while they start or rebuild their group."""

    def _plan_for(self, num_replicas: int) -> LaunchPlan:
        """Return the plan for another number of replicas.

        Raises:
            InvalidArgumentError: There can't be so many.
            FailedPreconditionError: The number cannot change.
        """
        raise FailedPreconditionError(f"{type(self).__name__} must keep its replicas, and cannot have {num_replicas}.")

    @final
    @folded
    def resize(self, num_replicas: int) -> None:
        """Go on with another number of replicas. Blocks until dispatched steps end, and new processes have started.

        Replicas that stay keep their processes; new ones take over parameters, optimizer states and attributes.
        Metrics and buffers keep the values that the program reads. The next batch is cut for the new number: no row is
        left out or used twice. Batches that were drawn before are cut again.

        Args:
            num_replicas: Number of replicas, at least 1. Of MultiWorkerMirroredStrategy: a multiple of the replicas of
                a worker.

        Raises:
            InvalidArgumentError: There can't be so many.
            FailedPreconditionError: The number cannot change: the strategy has rules of its own or other replicas than
                MirroredStrategy and MultiWorkerMirroredStrategy; an epoch has begun whose workers read separate parts,
                or that comes from a function; gradients of `no_sync` wait to be exchanged. Nothing has
                changed.
            DeadlineExceededError: The cluster has no room for further replicas. Nothing has changed.

        Source: Horovod's elastic training; torch elastic restarts all processes instead.

        >>> strategy = rd.MirroredStrategy("cpu")
        >>> strategy.resize(2)
        >>> strategy.num_replicas_in_sync
        2
        >>> strategy.close()
        """
        require_no_run()
        self._require_open("change the number of its replicas")
        if isinstance(num_replicas, bool) or not isinstance(num_replicas, int) or num_replicas < 1:
            raise InvalidArgumentError(f"num_replicas must be a number >= 1, got {num_replicas!r}.")
        with self._turn:
            plan = self._plan()
            if num_replicas == len(plan.setups):
                return
            first = plan.setups[0]
            if type(first.rules) is not StrategyHooks or plan.per_process > 1 or first.sharding is not None:
                raise FailedPreconditionError(
                    f"{type(self).__name__} must keep its {len(plan.setups)} replicas: the number changes only where "
                    "all replicas hold the same (MirroredStrategy, MultiWorkerMirroredStrategy)."
                )
            self._change_size(num_replicas)

    def _change_size(
        self,
        num_replicas: int,
        *,
        keep: Sequence[int] | None = None,
        reserved: Sequence[Reservation] = (),
        leaving: Collection[str] = (),
        why: str = "",
    ) -> None:
        """Change the replicas. The program has not asked for it if there is a reason `why`, which is logged."""
        before, began = self._plan(), time.monotonic()
        self._count_for_input.require_change()
        plan = self._with_rules(self._plan_for(num_replicas), before.setups[0].rules)
        if self._input_pipelines is not None:
            self._input_pipelines.change(num_replicas, leaving)
        rows: TableStates = []
        if self._launched is not None:
            group = self._replicas()
            self._drain()
            if self._loop is not None:
                self._loop.settle()
            self._await_saves()
            self._mirror.divide_anew()
            rows = self._mirror.export_tables()
            resize(group, plan, self._timeouts, self._title, keep=keep, reserved=reserved)
            said = f"{num_replicas} replicas instead of {len(before.setups)}"
            self._tell(logging.WARNING if why else logging.INFO, said, began, why)
        self._launch_plan = plan
        self._mirror.import_tables(rows)
        self._count_for_input.change(num_replicas, plan.num_workers)
        if self._growth is not None:
            self._growth.note_change()

    def _tell(self, level: int, said: str, began: float, why: str) -> None:
        because = f", because {why}" if why else ""
        step, seconds = self._launch().steps.last + 1, time.monotonic() - began
        _log.log(level, "%s: %s from step %d on, after a pause of %.1f s%s.", self._name, said, step, seconds, because)

    def _move(
        self, ranks: Sequence[int], places: Sequence[Place] = (), leaving: Collection[str] = (), *, why: str
    ) -> None:
        """Move replicas to these places; without places, beside the others."""
        group, began = self._replicas(), time.monotonic()
        self._drain()
        group.move(ranks, places)
        if leaving and self._input_pipelines is not None:
            self._input_pipelines.change(len(group.hosts), leaving)
            self._count_for_input.change(len(group.hosts), self._plan().num_workers)
        moved = " and ".join(f"replica {rank}" for rank in ranks)
        self._tell(logging.WARNING, f"{moved} in {'a place of its own' if places else 'another process'}", began, why)

    def _adapt(self) -> None:
        """Leave nodes that are drained, and give an elastic strategy the replicas that it has room for."""
        group = self._launched
        if group is None or (group.recovery is None and self._growth is None):
            return
        without_place = group.without_place
        now = time.monotonic()
        if now < self._look_at and not (without_place and self._growth is not None):
            return
        self._look_at = now + _LOOK_S
        with contextlib.suppress(FailedPreconditionError):  # not in this epoch, or with these gradients: later
            going = draining_nodes()
            drained = [rank for rank, host in enumerate(group.hosts) if host in going]
            self._must_end = len(drained) == len(group.hosts)
            if self._must_end:
                return
            if drained:
                why = f"node {next(iter(going))[:8]} is being drained"
                self._leave(set(drained) | without_place, going, why=why)
            elif without_place:
                self._give_places(without_place)
            elif self._growth is not None:
                self._grow(self._growth)

    def _prepare_growth(self) -> None:
        elastic, plan = self._failure_options.elastic, self._plan()
        if elastic is not None:
            request = functools.partial(PlaceRequest, holder=self._title)
            self._growth = Growth(elastic, len(plan.setups), plan.per_bundle, request=request)
            self._when_dropped.add(self._growth.close)

    def _leave(self, ranks: Collection[int], nodes: Collection[str] = (), *, why: str) -> None:
        """Go on without these replicas if the strategy is elastic, else with others beside those that stay."""
        plan, elastic = self._plan(), self._failure_options.elastic
        keep = [rank for rank in range(len(plan.setups)) if rank not in ranks]
        fewer = len(keep) // plan.per_bundle * plan.per_bundle
        if elastic is not None and fewer >= elastic.min_replicas:
            try:
                self._change_size(fewer, keep=keep[:fewer], leaving=nodes, why=why)
            except FailedPreconditionError:  # not in this epoch: a drained node is left all the same
                if not nodes:
                    raise
            else:
                return
        if self._launch().recovery is None or plan.setups[0].by_copies:  # nobody else has their state
            self._must_end = True
        else:
            self._move(sorted(ranks), leaving=nodes, why=why)

    def _give_places(self, without_place: Collection[int]) -> None:
        """Give replicas that share the place of others the places that are free now."""
        places = self._launch().idle_places()
        if len(places) >= len(without_place):
            self._move(sorted(without_place), places[: len(without_place)], why=_ROOM)
        elif self._growth is not None:
            self._leave(without_place, why="there is no room for a lost one")

    def _grow(self, growth: Growth) -> None:
        group, plan = self._launch(), self._plan()
        count, unit = len(plan.setups), plan.per_bundle
        if not growth.is_due(count):
            return
        self._count_for_input.require_change()
        ready = len(group.idle_places())
        found = growth.look(count, ready, group.num_idle, lambda: further_bundles(group, plan, unit)[0])
        if found > count:
            with contextlib.suppress(DeadlineExceededError):  # the room is gone again
                self._change_size(found, reserved=growth.take((found - count - ready) // unit), why=_ROOM)

    @property
    def _count_for_input(self) -> ReplicaCount:
        if self._replica_count is None:
            plan = self._plan()
            self._replica_count = ReplicaCount(len(plan.setups) // plan.setups[0].same_rows, plan.num_workers)
        return self._replica_count
