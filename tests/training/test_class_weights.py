from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd
from raydist.training.class_weights import ClassWeights
from raydist.training.elements import Example


@pytest.mark.parametrize(
    "y",
    [
        torch.tensor([0, 1, 2]),
        torch.tensor([[0.0], [1.0], [2.0]]),
        torch.eye(3),
    ],
)
def test_rows_weigh_by_their_class(y: torch.Tensor) -> None:
    weights = ClassWeights.parse({1: 5.0, 2: 0})
    assert weights.of(y).tolist() == [1.0, 5.0, 0.0]
    example = weights.weigh(Example("x", y))
    assert example.sample_weight.tolist() == [1.0, 5.0, 0.0]


def test_classes_and_weights_may_be_numbers_of_numpy() -> None:
    """As scikit-learn computes them."""
    weights = ClassWeights.parse(dict(zip(np.arange(2), np.array([1.0, 3.0], np.float32), strict=True)))
    assert weights.of(torch.tensor([0, 1])).tolist() == [1.0, 3.0]


def test_without_weights_nothing_is_weighted() -> None:
    example = Example("x", torch.ones(3))
    assert ClassWeights.parse(None).weigh(example) is example


@pytest.mark.parametrize(
    "given", [{}, [1.0, 2.0], {"cat": 1.0}, {-1: 1.0}, {0: -1.0}, {0: float("nan")}, {0: "heavy"}, {0: None}]
)
def test_others_are_refused(given: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="class_weight must"):
        ClassWeights.parse(given)


@pytest.mark.parametrize(("y", "got"), [(torch.ones(2, 2, 2), r"shape \(2, 2, 2\)"), ({"a": torch.ones(2)}, "dict")])
def test_targets_must_be_classes(y: Any, got: str) -> None:
    with pytest.raises(rd.SpecError, match=rf"class_weight needs targets .* got {got}"):
        ClassWeights.parse({0: 2.0}).of(y)
