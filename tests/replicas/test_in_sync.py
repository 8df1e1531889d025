"""Replicas hold the same values, and agree on what they wrote to buffers."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raydist.collectives.differentiable import all_gather
from raydist.core.errors import CollectiveMismatchError
from raydist.mirroring.aggregation import set_aggregation
from raydist.replicas.in_sync import SyncCheck, WrittenBuffers
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_ranks

Change = Callable[[int, nn.Linear, torch.optim.Optimizer], Any]


def compare(change: Change, *, world_size: int = 3, twice: bool = False) -> list[Any]:
    """Train alike, change something, compare: what every rank's weight is then, or what its error says."""

    def main(group: LocalGroup) -> Any:
        model = nn.Linear(2, 1)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        change(group.rank, model, optimizer)
        check = SyncCheck(group, lambda value: gathered(group, value), lambda: [model, *model.parameters(), optimizer])
        try:
            for _ in range(1 + twice):
                check.compare()
        except CollectiveMismatchError as error:
            return error.message
        return model.weight.detach().clone()

    return run_ranks(world_size, main)


def gathered(group: LocalGroup, value: Any) -> list[Any]:
    """Threads share what they hold: only places are exchanged."""
    key = torch.tensor([id(value)])
    rows = [torch.empty_like(key) for _ in range(group.world_size)]
    held[id(value)] = value
    group.all_gather(rows, key).wait()
    return [held[int(row)] for row in rows]


held: dict[int, Any] = {}


def test_parameters_in_swapped_places_are_named() -> None:
    """Also where a step uses two modules of one class, which nothing around them tells apart."""

    def main(group: LocalGroup) -> list[str]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        first, second = model
        parameters = list(model.parameters())  # as they were made: it stays
        if group.rank == 1:
            first.weight, second.weight = second.weight, first.weight
        messages = []
        for objects in ([model, *parameters], [first, second, *parameters]):
            check = SyncCheck(group, lambda value: gathered(group, value), functools.partial(list, objects))
            with pytest.raises(CollectiveMismatchError) as caught:
                check.compare()
            messages.append(caught.value.message)
        return messages

    for with_model, without in run_ranks(3, main):
        pattern = r"got replica 0: {} .*; replica 1: {} .* into other places"
        assert re.search(pattern.format(r"\S*0\.weight", r"\S*1\.weight"), with_model)
        assert re.search(pattern.format(r"Linear\.weight", r"Linear\(2\)\.weight"), without)


def test_equal_replicas_pass_and_one_that_parts_is_named_on_all() -> None:
    cases: list[tuple[Callable[[nn.Linear, Any], Any], str]] = [
        (
            lambda model, adam: model.weight.data[0, 1].add_(0.5),
            r"Linear\.weight differs \(by .* of the largest value\)",
        ),
        (lambda model, adam: model.weight.data.fill_(torch.nan), r"Linear\.weight differs"),
        (
            lambda model, adam: adam.state[model.bias]["exp_avg"].fill_(7.0),
            r"Adam\.state\[Linear\.bias\]\.exp_avg differs",
        ),
        (lambda model, adam: adam.state.pop(model.bias), "replica 1: nothing"),
        (
            lambda model, adam: adam.param_groups[0].update(weight_decay=0.5),
            r"Adam\.param_groups\[0\]\.weight_decay differs",
        ),
    ]
    for change, said in cases:
        for message in compare(functools.partial(on_rank_1, change)):
            assert re.search(said, message)
            assert "rank 1 differs from the others" in message
    for message in compare(add(0.5), world_size=2):
        assert "Linear.weight differs" in message
        assert "from the others" not in message  # of two neither is blamed
    for same in (lambda rank, model, adam: None, lambda rank, model, adam: model.weight.data.fill_(torch.nan)):
        first, *others = compare(same)
        assert all(torch.allclose(other, first, rtol=0, atol=0, equal_nan=True) for other in others)


def on_rank_1(change: Callable[[nn.Linear, Any], Any], rank: int, model: nn.Linear, adam: Any) -> None:
    if rank == 1:
        change(model, adam)


def add(amount: float) -> Change:
    def change(rank: int, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        model.weight.data[0, 1] += amount if rank == 1 else 0.0

    return change


def test_last_bits_become_the_first_ones_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        first, *others = compare(add(1e-7), twice=True)
    assert all(torch.equal(other, first) for other in others)
    assert len(caplog.records) == 3  # one a rank
    assert "last bits of Linear.weight" in caplog.records[0].message


class Statistics(nn.Module):
    """The mean of the rows that it has seen, as normalizers of observations keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))


def test_buffers_of_own_rows_are_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    def main(group: LocalGroup) -> None:
        for declared in (True, False):
            module = Statistics()
            layers = nn.Sequential(module, nn.BatchNorm1d(2))
            if declared:
                set_aggregation(module, "mean", aggregation="mean")
            objects = [layers, *layers]
            check = SyncCheck(group, lambda value: gathered(group, value), functools.partial(list, objects))
            check.compare_buffers()  # equal
            module.get_buffer("mean").fill_(group.rank)
            layers[1].get_buffer("running_mean").fill_(group.rank)
            for _ in range(2):
                check.compare()

    with caplog.at_level(logging.WARNING):
        run_ranks(3, main)
    (message,) = [record.getMessage() for record in caplog.records]
    assert re.match(r"Replicas differ in the buffer Statistics\.mean: .* rd\.set_aggregation what it is\.", message)


def agreed(
    write: Callable[[torch.Tensor, int], Any], how: str, value: Any, present: tuple[bool, ...] = (True, True)
) -> list[Any]:
    """Return the buffer of each replica after `write(buffer, rank)`."""

    def main(group: LocalGroup) -> Any:
        buffer = torch.as_tensor(value).clone()
        written = WrittenBuffers(lambda: [(buffer, how)], lambda tensor: all_gather(group, tensor, 0))
        written.begin()
        write(buffer, group.rank)
        written.agree(present)
        return buffer.tolist()

    return run_ranks(len(present), main)


def test_written_in_a_step() -> None:
    held = torch.tensor([0.1, 1e30]).tolist()
    for how, assigned, added in (("sum", 3.0, 13.0), ("mean", 1.5, 11.5), ("first", 1.0, 11.0)):
        assert agreed(lambda buffer, rank: buffer.fill_(rank + 1.0), how, 0.0) == [assigned] * 2
        assert agreed(lambda buffer, rank: buffer.add_(rank + 1.0), how, 10.0) == [added] * 2
        assert agreed(lambda buffer, rank: None, how, held) == [held] * 2, "nobody writes: nothing changes"
    for how, expected in (("sum", 15), ("first", 12)):  # who has no rows does not count
        found = agreed(lambda buffer, rank: buffer.add_(rank + 1), how, 10, present=(False, True, True))
        assert found == [expected] * 3
    small = torch.tensor(200, dtype=torch.uint8)
    assert agreed(lambda buffer, rank: buffer.sub_(rank), "sum", small, present=(True,) * 3) == [197] * 3
