from __future__ import annotations

import pytest
import torch

from raydist.collectives.hierarchical.frames import FRAME_HEAD_BYTES, Frame, FrameArrival, Head


@pytest.mark.parametrize("head", [Head(True, 0, b"barrier"), Head(False, 1 << 40, b"x" * 248), Head(True, 1, b"")])
def test_a_head_is_read_as_it_was_written(head: Head) -> None:
    written = head.encode()
    assert len(written) == FRAME_HEAD_BYTES
    assert Head.decode(torch.frombuffer(bytearray(written), dtype=torch.uint8)) == head
    assert Head.decode(memoryview(written)) == head


class Connection:
    """Gives these bytes, at most so many at a time."""

    def __init__(self, data: bytes, most: int) -> None:
        self.left = data
        self._most = most

    def recv_into(self, into: memoryview) -> int:
        count = min(len(into), self._most, len(self.left))
        into[:count], self.left = self.left[:count], self.left[count:]
        return count


@pytest.mark.parametrize("most", [1, 100, FRAME_HEAD_BYTES, 1 << 20])
@pytest.mark.parametrize("length", [0, 8, 5000])
@pytest.mark.parametrize("used", [0, 8])
def test_a_frame_is_as_long_as_its_head_says(length: int, used: int, most: int) -> None:
    head = Head(True, length, b"all_reduce(SUM)")
    body = bytes(number % 251 for number in range(length))
    connection = Connection(head.encode() + body + b"what follows", most)
    memory = Frame(used)
    arrival = FrameArrival(3, memory)
    while not arrival.done:
        assert arrival.proceed(connection.recv_into)
    assert arrival.head == head
    assert bytes(arrival.frame.body(torch.uint8).numpy()) == body
    assert (arrival.frame is memory) == (length == used)
    assert connection.left == b"what follows"


def test_memory_of_a_frame_is_shown_as_any_dtype() -> None:
    frame = Frame(16)
    frame.body(torch.float64).copy_(torch.tensor([1.0, -2.0]))
    assert frame.body(torch.float64) is frame.body(torch.float64)
    assert bytes(frame.memory[FRAME_HEAD_BYTES:]) == bytes(frame.body(torch.uint8).numpy())
