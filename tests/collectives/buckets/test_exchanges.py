from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn

from raydist.collectives.base import Communicator, Membership, Work
from raydist.collectives.buckets.exchange import BucketExchange
from raydist.collectives.buckets.exchanges import Exchanges
from raydist.collectives.buckets.forms import StepWeight
from raydist.collectives.buckets.tail import PassStamp
from raydist.collectives.local import LocalGroup, LocalHub
from raydist.errors import CollectiveMismatchError
from raydist.values import ReduceOp
from tests.collectives.processes import ProcessTeam
from tests.collectives.threads import run_ranks

FULL = StepWeight(1.0, counts=True)


class Rank:
    """Runs passes over parameters of two elements, in buckets of one each."""

    def __init__(self, communicator: Communicator, num_parameters: int = 3) -> None:
        self.parameters = {number: nn.Parameter(torch.zeros(2)) for number in range(num_parameters)}
        self.exchanges = Exchanges(communicator, bucket_bytes=1, first_bucket_bytes=1)
        self.num_passes = 0

    def open(self, trained: tuple[int, ...], kept: list[torch.Tensor] | None = None) -> BucketExchange:
        self.num_passes += 1
        stamp = PassStamp(0, self.num_passes)
        return self.exchanges.open(trained, self.parameters, stamp, FULL, kept=kept or [], held=())

    def run(
        self, trained: tuple[int, ...], order: tuple[int, ...] | None = None, kept: list[torch.Tensor] | None = None
    ) -> dict[int, torch.Tensor]:
        exchange = self.open(trained, kept)
        for index in trained if order is None else order:
            self.exchanges.receiver(index, torch.full((2,), float(index)))
        exchange.finish()
        found = {index: gradient.value for index, gradient in exchange.gradients().items()}
        self.exchanges.done()
        return found

    @property
    def buckets(self) -> list[int]:
        return [bucket.indices[0] for bucket in self.exchanges.layout.buckets]


def test_a_pass_costs_its_buckets_alone() -> None:
    def body(group: LocalGroup) -> list[int]:
        rank, counts = Rank(group), []
        for trained in [(0, 1), (0, 1), (0, 1), (0,), (0,), (), ()]:
            before = group.num_calls
            rank.run(trained, trained[::-1])
            counts.append(group.num_calls - before)
        return counts

    # An agreement and, with several buckets, their order; a change of layout is told by the first bucket.
    assert run_ranks(2, body) == [[1 + 2 + 1, 2, 2, 1 + 1 + 1, 1, 1 + 1, 1]] * 2


def test_buckets_are_laid_out_in_the_order_in_which_the_first_rank_saw_gradients() -> None:
    def body(group: LocalGroup) -> list[list[int]]:
        rank = Rank(group, 4)
        layouts = []
        for order in [(1, 3, 0), (0, 1, 3)]:
            rank.run((0, 1, 2, 3), order if group.rank == 0 else (3, 2, 1, 0))
            layouts.append(rank.buckets)
        values = rank.run((0, 1, 2, 3))
        assert {index: value[0].item() for index, value in values.items()} == {0: 0, 1: 2, 2: 4, 3: 6}
        return layouts

    assert run_ranks(2, body) == [[[1, 3, 0, 2]] * 2] * 2


def test_a_parameter_that_appears_again_counts_where_it_came_last() -> None:
    def body(group: LocalGroup) -> list[int]:
        rank = Rank(group)
        rank.run((0, 1, 2), (1, 2, 0, 1))
        return rank.buckets

    assert run_ranks(2, body) == [[2, 0, 1]] * 2


def test_memory_is_kept_and_what_somebody_holds_is_left_alone() -> None:
    def body(group: LocalGroup) -> None:
        rank = Rank(group)
        addresses, held = [], []
        for round_ in range(5):
            values = rank.run((1,))
            addresses.append(values[1].data_ptr())
            if round_ in (1, 2):
                held.append(values[1])
            del values
        own, other = addresses[0], addresses[2]
        assert addresses == [own, own, other, addresses[3], addresses[3]]
        assert len({own, other, addresses[3]}) == 3
        assert [value.tolist() for value in held] == [[2.0, 2.0]] * 2
        held.clear()
        assert rank.run((1,))[1].data_ptr() == own

    run_ranks(2, body)


def test_what_stays_in_grad_moves_out() -> None:
    def body(group: LocalGroup) -> None:
        rank = Rank(group)
        first = rank.run((1,))[1]
        own = first.data_ptr()
        assert rank.run((1,), kept=[first])[1].data_ptr() == own != first.data_ptr()
        assert first.tolist() == [2.0, 2.0]

    run_ranks(2, body)


