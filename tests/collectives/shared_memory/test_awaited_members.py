from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from raydist.collectives.base import Membership
from raydist.collectives.bulletin import Bulletin
from raydist.collectives.rendezvous.signed_store import SignedStore
from raydist.collectives.rendezvous.store import RendezvousStore, connect_store
from raydist.collectives.shared_memory.awaited_members import AwaitedMembers
from raydist.errors import CancelledError, DeadlineExceededError


@pytest.fixture
def membership() -> Iterator[Membership]:
    """Of rank 0 of two, whose peer does not come."""
    with RendezvousStore() as store:
        yield store.membership("g", generation=0, rank=0, world_size=2)


@pytest.fixture
def store(membership: Membership) -> SignedStore:
    return connect_store(membership, 5.0)


def test_who_did_not_come_is_named(membership: Membership, store: SignedStore) -> None:
    with pytest.raises(DeadlineExceededError, match=r"timed out after 0.1 s: rank 1 did not arrive"):
        AwaitedMembers(membership, 0.1).arrive(Bulletin(store, membership))


def test_an_answer_is_read_where_there_is_one(membership: Membership, store: SignedStore) -> None:
    awaited = AwaitedMembers(membership, 0.1)
    store.set("answer/1", "yes")
    assert awaited.answer(store, "answer/1", 1, time.monotonic() + 5) == "yes"
    with pytest.raises(DeadlineExceededError, match="rank 3 did not arrive"):
        awaited.answer(store, "answer/3", 3, time.monotonic() + 0.05)


def test_whoever_waits_is_told_of_an_abort(membership: Membership, store: SignedStore) -> None:
    awaited = AwaitedMembers(membership, 20.0)
    awaited.check()
    timer = threading.Timer(0.05, awaited.abort)
    timer.start()
    with pytest.raises(CancelledError, match="was given up: it was aborted"):
        awaited.answer(store, "answer/1", 1, time.monotonic() + 20)
    timer.join(5)
