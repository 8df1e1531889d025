from __future__ import annotations

import pickle

import numpy as np
import torch

from raydist.pipelines.elements.convert import numpy_rows, torch_rows
from raydist.pipelines.elements.rows import block_of_rows


def test_torch_rows() -> None:
    rows = torch_rows(block_of_rows([(1, 2.5, np.zeros((2, 2), np.uint8), b"b", ["s", "t"])]), torch.from_numpy)
    number, real, image, raw, text = rows[0]
    assert (number.dtype, number.shape, real.dtype, image.shape) == (torch.int64, (), torch.float32, (2, 2))
    assert raw == b"b"
    assert text.tolist() == ["s", "t"]


def test_ragged_rows() -> None:
    rows = torch_rows(block_of_rows([np.zeros(2), np.zeros(3)]), torch.from_numpy)
    assert [row.shape for row in rows] == [(2,), (3,)]


def test_rows_of_shared_columns_are_copies() -> None:
    block = block_of_rows([np.zeros(2), np.zeros(2)])
    for rows in (numpy_rows(block.shared()), torch_rows(block.shared(), torch.from_numpy)):
        rows[0][:] = 1
    assert not block.columns[0].any()


def test_a_tensor_pickles_its_own_bytes_alone() -> None:
    rows = torch_rows(block_of_rows([np.zeros(10)] * 1000), torch.from_numpy)
    assert len(pickle.dumps(rows[3])) < 2000
