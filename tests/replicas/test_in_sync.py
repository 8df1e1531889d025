"""Replicas hold the same values, and agree on what they wrote to buffers."""

from __future__ import annotations

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

Change = Callable[[int, nn.Linear, torch.optim.Optimizer], None]


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


def test_equal_replicas_pass() -> None:
    first, *others = compare(lambda rank, model, optimizer: None)
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize(
    ("with_model", "first_name", "second_name"),
    [(True, r"\S*0\.weight", r"\S*1\.weight"), (False, r"Linear\.weight", r"Linear\(2\)\.weight")],
)
def test_parameters_in_swapped_places_are_named(with_model: bool, first_name: str, second_name: str) -> None:
    """Also where a step uses two modules of one class, which nothing around them tells apart."""

    def main(group: LocalGroup) -> str:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        first, second = model
        objects = [*([model] if with_model else [first, second]), *model.parameters()]  # as they were made: it stays
        if group.rank == 1:
            first.weight, second.weight = second.weight, first.weight
        check = SyncCheck(group, lambda value: gathered(group, value), lambda: objects)
        with pytest.raises(CollectiveMismatchError) as caught:
            check.compare()
        return caught.value.message

    for told in run_ranks(3, main):
        assert re.search(f"got replica 0: {first_name} .*; replica 1: {second_name} .* into other places", told)


def add(amount: float) -> Change:
    def change(rank: int, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        if rank == 1:
            model.weight.data[0, 1] += amount

    return change


def momentum(rank: int, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    if rank == 1:
        optimizer.state[model.bias]["exp_avg"].fill_(7.0)


def decay(rank: int, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    if rank == 1:
        optimizer.param_groups[0]["weight_decay"] = 0.5


def no_state(rank: int, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    if rank == 1:
        del optimizer.state[model.bias]


def nan(rank: int, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    if rank == 1:
        model.weight.data.fill_(float("nan"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (add(0.5), r"Linear\.weight differs \(by .* of the largest value\)"),
        (momentum, r"Adam\.state\[Linear\.bias\]\.exp_avg differs"),
        (decay, r"Adam\.param_groups\[0\]\.weight_decay differs"),
        (no_state, "replica 1: nothing"),
        (nan, r"Linear\.weight differs"),
    ],
)
def test_a_replica_that_parts_is_named_on_all(change: Change, said: str) -> None:
    for message in compare(change):
        assert re.search(said, message)
        assert "rank 1 differs from the others" in message


def test_of_two_neither_is_blamed() -> None:
    for message in compare(add(0.5), world_size=2):
        assert "Linear.weight differs" in message
        assert "from the others" not in message


def test_last_bits_become_the_first_ones_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        first, *others = compare(add(1e-7), twice=True)
    assert all(torch.equal(other, first) for other in others)
    assert len(caplog.records) == 3  # one a rank
    assert "last bits of Linear.weight" in caplog.records[0].message


def test_the_same_nan_everywhere_is_no_difference() -> None:
    def everywhere(rank: int, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        model.weight.data.fill_(float("nan"))

    assert all(isinstance(result, torch.Tensor) for result in compare(everywhere))


def carried_for(monkeypatch: pytest.MonkeyPatch, *objects: Any) -> list[list[str]]:
    """Return the collectives of each rank for a comparison of these objects."""
    carried: list[list[str]] = [[], [], []]

    def count(name: str) -> None:
        plain: Any = getattr(LocalGroup, name)

        def counted(group: LocalGroup, *args: Any) -> Any:
            carried[group.rank].append(name)
            return plain(group, *args)

        monkeypatch.setattr(LocalGroup, name, counted)

    for name in ("all_reduce", "all_gather"):
        count(name)
    run_ranks(3, lambda group: SyncCheck(group, lambda value: gathered(group, value), lambda: objects).compare())
    return carried


def test_to_find_that_all_is_equal_takes_one_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 1)
    assert carried_for(monkeypatch, model, *model.parameters()) == [["all_reduce"]] * 3


class Statistics(nn.Module):
    """The mean of the rows that it has seen, as normalizers of observations keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))


@pytest.mark.parametrize("declared", [False, True])
def test_buffers_of_own_rows_are_a_warning_once(caplog: pytest.LogCaptureFixture, declared: bool) -> None:
    def main(group: LocalGroup) -> None:
        module = Statistics()
        layers = nn.Sequential(module, nn.BatchNorm1d(2))
        if declared:
            set_aggregation(module, "mean", aggregation="mean")
        check = SyncCheck(group, lambda value: gathered(group, value), lambda: [layers, *layers])
        check.compare_buffers()  # equal
        module.get_buffer("mean").fill_(group.rank)
        layers[1].get_buffer("running_mean").fill_(group.rank)
        for _ in range(2):
            check.compare()

    with caplog.at_level(logging.WARNING):
        run_ranks(3, main)
    told = [record.getMessage() for record in caplog.records]
    if declared:
        assert not told
    else:
        (message,) = told
        assert re.match(r"Replicas differ in the buffer Statistics\.mean: .* rd\.set_aggregation what it is\.", message)


def agreed(
    write: Callable[[torch.Tensor, int], Any], how: str, value: Any, present: tuple[bool, ...] = (True, True)
) -> list[Any]:
    """Return the buffer of each replica after `write(buffer, rank)`."""

    def main(group: LocalGroup) -> Any:
        buffer = torch.tensor(value)
        written = WrittenBuffers(lambda: [(buffer, how)], lambda tensor: all_gather(group, tensor, 0))
        written.begin()
        write(buffer, group.rank)
        written.agree(present)
        return buffer.tolist()

    return run_ranks(len(present), main)


# tf.distribute's table of variables that are aggregated on writing: replicas assign 1 and 2, or add them to 10.
@pytest.mark.parametrize(("how", "assigned", "added"), [("sum", 3.0, 13.0), ("mean", 1.5, 11.5), ("first", 1.0, 11.0)])
def test_written_in_a_step(how: str, assigned: float, added: float) -> None:
    assert agreed(lambda buffer, rank: buffer.fill_(rank + 1.0), how, 0.0) == [assigned] * 2
    assert agreed(lambda buffer, rank: buffer.add_(rank + 1.0), how, 10.0) == [added] * 2


@pytest.mark.parametrize("how", ["sum", "mean", "first"])
def test_a_batch_in_which_nobody_writes_changes_nothing(how: str) -> None:
    held = torch.tensor([0.1, 1e30]).tolist()
    assert agreed(lambda buffer, rank: None, how, held) == [held] * 2


@pytest.mark.parametrize(("how", "expected"), [("sum", 15), ("first", 12)])
def test_who_has_no_rows_does_not_count(how: str, expected: int) -> None:
    found = agreed(lambda buffer, rank: buffer.add_(rank + 1), how, 10, present=(False, True, True))
    assert found == [expected] * 3


def test_small_integers_add_up() -> None:
    def main(group: LocalGroup) -> Any:
        buffer = torch.tensor(200, dtype=torch.uint8)
        written = WrittenBuffers(lambda: [(buffer, "sum")], lambda tensor: all_gather(group, tensor, 0))
        written.begin()
        buffer.sub_(group.rank)
        written.agree((True, True, True))
        return buffer.item()

    assert run_ranks(3, main) == [197, 197, 197]
