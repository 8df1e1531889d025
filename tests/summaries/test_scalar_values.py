from __future__ import annotations

import math

import torch

from raydist.summaries.scalar_values import ScalarValue


def test_a_mean_weighs_rows() -> None:
    assert ScalarValue(1.0, 3.0).joined([ScalarValue(5.0, 1.0)]) == ScalarValue(2.0, 4.0)


def test_a_replica_without_rows_has_no_say_whatever_it_says() -> None:
    assert ScalarValue(math.nan, 0.0).joined([ScalarValue(5.0, 2.0)]) == ScalarValue(5.0, 2.0)


def test_where_nobody_has_rows_all_weigh_the_same() -> None:
    assert ScalarValue(1.0, 0.0).joined([ScalarValue(3.0, 0.0)]) == ScalarValue(2.0, 0.0)


def test_a_sum_adds_whatever_they_weigh() -> None:
    total = ScalarValue(1.0, 3.0, is_sum=True).joined([ScalarValue(5.0, 0.0, is_sum=True)])
    assert total == ScalarValue(6.0, 3.0, is_sum=True)


def test_infinities_stay() -> None:
    assert ScalarValue(math.inf).joined([ScalarValue(1.0)]) == ScalarValue(math.inf, 2.0)


def test_a_tensor_is_read_when_it_is_settled() -> None:
    assert ScalarValue(torch.tensor(0.5)).settled() == ScalarValue(0.5)
