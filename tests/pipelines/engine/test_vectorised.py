from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.elements.tensor_functions import with_tensors
from tests.contracts.op import collect, iterate, same

ON = Options(optimization=OptimizationOptions(map_vectorization=True))
IMAGES = np.arange(60, dtype=np.float32).reshape(20, 3)


def check_same(dataset: Dataset, case: object) -> list[Any]:
    """Return the elements, which are the same with and without the setting."""
    plain = collect(iterate(dataset))
    assert same(collect(iterate(dataset.with_options(ON))), plain), case
    return plain


def half(x: Any) -> Any:
    return torch.as_tensor(x) / 2


def test_results_are_those_of_each_element() -> None:
    slices = Dataset.from_tensor_slices
    for number, dataset in enumerate(
        (
            slices(IMAGES).map(half),
            slices((IMAGES, IMAGES[:, 0])).map(lambda x, y: {"x": x + y, "y": y}),
            slices({"a": IMAGES}).map(lambda row: (row["a"].sum(), row["a"])),
            Dataset.range(20).map(lambda x: x * 2, output_spec=TensorSpec((), "int64")),
            slices(IMAGES).map(with_tensors(torch.relu)),
        )
    ):
        check_same(dataset, number)


def test_a_function_that_writes_to_its_argument() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        x *= 2
        return x.clone()

    dataset = Dataset.from_tensor_slices(IMAGES.copy()).map(lambda x: x + 1).map(with_tensors(doubled))
    assert np.array_equal(np.stack(check_same(dataset, "written to")), 2 * (IMAGES + 1))


def test_whole_blocks_are_run_at_once() -> None:
    calls: list[tuple[int, ...]] = []

    def note(x: Any) -> Any:
        calls.append(tuple(x.shape))
        return x + 1

    elements = collect(iterate(Dataset.range(1, 400).map(note).batch(400).with_options(ON)))
    assert elements[0].tolist() == list(range(2, 401))
    assert len(calls) < 100


def branches(x: Any) -> Any:
    return x if x > 4 else -x


def fails_once(x: Any) -> Any:
    if x == 7:
        raise ValueError("seven")
    return x


def test_a_function_that_vmap_cannot_run_is_called_for_each_element() -> None:
    functions: list[Callable[..., Any]] = [
        *(branches, fails_once, str, lambda x: x * 0.5, lambda x: x + np.random.default_rng(0).integers(9))
    ]
    for fn in functions:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_same(Dataset.range(20).map(fn).batch(20), fn)
    with pytest.warns(RuntimeWarning, match=r"py:\d+ branches\) over whole blocks, and cannot"):
        collect(iterate(Dataset.range(20).map(branches).batch(20).with_options(ON)))
