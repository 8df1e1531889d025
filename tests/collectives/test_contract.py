"""Every backend, and the group of threads for tests, keeps the contract of communicators."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raydist.collectives import opening
from raydist.collectives.base import Communicator, Membership, Work
from raydist.collectives.checked import CheckedCommunicator, all_equal, describe_call, exchange
from raydist.collectives.hierarchical import HierarchicalBackend
from raydist.collectives.shared_memory.communicator import SharedMemoryCommunicator
from raydist.core.errors import (
    CollectiveMismatchError,
    DeadlineExceededError,
    RaydistError,
    UnavailableError,
)
from raydist.core.values import ReduceOp
from tests.cases import case
from tests.collectives.local_group import LocalGroup
from tests.collectives.processes import Failing, ProcessTeam, stop_myself
from tests.collectives.shared_memory.operations import starting
from tests.collectives.threads import run_hosted, run_ranks, run_sharing, team_on
from tests.contracts import communicator as contract

pytestmark = pytest.mark.timeout(180)

KINDS = ["local", *(backend.name for backend in opening.BACKENDS)]


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


@pytest.mark.parametrize("kind", KINDS)
def test_contract(request: pytest.FixtureRequest, kind: str) -> None:
    team = team_of(request, kind)
    for check in contract.CHECKS:
        with case(check.__name__):
            check(team)


LARGE = 300_000
Call = Callable[[Communicator], None]


def all_reduced(communicator: Communicator, shape: tuple[int, ...], op: ReduceOp, dtype: torch.dtype) -> None:
    communicator.all_reduce(torch.ones(shape, dtype=dtype), op).wait()


def added(*shape: int, op: ReduceOp = ReduceOp.SUM, dtype: torch.dtype = torch.float32) -> Call:
    return functools.partial(all_reduced, shape=shape, op=op, dtype=dtype)


def told(communicator: Communicator, root: int = 0) -> None:
    communicator.broadcast(torch.ones(3), root).wait()


def collected(communicator: Communicator, last: int = 2) -> None:
    """Ranks have two rows each, but the last rank `last`."""
    rows = [torch.ones(2, 3) for _ in range(communicator.world_size)]
    rows[-1] = torch.ones(last, 3)
    communicator.all_gather_rows(rows, torch.ones(len(rows[communicator.rank]), 3)).wait()


def gathered(communicator: Communicator, length: int = 3) -> None:
    parts = [torch.ones(length) for _ in range(communicator.world_size)]
    communicator.all_gather(parts, torch.ones(length)).wait()


def met(communicator: Communicator) -> None:
    communicator.barrier()


CASES: dict[str, tuple[list[Call], list[Call]]] = {
    "skips": ([added(3), met], [met]),
    "skips large": ([added(LARGE), added(3)], [added(3)]),
    "adds": ([added(3)], [told, added(3)]),
    "adds large": ([added(3)], [added(LARGE), added(3)]),
    "reorders": ([added(3), told], [told, added(3)]),
    "reshapes": ([added(3)], [added(3, 1)]),
    "other op": ([added(3)], [added(3, op=ReduceOp.PRODUCT)]),
    "other dtype": ([added(3)], [added(3, dtype=torch.int32)]),
    "other root": ([told], [functools.partial(told, root=1)]),
    "other lengths": ([functools.partial(collected, last=3)], [collected]),
    "other sizes": ([added(LARGE)], [added(3)]),
    "other gathered": ([gathered], [functools.partial(gathered, length=4)]),
    "other sizes gathered": ([gathered], [functools.partial(gathered, length=LARGE)]),
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


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_learns_of_it_and_goes_on(request: pytest.FixtureRequest, kind: str) -> None:
    team = team_of(request, kind)
    for number, (name, (usual, differing)) in enumerate(CASES.items()):
        odd = number % team.world_size
        bodies = dict.fromkeys(range(team.world_size), Calling(usual)) | {odd: Calling(differing)}
        for rank, outcome in team.begin(bodies)().items():
            with case(f"{name}, rank {rank}"):
                assert isinstance(outcome, tuple), outcome
                seconds, error, total = outcome
                assert isinstance(error, CollectiveMismatchError), error
                assert f"; rank {odd} differs from the others" in str(error)
                assert all(f"rank {other}: " in str(error) for other in range(team.world_size))
                assert seconds < team.timeout_s
                assert total == team.world_size


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


def test_all_are_told_whether_all_hold_the_same_and_who_calls_something_else() -> None:
    def compare(group: LocalGroup, held: tuple[int, ...]) -> bool:
        return all_equal(group, describe_call("comparison", None), held[group.rank])

    def body(group: LocalGroup) -> list[bool]:
        for held in ((5, 5, 5), (5, 5, 6)):
            call: Callable[[], object] = functools.partial(compare, group, held)
            if group.rank == 1:
                call = functools.partial(exchange, group, describe_call("all_reduce(SUM)", torch.ones(2)))
            with pytest.raises(CollectiveMismatchError, match=r"comparison.*all_reduce.*comparison"):
                call()
        return [compare(group, (5, 5, 5)), compare(group, (5, 5, 6))]

    assert run_ranks(3, body) == [[True, False]] * 3


# --- groups on several hosts ------------------------------------------------------------------------------------------

SHAPES = ("ab", "abaa", "abc", "aabbbcc")
"""One letter a rank: its host. One rank each, fewer here than there, three hosts, three uneven ones."""


def test_one_host_shares_memory_and_unknown_hosts_are_declined() -> None:
    backend = HierarchicalBackend()
    assert "nobody has said" in str(backend.declines(Membership("g", 0, 0, 2)))
    assert backend.declines(Membership("g", 0, 0, 2, hosts=("a", "b"))) is None
    with team_on(HierarchicalBackend(), 2, "aa") as team:
        assert isinstance(team._groups[0], SharedMemoryCommunicator)


def test_hosts_of_all_shapes_keep_the_contract() -> None:
    for hosts in SHAPES:
        with case(hosts), team_on(HierarchicalBackend(), len(hosts), hosts) as team:
            for check in (contract.check_moves, contract.check_tensor_kinds, contract.check_rows):
                check(team)


def test_many_may_be_under_way() -> None:
    def many_at_once(communicator: Communicator) -> set[float]:
        """More than there are slots for."""
        tensors = [torch.ones(numel) for _ in range(20) for numel in (3, 20_000, 60_000)]
        works = [communicator.all_reduce(tensor, ReduceOp.SUM) for tensor in tensors]
        for work in works:
            work.wait()
        return {tensor.unique().item() for tensor in tensors}

    assert run_hosted("aab", many_at_once) == [{3.0}] * 3


def num_held() -> int:
    gc.collect()
    return len([path for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)])


def test_nothing_is_left_behind() -> None:
    run_hosted("abc", contract.sum_of_ones)
    before = num_held()
    for _ in range(2):
        run_hosted("abc", contract.sum_of_ones)
    deadline = time.monotonic() + 10.0  # gloo closes its sockets in a thread of its own
    while num_held() > before + 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert num_held() <= before + 1


def test_killed_ranks_and_hosts_are_noticed_at_once(hierarchical_team: ProcessTeam) -> None:
    team = hierarchical_team
    cases = [((0,), "broadcast"), ((1,), "all_gather"), ((2,), "all_reduce"), ((0, 2), "barrier")]
    for victims, name in cases:
        failing = Failing(starting(name, victims[0]))
        outcomes = team.begin({rank: failing for rank in range(team.world_size) if rank not in victims})
        time.sleep(0.2)
        killed = time.monotonic()
        for victim in victims:
            team.kill(victim)
        results = outcomes()
        took = time.monotonic() - killed
        with case(f"{victims} in {name}"):
            for _, error in results.values():
                assert isinstance(error, UnavailableError), error
                assert "No sign of rank" in str(error) or "gone" in str(error)
                assert str(victims[0]) in str(error).split("No sign of")[-1]
            assert took < 2.0
            team.reform()
            contract.check_asynchronous(team)


@pytest.mark.parametrize(
    ("victim", "name"), [pytest.param(0, "all_reduce small", marks=pytest.mark.long), (1, "all_reduce"), (2, "barrier")]
)
def test_a_stopped_rank_is_named_when_the_limit_is_over(hierarchical_team: ProcessTeam, victim: int, name: str) -> None:
    team = hierarchical_team
    resumed = team.begin({victim: stop_myself})
    others = [rank for rank in range(team.world_size) if rank != victim]
    outcomes = team.begin(dict.fromkeys(others, Failing(starting(name, victim))))()
    team.resume(victim)
    assert resumed() == {victim: None}
    for seconds, error in outcomes.values():
        assert isinstance(error, DeadlineExceededError), error
        assert f"No sign of rank {victim}." in str(error)
        assert seconds < team.timeout_s + 2.0
    team.reform()
    contract.check_asynchronous(team)


def test_a_neighbour_that_is_gone_is_noticed_where_the_leader_is_late() -> None:
    with team_on(HierarchicalBackend(), 4, "aaab") as team:
        outcomes = team.begin(dict.fromkeys((2, 3), Failing(starting("all_reduce small", 1))))
        time.sleep(0.1)
        team.kill(1)
        for seconds, error in outcomes().values():
            assert isinstance(error, UnavailableError), error
            assert "rank 1 is gone" in str(error)
            assert seconds < 10.0
