from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore

from raydist.collectives.backend import JoiningCommunicator
from raydist.collectives.gloo import GlooBackend
from raydist.collectives.rendezvous.signed_store import SignedStore
from raydist.collectives.rendezvous.store import RendezvousStore, connect_store
from raydist.errors import DataLossError
from raydist.values import ReduceOp
from tests.collectives.threads import begin_threads


def test_members_read_what_members_wrote() -> None:
    entries = HashStore()
    mine, theirs = (SignedStore(entries, "g/0", b"secret") for _ in range(2))
    mine.set("text", "value")
    mine.set("bytes", b"\0\xff")
    assert theirs.check(["text", "bytes"])
    assert not theirs.check(["text", "missing"])
    assert (theirs.get("text"), theirs.get("bytes")) == (b"value", b"\0\xff")
    theirs.wait(["text"], timedelta(seconds=1))


def test_what_a_stranger_wrote_is_not_there() -> None:
    entries = HashStore()
    store = SignedStore(entries, "g/0", b"secret")
    stranger = SignedStore(entries, "g/0", b"another secret")
    for value in ("forged", "x" * 32, ""):
        entries.set("g/0/key", value)
        assert not store.check(["key"])
    stranger.set("key", "forged")
    assert not store.check(["key"])
    with pytest.raises(DataLossError, match="'g/0/key'"):
        store.get("key")


def test_an_entry_proves_nothing_in_another_place() -> None:
    entries = HashStore()
    store = SignedStore(entries, "g/0", b"secret")
    store.set("key", "value")
    stolen = entries.get("g/0/key")
    for place in ("g/0/other", "g/1/key"):
        entries.set(place, stolen)  # type: ignore[arg-type]  # the stub knows no bytes
    assert not store.check(["other"])
    assert not SignedStore(entries, "g/1", b"secret").check(["key"])


def test_the_secret_is_not_told() -> None:
    with RendezvousStore() as store:
        membership = store.membership("g", generation=0, rank=0, world_size=1)
        assert len(store.secret) == 32
        assert str(store.secret) not in repr(membership)
        assert store.secret != RendezvousStore().secret
        connect_store(membership, 5.0).set("key", "value")
        stranger = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        assert store.secret not in stranger.get("g/0/key")


def test_a_stranger_does_not_end_a_group() -> None:
    """Lists what is there and writes over all of it, between two collectives."""
    with RendezvousStore() as store:
        groups: list[JoiningCommunicator] = []
        for rank in range(2):
            membership = store.membership("g", generation=0, rank=rank, world_size=2)
            groups.append(GlooBackend().communicator(membership, torch.device("cpu"), 20.0))
        assert begin_threads({group.rank: group.start for group in groups})() == {0: None, 1: None}
        stranger = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        for key in (*stranger.list_keys(), "g/0/failure"):
            stranger.set(key, "CancelledError\nstop")
        tensors = [torch.ones(3), torch.ones(3)]
        begin_threads({rank: groups[rank].all_reduce(tensors[rank], ReduceOp.SUM).wait for rank in range(2)})()
        assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3] * 2
        for group in groups:
            group.close()


def test_of_those_who_replace_a_value_one_succeeds() -> None:
    entries = HashStore()
    first, second = (SignedStore(entries, "group/0", b"secret") for _ in range(2))
    assert first.replace("decision", None, b"go") == b"go"
    assert second.replace("decision", None, b"no") == b"go"
    assert second.replace("decision", b"go", b"next") == b"next"
    assert first.replace("decision", b"go", b"other") == b"next"
