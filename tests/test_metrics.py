from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from raydist.training.metrics import Mean


def test_values_count_by_their_weights() -> None:
    mean = Mean()
    mean.update(2.0, weight=3)
    mean.update(torch.tensor([6.0, 8.0]), weight=torch.tensor([1.0, 0.0]))
    assert mean.compute().item() == pytest.approx((3 * 2 + 6) / 4)


def test_one_weight_serves_all_values() -> None:
    mean = Mean()
    mean.update([1.0, 3.0], weight=2)
    mean.update(5.0, weight=4)
    assert mean.compute().item() == pytest.approx(28 / 8)


def test_without_weight_the_mean_is_zero() -> None:
    mean = Mean()
    mean.update(5.0, weight=0)
    assert mean.compute().item() == 0.0


def test_sums_keep_the_digits_of_float64() -> None:
    mean = Mean()
    mean.update(2.0**24, weight=1)
    mean.update(1.0, weight=1)
    assert mean.compute().item() == (2**24 + 1) / 2  # float32 would give 2 ** 23


def test_states_merge_as_sums_over_replicas() -> None:
    first, second = Mean(), Mean()
    first.update(1.0, weight=3)
    second.update(5.0, weight=1)
    first.merge_state(second)
    assert first.compute().item() == 2.0


def test_values_carry_no_gradients() -> None:
    mean = Mean()
    mean.update(torch.ones(2, requires_grad=True))
    assert not mean.total.requires_grad


def test_reset_and_pickling() -> None:
    mean = Mean()
    mean.update(np.float64(4.0))
    copy = pickle.loads(pickle.dumps(mean))
    mean.reset()
    mean.update(1.0)
    assert (copy.compute().item(), mean.compute().item()) == (4.0, 1.0)
