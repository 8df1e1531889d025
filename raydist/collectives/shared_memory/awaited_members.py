"""Waiting for the members of a group that are on their way into it: until a limit, or until it is aborted."""

from __future__ import annotations

import threading
import time
from typing import final

from raydist.collectives.base import Membership
from raydist.collectives.bulletin import Bulletin
from raydist.collectives.rendezvous.signed_store import SignedStore
from raydist.collectives.translation import describe_operation, describe_ranks
from raydist.errors import CancelledError, DeadlineExceededError

__all__ = ["AwaitedMembers"]

_POLL_S = 0.002


@final
class AwaitedMembers:
    """See the module.

    Args:
        membership: Of the rank that waits.
        timeout_s: The limit.
    """

    def __init__(self, membership: Membership, timeout_s: float) -> None:
        self._membership = membership
        self._timeout_s = timeout_s
        self._aborted = threading.Event()

    def arrive(self, bulletin: Bulletin) -> None:
        """Return once all members have come.

        Raises:
            DeadlineExceededError: A member did not come; the message says which.
            CancelledError: It was aborted.
        """
        missing = bulletin.arrive(self._timeout_s, self.check)
        if missing:
            raise self._late(missing)

    def answer(self, store: SignedStore, key: str, rank: int, deadline: float) -> str:
        """What a member says under a key.

        Args:
            store: Where it says so.
            key: The key.
            rank: The member.
            deadline: When to give up, as `time.monotonic()` has it.

        Raises:
            DeadlineExceededError: It says nothing.
            CancelledError: It was aborted.
        """
        while not store.check([key]):
            self.check()
            if time.monotonic() >= deadline:
                raise self._late((rank,))
            time.sleep(_POLL_S)
        return store.get(key).decode()

    def check(self) -> None:
        """CancelledError where it was aborted."""
        if self._aborted.is_set():
            raise CancelledError(f"{describe_operation(self._membership, 'rendezvous')} was given up: it was aborted.")

    def abort(self) -> None:
        """End every wait with an error. May come from another thread."""
        self._aborted.set()

    def _late(self, missing: tuple[int, ...]) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{describe_operation(self._membership, 'rendezvous')} timed out after {self._timeout_s} s: "
            f"{describe_ranks(missing)} did not arrive. Raise the limit if they were only slow to start."
        )
