from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from raydist.checkpoints import dtypes
from raydist.checkpoints.dtypes import dtype_name, is_storable_tensor, stored_dtype

ALL = list(dtypes._NAMES)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_names_are_those_of_safetensors(dtype: torch.dtype, tmp_path: object) -> None:
    path = f"{tmp_path}/x.safetensors"
    save_file({"a": torch.zeros(4, dtype=torch.uint8).view(torch.uint8).to(dtype)}, path)
    with open(path, "rb") as file:
        assert f'"dtype":"{dtype_name(dtype)}"'.encode() in file.read()
    assert load_file(path)["a"].dtype == dtype
    assert stored_dtype(dtype_name(dtype)) == dtype


def test_others_are_none() -> None:
    with pytest.raises(ValueError, match="'F31'"):
        stored_dtype("F31")
    assert not is_storable_tensor(torch.zeros(2, dtype=torch.complex128))
    assert not is_storable_tensor(torch.ones(2).to_sparse())
