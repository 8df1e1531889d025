from __future__ import annotations

import numpy as np
import pytest

from raydist.dataset import Dataset
from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.spec import TensorSpec


@pytest.mark.parametrize(
    "args",
    [(0,), (5,), (5, 10), (10, 5), (5, 10, 2), (10, 5, -2), (0, 0, -2), (3, 3, 1), (-4, -4, 2), (1, 0, 3), (0, 1, -3)],
)
def test_the_numbers_are_pythons(args: tuple[int, ...]) -> None:
    dataset = Dataset.range(*args)
    assert [int(x) for x in dataset] == list(range(*args))
    assert dataset.cardinality() == len(range(*args))


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="must not be 0"):
        Dataset.range(1, 5, 0)
    with pytest.raises(InvalidArgumentError, match="got 0 arguments"):
        Dataset.range()
    with pytest.raises(InvalidArgumentError, match="got 4 arguments"):
        Dataset.range(1, 2, 3, 4)


def test_dtype() -> None:
    assert Dataset.range(3).element_spec == TensorSpec((), np.int64)
    dataset = Dataset.range(3, output_type="float32")
    assert dataset.element_spec == TensorSpec((), np.float32)
    assert [x.dtype for x in dataset.as_numpy_iterator()] == [np.float32] * 3
