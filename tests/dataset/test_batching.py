from __future__ import annotations

import pytest

from raydist.dataset import Dataset
from raydist.errors import InvalidArgumentError


@pytest.mark.parametrize("method", ["batch", "padded_batch", "rebatch", "window"])
@pytest.mark.parametrize("size", [1.5, "3", True])
def test_sizes_are_whole_numbers(method: str, size: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"(batch_size|size) must be a whole number, got "):
        getattr(Dataset.range(4), method)(size)
