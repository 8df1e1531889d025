from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from raydist.parameter_servers.desk import Outcome, ServerDesk
from raydist.parameter_servers.lanes import hall as module
from raydist.parameter_servers.lanes.hall import Hall
from raydist.parameter_servers.lanes.lane_link import LaneLink
from raydist.parameter_servers.requests import ServerAnswer, ServerRequest, Statistics
from tests.parameter_servers.plain_server import PlainServer


def answered(hall: Hall) -> Outcome:
    told: list[Outcome] = []
    there = threading.Event()

    def job(desk: ServerDesk) -> None:
        desk.take(Statistics(), (), told.append)
        there.set()

    hall.submit(job)
    assert there.wait(10)
    return told[0]


@pytest.mark.parametrize("reason", [None, "it is another machine"])
def test_others_ask_by_the_same_thread(reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_unsupported", lambda: reason)
    server = PlainServer()
    hall = Hall.open(ServerDesk(server), "parameter server 0")
    assert (hall.open_lane() is None) is (reason is not None)
    thread = threading.Thread(target=hall.serve)
    thread.start()
    assert answered(hall).answer.value == {"Statistics": 1}
    assert answered(hall).answer.value == {"Statistics": 2}
    hall.stop()
    hall.stop()
    thread.join(10)
    assert not thread.is_alive()
    server.close()


def test_lanes_that_nobody_uses_any_more_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "_TO_OPEN_S", 0.1)
    server = PlainServer()
    hall = Hall.open(ServerDesk(server), "parameter server 0")
    tickets = [hall.open_lane() for _ in range(3)]
    thread = threading.Thread(target=hall.serve)
    thread.start()
    assert tickets[0] is not None
    assert tickets[1] is not None
    kept, left = LaneLink.open(tickets[0]), LaneLink.open(tickets[1])
    left.close()
    limit = time.monotonic() + 10
    while len(hall._lanes) > 1 and time.monotonic() < limit:
        time.sleep(0.02)
    assert len(hall._lanes) == 1
    assert kept.ask(Statistics()).answer(10)[0].value == {"Statistics": 1}
    kept.close()
    hall.stop()
    thread.join(10)
    server.close()


class Unspeakable:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("nobody can say this")


class OddServer(PlainServer):
    """Its first answer cannot be said."""

    def handle(self, request: ServerRequest, tensors: Sequence[torch.Tensor]) -> Any:
        answer, told = super().handle(request, tensors)
        first = answer.value == {"Statistics": 1}
        return (ServerAnswer(value=Unspeakable()), (torch.ones(3),)) if first else (answer, (torch.ones(3), *told))


def test_an_answer_that_cannot_be_said_is_an_error_of_its_request_alone() -> None:
    server = OddServer()
    hall = Hall.open(ServerDesk(server), "parameter server 0")
    ticket = hall.open_lane()
    assert ticket is not None
    thread = threading.Thread(target=hall.serve)
    thread.start()
    link = LaneLink.open(ticket)
    with pytest.raises(ZeroDivisionError, match="nobody can say this"):
        link.ask(Statistics()).answer(10)
    answer, tensors = link.ask(Statistics()).answer(10)
    assert answer.value == {"Statistics": 2}
    assert tensors[0].tolist() == [1, 1, 1]
    link.close()
    hall.stop()
    thread.join(10)
    server.close()
