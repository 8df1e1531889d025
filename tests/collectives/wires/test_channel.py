from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from raydist.collectives.wires.channel import Attendance, Channel, Passage, bytes_of

# More than the kernel keeps.
LARGE = 2_000_000


class Pair:
    """Both ends of a direction, and the one who serves them."""

    def __init__(self) -> None:
        self.poll = select.epoll()
        self.settled = 0
        attendance = Attendance()
        self.sending = Channel(1, incoming=False, attendance=attendance, settled=self._count)
        self.receiving = Channel(0, incoming=True, attendance=attendance, settled=self._count)
        self.sockets = socket.socketpair()

    def _count(self) -> None:
        self.settled += 1

    def connect(self) -> None:
        self.channels = {}
        for channel, connection in zip((self.sending, self.receiving), self.sockets, strict=True):
            connection.setblocking(False)
            self.channels[connection.fileno()] = channel
            channel.connect(connection, self.poll)

    def serve(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not until():
            assert time.monotonic() < deadline
            for descriptor, event in self.poll.poll(0.1):
                self.channels[descriptor].ready(event)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.sending.close()
    pair.receiving.close()
    for connection in pair.sockets:
        connection.close()
    pair.poll.close()


def buffer(size: int, value: int = 0) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_small_things_need_nobody_to_serve(pair: Pair) -> None:
    pair.connect()
    assert pair.sending.start(bytes_of(buffer(5, 3))).done
    got = buffer(5)
    assert pair.receiving.start(bytes_of(got)).done
    assert got.tolist() == [3] * 5
    assert pair.settled == 0


def test_what_was_started_before_the_connection_goes_then(pair: Pair) -> None:
    got = buffer(4)
    transfers = [pair.sending.start(bytes_of(buffer(4, 9))), pair.receiving.start(bytes_of(got))]
    assert not any(transfer.done for transfer in transfers)
    pair.connect()
    pair.serve(lambda: all(transfer.done for transfer in transfers))
    assert got.tolist() == [9] * 4


def test_large_things_arrive_in_order(pair: Pair) -> None:
    pair.connect()
    sent = [pair.sending.start(bytes_of(buffer(LARGE, value))) for value in (1, 2)]
    assert not any(transfer.done for transfer in sent)
    got = [buffer(LARGE) for _ in range(2)]
    received = [pair.receiving.start(bytes_of(tensor)) for tensor in got]
    pair.serve(lambda: all(transfer.done for transfer in (*sent, *received)))
    assert [tensor.unique().tolist() for tensor in got] == [[1], [2]]
    assert pair.settled > 0


def test_what_came_before_the_end_is_read(pair: Pair) -> None:
    pair.connect()
    pair.sending.start(bytes_of(buffer(6, 5)))
    pair.sending.close()
    first, second = buffer(4), buffer(4)
    assert pair.receiving.start(bytes_of(first)).done
    late = pair.receiving.start(bytes_of(second))
    pair.serve(lambda: late.broken)
    assert (first.tolist(), second.tolist(), late.done) == ([5] * 4, [5, 5, 0, 0], False)
    assert pair.receiving.start(bytes_of(second)).broken


def test_nothing_is_sent_to_who_is_gone(pair: Pair) -> None:
    pair.connect()
    waiting = pair.sending.start(bytes_of(buffer(LARGE)))
    pair.receiving.close()
    pair.serve(lambda: waiting.broken)
    assert pair.sending.start(bytes_of(buffer(3))).broken
    assert pair.settled == 1


def test_closing_breaks_what_waits(pair: Pair) -> None:
    pair.connect()
    waiting: Passage = pair.receiving.start(bytes_of(buffer(3)))
    pair.receiving.close()
    pair.receiving.close()
    assert (waiting.broken, waiting.done) == (True, False)


def test_a_forked_childs_copy_lets_go_without_a_word_to_the_poll(pair: Pair) -> None:
    pair.connect()
    waiting = pair.receiving.start(bytes_of(buffer(3)))
    pair.sending.became_a_copy()
    pair.serve(lambda: waiting.broken)
    assert not pair.sending.start(bytes_of(buffer(3))).done


def test_nothing_is_done_at_once(pair: Pair) -> None:
    assert pair.receiving.start(bytes_of(torch.empty(0))).done


def tcp_sockets() -> tuple[socket.socket, socket.socket]:
    """The ends of a connection through the network's code, which `socketpair` has not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


@pytest.fixture
def tcp_pair(pair: Pair) -> Pair:
    for connection in pair.sockets:
        connection.close()
    pair.sockets = tcp_sockets()
    pair.connect()
    return pair


def test_the_kernel_tells_of_large_parts_and_of_whatever_is_left(tcp_pair: Pair) -> None:
    """Each time it tells costs a switch of threads; and what it does not tell of must not be waited for."""
    pair, size, step = tcp_pair, 1_000_001, 20_000
    large, small = buffer(size), buffer(10)
    received = [pair.receiving.start(bytes_of(large)), pair.receiving.start(bytes_of(small))]
    told = 0
    data = bytes_of(torch.cat([buffer(size, 7), buffer(10, 9)]))
    for start in range(0, len(data), step):
        pair.sending.start(data[start : start + step])
        events = dict(pair.poll.poll(0.01))
        told += events.get(pair.sockets[1].fileno(), 0) & select.EPOLLIN
        for descriptor, event in events.items():
            pair.channels[descriptor].ready(event)
    pair.serve(lambda: all(transfer.done for transfer in received))
    assert (large.unique().tolist(), small.tolist()) == ([7], [9] * 10)
    assert told <= 4


class WithoutOptions(socket.socket):
    """Of a system that has none."""

    def setsockopt(self, *_: object) -> None:
        raise OSError("Protocol not available")


def test_a_system_that_tells_of_whatever_comes_will_do(pair: Pair) -> None:
    ours, theirs = pair.sockets
    pair.sockets = (ours, WithoutOptions(fileno=theirs.detach()))
    pair.connect()
    received = pair.receiving.start(bytes_of(got := buffer(LARGE)))
    pair.sending.start(bytes_of(buffer(LARGE, 4)))
    pair.serve(lambda: received.done)
    assert got.unique().tolist() == [4]
