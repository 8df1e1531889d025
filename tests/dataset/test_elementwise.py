from __future__ import annotations

import pytest

from raydist.dataset import Dataset


def test_apply_must_return_a_dataset() -> None:
    assert len(Dataset.range(4).apply(lambda ds: ds.take(2))) == 2
    with pytest.raises(TypeError, match="must return a Dataset, got 3"):
        Dataset.range(4).apply(lambda ds: 3)  # type: ignore[arg-type, return-value]  # the point of this test


@pytest.mark.parametrize("method", ["map", "interleave"])
def test_deterministic_is_a_choice(method: str) -> None:
    with pytest.raises(TypeError, match="deterministic must be a bool or None, got 'no'"):
        getattr(Dataset.range(4), method)(Dataset.from_tensors, deterministic="no")
