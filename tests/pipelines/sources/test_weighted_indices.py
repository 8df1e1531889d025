from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.dataset import Dataset

_ROWS = Dataset.from_tensor_slices(np.arange(5) * 10)


def _values(dataset: Dataset) -> list[int]:
    return [int(x) for x in dataset]


@pytest.mark.parametrize(
    "weights", [[1, 0, 2, 0, 1], np.array([1e300, 0, 2e300, 0, 1e300]), torch.tensor([1.0, 0, 2, 0, 1])]
)
def test_elements_come_as_often_as_their_weights_say(weights: Any) -> None:
    counts = np.bincount(_values(_ROWS.sample_by_weight(weights, 8000, seed=3)), minlength=50)
    assert counts[[10, 30]].tolist() == [0, 0]
    assert np.abs(counts[[0, 20, 40]] / 8000 - [0.25, 0.5, 0.25]).max() < 0.02


def test_draws_without_replacement_have_the_odds_of_draws_one_after_the_other() -> None:
    weights = np.array([5.0, 3.0, 0.0, 2.0, 1.0])
    dataset = _ROWS.sample_by_weight(weights, 2, replacement=False)
    pairs = [tuple(_values(dataset)) for _ in range(3000)]
    assert all(first != second and 20 not in (first, second) for first, second in pairs)
    share = sum(pair == (0, 10) for pair in pairs) / len(pairs)
    assert abs(share - 5 / 11 * 3 / 6) < 0.04


def test_every_epoch_is_another_draw_and_a_seed_decides_them_all() -> None:
    dataset = _ROWS.sample_by_weight([1] * 5, 20, seed=1)
    epochs = [_values(dataset) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs == [_values(again) for again in [_ROWS.sample_by_weight([1] * 5, 20, seed=1)] for _ in range(3)]
    assert len(dataset) == 20
    assert len(_ROWS.sample_by_weight([1] * 5)) == 5


def test_a_state_belongs_to_its_weights() -> None:
    iterator = iter(_ROWS.sample_by_weight([1, 2, 3, 4, 5], 20, seed=1))
    next(iterator)
    with pytest.raises(InvalidArgumentError, match="settings that it was saved with"):
        iter(_ROWS.sample_by_weight([1, 2, 3, 4, 6], 20, seed=1)).load_state_dict(iterator.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2],), r"one number for each of the 5 elements, got int64 of shape \(2,\)"),
        ((["a"] * 5,), "one number for each"),
        (([1, 1, -2, 1, 1],), "got -2.0 for element 2"),
        (([1, 1, 1, float("nan"), 1],), "got nan for element 3"),
        (([0] * 5,), "One of the weights must be > 0"),
        (([1] * 5, 0), "num_samples must be >= 1, got 0"),
        (([1] * 5, 2.5), "must be a whole number"),
        (([1, 1, 0, 1, 1], 5, False), "must be <= 4, got 5"),
        (([1] * 5, 5, 1), "replacement must be True or False"),
    ],
)
def test_wrong_arguments_say_what_must_hold(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        _ROWS.sample_by_weight(*arguments)


def test_elements_that_have_no_index_are_refused_with_what_to_do() -> None:
    with pytest.raises(FailedPreconditionError, match="sample_from_datasets"):
        Dataset.range(5).filter(lambda x: x > 1).sample_by_weight([1] * 5)
