from __future__ import annotations

import copy
import pickle

import pytest
import torch

from raydist.parameter_servers.rows.local_rows import RowGradient, add_row_gradient, pending_rows
from raydist.pickling.pickler import dumps


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(0, 2, dtype=torch.float64))


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None].expand(-1, 2).contiguous()


def as_dict(parameter: torch.nn.Parameter) -> dict[int, list[float]]:
    pending = pending_rows(parameter)
    assert pending is not None
    assert pending[0].tolist() == sorted(set(pending[0].tolist()))
    return dict(zip(pending[0].tolist(), pending[1].tolist(), strict=True))


def test_passes_are_added_up() -> None:
    parameter = weight()
    assert pending_rows(parameter) is None
    add_row_gradient(parameter, rows(1, 4), values(1, 2))
    add_row_gradient(parameter, rows(0, 4), values(3, 4))
    assert as_dict(parameter) == {0: [3, 3], 1: [1, 1], 4: [6, 6]}
    assert parameter.grad is not None
    assert parameter.grad.shape == parameter.shape


@pytest.mark.parametrize("others", [False, True])
def test_clipping_counts_rows_as_the_values_that_they_are(others: bool) -> None:
    parameter, dense = weight(), torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    dense.grad = torch.ones_like(dense)
    add_row_gradient(parameter, rows(1, 4), values(1, 2))
    add_row_gradient(parameter, rows(1), values(1))
    expected = torch.cat([dense.grad.clone(), values(2, 2).flatten()][not others :]).norm()
    norm = torch.nn.utils.clip_grad_norm_([dense, parameter] if others else [parameter], 0.5)
    assert norm == pytest.approx(float(expected))
    scaled = 2 * 0.5 / float(expected)
    assert as_dict(parameter) == {1: pytest.approx([scaled] * 2, rel=1e-5), 4: pytest.approx([scaled] * 2, rel=1e-5)}


def test_clipping_by_value() -> None:
    parameter = weight()
    add_row_gradient(parameter, rows(1, 4), values(1, -7))
    torch.nn.utils.clip_grad_value_([parameter], 0.5)
    assert as_dict(parameter) == {1: [0.5, 0.5], 4: [-0.5, -0.5]}


def test_a_scaler_sees_infinities_and_divides() -> None:
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for value, found in ((8.0, 0.0), (float("inf"), 1.0)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(1))
        optimizer.zero_grad()
        add_row_gradient(parameter, rows(1), values(value))
        scaler.unscale_(optimizer)
        assert as_dict(parameter) == {1: [value / 4] * 2}
        assert sum(scaler._found_inf_per_device(optimizer).values()) == found


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
def test_zero_grad_drops_it(set_to_none: bool, foreach: bool) -> None:
    parameter, dense = weight(), torch.nn.Parameter(torch.zeros(3))
    dense.grad = torch.ones(3)
    add_row_gradient(parameter, rows(1), values(1))
    optimizer = torch.optim.SGD([parameter, dense], lr=1.0, foreach=foreach)
    optimizer.zero_grad(set_to_none=set_to_none)
    pending = pending_rows(parameter)
    assert pending is None if set_to_none else pending is not None and len(pending[0]) == len(pending[1]) == 0
    assert dense.grad is None or not dense.grad.any()
    add_row_gradient(parameter, rows(2), values(5))
    assert as_dict(parameter) == {2: [5, 5]}


def test_a_gradient_that_is_none_of_rows_gives_way() -> None:
    parameter = weight()
    parameter.grad = torch.zeros_like(parameter)
    assert pending_rows(parameter) is None
    add_row_gradient(parameter, rows(2), values(5))
    assert as_dict(parameter) == {2: [5, 5]}


def test_copies_are_their_own() -> None:
    parameter = weight()
    add_row_gradient(parameter, rows(2), values(5))
    assert parameter.grad is not None
    twins = [copy.deepcopy(parameter.grad), pickle.loads(pickle.dumps(parameter.grad)), parameter.grad.clone()]
    assert pickle.loads(dumps(parameter.grad.detach(), lambda _: None)).joined()[0].tolist() == [2]
    for twin in twins:
        assert isinstance(twin, RowGradient)
        twin.mul_(2)
        assert twin.joined()[1].tolist() == [[10, 10]]
    assert as_dict(parameter) == {2: [5, 5]}
    assert "values=" in repr(parameter.grad)
