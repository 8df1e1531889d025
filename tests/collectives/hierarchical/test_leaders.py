from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from raydist.collectives.hierarchical.frames import Head
from raydist.collectives.hierarchical.leaders import LeaderFrames
from raydist.collectives.hierarchical.plan import HostPlan
from tests.collectives.wired_ranks import WiredRank, await_true, wired_ranks

Told = dict[int, tuple[Head, list[float]]]


class Leader:
    """One of three, alone on its host."""

    def __init__(self, place: WiredRank) -> None:
        self.rank = place.rank
        self._frames = LeaderFrames(HostPlan.of(place.membership), place.wires)

    def tell(self, text: str, numbers: list[float]) -> None:
        frame = self._frames.next(4 * len(numbers))
        frame.body(torch.float32).copy_(torch.tensor(numbers))
        self._frames.tell(Head(True, frame.num_bytes, text.encode()), frame)

    def hear(self) -> Told:
        hearing = self._frames.hear()
        while True:
            try:
                await_true(next(hearing).met)
            except StopIteration as ended:
                return {host: (head, frame.body(torch.float32).tolist()) for host, (head, frame) in ended.value.items()}


@pytest.fixture
def leaders() -> Iterator[list[Leader]]:
    with wired_ranks("a", "b", "c") as ranks:
        yield list(map(Leader, ranks))


def check_call(leaders: list[Leader], call: int, numbers: Callable[[int, int], list[float]]) -> None:
    """Each hears of the others what `numbers` gives for their ranks and the call."""
    for leader in leaders:
        others = {rank: numbers(rank, call) for rank in range(3) if rank != leader.rank}
        expected = {rank: (Head(True, 4 * len(told), f"{call} {rank}".encode()), told) for rank, told in others.items()}
        assert leader.hear() == expected


def tell_call(leaders: list[Leader], call: int, numbers: Callable[[int, int], list[float]]) -> None:
    for leader in leaders:
        leader.tell(f"{call} {leader.rank}", numbers(leader.rank, call))


@pytest.mark.parametrize("length", [0, 3, 20_000])
def test_each_hears_what_all_others_tell_time_after_time(leaders: list[Leader], length: int) -> None:
    def numbers(rank: int, call: int) -> list[float]:
        return [100.0 * call + rank] * length

    for call in range(3):
        tell_call(leaders, call, numbers)
        check_call(leaders, call, numbers)


def test_frames_of_other_lengths_are_told_apart_from_those_that_follow(leaders: list[Leader]) -> None:
    """All have told of all calls before any is heard: nothing of the next frame may be read early."""

    def numbers(rank: int, call: int) -> list[float]:
        return [10.0 * call + rank] * [7, 0, 5000][(rank + call) % 3]

    for call in range(4):
        tell_call(leaders, call, numbers)
    for call in range(4):
        check_call(leaders, call, numbers)


def test_what_is_not_gone_yet_is_not_written_over(leaders: list[Leader]) -> None:
    """Far more than the kernel holds, told before anybody hears."""

    def numbers(_: int, call: int) -> list[float]:
        return [float(call)] * 200_000

    for call in range(20):
        tell_call(leaders, call, numbers)
    for call in range(20):
        check_call(leaders, call, numbers)
