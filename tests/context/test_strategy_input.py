from __future__ import annotations

from typing import Any

import pytest

import raydist as rd


def test_rows_of_arrays_become_a_dataset() -> None:
    dataset = rd.OneDeviceStrategy().make_numpy_dataset({"x": [1, 2]})
    assert [element["x"].item() for element in dataset] == [1, 2]


@pytest.mark.parametrize("wrong", [[1, 2], None, range(3)])
def test_only_a_dataset_can_be_distributed(wrong: Any) -> None:
    with pytest.raises(rd.SpecError, match="Dataset"):
        rd.OneDeviceStrategy().distribute_dataset(wrong)
