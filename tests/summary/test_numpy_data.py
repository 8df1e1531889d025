from __future__ import annotations

import numpy as np
import torch

from raydist.summary.numpy_data import as_array


def test_tensors_of_all_kinds_are_arrays() -> None:
    assert as_array(torch.eye(2).to_sparse()).tolist() == [[1, 0], [0, 1]]
    assert as_array(torch.ones(1, dtype=torch.float16)).dtype == np.float32
    assert as_array(torch.nn.Parameter(torch.ones(1))).tolist() == [1]
    assert as_array([1, 2]).tolist() == [1, 2]
