"""Rendezvous stores and the broadcast of errors."""

from __future__ import annotations

import functools
import socket
import threading

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from raydist.collectives.base import Membership
from raydist.collectives.rendezvous import ErrorBroadcast, RendezvousStore, connect_store, local_address, peek
from raydist.core.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    RaydistError,
    UnavailableError,
)
from tests.collectives.threads import begin_threads

# --- rendezvous -------------------------------------------------------------------------------------------------------


def test_generations_and_groups_do_not_see_each_other() -> None:
    with RendezvousStore() as store:
        ends = [
            connect_store(store.membership(group, generation=generation, rank=0, world_size=1), 5.0)
            for group, generation in (("a", 0), ("a", 1), ("b", 0))
        ]
        ends[0].set("key", "value")
        assert [end.check(["key"]) for end in ends] == [True, False, False]


def test_listens_only_where_it_is_told() -> None:
    with RendezvousStore("127.0.0.1") as store, socket.socket() as other:
        # The same port of another address of this machine is still free.
        other.bind(("127.0.0.2", store.port))
        assert local_address(store.membership("g", generation=0, rank=0, world_size=1)) == "127.0.0.1"


def test_closed_store_frees_its_port_and_has_none() -> None:
    store = RendezvousStore().start()
    port = store.port
    store.close()
    store.close()
    with pytest.raises(FailedPreconditionError, match="started"):
        _ = store.port
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))


def test_start_twice_is_one_server() -> None:
    with RendezvousStore() as store:
        assert store.start().port == store.port


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(DeadlineExceededError, match=f"127.0.0.1:{port} did not accept a connection for 0.3 s"):
        connect_store(Membership("g", 0, 0, 1, "127.0.0.1", port), 0.3)


def test_limits_of_reads_are_the_members() -> None:
    with RendezvousStore() as store:
        end = connect_store(store.membership("g", generation=0, rank=0, world_size=1), 0.5)
        with pytest.raises(RuntimeError, match="500ms|timeout"):
            end.get("nobody writes this")


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        RendezvousStore("192.0.2.1").start()


def test_peek_does_not_wait() -> None:
    entries = HashStore()
    assert peek(entries, "key") is None
    entries.set("key", "value")
    assert peek(entries, "key") == b"value"


# --- error broadcast --------------------------------------------------------------------------------------------------


def bulletins(world_size: int) -> list[ErrorBroadcast]:
    store = PrefixStore("g/0", HashStore())
    return [ErrorBroadcast(store, Membership("g", 0, rank, world_size)) for rank in range(world_size)]


def test_data_is_exchanged_again_and_again() -> None:
    members = bulletins(2)
    for number in range(5):
        calls = {
            rank: functools.partial(member.exchange, b"x" * number * rank, "a test", 10.0)
            for rank, member in enumerate(members)
        }
        assert begin_threads(calls)() == dict.fromkeys(range(2), [b"", b"x" * number])


def test_who_does_not_arrive_is_named() -> None:
    with pytest.raises(DeadlineExceededError, match=r"a test by rank 0 of 3 .* ranks 1, 2 did not arrive"):
        bulletins(3)[0].exchange(b"", "a test", 0.0)


def test_waiting_can_be_given_up() -> None:
    waiting, other = bulletins(2)
    other.fail(CancelledError("aborted"))
    with pytest.raises(CancelledError):
        waiting.exchange(b"", "a test", 60.0)


@pytest.mark.parametrize("kind", [CancelledError, DeadlineExceededError, UnavailableError])
def test_the_first_failure_stays(kind: type[RaydistError]) -> None:
    first, second = bulletins(2)
    assert not second.listen()
    second.check("a test")
    first.fail(kind("rank 0: two\nlines"))
    first.fail(CancelledError("later"))
    assert second.listen()
    assert not second.listen()
    for member in (first, second):
        with pytest.raises(kind, match="a test by rank . of 2 .* was given up: rank 0: two\nlines Open the group anew"):
            member.check("a test")


def test_a_failure_names_the_ranks_that_do_not_answer() -> None:
    first, _ = bulletins(2)
    first.fail(UnavailableError("Connection closed."))
    assert str(first.named()) == "Connection closed. No sign of rank 1."
    aborted, _ = bulletins(2)
    aborted.fail(CancelledError("rank 0 aborted"))
    assert str(aborted.named()) == "rank 0 aborted"


def test_roll_call() -> None:
    first, second, third = bulletins(3)
    assert first.roll_call(0.0) == (1, 2)
    assert third.roll_call(0.0) == (1,)
    assert second.roll_call(60.0) == ()


def test_the_last_living_rank_to_report_is_not_missing() -> None:
    first, second = bulletins(2)
    later = threading.Timer(0.01, second.roll_call, [0.0])
    later.start()
    assert first.roll_call(5.0) == ()
    later.join()
