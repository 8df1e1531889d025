from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from raydist.collectives.rendezvous.store import RendezvousStore, connect_store
from raydist.collectives.wires.wires import Topic, Wires
from raydist.errors import DeadlineExceededError
from tests.collectives.wired_ranks import WiredRank, await_true, nothing, wired_ranks


@pytest.fixture
def ranks() -> Iterator[list[WiredRank]]:
    with wired_ranks() as ranks:
        yield ranks


def test_everybody_reaches_everybody(ranks: list[WiredRank]) -> None:
    for source in ranks:
        for target in ranks:
            if source is not target:
                source.wires.send(target.rank, torch.tensor([10 * source.rank + target.rank]))
    for target in ranks:
        for source in ranks:
            if source is not target:
                got = torch.tensor([0])
                transfer = target.wires.receive(source.rank, got)
                await_true(functools.partial(getattr, transfer, "done"))
                assert got.item() == 10 * source.rank + target.rank


def test_who_waits_is_woken_by_the_thread(ranks: list[WiredRank]) -> None:
    got = torch.zeros(3)
    transfer = ranks[1].wires.receive(0, got)
    assert not transfer.done
    ranks[0].wires.send(1, torch.ones(3))
    assert ranks[1].woken.wait(10)
    assert transfer.done
    assert got.tolist() == [1.0] * 3


def test_who_waits_may_do_it_himself(ranks: list[WiredRank]) -> None:
    transfer = ranks[1].wires.receive(2, torch.zeros(1_000_000))
    threading.Timer(0.05, lambda: ranks[2].wires.send(1, torch.ones(1_000_000))).start()
    deadline = time.monotonic() + 10
    ranks[1].wires.attend()
    while not transfer.done:
        assert time.monotonic() < deadline
        ranks[1].wires.sleep(1.0)
    assert not ranks[1].woken.is_set()
    ranks[1].wires.leave()


def test_what_is_left_to_the_thread_goes_on(ranks: list[WiredRank]) -> None:
    ranks[1].wires.attend()
    transfer = ranks[1].wires.receive(0, torch.zeros(3))
    ranks[0].wires.send(1, torch.ones(3))
    time.sleep(0.05)
    assert not transfer.done
    ranks[1].wires.leave()
    assert ranks[1].woken.wait(10)
    assert transfer.done


def test_topics_do_not_meet(ranks: list[WiredRank]) -> None:
    ranks[0].wires.send(1, torch.tensor([1]), Topic.MESSAGE)
    ranks[0].wires.send(1, torch.tensor([2]), Topic.COLLECTIVE)
    got = {topic: torch.tensor([0]) for topic in Topic}
    transfers = [ranks[1].wires.receive(0, tensor, topic) for topic, tensor in got.items()]
    await_true(lambda: all(transfer.done for transfer in transfers))
    assert {topic: tensor.item() for topic, tensor in got.items()} == {Topic.MESSAGE: 1, Topic.COLLECTIVE: 2}


def test_strangers_are_sent_away_and_disturb_nobody(ranks: list[WiredRank]) -> None:
    port, host = ranks[0].store.get("wires/0").decode().split(" ")
    strangers = [socket.create_connection((host, int(port))) for _ in range(300)]
    strangers[-1].sendall(bytes(500))
    await_true(lambda: _is_closed(strangers[-1]))
    await_true(lambda: _is_closed(strangers[0]))  # so many who say nothing are not kept
    transfer = ranks[0].wires.receive(1, torch.zeros(1), Topic.MESSAGE)
    ranks[1].wires.send(0, torch.ones(1), Topic.MESSAGE)
    await_true(lambda: transfer.done)
    for stranger in strangers:
        stranger.close()


def _is_closed(stranger: socket.socket) -> bool:
    stranger.settimeout(0.01)
    try:
        while stranger.recv(1000):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
    return True


def test_who_leaves_breaks_what_waits_for_him(ranks: list[WiredRank]) -> None:
    waiting = ranks[0].wires.receive(2, torch.zeros(3))
    ranks[2].wires.close()
    await_true(lambda: waiting.broken)


def test_who_does_not_come_is_named() -> None:
    with RendezvousStore() as store:
        membership = store.membership("g", generation=0, rank=0, world_size=2)
        wires = Wires(membership, 0.2)
        with pytest.raises(DeadlineExceededError, match="rank 1 did not connect"):
            wires.start(connect_store(membership, 1.0), [1], settled=nothing, check=nothing)
        wires.close()
