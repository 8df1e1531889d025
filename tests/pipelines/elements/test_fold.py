from __future__ import annotations

import numpy as np
import pytest

from raydist.core.errors import SpecError
from raydist.pipelines.elements.fold import FoldState


def test_shapes_may_change_and_dtypes_may_not() -> None:
    carried = FoldState({"rows": [1, 2], "name": "a"})
    carried.replace({"rows": np.arange(3), "name": "b"}, "scan-1")
    assert carried.value["rows"].tolist() == [0, 1, 2]
    with pytest.raises(SpecError, match="The state of scan-1 must keep its structure and dtypes"):
        carried.replace({"rows": [0.5], "name": "b"}, "scan-1")
    assert carried.value["name"] == "b"


def test_the_initial_value_is_a_copy() -> None:
    mine = np.zeros(2)
    FoldState(mine).value[0] = 1
    assert mine.tolist() == [0, 0]
