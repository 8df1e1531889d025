from __future__ import annotations

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset


@pytest.mark.parametrize("method", ["batch", "padded_batch", "rebatch", "window"])
@pytest.mark.parametrize("size", [1.5, "3", True])
def test_sizes_are_whole_numbers(method: str, size: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"(batch_size|size) must be a whole number, got "):
        getattr(Dataset.range(4), method)(size)


def test_batch_takes_what_tf_datas_takes() -> None:
    ds = Dataset.range(5).batch(2, drop_remainder=True, num_parallel_calls=4, deterministic=False, name="pairs")
    assert [x.tolist() for x in ds] == [[0, 1], [2, 3]]
    assert len(list(Dataset.range(5).batch(2, num_parallel_calls=-1))) == 3
    with pytest.raises(InvalidArgumentError, match="num_parallel_calls must be >= 1, AUTOTUNE or None, got 0"):
        Dataset.range(5).batch(2, num_parallel_calls=0)
    with pytest.raises(TypeError, match="deterministic must be a bool or None, got 'no'"):
        Dataset.range(5).batch(2, deterministic="no")  # type: ignore[arg-type]  # the point of this test
