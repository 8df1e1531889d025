from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.ops.rejection_resample import ClassBalance


def test_a_known_distribution() -> None:
    balance = ClassBalance.of([1, 1, 0], [0.9, 0.1, 0.0])
    kept, seen = balance.kept(np.array([0, 1, 2, 0]), np.zeros(3, np.int64))
    np.testing.assert_allclose(kept, [1 / 9, 1.0, 0.0, 1 / 9])
    assert seen.tolist() == [0, 0, 0]


def test_weights_need_not_sum_to_one() -> None:
    classes, nothing = np.array([0, 1]), np.zeros(2, np.int64)
    (first, _), (second, _) = (ClassBalance.of([a, a], [0.8, 0.2]).kept(classes, nothing) for a in (0.5, 7))
    np.testing.assert_allclose(first, second)


def test_an_estimate_counts_each_element_before_it_is_judged() -> None:
    balance = ClassBalance.of([0.5, 0.5], None)
    kept, seen = balance.kept(np.array([0, 0, 1]), np.array([4, 0]))
    np.testing.assert_allclose(kept, [10 / 15, 10 / 16, 1.0])
    assert seen.tolist() == [6, 1]


def test_an_estimate_does_not_depend_on_how_elements_are_grouped() -> None:
    classes = np.random.default_rng(1).integers(0, 3, 50)
    balance = ClassBalance.of([0.1, 0.3, 0.6], None)
    together, _ = balance.kept(classes, np.zeros(3, np.int64))
    parts, seen = [], np.zeros(3, np.int64)
    for part in np.split(classes, [7, 8, 30]):
        kept, seen = balance.kept(part, seen)
        parts.append(kept)
    np.testing.assert_array_equal(np.concatenate(parts), together)


@pytest.mark.parametrize(
    ("target", "initial", "message"),
    [
        (0.5, None, "target_dist must be a list of weights"),
        ([], None, "target_dist must be a list of weights"),
        (["a"], None, "target_dist must be a list of weights"),
        ([[1.0]], None, "target_dist must be a list of weights"),
        ([0.5, -0.5], None, "weights >= 0, not all of them 0"),
        ([0.0, 0.0], None, "weights >= 0, not all of them 0"),
        ([1.0, float("nan")], None, "weights >= 0, not all of them 0"),
        ([0.5, 0.5], [1.0], "got 2 and 1 entries"),
        ([0.5, 0.5], [1.0, 0.0], "got 0 for class 1, which is wanted"),
    ],
)
def test_bad_distributions(target: Any, initial: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ClassBalance.of(target, initial)
