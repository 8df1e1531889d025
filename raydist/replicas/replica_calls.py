"""Calls to the runners of all replicas of a group, and the record of failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple, final

from raydist.actors.replica import ReplicaActors
from raydist.actors.supervision import wait_for_all
from raydist.errors import UnavailableError
from raydist.options import Timeouts
from raydist.replicas.runner import ReplicaRunner

__all__ = ["ReplicaCalls"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@final
class ReplicaCalls:
    """Calls to the runners of all replicas. One thread uses this class; any thread may call `beside`.

    Args:
        actors: The replicas' processes.
        num_replicas: Number of replicas.
        timeouts: The limit of every wait.

    Attributes:
        generation: Current generation (incarnation) of the process group; -1 before the first.
        failed: True if something failed since the current generation was formed.
        dead: The error of a replica that is gone for good.
    """

    def __init__(self, actors: ReplicaActors, num_replicas: int, timeouts: Timeouts) -> None:
        self.generation = -1
        self.failed = False
        self.dead: UnavailableError | None = None
        self._actors = actors
        self._ranks = range(num_replicas)
        self._step_s = timeouts.step_s

    def require_alive(self) -> None:
        """Raise if a replica is gone for good.

        Raises:
            UnavailableError: A replica is gone.
        """
        if self.dead is not None:
            raise self.dead

    def ask(self, rank: int, method: Callable[[ReplicaRunner, *_Args], object], *args: *_Args) -> Any:
        """Call a method of one replica's runner by name; return the reference of its result. Does not block."""
        return self._actors.call(rank, method.__name__, *args)

    def ask_all(self, method: Callable[[ReplicaRunner, *_Args], object], *args: *_Args) -> list[Any]:
        """Call `ask` for every replica, in rank order."""
        return [self.ask(rank, method, *args) for rank in self._ranks]

    def answers(
        self,
        method: Callable[[ReplicaRunner, *_Args], Any],
        *args: *_Args,
        doing: str,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return the results of a method on replicas (None: all); blocks for at most `Timeouts.step_s`."""
        asked = self._ranks if ranks is None else ranks
        refs = [self.ask(rank, method, *args) for rank in asked]
        names = [self._actors.names[rank] for rank in asked]
        return self.wait(refs, self._step_s, doing, "Timeouts.step_s", names=names)

    def wait(
        self,
        refs: Sequence[Any],
        timeout_s: float,
        doing: str,
        limit: str,
        *,
        names: Sequence[str] | None = None,
        present: bool = True,
    ) -> list[Any]:
        """Wait for results; see `supervision.wait_for_all`.

        Args:
            refs: References of the results.
            timeout_s: Longest wait in seconds.
            doing: The activity, for messages.
            limit: Name of the setting that gives the limit, for messages.
            names: Names of the called replicas; None for all replicas.
            present: An error concerns the current generation of the group: `failed` and `dead` are updated.
        """
        try:
            return self._actors.wait(
                refs,
                names or self._actors.names,
                timeout_s=timeout_s,
                doing=doing,
                limit=limit,
                on_error=self.give_up if present else _nothing,
            )
        except Exception as error:
            if present:
                self.failed = True
                if isinstance(error, UnavailableError) and error.actor is not None:
                    self.dead = error
            raise

    def beside(
        self, method: Callable[[ReplicaRunner, *_Args], _T], *args: *_Args, ranks: Sequence[int] | None = None
    ) -> list[_T]:
        """Return what replicas (None: all) answer concurrently with their steps. Thread-safe; changes no state here."""
        asked = self._ranks if ranks is None else ranks
        refs = [self._actors.ask_beside(rank, method.__name__, *args) for rank in asked]
        names = [self._actors.names[rank] for rank in asked]
        return wait_for_all(
            refs, names, timeout_s=self._step_s, doing="saving", limit="Timeouts.step_s", on_error=_nothing
        )

    def give_up(self) -> None:
        """Abort the collectives of every replica, because one of the replicas will not take part."""
        self.failed = True
        self._actors.control_all(ReplicaRunner.abort.__name__, self.generation)


def _nothing() -> None:
    return None
