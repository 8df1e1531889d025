from __future__ import annotations

import weakref

import pytest
import torch

from raydist.parameter_servers.rows.row_index import GrowingRows
from raydist.parameter_servers.rows.row_optimizer import LazyUpdate, optimizer_name


def rows(count: int) -> GrowingRows:
    made = GrowingRows(2, torch.float64)
    made.extend(count)
    return made


def test_what_is_remembered_grows_with_the_rows() -> None:
    table = rows(2)
    update = LazyUpdate(table)
    options = {"lr": 1.0, "initial_accumulator_value": 0.5}
    update.apply(torch.tensor([1]), torch.full((1, 2), 2.0, dtype=torch.float64), torch.optim.Adagrad, options)
    table.extend(3)
    held = update.state()
    assert held["rows"]["sum"][:, 0].tolist() == [0.5, 4.5, 0.5]
    assert held["scalars"]["step"] == 1
    assert update.num_bytes == 3 * 16


def test_options_may_change_from_step_to_step() -> None:
    table = rows(1)
    update, one = LazyUpdate(table), torch.ones(1, 2, dtype=torch.float64)
    for lr, momentum in ((1.0, 0.0), (0.5, 0.0), (1.0, 0.9), (1.0, 0.8)):
        update.apply(torch.tensor([0]), one, torch.optim.SGD, {"lr": lr, "momentum": momentum})
    # 1, 0.5, then the buffer: 1 and 0.8 * 1 + 1.
    assert table.values[0].tolist() == [pytest.approx(-(1 + 0.5 + 1 + 1.8))] * 2


def test_state_that_is_not_used_now_has_all_rows_too() -> None:
    table = rows(1)
    update, one = LazyUpdate(table), torch.ones(1, 2, dtype=torch.float64)
    for momentum in (0.9, 0.0):
        update.apply(torch.tensor([0]), one, torch.optim.SGD, {"lr": 1.0, "momentum": momentum})
        table.extend(table.count + 1)
    assert update.state()["rows"]["momentum_buffer"][:, 0].tolist() == [1, 0, 0]


def test_a_step_without_rows_counts() -> None:
    update = LazyUpdate(rows(1))
    for kind in (torch.optim.SparseAdam, torch.optim.Adam):
        update = LazyUpdate(rows(1))
        update.apply(torch.empty(0, dtype=torch.int64), torch.empty(0, 2, dtype=torch.float64), kind, {"lr": 1.0})
        assert update.state()["scalars"]["step"] == 1


def test_optimizers_of_one_name_in_two_modules_differ() -> None:
    assert optimizer_name(torch.optim.Adam) != optimizer_name(type("Adam", (torch.optim.Adam,), {}))


def test_gradients_are_not_kept() -> None:
    update = LazyUpdate(rows(1))
    for options in ({"lr": 1.0}, {"lr": 1.0, "momentum": 0.9}):
        gradient = torch.ones(1, 2, dtype=torch.float64)
        dropped = weakref.ref(gradient)
        update.apply(torch.tensor([0]), gradient, torch.optim.SGD, options)
        del gradient
        assert dropped() is None
