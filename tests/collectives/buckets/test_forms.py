from __future__ import annotations

import torch

from raydist.collectives.buckets.forms import GlobalGradient, StepWeight


def test_weights_are_compared_by_value_and_gradients_say_whether_one_was_sparse() -> None:
    assert StepWeight(0.5, counts=True) == StepWeight(0.5, counts=True) != StepWeight(0.5, counts=False)
    assert GlobalGradient(torch.ones(1), sparse=True).sparse
