from __future__ import annotations

import socket

import pytest
from torch._C._distributed_c10d import HashStore

from raydist.collectives.base import Membership
from raydist.collectives.rendezvous import RendezvousStore, connect_store, local_address, peek
from raydist.errors import DeadlineExceededError, FailedPreconditionError


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
