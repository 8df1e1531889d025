"""All replicas stop at the same draw, wherever each is when that is decided."""

from __future__ import annotations

import random
import threading
import time

import pytest

from raydist.checkpoints.loops.replica_loop import DrawGate
from raydist.errors import DeadlineExceededError


@pytest.mark.parametrize("seed", range(5))
def test_whoever_is_behind_catches_up_and_all_have_drawn_the_same(seed: int) -> None:
    pace = random.Random(seed)
    gates, drawn = [DrawGate(20.0) for _ in range(4)], [0] * 4

    def draw(rank: int, pause_s: float) -> None:
        while not gates[rank].draw():
            drawn[rank] += 1
            time.sleep(pause_s)

    threads = [threading.Thread(target=draw, args=(rank, pace.random() / 500)) for rank in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    last = max(gate.hold() for gate in gates)
    for gate in gates:
        gate.stop_after(last)
    for thread in threads:
        thread.join(20)
    assert drawn == [last] * 4
    assert gates[0].draw(), "it stays shut"


def test_who_is_held_waits_and_may_go_on() -> None:
    gate = DrawGate(20.0)
    assert not gate.draw()
    assert gate.hold() == 1
    drew = threading.Event()

    def draw() -> None:
        gate.draw()
        drew.set()

    thread = threading.Thread(target=draw)
    thread.start()
    assert not drew.wait(0.05)
    gate.go_on()
    assert drew.wait(20)
    thread.join()
    assert gate.hold() == 2


def test_a_driver_that_says_nothing_is_an_error() -> None:
    gate = DrawGate(0.01)
    gate.hold()
    with pytest.raises(DeadlineExceededError, match=r"within 0\.01 s \(Timeouts\.step_s\) at which batch"):
        gate.draw()
