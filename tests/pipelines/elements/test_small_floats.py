"""bfloat16 and float8: everywhere elements go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from raydist.dataset import Dataset
from raydist.distributed_dataset import distribute
from raydist.options import InputOptions
from raydist.pipelines.elements.small_floats import (
    array_of_tensor,
    as_bits,
    dtype_kind,
    dtype_named,
    is_number,
    is_small_float,
    tensor_of_array,
)
from raydist.pipelines.elements.spec import TensorSpec, as_dtype
from raydist.pipelines.stored.fingerprint import fingerprint
from tests.actors.readers.fakes import fake_side

ON_DRIVER = InputOptions(num_input_workers=0)
NAMES = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.fixture(params=["bfloat16", "float8_e4m3fn"])  # of two bytes and of one
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = getattr(torch, request.param)
    return found


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Powers of two, which all of these types have."""
    count = int(np.prod(shape))
    return (2.0 ** (torch.arange(count) % 8 - 3)).reshape(shape).to(dtype)


def same(found: Any, expected: torch.Tensor) -> bool:
    alike = found.dtype == expected.dtype and found.shape == expected.shape
    return alike and torch.equal(found.float(), expected.float())


def test_types_and_tensors_there_and_back_without_a_copy() -> None:
    for name in NAMES:
        dtype: torch.dtype = getattr(torch, name)
        found = as_dtype(dtype)
        assert found == as_dtype(name) == dtype_named(name) == as_dtype(getattr(ml_dtypes, name))
        assert (is_small_float(found), is_number(found), dtype_kind(found)) == (True, True, "f")
        assert repr(TensorSpec((2,), dtype)) == f"TensorSpec(shape=(2,), dtype={name})"
        assert as_bits(np.zeros(3, found)).dtype == f"u{found.itemsize}"
        for given in (tensor(dtype, 3, 2), tensor(dtype, 4)[2], tensor(dtype, 4, 2).T):
            array = array_of_tensor(given)
            back = tensor_of_array(array, torch.from_numpy)
            assert same(back, given), name
            assert back.data_ptr() == given.data_ptr()
    arrays = [np.zeros(3, as_dtype(name)) for name in NAMES]
    assert len({fingerprint(array) for array in arrays}) == len({fingerprint(array.dtype) for array in arrays}) == 6


def test_elements(dtype: torch.dtype) -> None:
    given = tensor(dtype, 6, 2)
    slices = Dataset.from_tensor_slices({"z": given, "a": torch.arange(6)})
    assert slices.element_spec["z"] == TensorSpec((2,), dtype)
    assert next(slices.as_numpy_iterator())["z"].dtype == as_dtype(dtype)
    (batch,) = slices.batch(6)
    assert same(batch["z"], given)
    for name, dataset in {
        "slices": slices,
        "map": slices.map(lambda e: {"z": e["z"], "a": e["a"]}),
        "calls": slices.map(lambda e: {"z": e["z"].copy(), "a": e["a"]}, num_parallel_calls=2),
        "cache": slices.cache(),
        "window": slices.window(2).flat_map(lambda w: Dataset.zip({"z": w["z"], "a": w["a"]})),
        "unbatch": slices.batch(4).unbatch(),
        "shuffle": slices.shuffle(4, seed=1),
        "global_shuffle": slices.global_shuffle(2),
    }.items():
        rows = list(dataset)
        assert len(rows) == 6, name
        assert all(same(row["z"], given[int(row["a"])]) for row in rows), name


def test_saved_elements(dtype: torch.dtype, tmp_path: Path) -> None:
    given = tensor(dtype, 5, 3)
    dataset = Dataset.from_tensor_slices((given, given[:, 0])).concatenate(
        Dataset.from_tensors((tensor(dtype, 7), tensor(dtype, 1)[0]))
    )
    for form in ("arrow", "parquet"):
        dataset.save(str(tmp_path / form), format=form)
        found = list(Dataset.load(str(tmp_path / form)))
        assert all(same(row[0], expected) for row, expected in zip(found, [*given, tensor(dtype, 7)], strict=True))
        assert same(found[1][1], given[1, 0])
    cached = Dataset.from_tensor_slices(given).cache(str(tmp_path / "cache"))
    for _ in range(2):
        assert same(torch.stack([x.float() for x in cached]), given.float())


def test_distributed(dtype: torch.dtype) -> None:
    given = tensor(dtype, 11, 2)
    dataset = Dataset.from_tensor_slices((given, given[:, 0])).batch(4)
    with fake_side(2) as side:
        batches = [(rows.values, scalars.values) for rows, scalars in distribute(dataset, side, ON_DRIVER)]
    for parts, expected in zip(zip(*batches, strict=True), (given, given[:, 0]), strict=True):
        assert torch.equal(torch.cat([part.float() for values in parts for part in values]), expected.float())
        assert {part.dtype for values in parts for part in values} == {dtype}
