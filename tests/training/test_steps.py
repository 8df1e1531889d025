from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.training.steps import looped, prediction_step
from tests.training.toys import line


def test_a_loop_tells_how_many_steps_it_did() -> None:
    seen: list[Any] = []
    loop = looped(seen.append)
    batches = iter([1, 2, 3, 4, 5])
    assert [loop(batches, 2), loop(batches, 2), loop(batches, 2), loop(batches, 2)] == [2, 2, 1, 0]
    assert seen == [1, 2, 3, 4, 5]


def test_predictions_need_no_gradients() -> None:
    prediction = prediction_step(line(2.0))(torch.ones(3, 1, dtype=torch.float64))
    assert prediction.tolist() == [[2.0], [2.0], [2.0]]
    assert not prediction.requires_grad


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> Any:
        return self.value


def test_a_list_of_outputs_becomes_a_tuple() -> None:
    prediction = prediction_step(Returns([torch.ones(2), torch.zeros(2, 3)]))(torch.ones(2))
    assert [part.shape for part in prediction] == [(2,), (2, 3)]


@pytest.mark.parametrize(
    ("value", "got"),
    [(torch.ones(3), r"shape \(3,\)"), (torch.tensor(1.0), r"shape \(\)"), ("text", "a str without tensors")],
)
def test_an_output_must_have_one_entry_per_row(value: Any, got: str) -> None:
    with pytest.raises(rd.SpecError, match=rf"one entry per input row \(2\) from the module, got {got}"):
        prediction_step(Returns(value))(torch.ones(2))
