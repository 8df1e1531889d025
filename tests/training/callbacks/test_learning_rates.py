from __future__ import annotations

from typing import Any

import pytest
import torch

import raydist as rd
from raydist.training.callbacks.learning_rates import change_rates, rates_of


def optimizer(*rates: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates], lr=1.0)


def test_each_group_has_a_rate_of_its_own() -> None:
    both = optimizer(0.5, 0.25)
    assert change_rates(both, lambda rate: rate / 2)
    assert rates_of(both) == [0.25, 0.125]
    assert not change_rates(both, lambda rate: rate)


def test_a_rate_in_a_tensor_stays_one() -> None:
    one = optimizer(torch.tensor(0.5))
    change_rates(one, lambda rate: torch.tensor(2 * rate))
    assert torch.equal(one.param_groups[0]["lr"], torch.tensor(1.0))


@pytest.mark.parametrize("rate", [None, "0.1", True])
def test_a_rate_must_be_a_number(rate: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="A learning rate must be a number, got"):
        change_rates(optimizer(0.5), lambda _: rate)
