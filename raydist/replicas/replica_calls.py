"""Calls of the replicas' runners, and what it means for their group when one of them fails."""

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
    """See the module. Used by one thread, `beside` aside.

    Args:
        actors: The replicas' processes.
        num_replicas: How many replicas there are.
        timeouts: The limit of every wait.

    Attributes:
        generation: Of the group as it is now; -1 before the first.
        failed: Something failed since that was built.
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
        """Raise where a replica is gone for good.

        Raises:
            UnavailableError: One is.
        """
        if self.dead is not None:
            raise self.dead

    def ask(self, rank: int, method: Callable[[ReplicaRunner, *_Args], object], *args: *_Args) -> Any:
        """The reference of what a method of one replica's runner will return: its name is what travels."""
        return self._actors.call(rank, method.__name__, *args)

    def ask_all(self, method: Callable[[ReplicaRunner, *_Args], object], *args: *_Args) -> list[Any]:
        """As `ask`, of every replica, in rank order."""
        return [self.ask(rank, method, *args) for rank in self._ranks]

    def answer_of(self, rank: int, ref: Any, doing: str) -> Any:
        """What one replica was asked, within `Timeouts.step_s`."""
        return self.wait([ref], self._step_s, doing, "Timeouts.step_s", names=[self._actors.names[rank]])[0]

    def answers_of_all(self, refs: Sequence[Any], doing: str) -> list[Any]:
        """What every replica was asked, within `Timeouts.step_s`."""
        return self.wait(refs, self._step_s, doing, "Timeouts.step_s")

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
        """See `supervision.wait_for_all`.

        Args:
            refs: What is waited for.
            timeout_s: How long.
            doing: What is being done, for messages.
            limit: What sets the limit, for messages.
            names: Of those who were asked; None: all replicas.
            present: What goes wrong says something about the group as it is now.
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
        """What replicas (None: all) answer beside their steps. Any thread may ask; changes nothing here."""
        asked = self._ranks if ranks is None else ranks
        refs = [self._actors.ask_beside(rank, method.__name__, *args) for rank in asked]
        names = [self._actors.names[rank] for rank in asked]
        return wait_for_all(
            refs, names, timeout_s=self._step_s, doing="saving", limit="Timeouts.step_s", on_error=_nothing
        )

    def give_up(self) -> None:
        """Make every replica's collectives end now: a peer will not come."""
        self.failed = True
        self._actors.control_all(ReplicaRunner.abort.__name__, self.generation)


def _nothing() -> None:
    return None
