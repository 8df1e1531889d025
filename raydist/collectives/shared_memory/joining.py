"""How the members of a generation find out whether they share memory: all open rank 0's segment, or nobody uses it.

That they are on one host is not asked of anybody: who can open the file and reads the token in it is.
"""

from __future__ import annotations

import time
from typing import final

from raydist.collectives.backend import Declined
from raydist.collectives.base import Membership
from raydist.collectives.bulletin import Bulletin
from raydist.collectives.rendezvous.signed_store import SignedStore
from raydist.collectives.rendezvous.store import connect_store
from raydist.collectives.shared_memory.awaited_members import AwaitedMembers
from raydist.collectives.shared_memory.futex import why_unsupported
from raydist.collectives.shared_memory.layout import Layout
from raydist.collectives.shared_memory.segment import DIRECTORY, Segment, remove_leftovers

__all__ = ["Meeting"]

_YES = "yes"


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
        self._awaited = AwaitedMembers(membership, timeout_s)

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
        self._awaited.arrive(Bulletin(store, membership))
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
        self._awaited.abort()

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
        offer = self._awaited.answer(store, "segment/offer", 0, deadline)
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
        answers = [self._awaited.answer(store, f"segment/answer/{rank}", rank, deadline) for rank in ranks]
        return [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer != _YES]


def _describe(error: OSError) -> str:
    return f"no shared memory in {DIRECTORY}: {error.strerror or error}"
