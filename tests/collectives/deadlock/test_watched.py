from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from raydist.collectives.base import Membership
from raydist.collectives.deadlock import Progress, RankStatus, WatchedCommunicator
from raydist.errors import CancelledError, CollectiveMismatchError
from raydist.values import ReduceOp
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import ThreadTeam, run_ranks
from tests.contracts import communicator as contract


def no_verdict() -> None:
    return None


class WatchedTeam(contract.Team):
    """Threads whose groups are watched."""

    def __init__(self) -> None:
        self.world_size, self.timeout_s = 3, 2.0
        self._team = ThreadTeam(self.world_size, self.timeout_s)

    def begin(self, bodies: Mapping[int, contract.Body]) -> Callable[[], dict[int, Any]]:
        def on_watched(body: contract.Body) -> contract.Body:
            return lambda group: body(watched(group, "test", Progress()))

        return self._team.begin({rank: on_watched(body) for rank, body in bodies.items()})

    def kill(self, rank: int) -> None:
        self._team.kill(rank)

    def reform(self) -> None:
        self._team.reform()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(check: Callable[[contract.Team], None]) -> None:
    check(WatchedTeam())


class Held:
    """A group whose collectives end as told; notes how its rank was seen while it waited."""

    device = torch.device("cpu")
    membership = Membership("g", 0, 0, 1)
    timeout_s = 1.0
    checks_itself = host_runs_ahead = False

    def __init__(self, progress: Progress, error: Exception | None = None) -> None:
        self._progress = progress
        self._error = error
        self.seen: list[RankStatus] = []

    def announce(self, what: str) -> None:
        """It shows nothing."""

    def wait(self, timeout_s: float | None = None) -> None:
        self.seen.append(self._progress.look())
        if self._error is not None:
            raise self._error

    def begin(self, *arguments: object) -> Held:
        return self

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        self.wait()
        return [data]

    all_reduce = all_gather = broadcast = begin


def watched(held: Any, name: str, progress: Progress, verdict: Any = no_verdict) -> WatchedCommunicator:
    return WatchedCommunicator(held, name, progress, verdict)


def test_a_wait_can_be_seen() -> None:
    progress = Progress()
    held = Held(progress)
    group = watched(held, "gradients", progress)
    tensor = torch.ones(2, 3)
    group.barrier()
    group.all_reduce(tensor, ReduceOp.SUM).wait()
    group.announce("all_reduce(MAX) of a number")
    group.all_gather([tensor], tensor).wait()
    group.all_gather([tensor], tensor).wait()
    group.broadcast(tensor, 0).wait()
    form = " of torch.float32 (2, 3)"
    assert [status.doing for status in held.seen] == [
        "barrier",
        f"all_reduce(SUM){form}",
        "all_reduce(MAX) of a number",
        f"all_gather{form}",
        f"broadcast(root=0){form}",
    ]
    assert [(status.waits_in, status.number) for status in held.seen] == [("gradients", place) for place in range(5)]
    assert held.seen[-1].calls == {"gradients": 5}
    assert progress.look().waits_in == ""


def test_the_verdict_replaces_what_came_of_it() -> None:
    progress = Progress()
    verdict = CollectiveMismatchError("rank 1 has left")
    group = watched(Held(progress, CancelledError("aborted")), "values", progress, lambda: verdict)
    with pytest.raises(CollectiveMismatchError, match="rank 1 has left"):
        group.barrier()
    assert progress.look().waits_in == ""
    group = watched(Held(progress, CancelledError("aborted")), "values", progress)
    with pytest.raises(CancelledError, match="aborted"):
        group.barrier()


def test_the_number_of_a_call_is_that_of_its_group() -> None:
    def main(inner: LocalGroup) -> dict[str, int]:
        progress = Progress()
        first, second = (WatchedCommunicator(inner, name, progress, no_verdict) for name in ("a", "b"))
        first.all_reduce(torch.ones(1), ReduceOp.SUM).wait()
        second.barrier()
        first.allocate([(4, torch.float32)])
        return dict(progress.look().calls)

    assert run_ranks(2, main) == [{"a": 2, "b": 1}] * 2
