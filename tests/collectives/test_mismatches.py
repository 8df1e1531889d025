"""Ranks that skip, add, reorder or reshape a collective: on every backend an error on every rank, and life goes on.

And for gloo those that are killed or stopped; the other backends' folders have theirs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import pytest
import torch

from raydist.collectives import opening
from raydist.collectives.base import Communicator
from raydist.collectives.checked import CheckedCommunicator
from raydist.core.errors import CollectiveMismatchError, DeadlineExceededError, RaydistError, UnavailableError
from raydist.core.values import ReduceOp
from tests.collectives.faults import stop_myself
from tests.collectives.processes import ProcessTeam
from tests.collectives.test_contract import team_of
from tests.contracts.communicator import sum_of_ones, timed_failure

pytestmark = pytest.mark.timeout(180)

LARGE = 300_000
BACKENDS = [backend.name for backend in opening.BACKENDS]


def added(communicator: Communicator) -> None:
    communicator.all_reduce(torch.ones(3), ReduceOp.SUM).wait()


def added_large(communicator: Communicator) -> None:
    communicator.all_reduce(torch.ones(LARGE), ReduceOp.SUM).wait()


def reshaped(communicator: Communicator) -> None:
    communicator.all_reduce(torch.ones(3, 1), ReduceOp.SUM).wait()


def multiplied(communicator: Communicator) -> None:
    communicator.all_reduce(torch.ones(3), ReduceOp.PRODUCT).wait()


def of_whole_numbers(communicator: Communicator) -> None:
    communicator.all_reduce(torch.ones(3, dtype=torch.int32), ReduceOp.SUM).wait()


def told(communicator: Communicator) -> None:
    communicator.broadcast(torch.ones(3), 0).wait()


def told_by_another(communicator: Communicator) -> None:
    communicator.broadcast(torch.ones(3), 1).wait()


def collected(communicator: Communicator) -> None:
    rows = [torch.ones(2, 3) for _ in range(communicator.world_size)]
    communicator.all_gather_rows(rows, torch.ones(2, 3)).wait()


def collected_more(communicator: Communicator) -> None:
    """All but one know of one row more on the last rank."""
    rows = [torch.ones(2, 3) for _ in range(communicator.world_size)]
    rows[-1] = torch.ones(3, 3)
    communicator.all_gather_rows(rows, torch.ones(len(rows[communicator.rank]), 3)).wait()


def parts(communicator: Communicator, length: int) -> list[torch.Tensor]:
    return [torch.ones(length) for _ in range(communicator.world_size)]


def gathered(communicator: Communicator, length: int = 3) -> None:
    communicator.all_gather(parts(communicator, length), torch.ones(length)).wait()


def met(communicator: Communicator) -> None:
    communicator.barrier()


Call = Callable[[Communicator], None]
CASES: dict[str, tuple[list[Call], list[Call]]] = {
    "skips": ([added, met], [met]),
    "skips-large": ([added_large, added], [added]),
    "adds": ([added], [told, added]),
    "adds-large": ([added], [added_large, added]),
    "reorders": ([added, told], [told, added]),
    "reshapes": ([added], [reshaped]),
    "other-op": ([added], [multiplied]),
    "other-dtype": ([added], [of_whole_numbers]),
    "other-root": ([told], [told_by_another]),
    "other-lengths": ([collected_more], [collected]),
    "other-sizes": ([added_large], [added]),
    "other-gathered": ([gathered], [functools.partial(gathered, length=4)]),
    "other-sizes-gathered": ([gathered], [functools.partial(gathered, length=LARGE)]),
}


class Calling:
    """The first error of these calls, and what a call gives that all make afterwards."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def __call__(self, communicator: Communicator) -> tuple[float, RaydistError | None, float]:
        checked = CheckedCommunicator(communicator)
        start, error = time.monotonic(), None
        try:
            for call in self.calls:
                call(checked)
        except RaydistError as caught:
            error = caught
        seconds = time.monotonic() - start
        tensor = torch.ones(3)
        CheckedCommunicator(communicator).all_reduce(tensor, ReduceOp.SUM).wait()
        return seconds, error, tensor[0].item()


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("backend", ["local", *BACKENDS])
def test_every_rank_learns_of_it_and_goes_on(request: pytest.FixtureRequest, backend: str, odd: int) -> None:
    team = team_of(request, backend)
    for case, (usual, differing) in CASES.items():
        bodies = dict.fromkeys(range(team.world_size), Calling(usual)) | {odd: Calling(differing)}
        for rank, outcome in team.begin(bodies)().items():
            assert isinstance(outcome, tuple), (case, outcome)
            seconds, error, total = outcome
            assert isinstance(error, CollectiveMismatchError), f"{case}, rank {rank}: {error!r}"
            assert f"; rank {odd} differs from the others" in str(error), case
            assert all(f"rank {other}: " in str(error) for other in range(team.world_size)), case
            assert seconds < team.timeout_s, case
            assert total == team.world_size, case


@pytest.mark.parametrize("backend", BACKENDS)  # threads that are "local" name nobody
def test_a_rank_that_skips_the_last_one_is_named(request: pytest.FixtureRequest, backend: str) -> None:
    team, absent = team_of(request, backend), 2
    bodies = {rank: timed_failure for rank in range(team.world_size) if rank != absent}
    for seconds, error in team.begin(bodies)().values():
        assert isinstance(error, DeadlineExceededError), error
        assert f"No sign of rank {absent}" in str(error)
        assert seconds < team.timeout_s + 2.0
    team.reform()


def test_killed_ranks_end_what_is_waited_for_in_gloo(gloo_team: ProcessTeam) -> None:
    gloo_team.run(sum_of_ones)
    outcomes = gloo_team.begin({0: timed_failure})
    for victim in (1, 2):
        gloo_team.kill(victim)
    seconds, error = outcomes()[0]
    assert isinstance(error, UnavailableError), error
    assert "No sign of ranks 1, 2." in str(error)
    assert seconds < gloo_team.timeout_s * 0.9
    gloo_team.reform()
    assert gloo_team.run(sum_of_ones) == [3.0] * 3


def test_a_stopped_rank_is_named_by_gloo_too(gloo_team: ProcessTeam) -> None:
    resumed = gloo_team.begin({1: stop_myself})
    for seconds, error in gloo_team.begin(dict.fromkeys((0, 2), timed_failure))().values():
        assert isinstance(error, DeadlineExceededError)
        assert "No sign of rank 1." in str(error)
        assert seconds < gloo_team.timeout_s + 2.0
    gloo_team.resume(1)
    assert resumed() == {1: None}
    gloo_team.reform()
