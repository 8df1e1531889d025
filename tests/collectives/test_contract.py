"""Every backend, and the group of threads for tests, keeps the contract of communicators."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import pytest
import torch

from raydist.collectives import opening
from raydist.collectives.base import Communicator, Work
from raydist.collectives.checked import CheckedCommunicator, all_equal, describe_call, exchange
from raydist.core.errors import CollectiveMismatchError, DeadlineExceededError, RaydistError
from raydist.core.values import ReduceOp
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_ranks, run_sharing
from tests.contracts import communicator as contract
from tests.contracts.communicator import timed_failure

pytestmark = pytest.mark.timeout(180)

BACKENDS = [backend.name for backend in opening.BACKENDS]
KINDS = ["local", *BACKENDS]


def team_of(request: pytest.FixtureRequest, kind: str) -> contract.Team:
    """Return the ranks of one kind of group. Fail with instructions for a backend without a fixture."""
    fixture = f"{kind.replace('-', '_')}_team"
    try:
        team: contract.Team = request.getfixturevalue(fixture)
    except pytest.FixtureLookupError:
        pytest.fail(
            f"The table of backends names {kind!r}, but nobody checks it: add a fixture `{fixture}` to "
            "tests/collectives/conftest.py that gives a tests.contracts.communicator.Team of its ranks.",
            pytrace=False,
        )
    return team


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("kind", KINDS)
def test_contract(request: pytest.FixtureRequest, kind: str, check: Callable[[contract.Team], None]) -> None:
    check(team_of(request, kind))


# --- ranks that skip, add, reorder or reshape a collective ------------------------------------------------------------

LARGE = 300_000


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
@pytest.mark.parametrize("backend", KINDS)
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


# --- comparison of calls ----------------------------------------------------------------------------------------------


def test_nothing_is_added_where_the_other_one_checks_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(communicator: Communicator) -> list[float]:
        monkeypatch.setattr(communicator, "all_gather", refuse)
        checked = CheckedCommunicator(communicator)
        assert checked.checks_itself
        tensor = torch.ones(1)
        checked.all_reduce(tensor, ReduceOp.SUM).wait()
        with pytest.raises(CollectiveMismatchError, match=r"rank 0: .* \(2,\) .*rank 1: .* \(3,\)"):
            checked.all_reduce(torch.ones(2 + communicator.rank), ReduceOp.SUM).wait()
        return tensor.tolist()

    def refuse(outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        raise AssertionError("a round of its own")

    assert run_sharing(2, body) == [[2.0], [2.0]]


@pytest.mark.parametrize(("held", "alike"), [((5, 5, 5), True), ((5, 5, 6), False)])
def test_all_are_told_whether_all_hold_the_same(held: tuple[int, ...], alike: bool) -> None:
    def body(group: LocalGroup) -> bool:
        return all_equal(group, describe_call("comparison", None), held[group.rank])

    assert run_ranks(3, body) == [alike] * 3


@pytest.mark.parametrize("held", [(5, 5), (5, 6)])
def test_who_calls_something_else_is_told_so_whatever_is_held(held: tuple[int, ...]) -> None:
    def body(group: LocalGroup) -> None:
        calls: list[Callable[[], object]] = [
            lambda: all_equal(group, describe_call("comparison", None), held[0]),
            lambda: exchange(group, describe_call("all_reduce(SUM)", torch.ones(2))),
            lambda: all_equal(group, describe_call("comparison", None), held[1]),
        ]
        with pytest.raises(CollectiveMismatchError, match=r"comparison.*all_reduce.*comparison"):
            calls[group.rank]()

    run_ranks(3, body)
