from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raydist as rd
from raydist.strategies.losses import compute_average_loss


def test_the_denominator_is_global() -> None:
    losses = torch.tensor([1.0, 3.0])
    assert compute_average_loss(losses, global_batch_size=8).item() == 0.5
    assert compute_average_loss(losses).item() == 2.0
    assert compute_average_loss(losses, sample_weight=torch.tensor([0.0, 2.0])).item() == 3.0
    assert (
        compute_average_loss(torch.ones(2, 3), sample_weight=torch.tensor([1.0, 2.0]), global_batch_size=3).item() == 3
    )
    assert compute_average_loss(torch.zeros(0), global_batch_size=0).item() == 0.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"per_example_loss": torch.tensor(1.0)}, rd.InvalidArgumentError, "one loss per row"),
        ({"per_example_loss": torch.ones(2), "global_batch_size": 2.0}, rd.SpecError, "must be an int, got 2.0"),
        ({"per_example_loss": torch.ones(2), "global_batch_size": -1}, rd.InvalidArgumentError, "got -1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compute_average_loss(**arguments)


def test_it_belongs_into_a_step() -> None:
    with rd.OneDeviceStrategy().scope(), pytest.raises(rd.FailedPreconditionError, match="step function"):
        compute_average_loss(torch.ones(2))


@pytest.mark.ray
def test_summed_shares_train_like_the_global_mean(two: rd.MirroredStrategy) -> None:
    with two.scope():
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        loss = rd.compute_average_loss(weight * x)
        loss.backward()
        assert weight.grad is not None
        return weight.grad

    data = rd.Dataset.from_tensor_slices(np.array([1.0, 2.0, 6.0])).batch(3)
    (batch,) = two.distribute_dataset(data)
    grads = two.run(step, args=(batch,), options=rd.RunOptions(gradient_reduce_op=rd.ReduceOp.SUM))
    assert [grad.item() for grad in grads.values] == [3.0, 3.0]