def test_a_pass_that_failed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its memory is used again."""
    group = LocalGroup(LocalHub(), Membership("g", 0, 0, 1), timeout_s=5.0).start()
    rank, events = Rank(group, 2), list[str]()
    rank.run((0, 1))
    start = LocalGroup.all_reduce

    def noted(self: LocalGroup, tensor: torch.Tensor, op: ReduceOp) -> Work:
        work = start(self, tensor, op)
        events.append("sent")
        wait = work.wait

        def noted_wait() -> None:
            events.append("waited")
            wait()

        monkeypatch.setattr(work, "wait", noted_wait)
        return work

    monkeypatch.setattr(LocalGroup, "all_reduce", noted)
    failed = rank.open((0, 1))
    failed.put(rank.buckets[0], torch.full((2,), 99.0))
    assert events == ["sent"]
    values = rank.run((0, 1), tuple(rank.buckets))
    assert events == ["sent", "waited", "sent", "sent", "waited", "waited"]
    assert [values[0].tolist(), values[1].tolist()] == [[0.0, 0.0], [1.0, 1.0]]


def said_to_each_other(communicator: Communicator, *, passes: list[list[tuple[int, ...]]]) -> str:
    """Each rank trains other parameters in its last pass, or is in another pass: what it is told."""
    rank = Rank(communicator)
    *agreed, last = passes[communicator.rank]
    for trained in agreed:
        rank.run(trained)
    try:
        rank.run(last)
    except CollectiveMismatchError as error:
        return str(error)
    return "nothing"


CASES: dict[str, tuple[list[list[tuple[int, ...]]], str]] = {
    "from the start": ([[(0, 1)], [(0,)], [(0, 1)]], "layout"),
    "nothing at all": ([[(0, 1)], [()], [(0, 1)]], "layout"),
    "later": ([[(0, 1), (0, 1)], [(0, 1), (0,)], [(0, 1), (0, 1)]], "layout of trained parameters changes"),
    "to another": ([[(0, 1), (1,)], [(0, 1), (0,)], [(0, 1), (1,)]], "layout of trained parameters [0-9]"),
    "to nothing": ([[(0, 1), (0, 1)], [(0, 1), ()], [(0, 1), (0, 1)]], "layout of trained parameters changes"),
    "from nothing": ([[(), (0, 1)], [(), ()], [(), (0, 1)]], "layout of trained parameters [0-9]"),
}


@pytest.mark.parametrize(("passes", "said"), CASES.values(), ids=CASES)
def test_ranks_that_train_different_parameters_are_told(passes: list[list[tuple[int, ...]]], said: str) -> None:
    told = run_ranks(3, functools.partial(said_to_each_other, passes=passes))
    assert len(set(told)) == 1
    assert re.search(rf"rank 0: step 0.*rank 1: step 0.*{said}|{said}.*rank 1: step 0", told[0])


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_processes_that_train_different_parameters_are_told(backend: str, request: pytest.FixtureRequest) -> None:
    """Where a size that differs would end them."""
    team: ProcessTeam = request.getfixturevalue(f"{backend}_team")
    for name, (passes, _) in CASES.items():
        told: list[Any] = team.run(functools.partial(said_to_each_other, passes=passes))
        assert len(set(told)) == 1, name
        assert told[0].startswith("All ranks must agree on the backward pass, got rank 0: step 0"), name
        team.reform()


def sums_of_kept_and_shared_memory(communicator: Communicator) -> list[list[float]]:
    """One rank holds on to gradients, so that it must use other memory than its peers do."""
    parameters = {0: nn.Parameter(torch.zeros(20_000))}
    exchanges = Exchanges(communicator, bucket_bytes=1 << 20, first_bucket_bytes=1 << 20)
    held, sums = [], []
    for number in range(4):
        exchange = exchanges.open((0,), parameters, PassStamp(0, number), FULL, kept=[], held=())
        exchange.put(0, torch.full((20_000,), float(communicator.rank + number)))
        exchange.finish()
        ((_, (value,)),) = exchange.lend()
        exchanges.done()
        sums.append(value.unique().tolist())
        if communicator.rank == 1:
            held.append((value, sums[-1]))
        del value
    assert [value.unique().tolist() for value, _ in held] == [then for _, then in held]
    return sums


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_processes_one_of_which_holds_on_to_gradients(backend: str, request: pytest.FixtureRequest) -> None:
    team: ProcessTeam = request.getfixturevalue(f"{backend}_team")
    expected = [[float(sum(range(team.world_size)) + number * team.world_size)] for number in range(4)]
    assert team.run(sums_of_kept_and_shared_memory) == [expected] * team.world_size
