from __future__ import annotations

import socket

import pytest

from raydist.collectives.rendezvous import RendezvousStore, connect_store, local_address
from raydist.errors import FailedPreconditionError


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
