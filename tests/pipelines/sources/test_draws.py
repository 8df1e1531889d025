from __future__ import annotations

import numpy as np
import pytest

from raydist.dataset import Dataset
from raydist.errors import InvalidArgumentError
from raydist.pipelines.sources.draws import DrawsOp


def test_zero_weights_are_never_drawn() -> None:
    draws = Dataset(DrawsOp.of([0, 3, 0, 1, 0], 5, seed=1, rerandomize=False))
    (batch,) = draws.batch(9000).take(1).as_numpy_iterator()
    counts = np.bincount(batch, minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    assert 2.6 < counts[1] / counts[3] < 3.4


def test_weights_must_fit_the_datasets() -> None:
    with pytest.raises(InvalidArgumentError, match="one number per dataset, got 1 for 2"):
        DrawsOp.of([1.0], 2, seed=None, rerandomize=False)
