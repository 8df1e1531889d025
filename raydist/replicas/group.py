"""The driver's handle of a set of replica actors: dispatch steps, wait, call, rebuild after an error, stop.

One group serves every strategy whose replicas run in lock step. This module knows nothing of variables or datasets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple, final

from raydist.actors.replica import Place, ReplicaActors, ReplicaSlot
from raydist.actors.supervision import may_be_loss, wait_for_all
from raydist.actors.version_check import Software, installed_software, require_devices, require_same_software
from raydist.cluster.reservation import Reservation
from raydist.collectives.base import Communicator, Membership
from raydist.collectives.ray_backend import create_group
from raydist.collectives.rendezvous import RendezvousStore
from raydist.core.errors import DeadlineExceededError, UnavailableError
from raydist.core.exception_utils import describe
from raydist.core.fork_guard import OwningProcess
from raydist.mirroring.messages import MirrorCalls
from raydist.options import Timeouts
from raydist.replicas.dispatched_steps import DispatchedSteps
from raydist.replicas.recovery import Recovery, ReplicaFailure
from raydist.replicas.runner import ReplicaRunner
from raydist.replicas.state_copies import StateCopies
from raydist.replicas.step import ReplicaSetup

_ANSWER_S = 3.0  # a replica that does not say within this time that it lives is taken for stopped

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@final
@dataclass(frozen=True, slots=True)
class NewSize:
    """The replicas of a group that is resized.

    Attributes:
        setups: All replicas, in rank order.
        hosts: Their nodes.
        keep: The present ranks of those that stay; the new ones come behind them.
        added: Where each new process runs.
    """

    setups: tuple[ReplicaSetup, ...]
    hosts: tuple[str, ...]
    keep: tuple[int, ...]
    added: tuple[tuple[Place, ReplicaSlot], ...] = ()


@final
class ReplicaGroup:
    """N replicas in lock step. For use by one thread."""

    def __init__(
        self,
        setups: Sequence[ReplicaSetup],
        actors: ReplicaActors,
        store: RendezvousStore,
        timeouts: Timeouts,
        *,
        hosts: Sequence[str] = (),
        join_group: Callable[..., Communicator] = create_group,
    ) -> None:
        self._setups = list(setups)
        self._actors = actors
        self._timeouts = timeouts
        self._store = store
        self._join_group = join_group
        self.hosts = list(hosts)  # node ids, in rank order; recovery changes them
        self._silent = False
        self._process = OwningProcess("A strategy with its variables and results")
        self.steps = DispatchedSteps(actors, timeouts.step_s, self._process)
        self.steps.same_rows = setups[0].same_rows if setups else 1
        self.failures: list[ReplicaFailure] = []
        self.on_recovered: Callable[[float], object] = lambda _: None  # called with the seconds that a recovery took
        self.recovery: Recovery | None = None
        self.copies: StateCopies | None = None
        self._prepare_recovery()

    def _prepare_recovery(self) -> None:
        options = self._setups[0].failures if self._setups else None
        if options is None:
            self.recovery, self.copies, self.steps.recover = None, None, None
            return
        always = self._setups[0].by_copies or (self.copies is not None and self.copies.always)
        self.copies = StateCopies(self.steps, self._actors, self._timeouts.step_s, always=always)
        self.recovery = Recovery(
            self._setups,
            self._actors,
            self.steps,
            self.copies,
            options,
            self._timeouts,
            hosts=self.hosts,
            start=self._start,
            membership=self._membership,
            told=self._note_recovery,
        )
        self.steps.recover = self.recovery.recover

    def _note_recovery(self, failure: ReplicaFailure) -> None:
        self.failures.append(failure)
        self.on_recovered(failure.seconds)

    def start(self) -> None:
        """Start the runners and form the first generation. Blocks until every replica answers (limit: `start_s`)."""
        asked = [self._actors.about(setup.rank) for setup in self._setups]
        refs = [self._start(setup.rank) for setup in self._setups]
        found: list[Software] = self.steps.wait_for(asked, self._timeouts.start_s, "starting", "Timeouts.start_s")
        require_same_software(installed_software(), found, self._actors.names)
        require_devices([setup.device for setup in self._setups], found, self._actors.names)
        self.steps.wait_for(refs, self._timeouts.start_s, "starting", "Timeouts.start_s")
        self._store.start()
        self.rebuild()
        if self.recovery is not None:
            self._actors.prepare_spares(ReplicaRunner)

    def _start(self, rank: int) -> Any:
        return self._actors.start(rank, ReplicaRunner, self._setups[rank], self._join_group)

    @property
    def _ranks(self) -> range:
        return range(len(self._setups))

    def resize(self, plan: NewSize) -> None:
        """Change the number of replicas. All steps must have ended. Blocks while new processes start (`start_s`).

        Replicas that stay keep their processes. All of them take over what the first one holds; what differs between
        replicas the driver sends again.
        """
        handed, without_place = self._hand_over(plan.keep[0]), self.without_place
        self._actors.keep(plan.keep)
        for place, slot in plan.added:
            self._actors.add(place, slot)
        self._setups[:], self.hosts[:] = plan.setups, plan.hosts
        self.steps.resize(len(plan.setups))
        new, attempts = set(range(len(plan.keep), len(plan.setups))), 1
        while True:
            try:
                self._begin_again(handed, new)
            except Exception as error:
                lost = self._actors.lost(_ANSWER_S) if may_be_loss(error) else {}
                options = plan.setups[0].failures
                if not lost or options is None or attempts >= options.attempts_per_step:
                    self.steps.dead = self.steps.dead or UnavailableError(
                        f"The number of replicas was to change, but that failed: {describe(error)}. Their state is "
                        "lost. Start the program again from its last checkpoint."
                    )
                    raise
                attempts += 1
                for rank in lost:
                    self._actors.replace(rank)
                    new.add(rank)
                self.steps.dead = None
            else:
                break
        if self.recovery is not None:
            self.recovery.without_place = {number for number, rank in enumerate(plan.keep) if rank in without_place}

    def _hand_over(self, source: int) -> Any:
        """Close all runners; return the reference of what one of them held."""
        while True:
            try:
                ready = self._ask(ReplicaRunner.require_exchanged, self._ranks)
                self.steps.wait_for(ready, self._timeouts.step_s, "resizing", present=False)
                handed = self._actors.call(source, ReplicaRunner.hand_over.__name__)
                names = [self._actors.names[source]]
                self.steps.wait_for([handed], self._timeouts.step_s, "resizing", names=names)
                closing = self._ask(ReplicaRunner.close, self._ranks)
                self.steps.wait_for(closing, self._timeouts.close_s, "leaving the group", "Timeouts.close_s")
            except Exception as error:
                if self.recovery is None or not self.recovery.recover(error):
                    raise
            else:
                return handed

    def _begin_again(self, handed: Any, new: Collection[int]) -> None:
        """Start all runners anew, with the state that was handed over; the ranks in `new` are other processes."""
        starting = [self._start(rank) for rank in self._ranks]
        self.steps.wait_for(starting, self._timeouts.start_s, "starting", "Timeouts.start_s")
        self._prepare_recovery()
        self.rebuild()
        step = self.steps.last + 1
        taking = [
            self._actors.call(rank, ReplicaRunner.take_over.__name__, handed, step, rank in new) for rank in self._ranks
        ]
        self.steps.wait_for(taking, self._timeouts.start_s, "taking over the state", "Timeouts.start_s")

    def move(self, ranks: Sequence[int], places: Sequence[Place] = ()) -> None:
        """Move replicas to other processes; see `Recovery.move`. A replica that is lost meanwhile is replaced."""
        if self.recovery is None:
            return
        try:
            self.recovery.move(ranks, places)
        except Exception as error:
            if not self.recovery.recover(error):
                raise

    def holds(self, reservation: Reservation) -> bool:
        """Return True if the replicas release the reservation when they are stopped."""
        return self._actors.holds(reservation)

    @property
    def is_sharded(self) -> bool:
        """True if each replica holds a part of the parameters."""
        return self._setups[0].sharding is not None

    @property
    def num_idle(self) -> int:
        """Number of reserved places that no replica uses, also on nodes that are gone."""
        return self._actors.num_idle

    @property
    def without_place(self) -> frozenset[int]:
        """The ranks that share the place of others, because the cluster had no room for them."""
        return frozenset() if self.recovery is None else frozenset(self.recovery.without_place)

    def idle_places(self) -> list[Place]:
        """Return the reserved places that replicas have left, on nodes that live."""
        return self._actors.idle_places()

    def rebuild(self) -> None:
        """Form a new generation of all replicas, and clear earlier failures. Gives up dispatched steps. Blocks."""
        self.steps.tell()
        self.steps.require_alive()
        self.steps.give_up()
        self.steps.generation += 1
        join = ReplicaRunner.join.__name__
        refs = [self._actors.call(setup.rank, join, self._membership(setup)) for setup in self._setups]
        self.steps.wait_for(refs, self._timeouts.start_s, "joining the group", "Timeouts.start_s")
        self.steps.failed = False

    def start_over(self) -> None:
        """Start all replicas again from the last copy of their states, and clear a failure; see `Recovery`. Blocks."""
        self.steps.tell()
        self.steps.require_alive()
        if self.recovery is not None:
            self.recovery.start_over()

    def _membership(self, setup: ReplicaSetup) -> Membership:
        return self._store.membership(
            setup.name,
            generation=self.steps.generation,
            rank=setup.rank,
            world_size=setup.world_size,
            hosts=tuple(self.hosts),
        )

    def wait_to_close(self) -> None:
        """Wait for every dispatched step, but first check that the replicas' processes answer beside their steps."""
        if not self._actors.reachable:
            return  # Ray was shut down
        silent = self._actors.silent(self._timeouts.close_s) if self.steps.num_under_way else []
        if silent:
            self._silent = True
            raise DeadlineExceededError(
                f"Dispatched steps must end before the strategy closes, but {' and '.join(silent)} did not even say "
                f"that it works within {self._timeouts.close_s:g} s (Timeouts.close_s). Its process may be stopped, or "
                "its machine unreachable; it is killed now."
            )
        self.steps.wait()

    def answers(self, within_s: float) -> bool:
        """Return True if every replica has completed the dispatched steps and answers; waits up to `within_s`."""
        if self.steps.dead is not None or self._silent or not self._actors.reachable:
            return False
        refs = self._ask(ReplicaRunner.ping, self._ranks)
        self._silent = not self._actors.are_ready(refs, within_s)
        return not self._silent

    def nonfinite_counts(self) -> tuple[int, int]:
        """Return `ReplicaRunner.nonfinite_counts`, equal on all replicas. Waits for all dispatched steps."""
        found: tuple[int, int] = self._answers("counting", [0], ReplicaRunner.nonfinite_counts)[0]
        return found

    def ask_mirrors(
        self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args, ranks: Sequence[int] | None = None
    ) -> list[_T]:
        """Call a method of the mirrored variables of replicas (None: all); return the results in rank order.

        Blocks until all dispatched steps and the calls are done; raises their error.
        """
        return self._answers(f"{method.__name__} of the variables", ranks, ReplicaRunner.mirror, method, *args)

    def _answers(
        self, doing: str, ranks: Sequence[int] | None, method: Callable[[ReplicaRunner, *_Args], Any], *args: *_Args
    ) -> list[Any]:
        asked = self._ranks if ranks is None else ranks
        names = [self._actors.names[rank] for rank in asked]
        while True:
            self.steps.wait()
            try:
                return self.steps.wait_for(self._ask(method, asked, *args), self._timeouts.step_s, doing, names=names)
            except Exception as error:
                if self.recovery is None or not self.recovery.recover(error):
                    raise

    def _ask(self, method: Callable[[ReplicaRunner, *_Args], object], ranks: Sequence[int], *args: *_Args) -> list[Any]:
        """Call a method of runners by name; return the references of the results. Does not block."""
        return [self._actors.call(rank, method.__name__, *args) for rank in ranks]

    def ask_beside(
        self, method: Callable[[ReplicaRunner, *_Args], _T], *args: *_Args, ranks: Sequence[int] | None = None
    ) -> list[_T]:
        """Return what replicas (None: all) answer concurrently with their steps. Thread-safe; changes no state here."""
        asked = self._ranks if ranks is None else ranks
        refs = [self._actors.ask_beside(rank, method.__name__, *args) for rank in asked]
        names = [self._actors.names[rank] for rank in asked]
        return wait_for_all(
            refs,
            names,
            timeout_s=self._timeouts.step_s,
            doing="saving",
            limit="Timeouts.step_s",
            on_error=lambda: None,
        )

    def close(self, *, gently: bool) -> None:
        """Stop the replicas; `gently` lets them leave their group first. Does not raise if a replica is gone."""
        if not self._process.is_this:
            return  # a forked child drops its copy
        if gently and not self.steps.failed and self.answers(self._timeouts.close_s / 2):
            refs = self._ask(ReplicaRunner.close, self._ranks)
            with contextlib.suppress(Exception):  # replicas that do not stop are killed next
                self.steps.wait_for(refs, self._timeouts.close_s / 2, "closing", "Timeouts.close_s")
        self.steps.give_up()
        self._actors.kill()
        self.steps.close()
        self._store.close()
