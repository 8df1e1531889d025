"""The driver's handle of a set of replica actors: dispatch steps, wait, call, rebuild after an error, stop.

One group serves every strategy whose replicas run in lock step. This module knows nothing of variables or datasets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple, final

from raydist.actors.replica import ReplicaActors
from raydist.actors.software import Software, installed_software, require_devices, require_same_software
from raydist.collectives.base import Communicator, Membership
from raydist.collectives.ray_backend import create_group
from raydist.collectives.rendezvous import RendezvousStore
from raydist.errors import DeadlineExceededError
from raydist.mirroring.calls import MirrorCalls
from raydist.options import Timeouts
from raydist.owning_process import OwningProcess
from raydist.replicas.dispatched_steps import DispatchedSteps
from raydist.replicas.replica_calls import ReplicaCalls
from raydist.replicas.results import StepOutcome, StepResult
from raydist.replicas.runner import ReplicaRunner
from raydist.replicas.step import ReplicaSetup
from raydist.replicas.step_message import PlannedStep

__all__ = ["ReplicaGroup"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


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
        self._setups = tuple(setups)
        self._actors = actors
        self._timeouts = timeouts
        self._store = store
        self._join_group = join_group
        self.hosts = tuple(hosts)  # node ids, in rank order
        self._calls = ReplicaCalls(actors, len(setups), timeouts)
        self._silent = False
        self._process = OwningProcess("A strategy with its variables and results")
        self._steps = DispatchedSteps(actors, self._calls, len(setups), timeouts.step_s, self._process)

    def on_results(self, *told: Callable[[Sequence[StepResult]], None]) -> None:
        """Add callbacks for each ended step, in order, with all results. They must neither raise nor block."""
        self._steps.on_results += told

    @property
    def generation(self) -> int:
        """Current generation (incarnation) of the process group; a step header must name it."""
        return self._calls.generation

    @property
    def failed(self) -> bool:
        """True if a step failed in the current generation: replicas refuse further steps until `rebuild`."""
        return self._calls.failed

    def start(self) -> None:
        """Start the runners and form the first generation. Blocks until every replica answers (limit: `start_s`).

        Raises:
            FailedPreconditionError: A replica's node has other software versions, or lacks the device.
        """
        asked = [self._actors.about(setup.rank) for setup in self._setups]
        refs = [self._actors.start(setup.rank, ReplicaRunner, setup, self._join_group) for setup in self._setups]
        found: list[Software] = self._calls.wait(asked, self._timeouts.start_s, "starting", "Timeouts.start_s")
        require_same_software(installed_software(), found, self._actors.names)
        require_devices([setup.device for setup in self._setups], found, self._actors.names)
        self._calls.wait(refs, self._timeouts.start_s, "starting", "Timeouts.start_s")
        self._store.start()
        self.rebuild()

    def rebuild(self) -> None:
        """Form a new generation of all replicas, and clear earlier failures. Gives up dispatched steps. Blocks."""
        self._steps.tell()
        self._calls.require_alive()
        self._steps.give_up()
        self._calls.generation += 1
        refs = [self._calls.ask(setup.rank, ReplicaRunner.join, self._membership(setup)) for setup in self._setups]
        self._calls.wait(refs, self._timeouts.start_s, "joining the group", "Timeouts.start_s")
        self._calls.failed = False

    def _membership(self, setup: ReplicaSetup) -> Membership:
        return self._store.membership(
            setup.name,
            generation=self._calls.generation,
            rank=setup.rank,
            world_size=setup.world_size,
            hosts=self.hosts,
        )

    def until_now(self) -> Callable[[], None]:
        """Return a function that waits for the steps dispatched so far; see `DispatchedSteps.until_now`."""
        return self._steps.until_now()

    def dispatch(self, step: PlannedStep) -> StepOutcome:
        """Send one step to every replica, now or soon; see `DispatchedSteps`."""
        return self._steps.dispatch(step)

    def wait(self) -> None:
        """Wait for every dispatched step; raise the error of the first step that failed."""
        self._steps.wait()

    def wait_to_close(self) -> None:
        """Like :meth:`wait`, but first check that the replicas' processes answer concurrently with their steps.

        Raises:
            DeadlineExceededError: A process does not answer within `close_s`; the steps are given up.
        """
        if not self._actors.reachable:
            return  # Ray was shut down
        silent = self._actors.silent(self._timeouts.close_s) if self._steps.num_under_way else []
        if silent:
            self._silent = True
            raise DeadlineExceededError(
                f"Dispatched steps must end before the strategy closes, but {' and '.join(silent)} did not even say "
                f"that it works within {self._timeouts.close_s:g} s (Timeouts.close_s). Its process may be stopped, or "
                "its machine unreachable; it is killed now."
            )
        self.wait()

    def answers(self, within_s: float) -> bool:
        """Return True if every replica has completed the dispatched steps and answers; waits up to `within_s`."""
        if self._calls.dead is not None or self._silent or not self._actors.reachable:
            return False
        refs = self._calls.ask_all(ReplicaRunner.ping)
        self._silent = not self._actors.are_ready(refs, within_s)
        return not self._silent

    def nonfinite_counts(self) -> tuple[int, int]:
        """Return `ReplicaRunner.nonfinite_counts`, equal on all replicas. Waits for all dispatched steps."""
        self.wait()
        found: tuple[int, int] = self._calls.answers(ReplicaRunner.nonfinite_counts, doing="counting", ranks=[0])[0]
        return found

    def ask_mirror(self, rank: int, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        """Call a method of one replica's mirrored variables after all dispatched steps. Blocks; raises its error."""
        return self.ask_mirrors(method, *args, ranks=[rank])[0]

    def ask_mirrors(
        self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args, ranks: Sequence[int] | None = None
    ) -> list[_T]:
        """Call a method of the mirrored variables of replicas (None: all); return the results. See `ask_mirror`."""
        self.wait()
        doing = f"{method.__name__} of the variables"
        return self._calls.answers(ReplicaRunner.mirror, method, *args, doing=doing, ranks=ranks)

    def ask_beside(
        self, method: Callable[[ReplicaRunner, *_Args], _T], *args: *_Args, ranks: Sequence[int] | None = None
    ) -> list[_T]:
        """Return what replicas (None: all) answer concurrently with their steps. Thread-safe; changes no state here."""
        return self._calls.beside(method, *args, ranks=ranks)

    def close(self, *, gently: bool) -> None:
        """Stop the replicas; `gently` lets them leave their group first. Does not raise if a replica is gone."""
        if not self._process.is_this:
            return  # a forked child drops its copy
        if gently and not self._calls.failed and self.answers(self._timeouts.close_s / 2):
            refs = self._calls.ask_all(ReplicaRunner.close)
            with contextlib.suppress(Exception):  # replicas that do not stop are killed next
                self._calls.wait(refs, self._timeouts.close_s / 2, "closing", "Timeouts.close_s")
        self._steps.give_up()
        self._actors.kill()
        self._steps.close()
        self._store.close()
