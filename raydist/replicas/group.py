"""The driver's end of a set of replica actors: dispatch steps, wait, call, rebuild after an error, stop.

One group serves every strategy whose replicas run in lock step. It knows nothing of variables or datasets.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple, final

from raydist.actors.replica import ReplicaActors
from raydist.collectives.base import Membership
from raydist.collectives.ray_backend import create_group
from raydist.collectives.rendezvous import RendezvousStore
from raydist.errors import UnavailableError
from raydist.mirroring.calls import MirrorCalls
from raydist.options import Timeouts
from raydist.replicas.runner import ReplicaRunner
from raydist.replicas.step import ReplicaSetup, StepHeader

__all__ = ["ReplicaGroup"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_WINDOW = 8  # dispatched steps under way: enough to hide the dispatch, few enough to bound what waits in queues


@final
class ReplicaGroup:
    """N replicas in lock step. Used by one thread."""

    def __init__(
        self, setups: Sequence[ReplicaSetup], actors: ReplicaActors, store: RendezvousStore, timeouts: Timeouts
    ) -> None:
        self._setups = tuple(setups)
        self._actors = actors
        self._timeouts = timeouts
        self._store = store
        self._generation = -1
        self._under_way: deque[tuple[int, list[Any]]] = deque()
        self._failed = False
        self._dead: UnavailableError | None = None

    @property
    def num_replicas(self) -> int:
        return len(self._setups)

    @property
    def generation(self) -> int:
        """Of the group as it is now; a step must name it."""
        return self._generation

    @property
    def failed(self) -> bool:
        """A step failed since the group was built: replicas refuse further ones until it is rebuilt."""
        return self._failed

    def start(self) -> None:
        """Build the runners and the first generation. Blocks until every replica answers (limit: `start_s`)."""
        refs = [self._actors.start(setup.rank, ReplicaRunner, setup, create_group) for setup in self._setups]
        self._wait(refs, self._timeouts.start_s, "starting", "Timeouts.start_s")
        self._store.start()
        self.rebuild()

    def rebuild(self) -> None:
        """Form a new generation of all replicas; what failed before is forgotten. Dispatched steps are given up."""
        if self._dead is not None:
            raise self._dead
        self._give_up_dispatched()
        self._generation += 1
        refs = [self._ask(setup.rank, ReplicaRunner.join, self._membership(setup)) for setup in self._setups]
        self._wait(refs, self._timeouts.start_s, "joining the group", "Timeouts.start_s")
        self._failed = False

    def _give_up_dispatched(self) -> None:
        """Forget steps that nobody will wait for: they follow one that failed, and were refused."""
        while self._under_way:
            self._actors.discard(self._under_way.popleft()[1])

    def _membership(self, setup: ReplicaSetup) -> Membership:
        return self._store.membership(
            setup.name, generation=self._generation, rank=setup.rank, world_size=setup.world_size
        )

    def dispatch(self, headers: Sequence[StepHeader], objects: Sequence[Sequence[Any]]) -> list[Any]:
        """Send one step, replica by replica, with the refs of its objects; returns the refs of its results.

        Blocks only while the window is full; then the error of the oldest step may come out.
        """
        if self._dead is not None:
            raise self._dead
        while len(self._under_way) >= _WINDOW:
            self._finish_oldest()
        refs = [
            self._actors.step(setup.rank, header, refs)
            for setup, header, refs in zip(self._setups, headers, objects, strict=True)
        ]
        self._under_way.append((headers[0].step, refs))
        return refs

    def wait(self) -> None:
        """Return once every dispatched step is done; raises the error of the first that failed."""
        while self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        step, refs = self._under_way.popleft()
        self._wait(refs, self._timeouts.step_s, f"step {step}", "Timeouts.step_s", values=False)

    def fetch(self, step: int, generation: int, refs: Sequence[Any]) -> list[Any]:
        """The results of one step of `generation`, in rank order; raises its error, as often as it is asked for."""
        while self._under_way and self._under_way[0][0] < step:
            self._finish_oldest()
        if self._under_way and self._under_way[0][0] == step:
            self._under_way.popleft()  # what comes of it is told here, and not again when the strategy closes
        return self._wait(refs, self._timeouts.step_s, f"step {step}", "Timeouts.step_s", generation=generation)

    def answers(self, within_s: float) -> bool:
        """Whether every replica has done what was dispatched and answers; waits up to `within_s`."""
        if self._dead is not None:
            return False
        refs = [self._ask(setup.rank, ReplicaRunner.ping) for setup in self._setups]
        return self._actors.are_ready(refs, within_s)

    def ask_mirror(self, rank: int, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        """What one replica's mirrored variables answer, after all dispatched steps; raises an error of theirs."""
        self.wait()
        refs = [self._ask(rank, ReplicaRunner.mirror, method, *args)]
        names = [self._actors.names[rank]]
        doing = f"{method.__name__} of the variables"
        found: _T = self._wait(refs, self._timeouts.step_s, doing, "Timeouts.step_s", names=names)[0]
        return found

    def ask_mirrors(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> list[_T]:
        """What every replica's mirrored variables answer, in rank order; waits and raises as `ask_mirror`."""
        self.wait()
        refs = [self._ask(setup.rank, ReplicaRunner.mirror, method, *args) for setup in self._setups]
        return self._wait(refs, self._timeouts.step_s, f"{method.__name__} of the variables", "Timeouts.step_s")

    def _ask(self, rank: int, method: Callable[[ReplicaRunner, *_Args], object], *args: *_Args) -> Any:
        """The reference of what a method of one replica's runner will return: its name is what travels."""
        return self._actors.call(rank, method.__name__, *args)

    def _wait(
        self,
        refs: Sequence[Any],
        timeout_s: float,
        doing: str,
        limit: str,
        *,
        names: Sequence[str] | None = None,
        values: bool = True,
        generation: int | None = None,
    ) -> list[Any]:
        # A result of an older generation may be read late: its error says nothing about the group as it is now.
        present = generation in (None, self._generation)
        try:
            return self._actors.wait(
                refs,
                names or self._actors.names,
                timeout_s=timeout_s,
                doing=doing,
                limit=limit,
                on_error=self._give_up if present else _nothing,
                values=values,
            )
        except Exception as error:
            if present:
                self._failed = True
                if isinstance(error, UnavailableError) and error.actor is not None:
                    self._dead = error
            raise

    def _give_up(self) -> None:
        """Make every replica's collectives end now: a peer will not come."""
        self._failed = True
        self._actors.control_all(ReplicaRunner.abort.__name__)

    def close(self, *, gently: bool) -> None:
        """Stop the replicas; `gently` lets them leave their group first. Never raises because one is gone already."""
        if gently and self._dead is None and not self._failed:
            refs = [self._ask(setup.rank, ReplicaRunner.close) for setup in self._setups]
            with contextlib.suppress(Exception):  # what does not stop gently is killed next
                self._wait(refs, self._timeouts.close_s, "closing", "Timeouts.close_s")
        self._give_up_dispatched()
        self._actors.kill()
        self._store.close()


def _nothing() -> None:
    return None
