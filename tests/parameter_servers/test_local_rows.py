"""Rows of embedding tables in a process, and their gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.parameter_servers.local_rows import (
    LocalRows,
    RowGradient,
    access_to,
    add_row_gradient,
    attach_access,
    held_rows,
    hold_rows,
    mark_table,
    pending_rows,
    reading_rows,
    take_held_rows,
)
from raydist.parameter_servers.table_spec import EmbeddingTableSpec
from raydist.pickling.pickler import dumps

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
    values(weight)
    attach_access(weight, driver)
    assert access_to(weight) is driver
    assert held_rows(weight) == [], "rows that lie elsewhere are not kept here"
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


def bare_weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(0, 2, dtype=torch.float64))


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def pairs(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None].expand(-1, 2).contiguous()


def as_dict(parameter: torch.nn.Parameter) -> dict[int, list[float]]:
    pending = pending_rows(parameter)
    assert pending is not None
    assert pending[0].tolist() == sorted(set(pending[0].tolist()))
    return dict(zip(pending[0].tolist(), pending[1].tolist(), strict=True))


def test_passes_are_added_up() -> None:
    parameter = bare_weight()
    assert pending_rows(parameter) is None
    add_row_gradient(parameter, rows(1, 4), pairs(1, 2))
    add_row_gradient(parameter, rows(0, 4), pairs(3, 4))
    assert as_dict(parameter) == {0: [3, 3], 1: [1, 1], 4: [6, 6]}
    assert parameter.grad is not None
    assert parameter.grad.shape == parameter.shape


@pytest.mark.parametrize("others", [False, True])
def test_clipping_counts_rows_as_the_values_that_they_are(others: bool) -> None:
    parameter, dense = bare_weight(), torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    dense.grad = torch.ones_like(dense)
    add_row_gradient(parameter, rows(1, 4), pairs(1, 2))
    add_row_gradient(parameter, rows(1), pairs(1))
    expected = torch.cat([dense.grad.clone(), pairs(2, 2).flatten()][not others :]).norm()
    norm = torch.nn.utils.clip_grad_norm_([dense, parameter] if others else [parameter], 0.5)
    assert norm == pytest.approx(float(expected))
    scaled = 2 * 0.5 / float(expected)
    assert as_dict(parameter) == {1: pytest.approx([scaled] * 2, rel=1e-5), 4: pytest.approx([scaled] * 2, rel=1e-5)}


def test_clipping_by_value() -> None:
    parameter = bare_weight()
    add_row_gradient(parameter, rows(1, 4), pairs(1, -7))
    torch.nn.utils.clip_grad_value_([parameter], 0.5)
    assert as_dict(parameter) == {1: [0.5, 0.5], 4: [-0.5, -0.5]}


def test_a_scaler_sees_infinities_and_divides() -> None:
    parameter = bare_weight()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for value, found in ((8.0, 0.0), (float("inf"), 1.0)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(1))
        optimizer.zero_grad()
        add_row_gradient(parameter, rows(1), pairs(value))
        scaler.unscale_(optimizer)
        assert as_dict(parameter) == {1: [value / 4] * 2}
        assert sum(scaler._found_inf_per_device(optimizer).values()) == found


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
def test_zero_grad_drops_it(set_to_none: bool, foreach: bool) -> None:
    parameter, dense = bare_weight(), torch.nn.Parameter(torch.zeros(3))
    dense.grad = torch.ones(3)
    add_row_gradient(parameter, rows(1), pairs(1))
    optimizer = torch.optim.SGD([parameter, dense], lr=1.0, foreach=foreach)
    optimizer.zero_grad(set_to_none=set_to_none)
    pending = pending_rows(parameter)
    assert pending is None if set_to_none else pending is not None and len(pending[0]) == len(pending[1]) == 0
    assert dense.grad is None or not dense.grad.any()
    add_row_gradient(parameter, rows(2), pairs(5))
    assert as_dict(parameter) == {2: [5, 5]}


def test_a_gradient_that_is_none_of_rows_gives_way() -> None:
    parameter = bare_weight()
    parameter.grad = torch.zeros_like(parameter)
    assert pending_rows(parameter) is None
    add_row_gradient(parameter, rows(2), pairs(5))
    assert as_dict(parameter) == {2: [5, 5]}


def test_copies_are_their_own() -> None:
    parameter = bare_weight()
    add_row_gradient(parameter, rows(2), pairs(5))
    assert parameter.grad is not None
    twins = [copy.deepcopy(parameter.grad), pickle.loads(pickle.dumps(parameter.grad)), parameter.grad.clone()]
    assert pickle.loads(dumps(parameter.grad.detach(), lambda _: None)).joined()[0].tolist() == [2]
    for twin in twins:
        assert isinstance(twin, RowGradient)
        twin.mul_(2)
        assert twin.joined()[1].tolist() == [[10, 10]]
    assert as_dict(parameter) == {2: [5, 5]}
    assert "values=" in repr(parameter.grad)
