"""A replica's end of a channel, whose hub is in the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raydist.actors.step_head import DONE, HEAD, KEPT, LEAVE, MOST_BYTES, STEPS
from raydist.actors.step_server import StepServer
from raydist.channels.hub import ChannelEnd, ChannelHub
from raydist.collectives.shared_memory.spare_time import use_spare_time


class Returned:
    def __init__(self, packed: bytes | None) -> None:
        self._packed = packed

    def packed(self) -> bytes | None:
        return self._packed


class Runner:
    """Notes what it is asked; a message that holds "waits" waits for others."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.results: dict[bytes, bytes | None] = {}

    def read_ahead(self, message: bytes) -> str | None:
        self.asked.append(("read", message))
        if message == b"bad":
            raise ValueError("not to be read")
        return None if message == b"later" else f"said {message.decode()}"

    def run_message(self, message: bytes, said: str | None, more_wait: Callable[[], bool]) -> Returned:
        self.asked.append(("run", message, said, more_wait()))
        if b"waits" in message:
            use_spare_time()
            use_spare_time()
        return Returned(self.results.get(message, message.upper()))


class Served:
    """One end, and what was sent to it."""

    def __init__(self) -> None:
        self.hub = ChannelHub.open(1)
        self.end = ChannelEnd.open(self.hub.ticket(0))
        self.runner = Runner()
        self.kept: dict[int, Any] = {}

    def serve(self, *messages: bytes, reads_ahead: bool = True) -> list[tuple[int, int, bytes]]:
        """Serve these, and the end of the turn; what was answered."""
        for number, message in enumerate(messages):
            assert self.hub.put(0, HEAD.pack(STEPS, number) + message)
        assert self.hub.put(0, HEAD.pack(LEAVE, 1))
        StepServer(self.end, self.runner, self.kept.__setitem__, reads_ahead=reads_ahead).serve(1)
        answers = []
        while (answer := self.hub.peek(0)) is not None:
            answers.append((*HEAD.unpack_from(answer), answer[HEAD.size :]))
            self.hub.drop(0)
        return answers


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.end.close()
    one.hub.close()


def test_messages_are_run_in_order_and_each_is_answered(served: Served) -> None:
    assert served.serve(b"a", b"b") == [(DONE, 0, b"A"), (DONE, 1, b"B")]
    assert served.runner.asked == [("run", b"a", None, True), ("run", b"b", None, False)]


def test_what_comes_next_is_read_once_while_the_runner_waits(served: Served) -> None:
    assert served.serve(b"waits", b"b", b"c") == [(DONE, 0, b"WAITS"), (DONE, 1, b"B"), (DONE, 2, b"C")]
    assert served.runner.asked == [
        ("run", b"waits", None, True),
        ("read", b"b"),
        ("run", b"b", "said b", True),
        ("run", b"c", None, False),
    ]


@pytest.mark.parametrize("following", [b"later", b"bad"])
def test_what_is_not_read_before_its_turn_is_run_as_it_came(following: bytes, served: Served) -> None:
    assert len(served.serve(b"waits", following)) == 2
    assert served.runner.asked[-1] == ("run", following, None, False)


def test_the_end_of_a_turn_is_no_steps(served: Served) -> None:
    served.serve(b"waits")
    assert served.runner.asked == [("run", b"waits", None, False)]


def test_nothing_is_read_where_nobody_asked_for_it(served: Served) -> None:
    served.serve(b"waits", b"b", reads_ahead=False)
    assert [what for what, *_ in served.runner.asked] == ["run", "run"]


@pytest.mark.parametrize("packed", [None, bytes(MOST_BYTES + 1)])
def test_a_result_that_cannot_travel_here_is_kept(packed: bytes | None, served: Served) -> None:
    served.runner.results[b"a"] = packed
    assert served.serve(b"a") == [(KEPT, 0, b"")]
    assert served.kept[0].packed() == packed


def test_the_end_of_another_turn_ends_nothing(served: Served) -> None:
    served.hub.put(0, HEAD.pack(LEAVE, 7))
    assert served.serve(b"a") == [(DONE, 0, b"A")]
