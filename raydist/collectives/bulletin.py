"""What the members of one generation tell each other beside the data: who has arrived, and why the group failed.

Sockets alone are not enough: a rank that waits for a living neighbour does not notice that a third one died, and gloo
has no abort. So the first rank that learns of a failure posts it in the rendezvous store, and waiting ranks look there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import final

from raydist.collectives.base import Membership
from raydist.collectives.rendezvous import peek, write
from raydist.compat.torch_internals import Store
from raydist.errors import (
    CancelledError,
    CollectiveMismatchError,
    DeadlineExceededError,
    RaydistError,
    UnavailableError,
)

__all__ = ["Bulletin"]

_KINDS: dict[str, type[RaydistError]] = {
    kind.__name__: kind for kind in (CancelledError, CollectiveMismatchError, DeadlineExceededError, UnavailableError)
}
_FAILURE = "failure"
_POLL_S = 0.005
_READ_BY_ALL = 2  # exchanges ago: all members have told their data of the exchange after that


@final
class Bulletin:
    """One member's view of its generation's keys in the store."""

    def __init__(self, store: Store, membership: Membership) -> None:
        self._store = store
        self._membership = membership

    def arrive(self, timeout_s: float, check: Callable[[], None]) -> tuple[int, ...]:
        """Report this rank and wait for all others; the ranks that are missing when the limit is over.

        Args:
            timeout_s: The limit in seconds.
            check: Called between looks; raises to give up.
        """
        self._store.set(f"arrived/{self._membership.rank}", "")
        return self._await_all("arrived", timeout_s, check=check, enough=self._membership.world_size)

    def tell(self, number: int, data: bytes) -> None:
        """Give the other members this rank's data of an exchange; exchanges are numbered through."""
        if number > _READ_BY_ALL:
            self._store.set(f"told/{number - _READ_BY_ALL}/{self._membership.rank}", ".")
        write(self._store, f"told/{number}/{self._membership.rank}", b"." + data)

    def silent(self, number: int) -> tuple[int, ...]:
        """Return the ranks that have not told their data of an exchange."""
        ranks = range(self._membership.world_size)
        return tuple(rank for rank in ranks if not self._store.check([f"told/{number}/{rank}"]))

    def told(self, number: int) -> list[bytes]:
        """Return every rank's data of an exchange."""
        return [self._store.get(f"told/{number}/{rank}")[1:] for rank in range(self._membership.world_size)]

    def post(self, failure: RaydistError) -> None:
        """Tell everybody why the group failed; an earlier post stays. A store that is gone is passed over."""
        kind = type(failure).__name__ if type(failure).__name__ in _KINDS else UnavailableError.__name__
        with contextlib.suppress(RuntimeError):
            if peek(self._store, _FAILURE) is None:
                self._store.set(_FAILURE, f"{kind}\n{failure.message}")

    def failure(self) -> RaydistError | None:
        """What was posted. UnavailableError as well where the store itself is gone: its owner ends the group."""
        try:
            posted = peek(self._store, _FAILURE)
        except RuntimeError:
            owner = f"{self._membership.store_host}:{self._membership.store_port}"
            return UnavailableError(f"The rendezvous store at {owner} is gone: the owner of the group has ended.")
        if posted is None:
            return None
        kind, _, message = posted.decode().partition("\n")
        return _KINDS.get(kind, UnavailableError)(message)

    def roll_call(self, limit_s: float) -> tuple[int, ...]:
        """After a failure: report this rank, give the others `limit_s` seconds to do so, and return who did not.

        Ends as soon as a single rank is missing: it is the one that failed.
        """
        try:
            self._store.set(f"seen/{self._membership.rank}", "")
            return self._await_all("seen", limit_s, check=_no_check, enough=self._membership.world_size - 1)
        except RuntimeError:
            return ()

    def _await_all(self, topic: str, limit_s: float, *, check: Callable[[], None], enough: int) -> tuple[int, ...]:
        deadline = time.monotonic() + limit_s
        missing = tuple(range(self._membership.world_size))
        while True:
            check()
            missing = tuple(rank for rank in missing if not self._store.check([f"{topic}/{rank}"]))
            if self._membership.world_size - len(missing) >= enough or time.monotonic() >= deadline:
                return missing
            time.sleep(_POLL_S)


def _no_check() -> None:
    return None
