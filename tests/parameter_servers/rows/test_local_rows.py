"""Tables of this process, by the hooks that the first of them registers for optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.parameter_servers.rows.local_rows import (
    LocalRows,
    access_to,
    add_row_gradient,
    attach_access,
    held_rows,
    hold_rows,
    mark_of,
    mark_table,
    pending_rows,
    reading_rows,
    row_access,
    spec_of,
    take_held_rows,
)
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec


class Nowhere:
    def pull(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, 2)

    def export_rows(self, weight: torch.Tensor) -> list[dict[str, Any]]:
        return []

    def import_rows(self, weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> None: ...


def test_who_runs_a_step_says_where_rows_are() -> None:
    outer, inner = Nowhere(), Nowhere()
    assert row_access() is None
    with reading_rows(outer):
        with reading_rows(inner):
            assert row_access() is inner
        assert row_access() is outer
    assert row_access() is None


def test_a_parameter_stands_for_a_table() -> None:
    weight, other = torch.nn.Parameter(torch.empty(0, 2)), torch.nn.Parameter(torch.empty(0, 2))
    spec = EmbeddingTableSpec(10, 2)
    mark_table(weight, spec)
    assert spec_of(weight) == spec
    assert spec_of(other) is None
    assert mark_of(other) is None


def test_rows_that_lie_elsewhere_are_not_kept_here() -> None:
    weight = torch.nn.Parameter(torch.empty(0, 2))
    mark = mark_table(weight, EmbeddingTableSpec(10, 2))
    mark.local = Nowhere()
    there = Nowhere()
    attach_access(weight, there)
    assert mark.access is there
    assert mark.local is None


SPEC = EmbeddingTableSpec(10, 2, torch.float64, initializer="zeros")
ROWS = torch.tensor([3, 7])
ONES = torch.ones(2, 2, dtype=torch.float64)


def table() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.empty(0, 2, dtype=torch.float64))
    mark_table(weight, SPEC)
    return weight


def values(weight: torch.nn.Parameter) -> list[float]:
    return access_to(weight).pull(weight, ROWS)[:, 0].tolist()


def test_steps_reach_tables_and_all_else() -> None:
    weight, other, dense = table(), table(), torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    groups: list[dict[str, Any]] = [{"params": [dense, weight]}, {"params": [other], "lr": 10.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    for step in range(2):
        values(weight), values(other)
        optimizer.zero_grad()
        dense.grad = torch.ones_like(dense)
        add_row_gradient(weight, ROWS, ONES.clone())
        if step == 0:
            add_row_gradient(other, ROWS[:1], ONES[:1].clone())
        optimizer.step()
    assert dense.item() == pytest.approx(-2.9)
    assert values(weight) == pytest.approx([-2.9, -2.9])
    assert values(other) == [-10, 0]
    assert pending_rows(weight) is not None  # it stays until zero_grad, as all gradients do


def test_a_step_with_a_closure() -> None:
    weight = table()
    values(weight)
    for optimizer in (torch.optim.SGD([weight], lr=1.0), torch.optim.SparseAdam([weight], lr=1.0)):

        def closure(optimizer: Any = optimizer) -> float:
            optimizer.zero_grad()
            add_row_gradient(weight, ROWS, ONES.clone())
            return 3.0

        assert optimizer.step(closure) == 3.0
    assert values(weight) == pytest.approx([-2, -2])


def test_hooks_are_registered_once() -> None:
    weight = table()
    access_to(weight), access_to(table())
    hooks = list(torch_optimizer._global_optimizer_pre_hooks.values())
    assert len(hooks) == len(set(hooks))
    frozen = table()
    optimizer = torch.optim.SGD([weight, frozen], lr=1.0)
    optimizer.step()  # nothing to do
    assert values(weight) == [0, 0]


def test_an_optimizer_that_cannot_step_on_rows_changes_nothing() -> None:
    weight, dense = table(), torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    values(weight)
    dense.grad = torch.ones_like(dense)
    optimizer = torch.optim.SGD([weight, dense], lr=1.0, momentum=0.9, dampening=0.5)
    with pytest.raises(InvalidArgumentError, match="SGD cannot"):
        optimizer.step()
    assert dense.item() == 0


def test_whoever_runs_a_step_goes_first() -> None:
    weight = table()
    there, driver = LocalRows(SPEC), LocalRows(SPEC)
    assert isinstance(access_to(weight), LocalRows)
    attach_access(weight, driver)
    assert access_to(weight) is driver
    with reading_rows(there):
        assert access_to(weight) is there
    with pytest.raises(FailedPreconditionError, match="must stand for a table"):
        access_to(torch.nn.Parameter(torch.ones(1)))


def test_rows_that_are_to_lie_elsewhere() -> None:
    weight, other = table(), table()
    assert held_rows(weight) == take_held_rows(weight) == []
    values(weight)
    hold_rows(other, take_held_rows(weight))
    assert held_rows(weight) == []
    assert held_rows(other)[0]["rows"].tolist() == [3, 7]
    assert held_rows(torch.nn.Parameter(torch.ones(1))) == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_steps_go_on_beside_a_table() -> None:
    """The hooks of a process that has a table are around the steps of all its optimizers."""
    values(table())
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def step() -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    before = model.bias.item()
    step()
    assert model.bias.item() == pytest.approx(before - 0.2)
