"""How the members of a generation find out whether they share memory: all open rank 0's segment, or nobody uses it.

That they are on one host is not asked of anybody: who can open the file and reads the token in it is.
"""

from __future__ import annotations

import threading
import time
from typing import final

from raydist.collectives.backend import Declined
from raydist.collectives.base import Membership
from raydist.collectives.bulletin import Bulletin
from raydist.collectives.rendezvous import connect_store
from raydist.collectives.shared_memory.futex import why_unsupported
from raydist.collectives.shared_memory.layout import Layout
from raydist.collectives.shared_memory.segment import DIRECTORY, Segment, remove_leftovers
from raydist.collectives.signed_store import SignedStore
from raydist.collectives.translation import describe_operation, describe_ranks
from raydist.errors import CancelledError, DeadlineExceededError

__all__ = ["Meeting"]

_YES = "yes"
_POLL_S = 0.002


@final
class Meeting:
    """The members of one generation on their way into a segment.

    Args:
        membership: This rank's place.
        timeout_s: The limit of :meth:`join`.
        layout: Of the segment, the same on every rank; the usual one for so many ranks, unless given.
    """

    def __init__(self, membership: Membership, timeout_s: float, layout: Layout | None = None) -> None:
        self._size = (layout or Layout.of(membership.world_size)).size
        self._membership = membership
        self._timeout_s = timeout_s
        self._aborted = threading.Event()

    def join(self) -> Segment:
        """The segment, in which this rank is seen to live; its file has no name any more.

        Blocking: until all members have come and opened it, at most `timeout_s`.

        Raises:
            Declined: Somebody cannot open it; on every rank alike, with the reasons.
            DeadlineExceededError: A member did not come; the message says which.
        """
        membership = self._membership
        deadline = time.monotonic() + self._timeout_s
        store = connect_store(membership, self._timeout_s)
        missing = Bulletin(store, membership).arrive(self._timeout_s, self._check)
        if missing:
            raise self._late(missing)
        segment: Segment | None = None
        try:
            segment, answer = self._create(store) if membership.rank == 0 else self._open(store, deadline)
            store.set(f"segment/answer/{membership.rank}", answer)
            refusals = self._refusals(store, deadline)
            if refusals or segment is None:
                raise Declined("; ".join(refusals))
            return segment
        except BaseException:
            if segment is not None:
                segment.close()
            raise
        finally:
            if segment is not None and membership.rank == 0:
                segment.unlink()

    def abort(self) -> None:
        """End :meth:`join` with an error. May come from another thread."""
        self._aborted.set()

    def _create(self, store: SignedStore) -> tuple[Segment | None, str]:
        reason = why_unsupported()
        offer = ""
        segment: Segment | None = None
        if reason is None:
            try:
                remove_leftovers()
                segment = Segment.create(self._size)
                segment.hold(self._membership.rank)
                offer = f"{segment.name} {segment.token.hex()}"
            except OSError as error:
                reason = _describe(error)
        store.set("segment/offer", offer)
        return segment, reason or _YES

    def _open(self, store: SignedStore, deadline: float) -> tuple[Segment | None, str]:
        offer = self._await(store, "segment/offer", deadline, rank=0)
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

    def _refusals(self, store: SignedStore, deadline: float) -> list[str]:
        ranks = range(self._membership.world_size)
        answers = [self._await(store, f"segment/answer/{rank}", deadline, rank=rank) for rank in ranks]
        return [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer != _YES]

    def _await(self, store: SignedStore, key: str, deadline: float, *, rank: int) -> str:
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
    return f"no shared memory in {DIRECTORY}: {error.strerror or error}"
