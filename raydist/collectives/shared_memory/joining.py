"""The rendezvous of ranks that share memory: all ranks open the first member's segment, or no rank uses it.

A rank is on the same host if it can open the segment and finds the token in it.
"""

from __future__ import annotations

import threading
import time
from typing import final

from raydist.collectives.base import Declined, Membership
from raydist.collectives.rendezvous import Bulletin, connect_store
from raydist.collectives.shared_memory.futex import why_unsupported
from raydist.collectives.translation import describe_operation, describe_ranks
from raydist.compat.torch_internals import Store
from raydist.errors import CancelledError, DeadlineExceededError
from raydist.shared_segment import Segment

__all__ = ["Rendezvous"]

_YES = "yes"
_POLL_S = 0.002


@final
class Rendezvous:
    """The rendezvous of one rank.

    Args:
        membership: Membership of the rank.
        members: The ranks that share the segment; the first of them creates it.
        size: Size of the segment in bytes.
        timeout_s: Limit of :meth:`join`, in seconds.
    """

    def __init__(self, membership: Membership, members: tuple[int, ...], size: int, timeout_s: float) -> None:
        self._membership = membership
        self._members = members
        self._size = size
        self._timeout_s = timeout_s
        self._aborted = threading.Event()

    def join(self) -> tuple[Segment, Bulletin]:
        """Return the segment, in which this rank holds its lock, and the group's bulletin.

        Blocking: until all ranks of the group have arrived and all members have opened the segment, at most
        `timeout_s`.

        Raises:
            Declined: A member cannot open the segment. All members raise it, with the reasons.
            DeadlineExceededError: A rank did not arrive; the message names it.
        """
        deadline = time.monotonic() + self._timeout_s
        store = connect_store(self._membership, self._timeout_s)
        bulletin = Bulletin(store, self._membership)
        missing = bulletin.arrive(self._timeout_s, self._check)
        if missing:
            raise self._late(missing)
        segment: Segment | None = None
        try:
            rank, root = self._membership.rank, self._members[0]
            segment, answer = self._create(store) if rank == root else self._open(store, root, deadline)
            store.set(f"segment/answer/{rank}", answer)
            answers = {one: self._answer(store, f"segment/answer/{one}", one, deadline) for one in self._members}
            refusals = [f"rank {one}: {said}" for one, said in answers.items() if said != _YES]
            if refusals or segment is None:
                raise Declined("; ".join(refusals))
            return segment, bulletin
        except BaseException:
            if segment is not None:
                segment.close()
            raise

    def abort(self) -> None:
        """Make :meth:`join` raise an error. May be called from another thread."""
        self._aborted.set()

    def _create(self, store: Store) -> tuple[Segment | None, str]:
        reason, offer, segment = why_unsupported(), "", None
        if reason is None:
            try:
                segment = Segment.create_nameless(self._size)
                segment.hold(self._membership.rank)
                offer = f"{segment.name} {segment.token.hex()}"
            except OSError as error:
                reason = _describe(error)
        store.set(f"segment/offer/{self._membership.rank}", offer)
        return segment, reason or _YES

    def _open(self, store: Store, root: int, deadline: float) -> tuple[Segment | None, str]:
        offer = self._answer(store, f"segment/offer/{root}", root, deadline)
        reason = why_unsupported()
        if not offer or reason is not None:
            return None, reason or _YES
        name, token = offer.split(" ")
        try:
            segment = Segment.open(name, self._size, bytes.fromhex(token))
            segment.hold(self._membership.rank)
        except OSError as error:
            return None, _describe(error)
        return segment, _YES

    def _answer(self, store: Store, key: str, rank: int, deadline: float) -> str:
        """Block until a rank has written a key of the store, and return the value."""
        while not store.check([key]):
            self._check()
            if time.monotonic() >= deadline:
                raise self._late((rank,))
            time.sleep(_POLL_S)
        return store.get(key).decode()

    def _check(self) -> None:
        if self._aborted.is_set():
            raise CancelledError(f"{describe_operation(self._membership, 'rendezvous')} was given up: it was aborted.")

    def _late(self, missing: tuple[int, ...]) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{describe_operation(self._membership, 'rendezvous')} timed out after {self._timeout_s} s: "
            f"{describe_ranks(missing)} did not arrive. Raise the limit if they were only slow to start."
        )


def _describe(error: OSError) -> str:
    return f"no shared memory: {error.strerror or error}"
