from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from raydist.errors import UnavailableError
from raydist.parameter_servers.rows.reserved import ReservedRows


def test_more_than_the_machine_has_may_be_reserved() -> None:
    rows = ReservedRows(10**9, 64, torch.float64)  # half a terabyte
    rows.extend(2, fill=0.5)
    rows.values[1] = 7
    at = rows.values.data_ptr()
    rows.extend(5)
    assert rows.values.data_ptr() == at
    assert rows.values[:5, 0].tolist() == [0.5, 7, 0, 0, 0]
    assert rows.num_bytes == 5 * 64 * 8


def test_rows_that_are_there_keep_their_values() -> None:
    rows = ReservedRows(10, 1, torch.float32)
    rows.extend(3)
    rows.extend(4, fill=2.0)
    rows.extend(1, fill=9.0)
    assert (rows.count, rows.values[:5, 0].tolist()) == (4, [0, 0, 0, 2, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_at_places(dtype: torch.dtype) -> None:
    rows, places = ReservedRows(10, 3, dtype), torch.tensor([7, 0, 4])
    rows.extend(10)
    values = torch.randn(3, 3, dtype=dtype)
    rows.put(places, values)
    assert torch.equal(rows.take(places.flip(0)), values.flip(0))
    rows.put(places, values.T)
    assert torch.equal(rows.values[places], values.T)
    rows.put(places[:0], values[:0])
    assert rows.values[[1, 2, 3, 5, 6, 8, 9]].eq(0).all()


def test_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refused)
    with pytest.raises(UnavailableError, match=r"640 bytes were refused: Cannot allocate memory\. Let the kernel"):
        ReservedRows(10, 16, torch.float32)
