from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from raydist.collectives.shared_memory.board import Board
from raydist.collectives.shared_memory.layout import Layout
from raydist.collectives.shared_memory.mailboxes import Mailboxes
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.shared_memory.task import Task
from raydist.errors import CollectiveMismatchError


@pytest.fixture
def ends() -> Iterator[list[Mailboxes]]:
    layout = Layout.of(3)
    segment = Segment.create(layout.size)
    segment.unlink()
    yield [Mailboxes(segment, Board(segment, layout, rank)) for rank in range(3)]
    segment.close()


def some_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 255, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def recv(end: Mailboxes, target: torch.Tensor, source: int, call: str = "bytes") -> tuple[Task, list[str]]:
    delivered: list[str] = []
    return end.recv("recv", target, call, source, lambda: delivered.append("there")), delivered


def test_a_small_message_is_gone_at_once_and_found_later(ends: list[Mailboxes]) -> None:
    data, target = some_bytes(100), torch.zeros(100, dtype=torch.uint8)
    sent = ends[0].send("send", data.clone(), "bytes", 2)
    assert sent.done
    task, delivered = recv(ends[2], target, 0)
    assert (task.done, delivered) == (True, ["there"])
    assert torch.equal(target, data)


@pytest.mark.parametrize("count", [0, 1, 1 << 20])
def test_a_message_of_any_size(ends: list[Mailboxes], count: int) -> None:
    data, target = some_bytes(count), torch.zeros(count, dtype=torch.uint8)
    sent = ends[1].send("send", data, "bytes", 0)
    task, _ = recv(ends[0], target, 1)
    for _ in range(100):
        ends[1].advance()
        ends[0].advance()
    assert sent.done
    assert task.done
    assert torch.equal(target, data)


def test_messages_arrive_in_order_and_pairs_do_not_mix(ends: list[Mailboxes]) -> None:
    for seed in range(5):
        ends[0].send("send", some_bytes(10, seed), "bytes", 2)
        ends[1].send("send", some_bytes(10, seed + 100), "bytes", 2)
    targets = {source: [torch.zeros(10, dtype=torch.uint8) for _ in range(5)] for source in (0, 1)}
    for source, of_source in targets.items():
        for target in of_source:
            recv(ends[2], target, source)
    for _ in range(10):
        for end in ends:
            end.advance()
    for seed in range(5):
        assert torch.equal(targets[0][seed], some_bytes(10, seed))
        assert torch.equal(targets[1][seed], some_bytes(10, seed + 100))


def test_who_is_waited_for(ends: list[Mailboxes]) -> None:
    receiving, _ = recv(ends[0], torch.zeros(3, dtype=torch.uint8), 2)
    sending = ends[0].send("send", some_bytes(1 << 20), "bytes", 1)
    assert (ends[0].missing(receiving), ends[0].missing(sending)) == ({2}, {1})
    assert ends[1].missing(sending) == set()
    ends[0].drop()
    assert ends[0].missing(sending) == set()


def test_a_message_that_is_something_else_is_dropped(ends: list[Mailboxes]) -> None:
    ends[0].send("send", some_bytes(8), "two floats", 1)
    ends[0].send("send", some_bytes(4, 1), "one float", 1)
    target = torch.zeros(4, dtype=torch.uint8)
    wrong, delivered = recv(ends[1], target, 0, "one float")
    assert isinstance(wrong.error, CollectiveMismatchError)
    assert "got one float on rank 1 for two floats from rank 0" in str(wrong.error)
    assert (delivered, target.tolist()) == ([], [0] * 4)
    right, delivered = recv(ends[1], target, 0, "one float")
    assert (right.done, right.error, delivered) == (True, None, ["there"])
