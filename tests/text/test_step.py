from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydist.text import TextStep


@dataclass(frozen=True)
class Lengths(TextStep):
    def apply(self, array: pa.Array) -> pa.Array:
        return pc.utf8_length(array)


@dataclass(frozen=True)
class Totals(TextStep):
    takes_lists: ClassVar[bool] = True

    def apply(self, array: pa.Array) -> pa.Array:
        return pa.array([sum(row) for row in array.to_pylist()])


def test_a_step_takes_one_string_or_arrays_of_any_shape() -> None:
    assert Lengths()("abc") == 3
    assert Lengths()(["a", b"bb"]).tolist() == [1, 2]
    assert Lengths()(np.array([["a"], ["bb"]])).tolist() == [[1], [2]]


def test_a_step_on_lists_takes_the_last_axis() -> None:
    assert Totals()([1, 2, 3]) == 6
    assert Totals()([[1, 2], [3, 4]]).tolist() == [3, 7]
